"""Events of a running call to its caller: output while the call runs, and questions.

Keys and commands: store/call_event_streams.py.

Invariant: events never fail a call, and a slow caller delays it only for a limited time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import structlog

from toolcrew.contract.call_events import (
    END,
    MAX_PAUSE_S,
    MAX_WAITING_BYTES,
    MAX_WAITING_EVENTS,
    STALL_S,
    decode_answer,
    encode_event,
    encode_output,
)
from toolcrew.contract.calls import ToolCall, ToolContext
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.call_event_streams import WorkerCallEventStore
from toolcrew.store.connection import SyncRedis

log = structlog.get_logger(__name__)

T = TypeVar("T")

FLUSH_EVERY_S = 0.03
"""Seconds between two writes. Pieces of output within this time are sent together."""
FLUSH_CHARS = 8 * 1024
FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.16
"""Seconds between two checks whether a slow caller has read events. The pause doubles, because a tenant with many slow
callers must not keep Redis busy.
"""


class CallEvents:
    """Events between a running call and its caller. A failure of the events never fails the call.

    This base class sends nothing. It serves calls whose caller wants only the result.
    """

    is_watched = False
    """Whether the caller receives output while the call runs."""

    def show(self, stream: str, text: str) -> None:
        """Send a piece of output. Wait for a slow caller, up to a total limit. Output that could not be sent is dropped
        and counted.
        """

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        """Send an event of another kind, after all earlier output. Return False when no process reads the event.

        Raises ValueError: the event is too large.
        """
        return False

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the caller's next answer. None: no answer came in time, or the caller has disconnected.

        Raises EnvelopeRefused: the answer cannot be read.
        """
        return None

    def close(self) -> int:
        """Send the last event. Return the number of characters of output that were dropped."""
        return 0


class CallEventWriter(CallEvents):
    """Writes the events of one call. Safe for use from several threads.

    `show` waits while MAX_WAITING_EVENTS events or MAX_WAITING_BYTES bytes are unread. Output stops when the caller
    reads nothing for STALL_S, or has delayed the call for MAX_PAUSE_S in total. All events stop when the caller stops
    reading or Redis does not answer.
    """

    def __init__(self, store: WorkerCallEventStore, call_id: str) -> None:
        self._store = store
        self._call_id = call_id
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._pending: list[tuple[str, str]] = []
        self._pending_chars = 0
        self._flushed_at = float("-inf")
        self._sizes: deque[int] = deque(maxlen=MAX_WAITING_EVENTS)
        self._waiting = 0
        self._count = 0
        self._hidden = 0
        self._paused_s = 0.0
        self._is_muted = False
        self._has_failed = False
        self.is_watched = True

    def show(self, stream: str, text: str) -> None:
        with self._lock:
            if not self.is_watched or not text:
                return
            if self._is_muted or self._has_failed:
                self._hidden += len(text)
                return
            self._pending.append((stream, text))
            self._pending_chars += len(text)
            remaining_s = self._flushed_at + FLUSH_EVERY_S - time.monotonic()
            if remaining_s <= 0 or self._pending_chars >= FLUSH_CHARS:
                self._flush()
            elif self._timer is None:
                # Without the timer, the last of several fast pieces would wait for the next piece or the end of the
                # call.
                self._timer = threading.Timer(remaining_s, self._flush)
                self._timer.daemon = True
                self._timer.start()

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        data = encode_event(kind, payload)
        with self._lock:
            self._flush()
            return self.is_watched and self._write(data, self._store.ask)

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        # Do not take the lock: another thread of the call may send output while this thread waits for an answer.
        until = time.monotonic() + timeout_s
        while not self._has_failed and (remaining_s := until - time.monotonic()) > 0:
            answer = self._try(partial(self._store.await_answer, remaining_s))
            if answer is not None:
                return decode_answer(answer)
            self._has_failed = self._has_failed or not self._try(self._store.is_read)
        return None

    def close(self) -> int:
        with self._lock:
            if self.is_watched:
                self._flush()
                self.is_watched = False
                self._write(encode_event(END, {"count": self._count, "hidden_chars": self._hidden}))
            return self._hidden

    def _flush(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            pending, self._pending, self._pending_chars = self._pending, [], 0
            for stream, text in _merge(pending):
                for characters, data in encode_output(stream, text):
                    if not (self._wait_for_space(len(data)) and self._write(data)):
                        self._hidden += characters
            self._flushed_at = time.monotonic()

    def _wait_for_space(self, size: int) -> bool:
        """Wait until the caller has read enough. Return whether one more piece may be written."""
        moved_at, pause_s = time.monotonic(), FIRST_POLL_S
        while not self._is_muted and not self._has_failed and not self._has_space(size):
            began, before = time.monotonic(), self._waiting
            if began - moved_at >= STALL_S or self._paused_s >= MAX_PAUSE_S:
                self._is_muted = True
                log.info("caller_too_slow", call=self._call_id, paused_s=round(self._paused_s, 3))
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
            self._waiting = self._try(self._store.count) or 0
            self._paused_s += time.monotonic() - began
            moved_at = time.monotonic() if self._waiting < before else moved_at
        return not self._is_muted and not self._has_failed

    def _has_space(self, size: int) -> bool:
        if self._waiting == 0:
            return True
        # The caller reads in order, so the unread entries are the last ones written.
        unread = sum(list(self._sizes)[-self._waiting :])
        return self._waiting < MAX_WAITING_EVENTS and unread + size <= MAX_WAITING_BYTES

    def _write(self, data: bytes, write: Callable[[bytes], int | None] | None = None) -> bool:
        """Write an event. Return False when no process reads the events any more."""
        waiting = self._try(partial(write or self._store.add, data)) if not self._has_failed else None
        if waiting is None:
            self._has_failed = True
            return False
        self._count += 1
        self._sizes.append(len(data))
        self._waiting = waiting
        return True

    def _try(self, command: Callable[[], T]) -> T | None:
        """Return the result of the command. Return None when Redis does not answer; the call then sends no more
        events.
        """
        try:
            return command()
        except BrokerUnavailable as error:
            self._has_failed = True
            log.warning("call_events_lost", call=self._call_id, error=str(error))
            return None


def open_call_events(
    client: SyncRedis, deployment: str, keys: SigningKeys, call: ToolCall, context: ToolContext
) -> CallEvents:
    """Return the event writer of a call. The signed context of the call must ask for events.

    `client` must send every command only once (`connect_once`).
    """
    assert context.events is not None
    return CallEventWriter(
        WorkerCallEventStore(client, deployment, keys, context.tenant, call.id, context.events), call.id
    )


def _merge(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join consecutive pieces of the same stream."""
    return [(stream, "".join(text for _, text in group)) for stream, group in groupby(pieces, key=itemgetter(0))]
