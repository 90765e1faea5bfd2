"""Traced runs for tests: a scripted model, tools that are functions, and a folder."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from rich.console import Console

from tests.support.records.builders import build_spec
from toolcrew.contract.calls import Clocks, SandboxInfo, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.masking import Masker
from toolcrew.contract.run_events import CallSent, OnEvent, pass_to
from toolcrew.orchestrator.cli.trace_printer import TracePrinter
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.traces.reading import Trace
from toolcrew.orchestrator.traces.recorder import TraceRecorder, open_trace

RUN = "run1"
Answer = Callable[[ToolCall], ToolResult]


def echo(call: ToolCall) -> ToolResult:
    """Return the call's text."""
    return ToolResult(
        call_id=call.id,
        name=call.name,
        success=True,
        output=str(call.arguments.get("text")),
        metadata={"exit_code": 0},
        clocks=Clocks(run_s=0.5),
        sandbox=SandboxInfo(id="box1"),
    )


def fail(call: ToolCall) -> ToolResult:
    """Return a result of a tool that has no time left."""
    return ToolResult.failed(call, ErrorCode.TIMEOUT, "it took too long", output="so far")


def call_echo(text: str) -> Calls:
    return Calls([("echo", {"text": text})], "Let me see.")


async def run_traced(
    folder: Path,
    model: Model | None = None,
    *,
    secrets: Mapping[str, str] | None = None,
    answer: Answer = echo,
    dialect: Dialect | None = None,
    history: list[dict[str, Any]] | None = None,
    run: str = RUN,
    is_sent: bool = True,
    also: OnEvent = lambda _: None,
    **options: Any,
) -> tuple[Path, RunResult, TraceRecorder]:
    """Run one agent with a trace."""
    with open_trace(folder, "acme", run, masker=Masker(secrets)) as trace:

        async def run_call(call: ToolCall) -> ToolResult:
            if is_sent:
                trace.on_event(CallSent(run=run, call=call))
            return answer(call)

        agent = Agent(
            model or ScriptedModel([call_echo("a"), "It is a."]),
            dialect or NativeDialect(),
            [build_spec("echo")],
            run_call,
            instruction="Be brief.",
            options=ReActOptions(**options),
            on_event=pass_to(trace.on_event, also),
            run_id=run,
        )
        result = await agent.run("do it", history=history or [])
    return trace.path, result, trace


def build_lines(trace: Trace, *, is_full: bool = False) -> list[str]:
    """Return the lines of `toolcrew traces show`."""
    out = io.StringIO()
    TracePrinter(Console(file=out, width=200), is_full=is_full).show(trace)
    return out.getvalue().splitlines()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_type(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(path) if line["type"] == kind]


# Runs with every kind of text, in one step or in several steps
texts = st.text(max_size=40)
replies = st.one_of(
    st.builds(
        lambda calls, text: Calls([("echo", {"text": one}) for one in calls], text),
        st.lists(texts, min_size=1, max_size=3),
        texts,
    ),
    st.builds(lambda: Calls([("echo", "{broken")])),
    st.builds(lambda name: Calls([(name, {})]), st.sampled_from(["ech", "other"])),
)
scripts = st.builds(lambda body, end: [*body, end or "."], st.lists(replies, max_size=3), texts)
