"""Transport that runs functions in this process instead of sending calls to a worker."""

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from toolcrew.contract.calls import Clocks, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_call, encode_result
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.functions.call_outputs import build_failure, build_result
from toolcrew.contract.functions.function_schemas import is_async
from toolcrew.contract.registry import Tool
from toolcrew.contract.signing import ResultSeal, SigningKeys
from toolcrew.orchestrator.dispatch.request import Attempt
from toolcrew.orchestrator.functions.blocking_calls import BlockingCall, BlockingCalls, FunctionOutcome
from toolcrew.orchestrator.functions.loop_waits import LoopRunner
from toolcrew.orchestrator.functions.session_state import MemoryState

CANCEL_GRACE_S = 1.0
"""Seconds that a cancelled function has for its cleanup."""


class Lookup(Protocol):
    """Interface that returns a function by its name: a mapping, or a ToolRegistry. Each call asks for its function
    again.
    """

    def get(self, name: str, /) -> Any: ...


ContextFor = Callable[[ToolCall, ToolContext], CallContext]


class InProcessTransport:
    """Runs functions as tools, for programs without a pool and for tests. It has the same envelopes, but no queue, no
    sandbox and no isolation.

    `functions`: plain functions by name, called with their arguments by name; or tools (contract.registry.Tool),
    whose handler is called with the arguments and the CallContext from `contexts`. Async functions run on the event
    loop and are cancelled at the limit. Other functions run in daemon threads and are interrupted by an exception. A
    function that is blocked in C code may continue to run, and its result says so.
    """

    def __init__(
        self,
        functions: Lookup,
        key: SigningKeys,
        *,
        contexts: ContextFor | None = None,
        threads: BlockingCalls | None = None,
    ) -> None:
        self._functions = functions
        self._key = key
        self._contexts = contexts or _bare_context
        self._threads = threads or BlockingCalls()
        self._abandoned: set[asyncio.Task[FunctionOutcome]] = set()
        self.delivered: deque[Attempt] = deque(maxlen=16)
        """The last few attempts, for tests."""

    async def deliver(self, attempt: Attempt) -> Any:
        """Run the function of the call's name with its arguments. Its return value or exception becomes the result."""
        self.delivered.append(attempt)
        call, context = decode_call(attempt.envelope, self._key)
        clock = _Clock()
        result = await self._run(call, context, attempt.request.wait_s, clock)
        return encode_result(
            result.model_copy(update={"clocks": clock.read()}),
            seal=ResultSeal(self._key, context.tenant, context.attempt),
        )

    def settle(self, tenant: str, call_id: str) -> None:
        """Do nothing: no result is stored."""

    async def send_order(self, queue: str, envelope: str) -> None:
        """Do nothing: a function runs in its caller's process."""

    async def aclose(self) -> None:
        """Do nothing: idle threads end by themselves."""

    async def _run(self, call: ToolCall, context: ToolContext, wait_s: float, clock: "_Clock") -> ToolResult:
        tool = self._functions.get(call.name)
        if tool is None:
            return ToolResult.failed(call, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}")
        limit_s = min(context.timeout_s, wait_s)
        try:
            function, run = self._prepare(tool, call, context)
            if is_async(function):
                outcome = await self._run_on_loop(run, limit_s)
            else:
                outcome = await self._run_in_thread(run, limit_s, wait_s, clock)
            return build_result(call, outcome.value) if outcome.error is None else build_failure(call, outcome.error)
        except _LimitReached as reached:
            return ToolResult.failed(call, ErrorCode.TIMEOUT, f"{call.name} {reached}")
        except Exception as error:  # noqa: BLE001
            # Encoding the return value of a user's function may raise anything; that becomes a result too.
            return build_failure(call, error)

    def _prepare(self, tool: Any, call: ToolCall, context: ToolContext) -> tuple[Callable[..., Any], Callable[[], Any]]:
        """Return the function, and a callable that runs it with its arguments."""
        if isinstance(tool, Tool):
            handler, call_context = tool.handler, self._contexts(call, context)
            return handler, lambda: handler(dict(call.arguments), call_context)
        return tool, lambda: tool(**call.arguments)

    async def _run_on_loop(self, run: Callable[[], Any], limit_s: float) -> FunctionOutcome:
        """Run the function in its own task. If the task ignores its cancellation, it is left running and the event
        loop continues.
        """
        task = asyncio.create_task(_await_outcome(run))
        try:
            finished, _ = await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            await self._cancel(task)
            raise
        if finished:
            return task.result()
        if await self._cancel(task):
            raise _LimitReached(f"did not end within its limit of {limit_s:g} s")
        raise _LimitReached(
            f"did not end within its limit of {limit_s:g} s and does not stop when it is cancelled: it may still run"
        )

    async def _cancel(self, task: "asyncio.Task[FunctionOutcome]") -> bool:
        """Cancel the task. Return whether it has ended."""
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        return task.done()

    async def _run_in_thread(
        self, run: Callable[[], Any], limit_s: float, wait_s: float, clock: "_Clock"
    ) -> FunctionOutcome:
        blocking = self._threads.submit(run)
        try:
            await self._await_start(blocking, wait_s)
            clock.start_run()
            finished, _ = await asyncio.wait({blocking.ended}, timeout=limit_s)
        except asyncio.CancelledError:
            if not self._threads.withdraw(blocking):
                blocking.interrupt()
            raise
        if not finished:
            blocking.interrupt()
            await asyncio.wait({blocking.ended}, timeout=CANCEL_GRACE_S)
            rest = "" if blocking.ended.done() else " and is blocked outside of Python code: it may still run"
            raise _LimitReached(f"did not end within its limit of {limit_s:g} s{rest}")
        outcome = blocking.ended.result()
        if outcome.error is None and inspect.isawaitable(outcome.value):
            return await self._run_on_loop(lambda: outcome.value, max(0.0, limit_s - clock.read().run_s))
        return outcome

    async def _await_start(self, blocking: BlockingCall, wait_s: float) -> None:
        await asyncio.wait({blocking.started}, timeout=wait_s)
        if not blocking.started.done() and self._threads.withdraw(blocking):
            message = (
                f"was not run: all {self._threads.limit} threads were busy for {wait_s:g} s with functions that have "
                "not returned"
            )
            raise _LimitReached(message)


class _LimitReached(Exception):
    """A call has reached its time limit. The message continues a sentence after the name of the tool."""


class _Clock:
    """Measures the wait and the run of a call. Async functions have no wait."""

    def __init__(self) -> None:
        self._received_at = self._began = time.monotonic()

    def start_run(self) -> None:
        self._began = time.monotonic()

    def read(self) -> Clocks:
        return Clocks(queued_s=self._began - self._received_at, run_s=time.monotonic() - self._began)


async def _await_outcome(run: Callable[[], Any]) -> FunctionOutcome:
    """Return the value or the exception of an awaitable. KeyboardInterrupt is not caught: raised in a task, it stops
    the event loop.
    """
    try:
        return FunctionOutcome(value=await run())
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
        # A user's function may raise anything.
        return FunctionOutcome(error=error)


def _bare_context(call: ToolCall, context: ToolContext) -> CallContext:
    return CallContext(
        call.id,
        tenant=context.tenant,
        run=context.run,
        session=context.session,
        cwd=context.cwd,
        config=context.config,
        state=MemoryState(),
        runner=LoopRunner(asyncio.get_running_loop()),
    )
