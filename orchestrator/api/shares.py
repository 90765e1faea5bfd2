"""Limits on what one API key may use in one process at a time, so that other keys are not blocked."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from toolcrew.orchestrator.api.sse import ServerEvent
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem

STREAMS_OF_A_KEY = 1000
FILES_PER_KEY = 4
"""Limit of concurrent file transfers of a key. Each file is in memory until the transfer ends."""
SEARCHES_PER_KEY = 2
"""Limit of concurrent searches of a key for calls. The limit exists because the search for a call without a record
reads all waiting calls.
"""
PAGES_PER_KEY = 2
"""Limit of long pages of a key that are rendered at the same time."""
RETRY_AFTER_S = 5
SANDBOX_STREAMS = 1000
"""Limit of the streams of sandboxes that a process relays, for all tenants together. Each may take 0.5 MiB."""
TENANT_SANDBOX_STREAMS = 250
KEY_SANDBOX_STREAMS = 100


class OpenEventStreams:
    """Counts the open event streams of every API key."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    def of(self, key: str) -> "EventStreams":
        """Return the streams of one key."""
        return EventStreams(self._open, key)


class EventStreams:
    """The open event streams of one key."""

    def __init__(self, streams: Counter[str], key: str) -> None:
        self._open = streams
        self._key = key

    def counted(self, events: AsyncIterator[ServerEvent]) -> AsyncIterator[ServerEvent]:
        """Return the same events. Until they are closed, they count as an open stream of the key. Raises ApiProblem
        when the key has too many streams.
        """
        if self._open[self._key] >= STREAMS_OF_A_KEY:
            raise ApiProblem(
                ApiCode.TOO_MANY_REQUESTS,
                f"this key has reached its limit of {STREAMS_OF_A_KEY} open event streams: close one, or use "
                "another key",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._open[self._key] += 1
        return _CountedEvents(events, self._end)

    def _end(self) -> None:
        self._open[self._key] -= 1
        if not self._open[self._key]:
            del self._open[self._key]


class SandboxStreams:
    """Counts the streams of sandboxes that this process relays: WebSockets, and transfers of files and output."""

    def __init__(self) -> None:
        self._open = Counter[tuple[str, str]]()

    @contextmanager
    def count(self, tenant: str, key: str) -> Iterator[None]:
        """Count one more stream while the block runs. Raises ApiProblem when there are too many."""
        limits = {
            ("process", ""): SANDBOX_STREAMS,
            ("tenant", tenant): TENANT_SANDBOX_STREAMS,
            ("key", key): KEY_SANDBOX_STREAMS,
        }
        for owner, limit in limits.items():
            if self._open[owner] >= limit:
                raise _too_many_streams(owner[0], limit)
        self._open.update(limits.keys())
        try:
            yield
        finally:
            self._open.subtract(limits.keys())
            self._open = +self._open


def _too_many_streams(owner: str, limit: int) -> ApiProblem:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    if owner == "process":
        return ApiProblem(
            ApiCode.NOT_READY,
            f"this service relays {limit} streams, its limit: try again in a moment, or use another replica",
            headers=headers,
        )
    return ApiProblem(
        ApiCode.TOO_MANY_REQUESTS,
        f"this {owner} has {limit} streams of sandboxes open in this service, the limit of a {owner}: close one first",
        headers=headers,
    )


class _CountedEvents(AsyncIterator[ServerEvent]):
    """Iterator of events that counts as an open stream until it is closed.

    The class is not a generator: the `finally` block of a generator that was never started never runs.
    """

    def __init__(self, events: AsyncIterator[ServerEvent], on_end: Callable[[], None]) -> None:
        self._events = events
        self._on_end: Callable[[], None] | None = on_end

    async def __anext__(self) -> ServerEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Stop counting the stream and close the events. Repeatable."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
        if (close := getattr(self._events, "aclose", None)) is not None:
            await close()


class ConcurrencyLimit:
    """Limits each key to `limit` concurrent operations. Further operations wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._semaphores: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def enter(self, key: str) -> AsyncIterator[None]:
        """Run the block when fewer than `limit` operations of the key run."""
        # The user count removes the semaphore of a key after its last use. Otherwise the dict would grow with every
        # key.
        semaphore, users = self._semaphores.get(key, (asyncio.Semaphore(self._limit), 0))
        self._semaphores[key] = (semaphore, users + 1)
        try:
            async with semaphore:
                yield
        finally:
            semaphore, users = self._semaphores.pop(key)
            if users > 1:
                self._semaphores[key] = (semaphore, users - 1)


class FairQueue:
    """Runs one operation at a time, for each tenant in turn.

    Each tenant has at most one request in the queue. A request of one tenant therefore waits for at most one request
    of each other tenant.
    """

    def __init__(self) -> None:
        self._of_tenants = ConcurrencyLimit(1)
        self._one = asyncio.Semaphore(1)

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        """Run the block when it is the tenant's turn."""
        async with self._of_tenants.enter(tenant), self._one:
            yield
