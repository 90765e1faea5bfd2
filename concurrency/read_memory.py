"""Memory for reading what tenants have stored: a limit over all requests of a process.

Invariant: memory is reserved before the data is read, from a size that Redis knows. A tenant has at most half of it, so
a tenant with many large requests delays its own requests only. Large reads leave a part to small ones, so slow clients
of two tenants do not stop the others.
"""

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from toolcrew.contract.errors import ErrorCode, ToolFailure

READ_BYTES = 256 * 1024 * 1024
"""Memory for all reads together, in bytes: a quarter of the memory of a service in this project's deployments."""
SMALL_SHARE, LARGE_SHARE = 1 / 256, 7 / 8
"""Shares of the memory: of a read that counts as small, and of all large reads together."""
WAIT_S = 10.0
"""Seconds that a read waits for memory."""
PARSED_LOG, PARSED_TRANSCRIPT = 4, 13
"""Memory that a parsed log or transcript takes, as a multiple of its text: the text in Redis's form, as characters of
up to 4 bytes, and as values.
"""


class Reservation:
    """The memory that one read has reserved. `release`: called with the bytes that are given back."""

    def __init__(self, size: int, release: Callable[[int], None]) -> None:
        self._size = size
        self._release = release

    def shrink(self, size: int) -> None:
        """Keep only `size` bytes, because the rest of the data is no longer in memory. Never grows."""
        if size < self._size:
            released, self._size = self._size - size, size
            self._release(released)


class ReadMemory:
    """The memory of one event loop."""

    def __init__(self, total: int = READ_BYTES) -> None:
        self._total = total
        self._used = 0
        self._of = Counter[str]()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, tenant: str, size: int) -> AsyncIterator[Reservation]:
        """Reserve memory during the block, which may shrink the reservation. Wait up to WAIT_S seconds for other reads
        to end. Raises ToolFailure(FILE_TOO_LARGE): a tenant never gets that much memory. Raises
        ToolFailure(RATE_LIMITED): other reads did not end.
        """
        if size > self._total // 2:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                f"the data needs more than {self._total // 2**21} MiB of memory here: read the events of a run, or its "
                "transcript after its end, over the API",
            )
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                await self._changed.wait_for(lambda: self._has_room(tenant, size))
                self._change(tenant, size)
        except TimeoutError:
            raise ToolFailure(
                ErrorCode.RATE_LIMITED,
                "other requests use the memory for reading runs: try again in a moment",
                retry_after_s=WAIT_S,
            ) from None
        reservation = Reservation(size, partial(self._release, tenant))
        try:
            yield reservation
        finally:
            reservation.shrink(0)

    def _release(self, tenant: str, size: int) -> None:
        # Without the lock, which a cancelled task could not wait for. Waiters are woken by a task of their own.
        self._change(tenant, -size)
        waking = asyncio.ensure_future(self._wake())
        waking.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def used(self) -> int:
        """Return the reserved bytes of all tenants."""
        return self._used

    def _has_room(self, tenant: str, size: int) -> bool:
        is_small = size <= self._total * SMALL_SHARE
        limit = self._total if is_small else self._total * LARGE_SHARE
        return self._used + size <= limit and self._of[tenant] + size <= self._total // 2

    def _change(self, tenant: str, size: int) -> None:
        self._used += size
        self._of[tenant] += size
        if not self._of[tenant]:
            del self._of[tenant]

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def release_pieces(pieces: deque[bytes], memory: Reservation) -> Iterator[bytes]:
    """Yield the pieces, and release the memory of a piece when the next one is read. No other variable may refer to
    the pieces.
    """
    size = sum(map(len, pieces))
    memory.shrink(size)
    while pieces:
        yield (piece := pieces.popleft())
        size -= len(piece)
        del piece
        memory.shrink(size)


_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ReadMemory]" = weakref.WeakKeyDictionary()


def read_memory() -> ReadMemory:
    """Return the memory for reads of this event loop."""
    return _of_loops.setdefault(asyncio.get_running_loop(), ReadMemory())
