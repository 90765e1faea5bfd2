"""Ends a call that no sandbox would end, inside the process that runs it: at its limit, or because it was cancelled."""

import hashlib
import mmap
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from contract.calls import POOL_GRACE_S, ToolCall, ToolContext
from contract.errors import ErrorCode, ToolFailure
from workers.executor import CallMiddleware
from workers.tools.base import Outcome, ToolEnvironment

END_SIGNAL = signal.SIGUSR1
"""Celery's own signal of a soft limit; we send it for a cancel, too."""
_DIGEST_BYTES = 16
_SLOTS = 1024


class CallInterrupted(BaseException):
    """Raised in the midst of a handler. No Exception: a tool that catches every one of those must not outlive its limit
    by it.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CancelBoard:
    """The last cancelled calls, in memory that a worker shares with the processes it forks: it writes, they read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOTS * _DIGEST_BYTES)
        self._next = 0
        self._lock = threading.Lock()

    def mark(self, tenant: str, call_id: str) -> None:
        """Note that the call is cancelled; the oldest note is forgotten when the board is full."""
        with self._lock:
            at = self._next * _DIGEST_BYTES
            self._memory[at : at + _DIGEST_BYTES] = _digest(tenant, call_id)
            self._next = (self._next + 1) % _SLOTS

    def is_marked(self, tenant: str, call_id: str) -> bool:
        return self._memory.find(_digest(tenant, call_id), 0) >= 0


@dataclass(frozen=True)
class _Running:
    call: ToolCall
    context: ToolContext
    started: float


class Interrupts(CallMiddleware):
    """Runs one call at a time in the main thread, and interrupts it when END_SIGNAL comes and is meant for it.

    Celery sends the signal when the soft limit of a task is reached, and takes the process when the hard one is. A
    signal that comes too late, for a call that has just ended, does nothing to the next one.
    """

    def __init__(self, board: CancelBoard, clean_up: Callable[[], None]) -> None:
        """`clean_up`: called after an interrupted call, for what may have been left half done, such as a reply still on
        its way.
        """
        self._board = board
        self._clean_up = clean_up
        self._running: _Running | None = None

    def listen(self) -> None:
        """Take the signal over: until then it is Celery's, which would raise whatever the process is doing."""
        signal.signal(END_SIGNAL, self._on_signal)

    def run(self, environment: ToolEnvironment, handler: Callable[[], Outcome]) -> Outcome:
        """Run the handler. Raises ToolFailure when it was interrupted."""
        began = time.monotonic()
        try:
            try:
                self._open(environment.call, environment.context)
                return handler()
            finally:
                self._close()
        except CallInterrupted as interrupted:
            # It may have come in the midst of closing; from here on none comes.
            self._close()
            self._clean_up()
            raise ToolFailure(interrupted.code, str(interrupted)) from None
        finally:
            environment.run_s = time.monotonic() - began

    def _open(self, call: ToolCall, context: ToolContext) -> None:
        # For every call anew: the tool before may have put in a handler of its own.
        self.listen()
        self._running = _Running(call, context, time.monotonic())
        if self._board.is_marked(context.tenant, call.id):
            raise CallInterrupted(ErrorCode.CANCELLED, f"{call.name} was cancelled before it began")

    def _close(self) -> None:
        self._running = None
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        running = self._running
        if running is None:
            return
        name, limit_s = running.call.name, running.context.timeout_s
        if self._board.is_marked(running.context.tenant, running.call.id):
            # Not by the worker's main process: a kill of its could reach the call after this one.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, POOL_GRACE_S)
            interrupted = CallInterrupted(ErrorCode.CANCELLED, f"{name} was cancelled and stopped")
        elif time.monotonic() - running.started > limit_s / 2:
            # Celery's clock started a little before ours; half the limit tells its signal from one for the call before.
            interrupted = CallInterrupted(
                ErrorCode.TIMEOUT, f"{name} did not end within its limit of {limit_s:g} s and was stopped"
            )
        else:
            return
        # Once is enough: a second one would only disturb the tool's cleaning up.
        self._running = None
        raise interrupted


def _digest(tenant: str, call_id: str) -> bytes:
    return hashlib.blake2b(f"{tenant}\0{call_id}".encode(), digest_size=_DIGEST_BYTES).digest()
