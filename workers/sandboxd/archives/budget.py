"""The memory that sandboxd uses for archives, counted across all requests and tenants."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

ARCHIVE_BYTES: Final = 16 * 1024 * 1024
"""Memory that one archive takes while it is packed, unpacked or copied: chunks that wait for the guest or the store,
and parts that the store collects.
"""
_TOTAL_BYTES: Final = 12 * ARCHIVE_BYTES
_SHARE_BYTES: Final = 6 * ARCHIVE_BYTES


class MemoryBudget:
    """A limit of bytes that all requests of this process share. `share`: the limit of one tenant, so that the requests
    of one tenant do not stop those of others.
    """

    def __init__(self, total: int = _TOTAL_BYTES, share: int = _SHARE_BYTES) -> None:
        self._total, self._share = total, share
        self._used: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def used(self) -> int:
        """The number of bytes in use."""
        return self._used.total()

    @asynccontextmanager
    async def hold(self, tenant: str, size: int = ARCHIVE_BYTES) -> AsyncIterator[None]:
        """Wait until `size` bytes are free, and use them inside the block."""
        while self.used + size > self._total or self._used[tenant] + size > self._share:
            await self._wait()
        self._used[tenant] += size
        try:
            yield
        finally:
            self._used -= Counter({tenant: size})
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            self._waiting.remove(waiter)
