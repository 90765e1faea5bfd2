"""What a running call tells its caller: output as it comes, questions, and at its end how much there was. Never the reason why a call fails."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import redis
import structlog

from contract.call_events import (
    END,
    MAX_PAUSE_S,
    MAX_WAITING_BYTES,
    MAX_WAITING_EVENTS,
    STALL_S,
    decode_answer,
    encode_event,
    encode_output,
    entry_fields,
)
from contract.calls import ToolCall, ToolContext
from contract.names import call_answers_key, call_events_key, call_room_key, call_wake_name, listener_key

log = structlog.get_logger(__name__)

FLUSH_EVERY_S = 0.03
"""Pieces that come faster than this are sent together."""
FLUSH_CHARS = 8 * 1024
WAKE_TTL_S = 60
WAIT_SLICE_S = 2.0
"""How long one blocking command may wait: less than the client's own time-out."""


class CallEvents(Protocol):
    """The way from a running call to its caller."""

    @property
    def is_watched(self) -> bool:
        """Whether the caller asked to see output before the call ends."""
        ...

    def show(self, stream: str, text: str) -> None:
        """A piece of output, now. Waits for a slow caller, for a bounded time in all; what is not shown is counted."""
        ...

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        """An event of another kind, after all that was shown before; False when nobody hears it. Raises ValueError when it is too large."""
        ...

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        """The caller's next answer; None when none came in time, or nobody is there to give one. Raises EnvelopeRefused for nonsense."""
        ...

    def close(self) -> int:
        """Say that nothing more comes. Gives how many characters of output were not shown; 0 when nobody watched."""
        ...


class Unwatched:
    """The events of a call whose caller hears nothing before its result."""

    is_watched = False

    def show(self, stream: str, text: str) -> None:
        """Nobody watches."""

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        return False

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        return None

    def close(self) -> int:
        return 0


class EventWriter:
    """Events of one call into the stream its caller made. Safe to use from several threads.

    At most MAX_WAITING_EVENTS or MAX_WAITING_BYTES lie unread; then `show` waits. When the caller takes nothing for STALL_S, or has held up
    the call for MAX_PAUSE_S in all, no more output is sent. When the stream is gone (the caller stopped listening) or Redis is away, nothing is.
    """

    def __init__(self, client: "redis.Redis", deployment: str, call: ToolCall, context: ToolContext) -> None:
        assert context.events is not None
        self._client = client
        self._call_id = call.id
        names = (deployment, context.tenant, call.id)
        self._key, self._room, self._answers = call_events_key(*names), call_room_key(*names), call_answers_key(*names)
        self._wake, self._name = listener_key(deployment, context.events), call_wake_name(context.tenant, call.id)
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
        self._is_gone = False
        self._is_closed = False

    @property
    def is_watched(self) -> bool:
        return not self._is_closed

    def show(self, stream: str, text: str) -> None:
        with self._lock:
            if self._is_closed or not text:
                return
            if self._is_muted or self._is_gone:
                self._hidden += len(text)
                return
            self._pending.append((stream, text))
            self._pending_chars += len(text)
            rest_s = self._flushed_at + FLUSH_EVERY_S - time.monotonic()
            if rest_s <= 0 or self._pending_chars >= FLUSH_CHARS:
                self._flush()
            elif self._timer is None:
                self._timer = threading.Timer(rest_s, self._flush)
                self._timer.daemon = True
                self._timer.start()

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        data = encode_event(kind, payload)
        with self._lock:
            self._flush()
            return not self._is_closed and self._write(data)

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        until = time.monotonic() + timeout_s
        while not self._is_gone and (rest_s := until - time.monotonic()) > 0:
            found = self._ask(partial(self._client.blpop, [self._answers], timeout=_blocking(rest_s)))
            if found is not None:
                return decode_answer(found[1])
            self._is_gone = self._is_gone or not self._ask(partial(self._client.exists, self._key))
        return None

    def close(self) -> int:
        with self._lock:
            if not self._is_closed:
                self._flush()
                self._is_closed = True
                self._write(encode_event(END, {"count": self._count, "hidden_chars": self._hidden}))
            return self._hidden

    def _flush(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            pending, self._pending, self._pending_chars = self._pending, [], 0
            for stream, text in _merged(pending):
                for characters, data in encode_output(stream, text):
                    if not (self._make_room(len(data)) and self._write(data)):
                        self._hidden += characters
            self._flushed_at = time.monotonic()

    def _make_room(self, size: int) -> bool:
        """Whether one more piece may lie unread; waits for the caller while it takes others."""
        while not self._is_muted and not self._is_gone and not self._has_room(size):
            rest_s = min(STALL_S, MAX_PAUSE_S - self._paused_s)
            began = time.monotonic()
            has_taken = rest_s > 0 and self._ask(partial(self._client.blpop, [self._room], timeout=_blocking(rest_s))) is not None
            self._paused_s += time.monotonic() - began
            if not has_taken:
                self._is_muted = True
                log.info("caller_too_slow", call=self._call_id, paused_s=round(self._paused_s, 3))
            else:
                self._waiting = self._ask(partial(self._client.xlen, self._key)) or 0
        return not self._is_muted and not self._is_gone

    def _has_room(self, size: int) -> bool:
        if self._waiting == 0:
            return True
        # What was sent last is what still waits.
        unread = sum(list(self._sizes)[-self._waiting :])
        return self._waiting < MAX_WAITING_EVENTS and unread + size <= MAX_WAITING_BYTES

    def _write(self, data: bytes) -> bool:
        """Add an entry and wake the caller; False when nobody has a stream for it any more."""
        if self._is_gone:
            return False
        pipe = self._client.pipeline(transaction=False)
        pipe.xadd(self._key, entry_fields(data), nomkstream=True)  # type: ignore[arg-type]
        pipe.xlen(self._key)
        # The oldest wake-up is served first: a noisy call does not push others back.
        pipe.zadd(self._wake, {self._name: time.time()}, nx=True)
        pipe.expire(self._wake, WAKE_TTL_S)
        told = self._ask(pipe.execute)
        if told is None or told[0] is None:
            self._is_gone = True
            return False
        self._count += 1
        self._sizes.append(len(data))
        self._waiting = int(told[1])
        return True

    def _ask(self, command: Callable[[], Any]) -> Any:
        """What Redis says; None when it does not answer, and then it is not asked again for this call."""
        try:
            return command()
        except redis.RedisError as error:
            self._is_gone = True
            log.warning("call_events_lost", call=self._call_id, error=str(error))
            return None


def open_events(client: "redis.Redis", deployment: str, call: ToolCall, context: ToolContext) -> CallEvents:
    """The events of a call, as its signed context asks for them. `client`: one that never repeats a command (`connect_once`)."""
    return Unwatched() if context.events is None else EventWriter(client, deployment, call, context)


def _merged(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one stream as one piece."""
    return [(stream, "".join(text for _, text in group)) for stream, group in groupby(pieces, key=itemgetter(0))]


def _blocking(seconds: float) -> float:
    """A time-out for one blocking command: not so short that Redis reads it as none at all."""
    return max(0.05, min(seconds, WAIT_SLICE_S))
