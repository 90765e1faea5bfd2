"""Daemon threads that run blocking functions next to the event loop and interrupt the functions at their limit.

Daemon threads never keep the process alive.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_THREADS = 256
IDLE_S = 10.0
"""Time in seconds after which an idle thread ends."""


class FunctionInterrupted(BaseException):
    """Interrupts a function at its limit. A BaseException, so that no `except Exception` of the function catches it."""


@dataclass(frozen=True)
class FunctionOutcome:
    """Outcome of a function: a value or an error.

    The outcome is plain data, because a future cannot carry a StopIteration.
    """

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class BlockingCall:
    """Call of one function in a thread. `started` and `ended` are futures of the loop that submitted the call."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    started: "asyncio.Future[None]"
    ended: "asyncio.Future[FunctionOutcome]"
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _thread: int | None = field(default=None, init=False)
    _is_interrupted: bool = field(default=False, init=False)

    def run(self) -> None:
        """Run the function in the current thread and resolve the futures. Raises nothing."""
        self._resolve_later(self.started, None)
        try:
            outcome = self._call()
        # The interrupt may arrive after the last step of the function and before `_thread` is cleared. The interrupt
        # is then the result of the call, and must not end the thread.
        except FunctionInterrupted as interrupt:
            self._thread, outcome = None, FunctionOutcome(error=interrupt)
        self._resolve_later(self.ended, outcome)

    def _call(self) -> FunctionOutcome:
        self._thread = threading.get_ident()
        try:
            return FunctionOutcome(value=self.context.run(self.function))
        except BaseException as error:  # noqa: BLE001
            # the edge of the thread: every error is the result of the waiting call
            return FunctionOutcome(error=error)
        finally:
            with self._lock:
                self._thread = None
            # An interrupt that was sent but not yet raised would hit the next call that this thread runs.
            if self._is_interrupted:
                _receive_interrupt()

    def interrupt(self) -> None:
        """Raise FunctionInterrupted in the function at its next Python instruction. Call this method once.

        A function that has ended is not affected. A function that is blocked in C code (a long `time.sleep`, a read
        without a timeout) is interrupted only after that code returns.
        """
        # The lock keeps the thread in this call until the interrupt is sent, so that no later call of the thread is
        # hit.
        with self._lock:
            if self._thread is not None:
                self._is_interrupted = True
                _interrupt_thread(self._thread)

    def _resolve_later(self, future: "asyncio.Future[Any]", value: Any) -> None:
        # A closed loop has no waiting tasks, so the error of the closed loop is ignored.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_resolve, future, value)


class BlockingCalls:
    """Pool of at most `limit` daemon threads. Further calls wait for a thread. The pool is not bound to one event
    loop.
    """

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self.limit = limit
        self._wake = threading.Condition()
        self._waiting: deque[BlockingCall] = deque()
        self._alive = 0
        self._idle = 0

    def submit(self, function: Callable[[], Any]) -> BlockingCall:
        """Queue `function` for a thread, and start a thread when no thread is idle.

        Raises RuntimeError when the pool has no thread and the system cannot start one.
        """
        loop = asyncio.get_running_loop()
        call = BlockingCall(function, loop, loop.create_future(), loop.create_future())
        with self._wake:
            self._waiting.append(call)
            # A notified thread counts as idle until it takes its call. The comparison with all waiting calls therefore
            # starts a new thread when every idle thread already has a call.
            if len(self._waiting) <= self._idle:
                self._wake.notify()
            elif self._alive < self.limit:
                self._start(call)
        return call

    def withdraw(self, call: BlockingCall) -> bool:
        """Remove a call that has not started. Return False when the call has started, and cannot be removed."""
        with self._wake:
            if call in self._waiting:
                self._waiting.remove(call)
                return True
        return False

    def _start(self, call: BlockingCall) -> None:
        self._alive += 1
        try:
            threading.Thread(target=self._work, name="tool", daemon=True).start()
        except RuntimeError:
            self._alive -= 1
            # Another living thread takes the call later. The call fails only when the pool has no thread at all.
            if not self._alive:
                self._waiting.remove(call)
                raise

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            # Drop the call now, because the call holds the caller's arguments and this thread may be idle for a long
            # time.
            del call

    def _next(self) -> BlockingCall | None:
        with self._wake:
            self._idle += 1
            try:
                if self._wake.wait_for(lambda: self._waiting, IDLE_S):
                    return self._waiting.popleft()
                self._alive -= 1
                return None
            finally:
                self._idle -= 1


def _interrupt_thread(thread: int) -> None:
    """Ask CPython to raise FunctionInterrupted in the thread at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(FunctionInterrupted))


def _receive_interrupt() -> None:
    """Send an interrupt to this thread and catch it. It replaces an earlier interrupt that was sent and not yet raised,
    and so must not hit later code.

    CPython could also cancel an interrupt, but Python 3.11 then blocks every thread of a process with a tracer, such
    as coverage. Such a process may still be blocked until the function takes its interrupt.
    """
    with contextlib.suppress(FunctionInterrupted):
        _interrupt_thread(threading.get_ident())
        while True:
            time.sleep(0)


def _resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)
