"""Threads that run blocking functions next to the loop and interrupt them at their limit. They never keep the process
alive.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_THREADS = 256
IDLE_S = 10.0
"""A thread without work ends after this many seconds."""


class FunctionInterrupted(BaseException):
    """Raised inside a function that is stopped at its limit. No `except Exception` of the function catches it."""


@dataclass(frozen=True)
class Ended:
    """How a function ended: with a value, or with an error. Plain data: no future may carry a StopIteration."""

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class BlockingCall:
    """One function on its way through a thread. `started` and `ended` are futures of the loop that submitted it."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    started: "asyncio.Future[None]"
    ended: "asyncio.Future[Ended]"
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _thread: int | None = field(default=None, init=False)

    def run(self) -> None:
        self._tell(self.started, None)
        try:
            ended = self._call()
        # The interrupt may arrive between the function's last step and the moment from which none is sent.
        except FunctionInterrupted as late:
            self._thread, ended = None, Ended(error=late)
        self._tell(self.ended, ended)

    def _call(self) -> Ended:
        self._thread = threading.get_ident()
        try:
            return Ended(value=self.context.run(self.function))
        except BaseException as error:  # noqa: BLE001
            # the thread's edge: every error is the result of the waiting call
            return Ended(error=error)
        finally:
            with self._lock:
                self._thread = None
            # One that was sent and has not arrived yet must not hit what this thread runs next.
            _raise_in_thread(threading.get_ident(), None)

    def interrupt(self) -> None:
        """Raise FunctionInterrupted in the function as soon as it executes Python code; nothing if it has ended. Call
        it once.

        A function that is blocked in C code (a long `time.sleep`, a read without a timeout) is interrupted only when
        that returns.
        """
        with self._lock:
            if self._thread is not None:
                _raise_in_thread(self._thread, FunctionInterrupted)

    def _tell(self, future: "asyncio.Future[Any]", value: Any) -> None:
        # A loop that is closed has nobody waiting any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_resolve, future, value)


class BlockingCalls:
    """At most `limit` daemon threads; calls beyond that wait their turn. Not bound to one loop."""

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self.limit = limit
        self._wake = threading.Condition()
        self._waiting: deque[BlockingCall] = deque()
        self._alive = 0
        self._idle = 0

    def submit(self, function: Callable[[], Any]) -> BlockingCall:
        """Hand `function` to a thread. Raises RuntimeError when the machine gives no thread and there is none."""
        loop = asyncio.get_running_loop()
        call = BlockingCall(function, loop, loop.create_future(), loop.create_future())
        with self._wake:
            self._waiting.append(call)
            if len(self._waiting) <= self._idle:
                self._wake.notify()
            elif self._alive < self.limit:
                self._start(call)
        return call

    def withdraw(self, call: BlockingCall) -> bool:
        """Take back a call that has not started. False: it has, and cannot be stopped."""
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
            if not self._alive:
                self._waiting.remove(call)
                raise

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            # Not kept until the next one comes: it holds the caller's arguments.
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


def _raise_in_thread(thread: int, error: type[BaseException] | None) -> None:
    """Have CPython raise `error` in that thread at its next step; None takes one back that has not been raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)
