"""Ended spans on their way to the collector: a bounded queue, and a thread that empties it. Whatever becomes of them,
nobody waits.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from telemetry.spans import Span

MAX_WAITING = 2048
MAX_BATCH = 512
PAUSE_S = 1.0
"""How long an ended span waits at most for others to go with it: what a process that is killed loses."""
CLOSE_S = 2.0
"""What the end of a process waits for its last spans."""
TOLD_EVERY_S = 60.0
THREAD = "toolcrew-spans"


class Outflow:
    """`send` gives whether the collector has taken a batch; it may take its time. `warn` is told what was lost, once a
    minute. `stop`: ends a `send` that waits.

    A process that is forked begins with an empty queue and a thread of its own."""

    def __init__(
        self,
        send: Callable[[Sequence[Span]], bool],
        warn: Callable[[str], None],
        *,
        stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._warn, self._stop, self._clock = send, warn, stop, clock
        self._told_at: float | None = None
        self._begin()

    def put(self, span: Span) -> None:
        """Never waits; a span for which there is no room is lost, and counted."""
        if self._pid != os.getpid():
            self._begin()
        if len(self._waiting) >= MAX_WAITING:
            self._lost += 1
            return
        self._waiting.append(span)
        if self._thread is None:
            self._start()
        elif len(self._waiting) >= MAX_BATCH:
            self._awake.set()

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most; what comes later is lost."""
        thread = self._thread if self._pid == os.getpid() else None
        self._is_closing = True
        if thread is not None:
            self._awake.set()
            thread.join(CLOSE_S)
        self._stop()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: deque[Span] = deque()
        self._lost = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._starting = threading.Lock()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._is_closing:
                thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._is_closing:
            self._awake.wait(PAUSE_S)
            self._awake.clear()
            self._empty()
        self._empty()
        self._tell()

    def _empty(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            if not self._send(batch):
                self._lost += len(batch)
            self._tell()

    def _tell(self) -> None:
        now = self._clock()
        if self._lost and (self._told_at is None or now - self._told_at >= TOLD_EVERY_S):
            lost, self._lost, self._told_at = self._lost, 0, now
            self._warn(
                f"{lost} spans did not reach the collector: see that it runs, and that OTEL_EXPORTER_OTLP_ENDPOINT "
                "names it"
            )
