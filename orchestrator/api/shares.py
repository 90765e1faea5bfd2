"""What one API key may have open of one process at a time, so that it leaves something for the others."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from orchestrator.api.sse import ServerEvent
from orchestrator.http.problems import ApiCode, ApiProblem

STREAMS_OF_A_KEY = 1000
FILES_OF_A_KEY = 4
"""Each lies in memory as a whole until its client has taken or sent it."""
LOOKS_OF_A_KEY = 2
"""For calls: one of which there is no record is looked for among all that wait."""
PAGES_OF_A_KEY = 2
"""Long ones, being made at a time."""
AGAIN_S = 5


class OpenStreams:
    """Counts the event streams of every key."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    def of(self, key: str) -> "Streams":
        return Streams(self._open, key)


class Streams:
    """The event streams of one key."""

    def __init__(self, streams: Counter[str], key: str) -> None:
        self._open, self._key = streams, key

    def counted(self, events: AsyncIterator[ServerEvent]) -> AsyncIterator[ServerEvent]:
        """The same events, of a stream that counts from now until it is closed. Raises ApiProblem for one too many."""
        if self._open[self._key] >= STREAMS_OF_A_KEY:
            raise ApiProblem(
                ApiCode.TOO_MANY_REQUESTS,
                f"{STREAMS_OF_A_KEY} event streams are open with this key, which is all that may: close some, or use "
                "another key",
                headers={"Retry-After": str(AGAIN_S)},
            )
        self._open[self._key] += 1
        return _Counted(events, self._end)

    def _end(self) -> None:
        self._open[self._key] -= 1
        if not self._open[self._key]:
            del self._open[self._key]


class _Counted(AsyncIterator[ServerEvent]):
    """Events that count as a stream until they are closed. No generator: one that was never begun would never end."""

    def __init__(self, events: AsyncIterator[ServerEvent], on_end: Callable[[], None]) -> None:
        self._events = events
        self._on_end: Callable[[], None] | None = on_end

    async def __anext__(self) -> ServerEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
        if (close := getattr(self._events, "aclose", None)) is not None:
            await close()


class Turns:
    """At most `most` at a time for each key; who comes beyond waits for the end of another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """One of them, once it is the key's turn."""
        place, users = self._places.get(key, (asyncio.Semaphore(self._most), 0))
        self._places[key] = (place, users + 1)
        try:
            async with place:
                yield
        finally:
            place, users = self._places.pop(key)
            if users > 1:
                self._places[key] = (place, users - 1)


class FairTurn:
    """One at a time in all. A tenant waits with one request at a time, so another tenant's request runs after one of
    each tenant that waits.
    """

    def __init__(self) -> None:
        self._of_tenants, self._one = Turns(1), asyncio.Semaphore(1)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Run when it is the tenant's turn."""
        async with self._of_tenants.turn(tenant), self._one:
            yield
