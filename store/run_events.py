"""Streams of events in Redis: one for each durable run, and one for each batch. One task per process follows all
durable runs for its clients.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from toolcrew.concurrency.tasks import begin_shared, cancel_all, check_cancelled
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import account_key, run_key, tenant_key
from toolcrew.contract.run_events import EventsMissed, RunEnded, RunEvent
from toolcrew.store.batches import NO_BATCH, RUN_TTL_S, batch_key, parse_batch_event
from toolcrew.store.connection import broker_errors
from toolcrew.store.memory import MEMORY_LUA
from toolcrew.store.scripts import Script
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


def run_events_key(deployment: str, tenant: str, run: str) -> str:
    """Return the key of the stream of a durable run's events."""
    return tenant_key(deployment, tenant, f"run.{run}:events")


MAX_EVENTS, MAX_STREAM_BYTES = 5000, 2 * 1024 * 1024
"""Limits of a run's stream: number of events, and their size in bytes. Above the limits, the oldest events are deleted.
"""
MAX_EVENT_BYTES = 16 * 1024
PAGE, BATCH_PAGE = 16, 1000
START = "0-0"
_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")
_STEPS_OF_CUT = (4000, 1000, 200, 40)
LEAST_STREAM_BYTES = 64 * 1024
"""Limit of a stream whose tenant may store no more, in bytes."""
_TRIM_LUA = (
    MEMORY_LUA
    + """
-- Deletes the oldest events of a stream above these limits. Returns the remaining bytes, and the id of the last deleted
-- event, nil for none.
local function trim(key, bytes, max_count, max_bytes)
  local count, trimmed = redis.call('XLEN', key), nil
  while count > max_count or bytes > max_bytes do
    local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 20)
    -- Redis has lost the stream, so its counters start again.
    if #oldest == 0 then return 0, trimmed end
    for _, one in ipairs(oldest) do
      if count > max_count or bytes > max_bytes then
        bytes, count, trimmed = bytes - #one[2][2], count - 1, one[1]
        redis.call('XDEL', key, trimmed)
      end
    end
  end
  return bytes, trimmed
end

-- Returns the limit of a stream that has grown to this size. Asks for the memory only once in LEAST_STREAM_BYTES.
local function limit_bytes(account, now, before, after, max_bytes)
  local least = tonumber(LEAST_STREAM_BYTES)
  local is_due = math.floor(before / least) < math.floor(after / least)
  if is_due and not has_room(account, now, RUNNING_WORK) then return least end
  return max_bytes
end
""".replace("LEAST_STREAM_BYTES)", f"{LEAST_STREAM_BYTES})")
)
# `first_event`: its number. `step`: the last step with complete events, '' for no further step.
# Returns `published`; or `taken` if another process owns the run, or if the run has ended.
_APPEND = Script(
    _TRIM_LUA
    + """
local present = redis.call('HMGET', run, 'claim', 'event_count', 'event_bytes')
if present[1] ~= claim then return 'taken' end
local first, before = tonumber(first_event), tonumber(present[3] or '0')
local stored_events, bytes, now = tonumber(present[2] or '0'), before, read_time()
for at, event in ipairs(events) do
  if first + at > stored_events then
    redis.call('XADD', stream, '*', 'e', event)
    bytes = bytes + #event
  end
end
local trimmed
local stream_bytes = limit_bytes(account, now, before, bytes, tonumber(max_bytes))
bytes, trimmed = trim(stream, bytes, tonumber(max_events), stream_bytes)
if trimmed then redis.call('HSET', run, 'trimmed', trimmed) end
redis.call('HSET', run, 'event_count', first + #events, 'event_bytes', bytes, 'asking', open_questions)
local size = bytes + ENTRY_BYTES * redis.call('XLEN', stream)
set_bytes(account, now, run, 'stream_bytes', size, now + ttl_s)
if step ~= '' then redis.call('HSET', run, 'published_step', step) end
redis.call('EXPIRE', run, ttl_s)
redis.call('EXPIRE', stream, ttl_s)
return 'published'
""",
    keys=("run", "stream", "account"),
    args=("claim", "first_event", "step", "open_questions", "ttl_s", "max_events", "max_bytes", "events..."),
)
# Events of a batch that was deleted are dropped.
_APPEND_PROGRESS = Script(
    _TRIM_LUA
    + """
if redis.call('EXISTS', batch) == 0 then return end
local before, now = tonumber(redis.call('HGET', batch, 'event_bytes') or '0'), read_time()
local bytes = before
for _, event in ipairs(events) do
  redis.call('XADD', stream, '*', 'h', event)
  bytes = bytes + #event
end
bytes = trim(stream, bytes, tonumber(max_events), limit_bytes(account, now, before, bytes, tonumber(max_bytes)))
redis.call('HSET', batch, 'event_bytes', bytes)
local size = bytes + ENTRY_BYTES * redis.call('XLEN', stream)
set_bytes(account, now, batch, 'stream_bytes', size, now + ttl_s)
redis.call('EXPIRE', stream, ttl_s)
""",
    keys=("batch", "stream", "account"),
    args=("ttl_s", "max_events", "max_bytes", "events..."),
)
StoredEvent = tuple[str, str]
"""The id and the JSON of an event."""
ProgressEvent = tuple[str, str, RunEvent]
"""The tenant, the batch and one of PROGRESS_EVENTS."""
MAX_PROGRESS, MAX_PROGRESS_BYTES = 20_000, 8 * 1024 * 1024
"""Limits of the stream of a batch: number of events, and their size in bytes. A reader that is further behind misses
events, but no outcome: the records of the runs contain the outcomes.
"""


