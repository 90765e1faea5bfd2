"""Limits on requests to a model. The limits of an endpoint are shared by all orchestrators of a pool
(store/model_limits.py). In a program without a pool, the requests of one model share them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from toolcrew.contract.model_endpoints import BLOCK_CAUSES, WAIT_NOTICE_S, BlockReason, EndpointBlocked, RequestLease


class RequestLimits(Protocol):
    """The limits of one endpoint. The methods have the same meaning as in SharedLimits (store/model_limits.py)."""

    async def acquire(
        self, estimate: Callable[[], int], max_wait_s: float, on_wait: Callable[[str], object] = ...
    ) -> RequestLease: ...

    async def release(self, lease: RequestLease, tokens: int) -> None: ...

    async def block(self, wait_s: float, reason: BlockReason) -> None: ...


class LocalLimits:
    """RequestLimits of a program without a pool: they only record for how long the server's rate limit blocks the
    endpoint.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._until = float("-inf")

    async def acquire(
        self, estimate: Callable[[], int], max_wait_s: float, on_wait: Callable[[str], object] = lambda _: None
    ) -> RequestLease:
        remaining_s = self._until - time.monotonic()
        if remaining_s > max_wait_s:
            raise EndpointBlocked(remaining_s, "rate_limit")
        if remaining_s > WAIT_NOTICE_S:
            on_wait(BLOCK_CAUSES["rate_limit"])
        if remaining_s > 0:
            await self._sleep(remaining_s)
        return RequestLease()

    async def release(self, lease: RequestLease, tokens: int) -> None:
        """Do nothing: the requests are not counted."""

    async def block(self, wait_s: float, reason: BlockReason) -> None:
        self._until = max(self._until, time.monotonic() + wait_s)
