"""Several pieces of work at once, of which none keeps the others."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import structlog

from contract.errors import SandboxUnavailable

log = structlog.get_logger(__name__)


async def settle(work: Iterable[Awaitable[Any]]) -> None:
    """All of it, whatever some of it raises. What the engine or the disk refused is tried again later; anything else is a bug, and loud."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, SandboxUnavailable):
            log.warning("work_not_done", error=str(result))
        elif isinstance(result, Exception):
            log.error("work_failed", exc_info=result)
