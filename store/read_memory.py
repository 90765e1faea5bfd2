"""Memory for reading what tenants have stored: a limit over all requests of a process.

Invariant: memory is reserved before the data is read, from a size that Redis knows. A tenant has at most half of it, so
a tenant with many large requests delays its own requests only.
"""

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contract.errors import ErrorCode, ToolFailure

READ_BYTES = 256 * 1024 * 1024
"""Memory for all reads together, in bytes: a quarter of the memory of a service in this project's deployments."""
WAIT_S = 10.0
"""Seconds that a read waits for memory."""
PARSED_LOG, PARSED_TRANSCRIPT = 4, 13
"""Memory that a parsed log or transcript takes, as a multiple of its text: the text in Redis's form, as characters of
up to 4 bytes, and as values.
"""


class ReadMemory:
    """The memory of one event loop."""

    def __init__(self, total: int = READ_BYTES) -> None:
        self._total, self._used = total, 0
        self._of = Counter[str]()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Reserve memory during the block. Wait up to WAIT_S seconds for other reads to end. Raises
        ToolFailure(FILE_TOO_LARGE): a tenant never gets that much memory. Raises ToolFailure(RATE_LIMITED): other
        reads did not end.
        """
        if size > self._total // 2:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                f"the messages of the run need more than {self._total // 2**21} MiB of memory here: read the events of "
                "the run, or its transcript over the API after its end",
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
        try:
            yield
        finally:
            # Without the lock, which a cancelled task could not wait for. Waiters are woken by a task of their own.
            self._change(tenant, -size)
            waking = asyncio.ensure_future(self._wake())
            waking.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _has_room(self, tenant: str, size: int) -> bool:
        return self._used + size <= self._total and self._of[tenant] + size <= self._total // 2

    def _change(self, tenant: str, size: int) -> None:
        self._used += size
        self._of[tenant] += size
        if not self._of[tenant]:
            del self._of[tenant]

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ReadMemory]" = weakref.WeakKeyDictionary()


def read_memory() -> ReadMemory:
    """Return the memory for reads of this event loop."""
    return _of_loops.setdefault(asyncio.get_running_loop(), ReadMemory())
