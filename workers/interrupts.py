"""Interrupts a call without a sandbox at its time limit or after a cancel. This code runs in the process of the call.

A signal can arrive at any moment. Invariant: the signal interrupts only the call that it was sent for. A late signal
must not interrupt the next call of the same process.
"""

import hashlib
import mmap
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from toolcrew.contract.calls import POOL_GRACE_S, ToolCall, ToolContext
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.executor import ExecutorMiddleware
from toolcrew.workers.tools.base import Outcome, ToolEnvironment

END_SIGNAL = signal.SIGUSR1
"""Celery's own signal for a soft time limit. toolcrew sends the same signal for a cancel."""
_DIGEST_BYTES = 16
_SLOTS = 1024


class CallInterrupted(BaseException):
    """Error that the signal handler raises inside a running tool handler.

    It is not a subclass of `Exception`, so a tool that catches every `Exception` still ends at its limit.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CancelBoard:
    """Ids of the last cancelled calls, in memory that a worker shares with its forked processes.

    The worker writes, the processes read.
    """

    def __init__(self) -> None:
        # Anonymous shared memory: a process forked later maps the same pages. A read without the lock may miss a
        # record that is being written; the signal after the write causes another read.
        self._memory = mmap.mmap(-1, _SLOTS * _DIGEST_BYTES)
        self._next = 0
        self._lock = threading.Lock()

    def mark(self, tenant: str, call_id: str) -> None:
        """Record that the call is cancelled. A full board overwrites its oldest record."""
        with self._lock:
            at = self._next * _DIGEST_BYTES
            self._memory[at : at + _DIGEST_BYTES] = _digest(tenant, call_id)
            self._next = (self._next + 1) % _SLOTS

    def is_marked(self, tenant: str, call_id: str) -> bool:
        return self._memory.find(_digest(tenant, call_id), 0) >= 0


@dataclass(frozen=True)
class _RunningCall:
    call: ToolCall
    context: ToolContext
    started: float


class CallInterrupts(ExecutorMiddleware):
    """Runs one call at a time in the main thread. Interrupts the call when END_SIGNAL arrives for this call.

    Celery sends the signal at a task's soft limit, and kills the process at the hard limit. A signal that arrives
    after its call has ended does not affect the next call.
    """

    def __init__(self, board: CancelBoard, clean_up: Callable[[], None]) -> None:
        """`clean_up` runs after an interrupted call. It repairs incomplete state, such as a connection with an unread
        reply.
        """
        self._board = board
        self._clean_up = clean_up
        self._running: _RunningCall | None = None

    def listen(self) -> None:
        """Replace Celery's handler of the signal. Celery's handler raises an exception at any moment, even when no
        handler of a tool runs.
        """
        signal.signal(END_SIGNAL, self._on_signal)

    def run(self, environment: ToolEnvironment, handler: Callable[[], Outcome]) -> Outcome:
        """Run the handler. Raises ToolFailure: the call was interrupted."""
        began = time.monotonic()
        try:
            try:
                self._open(environment.call, environment.context)
                return handler()
            finally:
                self._close()
        except CallInterrupted as interrupted:
            # The signal may have raised inside the `_close` above. After this second `_close` the handler ignores
            # signals.
            self._close()
            self._clean_up()
            raise ToolFailure(interrupted.code, str(interrupted)) from None
        finally:
            environment.run_s = time.monotonic() - began

    def _open(self, call: ToolCall, context: ToolContext) -> None:
        # Install the signal handler before every call: the tool of the previous call may have replaced the handler.
        self.listen()
        # Set `_running` before the check of the board. A cancel that arrives between the two lines then raises in the
        # signal handler.
        self._running = _RunningCall(call, context, time.monotonic())
        if self._board.is_marked(context.tenant, call.id):
            raise CallInterrupted(ErrorCode.CANCELLED, f"{call.name} was cancelled before it began")

    def _close(self) -> None:
        self._running = None
        # Stop the alarm of a cancelled call: it must not kill the process during the next call.
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        running = self._running
        if running is None:
            return
        name, limit_s = running.call.name, running.context.timeout_s
        if self._board.is_marked(running.context.tenant, running.call.id):
            # This process sets its own alarm. A kill from the worker's main process could hit the call after this
            # one.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, POOL_GRACE_S)
            interrupted = CallInterrupted(ErrorCode.CANCELLED, f"{name} was cancelled and stopped")
        elif time.monotonic() - running.started > limit_s / 2:
            # Celery starts its clock slightly before ours, so its signal may be early. A signal in the first half of
            # the limit was sent for the previous call.
            interrupted = CallInterrupted(
                ErrorCode.TIMEOUT, f"{name} did not end within its limit of {limit_s:g} s and was stopped"
            )
        else:
            return
        # One interrupt is enough. A second interrupt would only disturb the tool's clean-up.
        self._running = None
        raise interrupted


def _digest(tenant: str, call_id: str) -> bytes:
    return hashlib.blake2b(f"{tenant}\0{call_id}".encode(), digest_size=_DIGEST_BYTES).digest()
