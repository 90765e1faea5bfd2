"""Operators' functions in a worker's process: the context that they receive, and how the worker stops them."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from structlog.testing import capture_logs

from tests.support.records.builders import build_call, build_context
from toolcrew import CallContext, ToolFailure, tool
from toolcrew.contract.calls import ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.function_tools import FunctionTool
from toolcrew.workers.custom import outcomes
from toolcrew.workers.custom.calls import CustomCalls
from toolcrew.workers.custom.outcomes import MAX_METADATA_BYTES
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerResources

Logs = list[Any]


@pytest.fixture(autouse=True)
def logs() -> Iterator[Logs]:
    with capture_logs() as entries:
        yield entries


def run_tool(
    function_tool: FunctionTool[..., Any],
    arguments: dict[str, Any] | None = None,
    context: ToolContext | None = None,
    **config: Any,
) -> Outcome:
    context = context or build_context()
    handler = CustomCalls(config).build_handler(function_tool)
    return handler(arguments or {}, ToolEnvironment(build_call(function_tool.name), context, WorkerResources({})))


def test_wait_in_an_async_function_fails_instead_of_blocking() -> None:
    @tool
    async def check_wait(context: CallContext) -> Any:
        return context.wait(asyncio.sleep(0))

    assert "in an async function: use await" in str(run_tool(check_wait).error)


def test_threads_of_a_sync_function_can_wait_concurrently() -> None:
    @tool
    def check_wait(context: CallContext) -> Any:
        values: list[int] = []
        threads = [
            threading.Thread(target=lambda n=n: values.append(context.wait(asyncio.sleep(0, n)))) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(values)

    assert run_tool(check_wait).output == str(list(range(8)))


def test_state_without_a_session_is_refused() -> None:
    @tool
    async def count(context: CallContext) -> Any:
        return await context.state.get("n")

    outcome = run_tool(count, context=build_context(session=None))
    assert (outcome.error_code, "belongs to no session" in str(outcome.error)) == (ErrorCode.SESSION_NOT_FOUND, True)


def test_an_async_function_is_stopped_at_its_timeout() -> None:
    @tool
    async def slow() -> None:
        await asyncio.sleep(10)

    outcome = run_tool(slow, context=build_context(timeout_s=0.05))
    assert outcome.error_code == ErrorCode.TIMEOUT
    assert outcome.error == "slow did not end within its limit of 0.05 s and was stopped"


def test_a_timeout_raised_by_the_tool_is_reported_as_its_error() -> None:
    @tool
    async def slow() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)

    assert str(run_tool(slow).error).startswith("TimeoutError")


def test_tasks_left_by_an_async_function_are_cancelled() -> None:
    ended: list[str] = []

    async def wait_until_cancelled() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    @tool
    async def leave_task() -> str:
        task = asyncio.create_task(wait_until_cancelled())
        await asyncio.sleep(0)
        return "gone" if not task.done() else "done"

    assert (run_tool(leave_task).output, ended) == ("gone", ["cancelled"])


class Order(BaseModel):
    id: int
    note: str | None = None


@dataclass
class ShopResult:
    success: bool
    output: str | None = None
    error: str | None = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain 读", "plain 读"),
        (None, "null"),
        ([1, {"a": None}], '[1, {"a": null}]'),
        (Order(id=1), '{"id": 1, "note": null}'),
        ([Order(id=1)], '[{"id": 1, "note": null}]'),
        (b"bytes", "bytes"),
        ("\ud800", "?"),
    ],
    ids=["text", "none", "json", "a model", "models", "bytes", "lone surrogate"],
)
def test_a_return_value_is_converted_to_text(value: Any, text: str) -> None:
    @tool
    def return_value() -> Any:
        return value

    outcome = run_tool(return_value)
    assert (outcome.output, outcome.error, outcome.truncated) == (text, None, False)


def test_a_single_error_of_a_task_group_is_unwrapped() -> None:
    @tool
    async def fail_in_group() -> None:
        async with asyncio.TaskGroup() as group, asyncio.TaskGroup():
            group.create_task(asyncio.sleep(0))
            raise ToolFailure(ErrorCode.NO_MATCH, "no such article")

    outcome = run_tool(fail_in_group)
    assert (outcome.error, outcome.error_code) == ("no such article", ErrorCode.NO_MATCH)


def test_a_returned_tool_result_or_lookalike_keeps_its_fields() -> None:
    @tool
    def return_tool_result() -> ToolResult:
        return ToolResult(
            call_id="x", name="y", success=False, error="out of stock", error_code=ErrorCode.NO_MATCH, metadata={"n": 1}
        )

    @tool
    def return_lookalike() -> ShopResult:
        return ShopResult(False, "two of three parts", "out of stock")

    outcome = run_tool(return_tool_result)
    assert (outcome.error_code, outcome.error, outcome.metadata) == (ErrorCode.NO_MATCH, "out of stock", {"n": 1})
    outcome = run_tool(return_lookalike)
    assert (outcome.error_code, outcome.error) == (ErrorCode.INTERNAL, "out of stock")
    assert outcome.output == "two of three parts"


def test_a_returned_result_cannot_reference_a_blob() -> None:
    @tool
    def forge() -> ToolResult:
        return ToolResult(call_id="x", name="y", success=True, output="ok", blob="toolcrew:default:t:other:blob-web.x")

    assert run_tool(forge).blob is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "line\n" * 2001,
            "[Cut: 2000 of 2001 lines, 10000 of 10005 bytes; to see the rest call return_value for less at a time]",
        ),
        (
            "x" * 40_000,
            "[Cut: 1 of 1 lines, 32768 of 40000 bytes; to see the rest call return_value for less at a time]",
        ),
        (
            "读" * 20_000,
            "[Cut: 1 of 1 lines, 32766 of 60000 bytes; to see the rest call return_value for less at a time]",
        ),
        (
            "x" * 300_000,
            (
                "[Cut: 1 of at least 1 lines, 32768 of at least 262144 bytes; to see the rest call return_value for less at a "
                "time]"
            ),
        ),
        (
            ("y" * 99 + "\n") * 400,
            "[Cut: 327 of 400 lines, 32700 of 40000 bytes; to see the rest call return_value for less at a time]",
        ),
    ],
    ids=["lines", "one line", "whole characters", "beyond a result", "whole lines"],
)
def test_long_output_is_cut_with_a_note(text: str, expected: str) -> None:
    @tool
    def return_value() -> str:
        return text

    outcome = run_tool(return_value)
    assert outcome.truncated
    head, _, footer = str(outcome.output).rpartition("\n")
    assert footer == expected
    assert text.startswith(head)


def test_metadata_above_the_limit_is_dropped_and_reported() -> None:
    @tool
    def return_value() -> ToolResult:
        return ToolResult(call_id="x", name="y", success=True, output="ok", metadata={"k": "v" * MAX_METADATA_BYTES})

    assert run_tool(return_value).metadata == {"metadata_dropped_bytes": MAX_METADATA_BYTES + len('{"k": ""}')}


@given(st.text(alphabet="a读\n", max_size=60), st.integers(0, 60), st.integers(1, 6))
def test_cut_output_ends_at_a_line_or_character_boundary(text: str, times: int, lines: int) -> None:
    full_text = text * times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes, "MAX_LINES", lines)
        patch.setattr(outcomes, "MAX_OUTPUT_BYTES", 100)
        output, is_cut = outcomes.cut_output("return_value", full_text)
    if not is_cut:
        assert output == full_text
        return
    head, _, footer = output.rpartition("\n")
    assert footer.startswith("[Cut: ")
    assert full_text.startswith(head)
    assert (len(head.encode()) <= 100, head.count("\n") < lines) == (True, True)
    assert full_text[len(head) :].startswith("\n") or "\n" not in head


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
        (UnprintableError(), "UnprintableError"),
        (RecursionError("deep"), "RecursionError: deep"),
        (ValueError("x" * 100_000), "ValueError: xxx"),
        (StopIteration(), "StopIteration"),
    ],
    ids=["exit", "cancelled", "unprintable", "recursion", "long", "stop"],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_any_exception_fails_only_its_call(error: BaseException, expected: str, is_async: bool) -> None:
    @tool
    def sync_function() -> None:
        raise error

    @tool
    async def async_function() -> None:
        raise error

    outcome = run_tool(async_function if is_async else sync_function)
    assert outcome.error_code is ErrorCode.INTERNAL
    # A coroutine cannot raise StopIteration: Python makes it another error.
    assert str(outcome.error).startswith(expected) or isinstance(error, StopIteration)
    assert len(str(outcome.error)) < 20_000


def test_printed_text_is_logged_with_its_call_id(logs: Logs) -> None:
    @tool
    def print_text() -> str:
        print("one\ntwo")  # noqa: T201  # prints are what is tested
        print("half", end="")  # noqa: T201  # prints are what is tested
        return "done"

    before = sys.stdout
    assert run_tool(print_text).output == "done"
    assert [(entry["event"], entry["text"], entry["call"]) for entry in logs] == [
        ("tool_printed", text, "call-1") for text in ("one", "two", "half")
    ]
    assert sys.stdout is before


def test_printed_text_above_the_limit_is_counted_and_not_logged(logs: Logs) -> None:
    @tool
    def print_text() -> None:
        print("x" * 100_000)  # noqa: T201  # prints are what is tested

    run_tool(print_text)
    assert sum(len(entry["text"]) for entry in logs if entry["event"] == "tool_printed") == 64 * 1024
    assert (logs[-1]["event"], logs[-1]["dropped_chars"]) == ("tool_printed_too_much", 100_001 - 64 * 1024)


def test_a_tool_cannot_change_its_configuration() -> None:
    @tool
    def change_config(context: CallContext) -> None:
        context.config["server"] = "mine"  # type: ignore[index]

    assert "TypeError" in str(run_tool(change_config).error)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_function_receives_the_context_of_its_call(is_async: bool) -> None:
    contexts: list[CallContext] = []

    @tool
    def sync_function(context: CallContext) -> None:
        contexts.append(context)

    @tool
    async def async_function(context: CallContext) -> None:
        contexts.append(context)

    run_tool(
        async_function if is_async else sync_function, context=build_context(run="r1", cwd="/workspace/sub", model=None)
    )
    (result,) = contexts
    assert (result.call_id, result.tenant, result.run, result.session, result.cwd, result.model) == (
        "call-1",
        "acme",
        "r1",
        "s1",
        "/workspace/sub",
        None,
    )
