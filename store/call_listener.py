"""One listener a process for what calls tell while they run: one blocked connection, however many calls are heard."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.call_events import STALL_S
from contract.names import listener_key
from store.heard_calls import Handler, HeardCall
from store.pending_commands import Errands
from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

IDLE_S = 5.0
"""So long one blocking read waits; after it, and after every reconnection, all streams are read in case a wake-up was lost."""
RETRY_S = 0.5
WAKES_AT_ONCE = 64
READ_CALLS = 256
"""So many streams are read in one round trip."""
READ_COUNT = 256
CLOSE_S = 2.0
TTL_MARGIN_S = 60.0


class CallEvents:
    """Hears calls of this process. The listener's id travels in their signed context; connections are used only while some call is heard."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self.listener = secrets.token_hex(8)
        self._client = client
        self._deployment = deployment
        self._wake = listener_key(deployment, self.listener)
        self._calls: dict[str, HeardCall] = {}
        self._due: dict[str, HeardCall] = {}
        self._reading = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._errands = Errands(client)
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def listen(self, tenant: str, call_id: str, handlers: Mapping[str, Handler], ttl_s: float) -> AsyncIterator[HeardCall | None]:
        """Hear a call from before it is sent until its result is there: leaving waits for what is still on its way, unless by an exception.

        `ttl_s`: how long it may take at most. Gives None, and hears nothing, without handlers, when Redis does not answer, and when the id is
        heard already: a call never fails for its events.
        """
        call = await self._open(tenant, call_id, handlers, ttl_s) if handlers else None
        if call is None:
            yield None
            return
        delivering = asyncio.create_task(call.deliver(), name=f"events-{call_id}")
        try:
            yield call
            call.end_questions()
            await self._settle(call)
        finally:
            del self._calls[call.name]
            delivering.cancel()
            call.end_questions()
            if not self._is_closed:
                call.delete()

    async def close(self) -> None:
        """Stop listening. The keys of calls that have ended are deleted first; those of calls still heard expire by themselves."""
        self._is_closed = True
        await self._errands.close(CLOSE_S)
        if self._reader is not None:
            await cancel_all((self._reader,))

    async def _open(self, tenant: str, call_id: str, handlers: Mapping[str, Handler], ttl_s: float) -> HeardCall | None:
        if self._is_closed:
            return None
        call = HeardCall(self._client, self._errands, self._deployment, tenant, call_id, handlers)
        if call.name in self._calls:
            return None
        self._calls[call.name] = call
        try:
            await call.open(ttl_s + TTL_MARGIN_S)
        except (RedisError, OSError) as error:
            log.warning("call_not_heard", call=call_id, error=str(error))
            del self._calls[call.name]
            return None
        except BaseException:
            del self._calls[call.name]
            raise
        if self._reader is None:
            self._reader = begin_shared(self._run(), "call-events")
        return call

    async def _settle(self, call: HeardCall) -> None:
        """The result is there, and was written after the last event: read what is left without waiting for a wake-up, and let it be delivered."""
        try:
            # The reader may hang on a connection that is half dead; the result does not wait for it.
            async with asyncio.timeout(STALL_S):
                await self._read([call])
        except (RedisError, OSError) as error:  # a TimeoutError is an OSError
            log.warning("call_events_not_read", call=call.call_id, error=str(error))
        await call.settle()

    async def _run(self) -> None:
        is_sound = True
        while True:
            try:
                # What was woken when a read failed is woken no more: then all are read, until that works.
                await self._read(await self._woken() if is_sound else list(self._calls.values()))
                is_sound = True
            except (RedisError, OSError) as error:
                is_sound = False
                log.warning("call_events_connection_lost", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _woken(self) -> Iterable[HeardCall]:
        """The calls that have something new; after a long silence all."""
        found: Any = await self._client.zpopmin(self._wake, WAKES_AT_ONCE)
        if not found:
            item: Any = await self._client.bzpopmin([self._wake], timeout=IDLE_S)
            if item is None:
                return list(self._calls.values())
            found = [(item[1], item[2])]
        names = [name.decode(errors="replace") for name, _ in found]
        return [self._calls[name] for name in names if name in self._calls]

    async def _read(self, calls: Iterable[HeardCall]) -> None:
        """Hand what is new to these calls. One reader at a time, or an entry would be read twice; it reads for all who wait for their turn."""
        self._due.update((call.name, call) for call in calls)
        async with self._reading:
            unread, self._due = list(self._due.values()), {}
            try:
                while unread:
                    unread = unread[READ_CALLS:] + await self._read_group(unread[:READ_CALLS])
            except BaseException:
                # Who waits for its turn reads them.
                self._due = {call.name: call for call in unread} | self._due
                raise

    async def _read_group(self, calls: list[HeardCall]) -> list[HeardCall]:
        """Those of which there may be more."""
        calls = [call for call in calls if self._calls.get(call.name) is call]
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            pipe.xrange(call.key, min=f"({call.last_id}", count=READ_COUNT)
        answers = await pipe.execute()
        for call, entries in zip(calls, answers, strict=True):
            call.take(entries)
        return [call for call, entries in zip(calls, answers, strict=True) if len(entries) == READ_COUNT]
