"""Measure the native assembler on the arguments of one call in deltas of 16 characters.

The baseline is the least work that stores the deltas: append, join, parse.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Report
from benchmarks.sizes import size
from benchmarks.tag_parser import best_of, growth_of
from benchmarks.tag_streams import cut
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler

SIZE = size(128 * 1024, 4 * 1024)
GROWTH = 8
DELTA_CHARS = 16
FEWEST_PER_S = 40_000.0
"""Lowest allowed rate in deltas per second, which is 25 microseconds per delta."""
ROUNDS = size(9, 2)
CALLS = size(2000, 50)


def build_deltas(arguments: str) -> list[dict[str, Any]]:
    """Return the chunks of a reply with one call."""
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "write_tool", "arguments": ""}}
    entries = [first, *({"index": 0, "function": {"arguments": part}} for part in cut(arguments, DELTA_CHARS))]
    return [_chunk(entry) for entry in entries]


def build_small_calls(count: int) -> list[dict[str, Any]]:
    """Return complete calls without an index or an id, one per delta, as some servers send them."""
    return [_chunk({"function": {"name": "read_tool", "arguments": '{"path": "a"}'}}) for _ in range(count)]


def _chunk(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "r",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"tool_calls": [entry]}, "finish_reason": None}],
    }


def run_ours(chunks: Sequence[dict[str, Any]]) -> None:
    assembler = NativeCallAssembler("bench", 0)
    for chunk in chunks:
        assembler.feed(chunk)
    assembler.finish()


def run_floor(fragments: Sequence[str]) -> None:
    pieces = []
    for fragment in fragments:
        pieces.append(fragment)
    json.loads("".join(pieces))


def run(size: int = SIZE, rounds: int = ROUNDS) -> Report:
    report = Report(
        "native_assembler",
        notes=[f"least processor time of {rounds} interleaved rounds; {size} characters of arguments"],
    )
    small, large = _arguments(size), _arguments(GROWTH * size)
    deltas = build_deltas(small)
    cases = {
        "ours": functools.partial(run_ours, deltas),
        "floor": functools.partial(run_floor, cut(small, DELTA_CHARS)),
    }
    least = best_of(cases, rounds)
    label = f"deltas of {DELTA_CHARS} characters, parse at the end included"
    report.add("deltas_per_s", len(deltas) / least["ours"], label, at_least=FEWEST_PER_S)
    report.add("floor_ratio", least["ours"] / least["floor"], "ours / append, join, parse")
    by_size = growth_of(cases["ours"], functools.partial(run_ours, build_deltas(large)))
    report.add("arguments_growth_ratio", by_size, f"{GROWTH} times the arguments", at_most=10.0)
    few, many = build_small_calls(CALLS), build_small_calls(GROWTH * CALLS)
    by_calls = growth_of(functools.partial(run_ours, few), functools.partial(run_ours, many))
    report.add("calls_growth_ratio", by_calls, f"{GROWTH} times the calls ({CALLS})", at_most=10.0)
    return report


def _arguments(size: int) -> str:
    return json.dumps(
        {"path": "a.txt", "content": ('a line with "quotes" and 中文\n' * size)[:size]}, ensure_ascii=False
    )
