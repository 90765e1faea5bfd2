"""The additional contract of the in-process transport: any value, any error, and hard limits."""

import asyncio
import contextvars
import dataclasses
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from pydantic import BaseModel

from tests.support.records.builders import KEY, build_attempt, build_call, build_context, build_spec
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import MAX_OUTPUT_CHARS, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_result, encode_call
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.contract.signing import ResultSeal
from toolcrew.orchestrator.dispatch.in_process_transport import InProcessTransport
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.orchestrator.functions.blocking_calls import BlockingCalls

SEAL = ResultSeal(KEY, "acme")


def build_delivery(tool: str = "f", *, wait_s: float = SOON_S, timeout_s: float = SOON_S, **arguments: Any) -> Attempt:
    envelope = encode_call(build_call(tool, **arguments), build_context(timeout_s=timeout_s), KEY)
    return build_attempt(tool, call_id="call-1", envelope=envelope, wait_s=wait_s)


async def run(function: Callable[..., Any], *, threads: BlockingCalls | None = None, **fields: Any) -> ToolResult:
    transport = InProcessTransport({"f": function}, KEY, threads=threads)
    async with asyncio.timeout(SOON_S):
        return decode_result(await transport.deliver(build_delivery(**fields)), SEAL)


async def sync_and_async(value: Callable[[], Any]) -> list[ToolResult]:
    """Return the results of a plain and of an async function that return, or raise, the same."""

    async def on_loop() -> Any:
        return value()

    return [await run(lambda: value()), await run(on_loop)]


# Values


class Model(BaseModel):
    at: datetime


@dataclasses.dataclass
class Record:
    name: str
    tags: set[int]


VALUES: list[tuple[Any, str]] = [
    ("text 读", "text 读"),
    ("", ""),
    ({"a": ["读", 1.5, None, True]}, '{"a": ["读", 1.5, null, true]}'),
    ([1, (2, 3)], "[1, [2, 3]]"),
    (5, "5"),
    (None, "null"),
    (b"bytes", "bytes"),
    (Model(at=datetime(2026, 1, 2, tzinfo=UTC)), '{"at": "2026-01-02T00:00:00Z"}'),
    ({"inner": Record("a", {7})}, '{"inner": {"name": "a", "tags": [7]}}'),
    ({(1, 2): "a key that JSON has not"}, "{(1, 2): 'a key that JSON has not'}"),
    (datetime(2026, 1, 2, tzinfo=UTC), '"2026-01-02 00:00:00+00:00"'),
    ({"success": False, "error": "data"}, '{"success": false, "error": "data"}'),
    ("half \ud800", "half ?"),
]


@pytest.mark.parametrize(("value", "output"), VALUES, ids=lambda value: repr(value)[:30])
async def test_every_return_value_becomes_text(value: Any, output: str) -> None:
    for result in await sync_and_async(lambda: value):
        assert (result.success, result.output, result.truncated) == (True, output, False)


async def test_a_recursive_value_becomes_text() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert (await run(lambda: endless)).output == "[[...]]"


async def test_output_above_the_limit_is_truncated_and_marked() -> None:
    result = await run(lambda: "x" * (MAX_OUTPUT_CHARS + 1))
    assert (len(result.output or ""), result.truncated) == (MAX_OUTPUT_CHARS, True)


async def test_a_returned_tool_result_is_kept_under_the_id_of_the_call() -> None:
    mine = ToolResult(
        call_id="other", name="other", success=False, error="no", error_code=ErrorCode.NO_MATCH, metadata={"a": 1}
    )
    for result in await sync_and_async(lambda: mine):
        assert (result.call_id, result.name, result.error_code, result.metadata) == (
            "call-1",
            "f",
            ErrorCode.NO_MATCH,
            {"a": 1},
        )


LOOKALIKES: list[tuple[Any, tuple[bool, str | None, str | None]]] = [
    (SimpleNamespace(success=True, output={"a": 1}), (True, '{"a": 1}', None)),
    (SimpleNamespace(success=False, error="no", output="until then"), (False, "until then", "no")),
    (SimpleNamespace(content="hi", tool_call_id="x", status="success", artifact={"a": 1}), (True, "hi", None)),
    (SimpleNamespace(content="broke", tool_call_id="x", status="error"), (False, None, "broke")),
]


@pytest.mark.parametrize(("value", "expected"), LOOKALIKES, ids=range(len(LOOKALIKES)))
async def test_results_of_other_libraries_keep_success_and_failure(value: Any, expected: Any) -> None:
    result = await run(lambda: value)
    assert (result.success, result.output, result.error) == expected


# Errors


def leave() -> NoReturn:
    sys.exit(3)


def end_iteration() -> NoReturn:
    raise StopIteration


def cancel() -> NoReturn:
    raise asyncio.CancelledError


def rant() -> NoReturn:
    raise RuntimeError("x" * 20_000)


def time_out() -> NoReturn:
    raise TimeoutError("the server's")


class Shy(Exception):
    def __str__(self) -> str:
        raise ValueError


def be_shy() -> NoReturn:
    raise Shy


ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    (leave, "SystemExit: 3"),
    (end_iteration, "StopIteration"),
    (cancel, "CancelledError"),
    (rant, "RuntimeError: xxx"),
    (time_out, "TimeoutError: the server's"),
    (be_shy, "Shy"),
]


@pytest.mark.parametrize(("function", "expected"), ERRORS, ids=lambda value: getattr(value, "__name__", ""))
async def test_every_raised_exception_becomes_a_result_with_type_and_text(
    function: Callable[[], Any], expected: str
) -> None:
    for result in await sync_and_async(function):
        assert (result.success, result.error_code, expected in str(result.error)) == (False, ErrorCode.INTERNAL, True)