@dataclass(frozen=True)
class EventBatch:
    """Consecutive events of one run. `first`: how many events of the run its owner (the process that executes the run)
    has added before these. `last_step`: the last step of the run whose events are all in the stream after this batch;
    None: this batch completes no step.
    """

    tenant: str
    run: str
    claim: str
    first: int
    events: Sequence[str]
    last_step: int | None = None
    asking: int = 0


@dataclass(frozen=True)
class EventPage:
    """Events in order. `tip`: the id of the last event in the stream, which may be after this page. `is_over`: no
    events follow.
    """

    entries: tuple[StoredEvent, ...]
    tip: str
    is_over: bool


class RunEventStore:
    """The event streams of a deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    def key(self, tenant: str, run: str) -> str:
        return run_events_key(self._deployment, tenant, run)

    async def progress(self, tenant: str, run: str) -> tuple[int, bool]:
        """Return the last step whose events are all in the stream (0 for none), and whether the stream has events."""
        pipe = self._client.pipeline(transaction=False)
        pipe.hget(run_key(self._deployment, tenant, run), "published_step")
        pipe.exists(self.key(tenant, run))
        step, has_any = await self._ask(pipe.execute())
        return int(step or 0), bool(has_any)

    async def append(self, batches: Sequence[EventBatch], progress: Sequence[ProgressEvent] = ()) -> list[bool]:
        """Add events. Return, for each of `batches`, whether the process still owns the run. If the reply is lost, the
        caller may repeat the call: no event of a run is added twice, but events of `progress` may be.
        """
        pipe = self._client.pipeline(transaction=False)
        for batch in batches:
            _APPEND.add_to(
                pipe,
                run=run_key(self._deployment, batch.tenant, batch.run),
                stream=self.key(batch.tenant, batch.run),
                account=account_key(self._deployment, batch.tenant),
                claim=batch.claim,
                first_event=batch.first,
                step="" if batch.last_step is None else batch.last_step,
                open_questions=batch.asking,
                ttl_s=RUN_TTL_S,
                max_events=MAX_EVENTS,
                max_bytes=MAX_STREAM_BYTES,
                events=batch.events,
            )
        for (tenant, batch_id), texts in _group_progress(progress).items():
            _APPEND_PROGRESS.add_to(
                pipe,
                batch=batch_key(self._deployment, tenant, batch_id),
                stream=_progress_key(self._deployment, tenant, batch_id),
                account=account_key(self._deployment, tenant),
                ttl_s=RUN_TTL_S,
                max_events=MAX_PROGRESS,
                max_bytes=MAX_PROGRESS_BYTES,
                events=texts,
            )
        replies = await self._ask(pipe.execute()) if batches or progress else []
        return [reply == b"published" for reply in replies[: len(batches)]]

    async def read(self, tenant: str, run: str, after: str) -> EventPage:
        """Return the next events after an id. One EventsMissed event replaces all deleted events. Raises
        ToolFailure(FILE_NOT_FOUND): no such run.
        """
        key, pipe = self.key(tenant, run), self._client.pipeline(transaction=True)
        # A transaction: the stream and the record of the run must belong to the same moment.
        pipe.xrange(key, min=f"({after}", count=PAGE)
        pipe.xrevrange(key, count=1)
        pipe.hmget(run_key(self._deployment, tenant, run), "batch", "state", "trimmed", "last_event", "end")
        rows, last, fields = await self._ask(pipe.execute())
        tip = last[0][0].decode() if last else START
        entries = [(id_.decode(), entry[b"e"].decode()) for id_, entry in rows]
        if fields[0] is None and last:
            # Redis has lost the record. The last event of the stream reports the loss.
            return EventPage(tuple(entries), tip, is_over=not entries or entries[-1][0] == tip)
        if fields[0] != NO_BATCH.encode():
            raise not_found(run)
        values = dict(
            zip(
                ("state", "trimmed", "last_event", "end"),
                (value.decode() if value else "" for value in fields[1:]),
                strict=True,
            )
        )
        return _page(run, after, entries, tip, values)

    async def last(self, tenant: str, run: str) -> str:
        """Return the JSON of the last stored event of a tenant's run; "" for none."""
        rows = await self._ask(self._client.xrevrange(self.key(tenant, run), count=1))
        return rows[0][1][b"e"].decode() if rows else ""

    async def _ask(self, command: Awaitable[Any]) -> Any:
        with broker_errors("the events of the run were not read or written"):
            return await command


