"""Limits that the requests of all tenants share in sandboxd, such as the memory for archives."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

ARCHIVE_BYTES: Final = 16 * 1024 * 1024
"""Memory that one archive takes while it is packed, unpacked or copied: chunks that wait for the guest or the store,
and parts that the store collects.
"""
_TOTAL_BYTES: Final = 12 * ARCHIVE_BYTES
_SHARE_BYTES: Final = 6 * ARCHIVE_BYTES


class FairBudget:
    """A limit of bytes or places that all requests of this process share. A tenant gets no more than remains for
    others, and at most `share`: so even several tenants whose work is slow leave a part.
    """

    def __init__(self, total: int, share: int | None = None) -> None:
        self._total = total
        self._share = total if share is None else share
        self._used: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def used(self) -> int:
        """The number of bytes or places in use."""
        return self._used.total()

    def has_room(self, tenant: str, size: int) -> bool:
        """Return whether the tenant would not have to wait for `size` bytes or places."""
        return self._used[tenant] + size <= min(self._share, self._total - self.used)

    @asynccontextmanager
    async def hold(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes or places are free, and use them inside the block."""
        while not self.has_room(tenant, size):
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


class MemoryBudget(FairBudget):
    """The memory of all archives, in bytes."""

    def __init__(self) -> None:
        super().__init__(_TOTAL_BYTES, _SHARE_BYTES)

    def hold_archive(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Wait for the memory of one archive, and use it inside the block."""
        return self.hold(tenant, ARCHIVE_BYTES)
