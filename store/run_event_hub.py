"""Whoever follows runs in this process: one task reads what is new of all of them, over one connection, however many follow."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable
from store.run_events import Entry, EventPage, ToldEvents, is_before, parse_id
from store.tasks import begin_shared, cancel_all, check_cancelled
from telemetry.logs import get_logger

log = get_logger(__name__)

BLOCK_MS = 200
PAUSE_S = 0.05
"""After each read, so that what comes meanwhile is one more read, not many."""
AGAIN_S = 0.5
LOOK_S = 15.0
"""So long without an event a follower looks by himself whether the run is still there."""
READ_COUNT = 64
RING_EVENTS, RING_BYTES = 128, 64 * 1024
"""Of each run that is followed: whoever is further behind reads for himself."""


@dataclass
class _Stream:
    """One run's events as they come. `last`: the id up to which they are known here; None until somebody has read as far. `floor`: the id after which
    `ring` has all of them."""

    key: str
    readers: int = 0
    last: str | None = None
    floor: str = ""
    ring: "deque[Entry]" = field(default_factory=deque)
    bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, tip: str) -> None:
        """Somebody has read up to there."""
        if self.last is None:
            self.last = self.floor = tip

    def take(self, entries: list[Entry]) -> None:
        """The next ones."""
        for entry in entries:
            self.ring.append(entry)
            self.bytes += len(entry[1])
            self.last = entry[0]
        while len(self.ring) > RING_EVENTS or self.bytes > RING_BYTES:
            self.floor, text = self.ring.popleft()
            self.bytes -= len(text)
        self.changed.set()
        self.changed = asyncio.Event()

    def has_all_after(self, event: str) -> bool:
        return self.last is not None and not is_before(event, self.floor)

    def after(self, event: str) -> list[Entry]:
        return [entry for entry in self.ring if is_before(event, entry[0])]


class RunEventHub:
    """Nobody is held up by anybody: each follower takes what is new at his own pace, and reads for himself what has gone by."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._told = ToldEvents(client, deployment)
        self._streams: dict[str, _Stream] = {}
        self._reading: asyncio.Task[None] | None = None

    async def follow(self, tenant: str, run: str, after: str = "") -> AsyncIterator[Entry]:
        """As `HostedRuns.follow`. Raises BrokerUnavailable only before the first event; later it waits until Redis is back."""
        event = parse_id(after)
        page = await self.read(tenant, run, event)
        stream = self._join(self._told.key(tenant, run))
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
        """The next events that there are. Raises as `follow`."""
        return await self._told.read(tenant, run, parse_id(after))

    async def close(self) -> None:
        """Stop reading; whoever still follows waits in vain."""
        if self._reading is not None:
            await cancel_all((self._reading,))

    async def _next(self, stream: _Stream, tenant: str, run: str, event: str) -> EventPage:
        """What follows an event, as soon as there is something."""
        while True:
            if stream.has_all_after(event):
                changed = stream.changed
                if entries := stream.after(event):
                    return EventPage(tuple(entries), entries[-1][0], is_over=_is_end(entries[-1]))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await changed.wait()
                        continue
            page = await self._read(tenant, run, event)
            if page.entries or page.is_over:
                return page
            stream.begin(page.tip)

    async def _read(self, tenant: str, run: str, event: str) -> EventPage:
        while True:
            try:
                return await self._told.read(tenant, run, event)
            except BrokerUnavailable as error:
                log.warning("run_not_followed", run=run, error=str(error))
                await asyncio.sleep(AGAIN_S)

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
            known = {stream.key: stream.last for stream in self._streams.values() if stream.last is not None}
            if known:
                await self._read_new(known)
            await asyncio.sleep(PAUSE_S)

    async def _read_new(self, known: dict[str, str]) -> None:
        try:
            asked: Any = dict(known)
            told: Any = await self._client.xread(asked, count=READ_COUNT, block=BLOCK_MS)
        except (RedisError, OSError) as error:
            log.warning("runs_not_followed", runs=len(known), error=str(error))
            await asyncio.sleep(AGAIN_S)
            return
        for key, entries in _streams_of(told):
            stream = self._streams.get(key)
            # One that was left and joined again meanwhile has begun anew.
            if stream is not None and stream.last == known[key]:
                stream.take(entries)


def _is_end(entry: Entry) -> bool:
    # Only few are parsed: an event may hold the word without being it.
    return '"RunEnded"' in entry[1] and json.loads(entry[1])["type"] == "RunEnded"


def _streams_of(told: Any) -> list[tuple[str, list[Entry]]]:
    """In either shape that the client gives: pairs of key and entries, or a dict whose entries may lie in a list of their own."""
    found = []
    for key, entries in told.items() if isinstance(told, dict) else told or ():
        if entries and isinstance(entries[0], list) and (not entries[0] or isinstance(entries[0][0], list | tuple)):
            entries = entries[0]
        found.append((key.decode(), [(event.decode(), fields[b"e"].decode()) for event, fields in entries]))
    return found