def _group_progress(progress: Sequence[ProgressEvent]) -> dict[tuple[str, str], list[str]]:
    """Return the texts of the events of each batch, in their order."""
    texts: dict[tuple[str, str], list[str]] = {}
    for tenant, batch, event in progress:
        texts.setdefault((tenant, batch), []).append(_dump(event.to_json()))
    return texts


def _progress_key(deployment: str, tenant: str, batch: str) -> str:
    return f"{batch_key(deployment, tenant, batch)}:events"


class BatchEventReader:
    """Reads the event stream of one batch, and remembers its position."""

    def __init__(
        self, client: "redis.asyncio.Redis", deployment: str, tenant: str, batch: str, after: str = START
    ) -> None:
        self._client = client
        self._key = _progress_key(deployment, tenant, batch)
        self._after = after

    async def read(self, wait_s: float) -> Sequence[RunEvent]:
        """Return the events since the last read. Wait at most `wait_s` seconds for an event. Raises BrokerUnavailable
        when Redis does not answer.
        """
        with broker_errors("the events of the batch were not read"):
            reply = await self._client.xread(
                {self._key: self._after}, count=BATCH_PAGE, block=max(1, int(wait_s * 1000))
            )
        entries = [entry for _, some in _streams_of(reply) for entry in some]
        self._after = entries[-1][0] if entries else self._after
        return [parse_batch_event(text) for _, text in entries]


def _page(run: str, after: str, events: list[StoredEvent], tip: str, values: Mapping[str, str]) -> EventPage:
    trimmed, last = values["trimmed"], values["last_event"]
    entries = [(trimmed, _build_missed_event(run))] if trimmed and is_before(after, trimmed) else []
    entries += events
    if values["state"] != "ended":
        return EventPage(tuple(entries), tip, is_over=False)
    if not last or not is_before(after, last):
        return EventPage(tuple(entries), tip, is_over=not events)
    if not events:
        # The stream has expired, a day after the end, or Redis has lost it. The record still contains the end of the
        # run.
        previous = _id_before(last)
        entries = [(previous, _build_missed_event(run))] if is_before(after, previous) else []
        entries.append((last, values["end"]))
    return EventPage(tuple(entries), tip, is_over=entries[-1][0] == last)


def _build_missed_event(run: str) -> str:
    return build_event(EventsMissed(run=run).to_json())


def not_found(run: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.FILE_NOT_FOUND,
        f"run {run[:80]} was not found: runs are stored for 30 days. List the runs that exist",
    )