async def test_a_tool_failure_keeps_its_code_and_metadata() -> None:
    def refuse() -> None:
        raise ToolFailure(ErrorCode.NO_MATCH, "nothing like it", nearest=["a"], seen=object)

    for result in await sync_and_async(refuse):
        assert (result.error_code, result.error) == (ErrorCode.NO_MATCH, "nothing like it")
        assert "nearest" in result.metadata


async def test_a_value_whose_str_fails_becomes_an_error_result() -> None:
    class Silent:
        def __str__(self) -> str:
            raise ValueError("no words")

    assert (await run(Silent)).error == "ValueError: no words"


async def test_an_unknown_tool_is_reported_as_not_found() -> None:
    result = decode_result(await InProcessTransport({}, KEY).deliver(build_delivery("gone")), SEAL)
    assert (result.error, result.error_code) == ("Tool not found: gone", ErrorCode.TOOL_NOT_FOUND)


# Handlers


async def test_a_handler_gets_arguments_and_context() -> None:
    def handle(arguments: dict[str, Any], context: CallContext) -> list[Any]:
        return [arguments, context.call_id, context.session, context.tenant, context.cwd]

    transport = InProcessTransport(ToolRegistry([Tool(build_spec("f"), handle)]), KEY)
    result = decode_result(await transport.deliver(build_delivery(text="a")), SEAL)
    assert result.output == '[{"text": "a"}, "call-1", "s1", "acme", "/workspace"]'


async def test_the_context_is_built_by_the_configured_factory() -> None:
    def contexts(call: ToolCall, context: ToolContext) -> CallContext:
        return CallContext(call.id, cwd="/mine")

    transport = InProcessTransport({"f": Tool(build_spec("f"), lambda _, context: context.cwd)}, KEY, contexts=contexts)
    assert decode_result(await transport.deliver(build_delivery()), SEAL).output == "/mine"


async def test_an_awaitable_returned_by_a_plain_function_is_awaited() -> None:
    async def later() -> str:
        return "later"

    assert (await run(lambda: later())).output == "later"


async def test_a_plain_function_runs_in_a_thread_with_the_context_of_the_caller() -> None:
    caller = contextvars.ContextVar("who", default="unknown")
    caller.set("me")
    result = await run(
        lambda: [caller.get(), threading.current_thread() is threading.main_thread(), threading.current_thread().daemon]
    )
    assert result.output == '["me", false, true]'


# Limits


async def test_a_function_is_abandoned_after_the_wait() -> None:
    result = await run(lambda: asyncio.Event().wait(), wait_s=0.05)
    assert result.error_code is ErrorCode.TIMEOUT


async def test_an_async_function_is_cancelled_at_its_limit_and_cleans_up() -> None:
    cleaned = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    result = await run(hang, timeout_s=0.05)
    assert (result.error_code, result.error, cleaned.is_set()) == (
        ErrorCode.TIMEOUT,
        "f did not end within its limit of 0.05 s",
        True,
    )


async def test_an_async_function_that_ignores_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.dispatch.in_process_transport.CANCEL_GRACE_S", 0.05)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    result = await run(stubborn, timeout_s=0.05)
    release.set()
    assert (result.error_code, "may still run" in str(result.error)) == (ErrorCode.TIMEOUT, True)


async def test_a_cancelled_call_cancels_its_async_function() -> None:
    began, cleaned = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    call = asyncio.create_task(run(hang))
    await asyncio.wait_for(began.wait(), SOON_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert cleaned.is_set()


async def test_a_blocking_function_is_abandoned_at_its_limit_and_reported() -> None:
    release = threading.Event()
    result = await run(lambda: release.wait(30), timeout_s=0.05)
    release.set()
    assert result.error_code is ErrorCode.TIMEOUT
    assert "is blocked outside of Python code: it may still run" in str(result.error)


async def test_blocked_threads_leave_threads_for_other_calls() -> None:
    release = threading.Event()
    threads = BlockingCalls(limit=40)
    hung = await asyncio.gather(*(run(lambda: release.wait(30), threads=threads, timeout_s=0.05) for _ in range(30)))
    assert {result.error_code for result in hung} == {ErrorCode.TIMEOUT}
    assert (await run(lambda: "fine", threads=threads)).output == "fine"
    release.set()


async def test_a_call_without_a_free_thread_times_out_and_does_not_run() -> None:
    release, threads = threading.Event(), BlockingCalls(limit=1)
    held = asyncio.create_task(run(lambda: release.wait(30), threads=threads))
    await asyncio.sleep(0)
    ran: list[int] = []
    result = await run(lambda: ran.append(1), threads=threads, wait_s=0.1)
    release.set()
    await held
    assert (result.error_code, "was not run" in str(result.error)) == (ErrorCode.TIMEOUT, True)
    assert (await run(lambda: "next", threads=threads)).output == "next"
    assert ran == []


async def test_the_run_time_of_a_call_starts_when_it_gets_a_thread() -> None:
    threads, both = BlockingCalls(limit=1), []
    release = threading.Event()
    both.append(asyncio.create_task(run(lambda: release.wait(30), threads=threads)))
    both.append(asyncio.create_task(run(lambda: "second", threads=threads)))
    asyncio.get_running_loop().call_later(0.2, release.set)
    _, second = await asyncio.gather(*both)
    assert second.clocks.queued_s > 0.1 > second.clocks.run_s


async def test_many_blocking_functions_run_in_parallel() -> None:
    together = threading.Barrier(20, timeout=SOON_S)
    results = await asyncio.gather(
        *(run(together.wait, threads=threads) for threads in [BlockingCalls()] for _ in range(20))
    )
    assert all(result.success for result in results)
