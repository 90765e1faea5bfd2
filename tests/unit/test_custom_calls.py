"""Operators' functions in a worker's process: the context that they receive, and how the worker stops them."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from contract.calls import ToolContext
from contract.errors import ErrorCode
from contract.functions import CallContext, tool
from contract.functions.function_tools import FunctionTool
from tests.builders import build_call, build_context
from workers.custom.calls import CustomCalls
from workers.interrupts import CallInterrupted
from workers.tools.base import Outcome, ToolEnvironment, WorkerResources

Logs = list[Any]


@pytest.fixture(autouse=True)
def logs() -> Iterator[Logs]:
    with capture_logs() as entries:
        yield entries


def run(
    made: FunctionTool[..., Any],
    arguments: dict[str, Any] | None = None,
    context: ToolContext | None = None,
    **config: Any,
) -> Outcome:
    context = context or build_context()
    handler = CustomCalls(config).build_handler(made)
    return handler(arguments or {}, ToolEnvironment(build_call(made.name), context, WorkerResources({})))


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_function_learns_whose_call_it_is(is_async: bool) -> None:
    contexts: list[CallContext] = []

    @tool
    def plain(context: CallContext) -> None:
        contexts.append(context)

    @tool
    async def awaited(context: CallContext) -> None:
        contexts.append(context)

    run(awaited if is_async else plain, context=build_context(run="r1", cwd="/workspace/sub", model=None))
    (result,) = contexts
    assert (result.call_id, result.tenant, result.run, result.session, result.cwd, result.model) == (
        "call-1",
        "acme",
        "r1",
        "s1",
        "/workspace/sub",
        None,
    )


def test_the_configuration_cannot_be_changed() -> None:
    @tool
    def meddle(context: CallContext) -> None:
        context.config["server"] = "mine"  # type: ignore[index]

    assert "TypeError" in str(run(meddle).error)


def test_waiting_in_an_async_function_is_an_error_instead_of_a_deadlock() -> None:
    @tool
    async def look(context: CallContext) -> Any:
        return context.wait(asyncio.sleep(0))

    assert "in an async function use await" in str(run(look).error)


def test_threads_of_a_plain_function_may_wait_at_the_same_time() -> None:
    @tool
    def look(context: CallContext) -> Any:
        got: list[int] = []
        threads = [threading.Thread(target=lambda n=n: got.append(context.wait(asyncio.sleep(0, n)))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(got)

    assert run(look).output == str(list(range(8)))


def test_state_without_a_session_is_refused_in_words() -> None:
    @tool
    async def count(context: CallContext) -> Any:
        return await context.state.get("n")

    outcome = run(count, context=build_context(session=None))
    assert (outcome.error_code, "belongs to no session" in str(outcome.error)) == (ErrorCode.SESSION_NOT_FOUND, True)


# --- how it is stopped ---


def interrupt_after(seconds: float) -> None:
    """Interrupt the call as a worker does: a signal handler raises an exception at an arbitrary point of the code."""

    def stop(*_: object) -> None:
        raise CallInterrupted(ErrorCode.TIMEOUT, "time is up")

    signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    timer.daemon = True
    timer.start()


@pytest.fixture
def own_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("own_signal")
def test_a_plain_function_that_catches_every_exception_is_interrupted_all_the_same() -> None:
    started = threading.Event()

    @tool
    def stubborn() -> None:
        while True:
            try:
                started.wait(10)
            except Exception:  # noqa: BLE001  # the very habit that must not help
                continue

    interrupt_after(0.05)
    with pytest.raises(CallInterrupted):
        run(stubborn)


@pytest.mark.usefixtures("own_signal")
def test_an_async_function_that_is_interrupted_may_clean_up() -> None:
    cleaned: list[str] = []

    @tool
    async def slow() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    interrupt_after(0.05)
    with pytest.raises(CallInterrupted):
        run(slow)
    assert cleaned == ["up"]


def test_an_async_function_ends_at_its_limit_even_if_the_interruption_got_lost() -> None:
    @tool
    async def slow() -> None:
        await asyncio.sleep(10)

    outcome = run(slow, context=build_context(timeout_s=0.05))
    assert (outcome.error_code, outcome.error) == (
        ErrorCode.TIMEOUT,
        "slow did not end within its limit of 0.05 s and was stopped",
    )


def test_a_time_out_of_the_tools_own_is_its_own_error() -> None:
    @tool
    async def slow() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)

    assert str(run(slow).error).startswith("TimeoutError")


def test_what_an_async_function_left_running_is_cancelled_with_its_call() -> None:
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    @tool
    async def leave() -> str:
        task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        return "gone" if not task.done() else "done"

    assert (run(leave).output, ended) == ("gone", ["cancelled"])
