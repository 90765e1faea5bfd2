"""Measure the time that the agent loop adds to a step, without the time of the model and the tool."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect, build_tag_call
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import ReActOptions

STEPS = size(20, 3)
ROUNDS = size(15, 2)
CHUNK_CHARS = 16
OUTPUT = "x" * 1000
SPEC = ToolSpec(
    name="echo",
    description="Gives back its text.",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
)


def _content(text: str) -> list[Chunk]:
    pieces = [text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS)]
    return [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]


def _native_call() -> list[Chunk]:
    opening = {"index": 0, "id": "call", "function": {"name": "echo", "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"text": "', "some text", '"}')]
    return [
        {"choices": [{"index": 0, "delta": {"tool_calls": [entry]}, "finish_reason": None}]}
        for entry in (opening, *rest)
    ]


TEXT = "Let me look at that file before I say anything about it. " * 3
END: list[Chunk] = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
REPLIES: dict[str, tuple[Dialect, list[Chunk]]] = {
    "native": (NativeDialect(), [*_content(TEXT), *_native_call(), *END]),
    "tags": (TagsDialect(), [*_content(TEXT + build_tag_call("echo", {"text": "some text"})), *END]),
    "json": (JsonDecisionDialect(), [*_content('{"tool": "echo", "arguments": {"text": "some text"}}'), *END]),
}


class _PreparedModel:
    """Test double of a model that returns the same chunks immediately for each request."""

    name = "prepared"

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""


async def _answer(call: ToolCall) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output=OUTPUT)


async def _floor(model: _PreparedModel) -> float:
    """Return the seconds per step of the baseline: read the chunks of the model and call the tool."""
    started = time.perf_counter()
    for step in range(STEPS):
        async for _ in model.stream(ModelRequest([])):
            pass
        await _answer(ToolCall(id=f"floor-{step}", name="echo", arguments={"text": "some text"}))
    return (time.perf_counter() - started) / STEPS


async def _ours(model: _PreparedModel, dialect: Dialect) -> float:
    agent = Agent(model, dialect, [SPEC], _answer, options=ReActOptions(max_iterations=STEPS))
    started = time.perf_counter()
    result = await agent.run("Say it again.")
    took = time.perf_counter() - started
    if result.steps != STEPS:
        raise RuntimeError(f"{result.steps} steps instead of {STEPS}")
    return took / STEPS


@contextmanager
def quiet_log() -> Iterator[None]:
    """Suppress the warnings with which these runs end."""
    logger = logging.getLogger("toolcrew")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _measure() -> Report:
    cases: dict[str, Any] = {}
    for name, (dialect, chunks) in REPLIES.items():
        model = _PreparedModel(chunks)
        cases[f"{name} floor"] = lambda model=model: _floor(model)
        cases[name] = lambda model=model, dialect=dialect: _ours(model, dialect)
    seconds = await interleave(cases, ROUNDS, warm_up=2)
    report = Report(
        "loop_step",
        notes=[f"{STEPS} steps a run with {len(OUTPUT)} characters of output each; floor: chunks and tool alone"],
    )
    for name in REPLIES:
        ours, floor = median(seconds[name]), median(seconds[f"{name} floor"])
        report.add(
            f"{name}_added_ms",
            (ours - floor) * 1000,
            f"a step in the {name} dialect, without model and tool",
            at_most=1.0,
        )
        report.add(f"{name}_ratio", ours / floor, f"{name}: step / floor")
    return report


def run() -> Report:
    with quiet_log():
        return asyncio.run(_measure())