def parse_id(text: str) -> str:
    """Return the id of an event from its text; "" is the start of the stream. Raises ToolFailure(INVALID_ARGUMENTS):
    not an id.
    """
    if not text:
        return START
    parts = _ID.fullmatch(text)
    # Redis cannot search after the highest possible id.
    if (
        parts is None
        or any(int(part) >= 2**64 for part in parts.groups(default="0"))
        or set(parts.groups()) == {str(2**64 - 1)}
    ):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "the event id is invalid: use the id of an event that you received, or omit it to start with the first "
            "event",
        )
    return f"{int(parts[1])}-{int(parts[2] or 0)}"


def is_before(first: str, second: str) -> bool:
    """Return whether the first event id is before the other."""
    return _parse_event_id(first) < _parse_event_id(second)


def _parse_event_id(event: str) -> tuple[int, int]:
    milliseconds, _, number = event.partition("-")
    return int(milliseconds), int(number or 0)


def _id_before(event: str) -> str:
    milliseconds, number = _parse_event_id(event)
    return f"{milliseconds}-{number - 1}" if number else f"{milliseconds - 1}-{2**64 - 1}"


def build_event(event: dict[str, Any]) -> str:
    """Return the JSON of an event. Long texts of a large event are shortened, and `is_cut` is then true. Results and
    the transcript contain the whole text.
    """
    text = _dump(event)
    for limit in _STEPS_OF_CUT:
        if len(text.encode()) <= MAX_EVENT_BYTES:
            return text
        text = _dump({**_shorten(event, limit), "is_cut": True})
    if len(text.encode()) <= MAX_EVENT_BYTES:
        return text
    return _dump({name: event[name] for name in ("type", "run", "at", "attempt") if name in event} | {"is_cut": True})


def _dump(event: dict[str, Any]) -> str:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"), default=str)
    # The cut may have split a surrogate pair, and half of a pair cannot be encoded as UTF-8.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shorten(value: Any, limit: int) -> Any:
    match value:
        case str() if len(value) > limit:
            return value[:limit]
        case dict():
            return {str(name)[:limit]: _shorten(inner, limit) for name, inner in value.items()}
        case list() | tuple():
            return [_shorten(inner, limit) for inner in value]
        case _:
            return value


BLOCK_MS = 200
PAUSE_S = 0.05
"""Pause after each read, in seconds, so that one read returns several events."""
RETRY_S = 0.5
EXISTENCE_CHECK_S = 15.0
"""Time without an event after which a follower checks whether the run still exists, in seconds."""
READ_COUNT = 64
RING_EVENTS, RING_BYTES = 128, 64 * 1024
"""Limits of the events of a followed run that are kept in memory: their number, and their size in bytes. A follower
that is further behind reads the stream itself.
"""


@dataclass
class _Stream:
    """The latest events of one run. `last`: the id of the latest event in memory; None until a follower has read the
    stream to its end. `floor`: `ring` contains every event after this id.
    """

    key: str
    readers: int = 0
    last: str | None = None
    floor: str = ""
    ring: "deque[StoredEvent]" = field(default_factory=deque)
    bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, tip: str) -> None:
        """Keep events in memory from now on. `tip`: the id of the last event that a follower has read."""
        if self.last is None:
            self.last = self.floor = tip

    def take(self, entries: list[StoredEvent]) -> None:
        """Add the next events."""
        for entry in entries:
            self.ring.append(entry)
            self.bytes += len(entry[1])
            self.last = entry[0]
        while len(self.ring) > RING_EVENTS or self.bytes > RING_BYTES:
            self.floor, text = self.ring.popleft()
            self.bytes -= len(text)
        self.changed.set()
        # Each change gets a new event object, because several followers wait and none may clear it for the others.
        self.changed = asyncio.Event()

    def has_all_after(self, event: str) -> bool:
        return self.last is not None and not is_before(event, self.floor)

    def after(self, event: str) -> list[StoredEvent]:
        return [entry for entry in self.ring if is_before(event, entry[0])]


