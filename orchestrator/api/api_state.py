"""State that all requests of one API process share, including the limits that only the API has."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.previews import PreviewSite
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.api.shares import (
    FILES_PER_KEY,
    PAGES_PER_KEY,
    SEARCHES_PER_KEY,
    ConcurrencyLimit,
    FairQueue,
    OpenEventStreams,
    SandboxStreams,
)
from toolcrew.orchestrator.batches.stored_files import StoredFiles
from toolcrew.orchestrator.http.app_state import AppState
from toolcrew.store.pressure import PoolPressure

READY_FRESH_S = 1.0
"""Seconds for which a result of the readiness check is cached.

The readiness check needs no key, so the cache protects Redis from clients without a key.
"""

PRESSURE_FRESH_S = 3.0

T = TypeVar("T")


class ValueCache(Generic[T]):
    """Caches one value for `fresh_s` seconds. `clock`: monotonic seconds."""

    def __init__(self, fresh_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s = fresh_s
        self._clock = clock
        self._reads = SharedReads[T]()
        self._cached: tuple[T, float] | None = None

    async def get(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the cached value, or the result of `read`. Raises the errors of `read`. Errors are not cached."""
        if self._cached is not None and self._clock() - self._cached[1] < self._fresh_s:
            return self._cached[0]
        return await self._reads.read("", lambda: self._read_and_cache(read))

    async def _read_and_cache(self, read: Callable[[], Awaitable[T]]) -> T:
        value = await read()
        self._cached = (value, self._clock())
        return value


class ApiState(AppState):
    """Shared state of one API process."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        super().__init__(settings)
        self.readiness = ValueCache[Mapping[str, str]](READY_FRESH_S)
        # Autoscalers query every replica every few seconds, and counting the waiting calls reads all of them.
        self.pressure = ValueCache[PoolPressure](PRESSURE_FRESH_S)
        self.event_streams = OpenEventStreams()
        self.previews: PreviewSite | None = None
        self.sandbox_streams = SandboxStreams()
        self.files = ConcurrencyLimit(FILES_PER_KEY)
        self.pages = ConcurrencyLimit(PAGES_PER_KEY)
        # One skill at a time, because each takes up to half a GiB of memory.
        self.examining = FairQueue()
        self.call_searches = ConcurrencyLimit(SEARCHES_PER_KEY)
        # Open the store at the start, so that the service does not start with a store that cannot be opened.
        self._stored = StoredFiles.of(settings) if settings.workspace_store is not None else None

    def stored_files(self) -> StoredFiles:
        """Return the store of uploads and artifacts. Raises ConfigError when the deployment has no store."""
        return self._stored or StoredFiles.of(self.settings)
