"""Measure the tag parser on streams of 1 M and 8 M characters.

The baselines are a list append with one join, and a state machine for single characters.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.report import Report
from benchmarks.sizes import size
from benchmarks.tag_streams import CharacterMachine, cut, run_floor, streams
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser

SIZE = size(1_000_000, 20_000)
GROWTH = 8
CHUNKS = (4, 16)
MAX_FLOORS = {4: 12.0, 16: 50.0}
ROUNDS = size(7, 1)
GROWTH_CHUNK = 16


def run_ours(chunks: Sequence[str]) -> None:
    parser = TagStreamParser()
    feed = parser.feed
    for chunk in chunks:
        feed(chunk)
    parser.finish()


def run_peer(chunks: Sequence[str]) -> None:
    machine = CharacterMachine()
    for chunk in chunks:
        machine.feed(chunk)


def best_of(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the lowest CPU seconds of each case over interleaved rounds. Other processes can only add time, so the
    lowest value is the most accurate.
    """
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, case in cases.items():
            started = time.process_time()
            case()
            best[name] = min(best[name], time.process_time() - started)
    return best


def growth_of(few: Callable[[], object], many: Callable[[], object], times: int = GROWTH, rounds: int = 5) -> float:
    """Return the ratio of the time of `many` to the time of `few`. `many` is `times` as much work as `few`.

    One sample of `few` is `times` executions in a row, so that samples of both cases take equally long: the lowest
    value of shorter samples would be too low.
    """

    def few_in_a_row() -> None:
        for _ in range(times):
            few()

    least = best_of({"few": few_in_a_row, "many": many}, rounds)
    return times * least["many"] / least["few"]


def run(size: int = SIZE, rounds: int = ROUNDS) -> Report:
    report = Report(
        "tag_parser", notes=[f"least processor time of {rounds} interleaved rounds; streams of {size} characters"]
    )
    small = streams(size)
    for chunk in CHUNKS:
        _compare_mixed(report, small["mixed"], chunk, rounds)
    for chunk in CHUNKS:
        _compare_peer(report, small, chunk)
    _compare_growth(report, size)
    return report


def _compare_mixed(report: Report, text: str, chunk: int, rounds: int) -> None:
    chunks = cut(text, chunk)
    least = best_of(
        {"ours": functools.partial(run_ours, chunks), "floor": functools.partial(run_floor, chunks)}, rounds
    )
    report.add(
        f"mixed_{chunk}_chars_per_s", len(text) / least["ours"], f"mixed text in {chunk}-character chunks: characters"
    )
    report.add(
        f"mixed_{chunk}_floor_ratio",
        least["ours"] / least["floor"],
        f"mixed text in {chunk}-character chunks / append and join",
        at_most=MAX_FLOORS[chunk],
    )


def _compare_peer(report: Report, texts: dict[str, str], chunk: int) -> None:
    """Add the ratio to the state machine for single characters, on the stream where the tag parser is slowest."""
    ratios = {}
    for name, text in texts.items():
        chunks = cut(text[: len(text) // 4], chunk)
        least = best_of({"ours": functools.partial(run_ours, chunks), "peer": functools.partial(run_peer, chunks)}, 5)
        ratios[name] = least["ours"] / least["peer"]
    worst = max(ratios, key=lambda name: ratios[name])
    label = f"ours / single characters, {chunk}-character chunks"
    report.add(f"mixed_{chunk}_peer_ratio", ratios["mixed"], f"{label}, mixed")
    report.add(f"worst_{chunk}_peer_ratio", ratios[worst], f"{label}, worst stream ({worst})", at_most=2.0)


def _compare_growth(report: Report, size: int) -> None:
    """Add for each stream the ratio of the time of an input that is eight times as long."""
    large = streams(GROWTH * size)
    for name, text in streams(size).items():
        few, many = cut(text, GROWTH_CHUNK), cut(large.pop(name), GROWTH_CHUNK)
        growth = growth_of(functools.partial(run_ours, few), functools.partial(run_ours, many))
        report.add(
            f"{name.replace(' ', '_').replace('<', 'less')}_growth_ratio",
            growth,
            f"{GROWTH} times the input, {name}",
            at_most=10.0,
        )