class RunEventHub:
    """Follows runs for all clients of this process. No follower waits for another: each follower reads at its own
    speed, and reads older events itself.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._store = RunEventStore(client, deployment)
        self._streams: dict[str, _Stream] = {}
        self._reading: asyncio.Task[None] | None = None

    async def follow(self, tenant: str, run: str, after: str = "") -> AsyncIterator[StoredEvent]:
        """Yield the events of a run after an id until the end of the run. Raises BrokerUnavailable only before the
        first event. Later, the method waits until Redis answers.
        """
        event = parse_id(after)
        page = await self.read(tenant, run, event)
        stream = self._join(self._store.key(tenant, run))
        try:
            while True:
                for entry in page.entries:
                    event = entry[0]
                    yield entry
                if page.is_over:
                    return
                page = await self._next(stream, tenant, run, event)
        finally:
            await self._leave(stream)

    async def read(self, tenant: str, run: str, after: str = "") -> EventPage:
        """Return the next events that exist now. Raises the same errors as `follow`."""
        return await self._store.read(tenant, run, parse_id(after))

    async def close(self) -> None:
        """Stop reading. Followers receive no further events."""
        if self._reading is not None:
            await cancel_all((self._reading,))

    async def _next(self, stream: _Stream, tenant: str, run: str, event: str) -> EventPage:
        """Wait for the events after an id, and return them."""
        while True:
            if stream.has_all_after(event):
                # The event object is read before the ring: events that arrive between the two lines then still wake
                # this follower.
                changed = stream.changed
                if entries := stream.after(event):
                    return EventPage(tuple(entries), entries[-1][0], is_over=_is_end(entries[-1]))
                with suppress(TimeoutError):
                    async with asyncio.timeout(EXISTENCE_CHECK_S):
                        await changed.wait()
                        continue
            page = await self._read(tenant, run, event)
            if page.entries or page.is_over:
                return page
            stream.begin(page.tip)

    async def _read(self, tenant: str, run: str, event: str) -> EventPage:
        while True:
            try:
                return await self._store.read(tenant, run, event)
            except BrokerUnavailable as error:
                log.warning("run_not_followed", run=run, error=str(error))
                await asyncio.sleep(RETRY_S)

    def _join(self, key: str) -> _Stream:
        stream = self._streams.setdefault(key, _Stream(key))
        stream.readers += 1
        if self._reading is None or self._reading.done():
            self._reading = begin_shared(self._read_all(), "follow-runs")
        return stream

    async def _leave(self, stream: _Stream) -> None:
        stream.readers -= 1
        if not stream.readers:
            self._streams.pop(stream.key, None)
        if not self._streams and self._reading is not None:
            reading, self._reading = self._reading, None
            await cancel_all((reading,))

    async def _read_all(self) -> None:
        while True:
            check_cancelled()
            last_ids = {stream.key: stream.last for stream in self._streams.values() if stream.last is not None}
            if last_ids:
                await self._read_new(last_ids)
            await asyncio.sleep(PAUSE_S)

    async def _read_new(self, last_ids: dict[str, str]) -> None:
        try:
            streams: Any = dict(last_ids)
            with broker_errors("the runs are not followed"):
                reply: Any = await self._client.xread(streams, count=READ_COUNT, block=BLOCK_MS)
        except BrokerUnavailable as error:
            log.warning("runs_not_followed", runs=len(last_ids), error=str(error))
            await asyncio.sleep(RETRY_S)
            return
        for key, entries in _streams_of(reply):
            stream = self._streams.get(key)
            # If all followers left and a new one joined, the stream starts at another id. These events then do not
            # follow its last event.
            if stream is not None and stream.last == last_ids[key]:
                stream.take(entries)


def _is_end(entry: StoredEvent) -> bool:
    # The cheap test comes first, because most events need not be parsed. An event of another type may contain the word
    # too.
    return f'"{RunEnded.__name__}"' in entry[1] and json.loads(entry[1])["type"] == RunEnded.__name__


def _streams_of(reply: Any) -> list[tuple[str, list[StoredEvent]]]:
    """Parse the reply of XREAD, which has one of two forms: pairs of key and entries, or a dict whose entries may be in
    an inner list.
    """
    streams = []
    for key, entries in reply.items() if isinstance(reply, dict) else reply or ():
        if entries and isinstance(entries[0], list) and (not entries[0] or isinstance(entries[0][0], list | tuple)):
            entries = entries[0]
        # Each entry has exactly one field, the JSON of the event.
        streams.append((key.decode(), [(event.decode(), _only(fields).decode()) for event, fields in entries]))
    return streams


def _only(fields: Mapping[bytes, bytes]) -> bytes:
    (value,) = fields.values()
    return value
