"""Groups of tasks. The failure of one task does not stop the others."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import structlog

from toolcrew.contract.errors import SandboxUnavailable

log = structlog.get_logger(__name__)


async def settle(work: Iterable[Awaitable[Any]]) -> None:
    """Run all coroutines to their end, even if one fails. SandboxUnavailable (from the engine or the disk) is logged as
    a warning, because the caller tries again later. Any other exception is a bug and is logged with its traceback.
    """
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, SandboxUnavailable):
            log.warning("session_operation_repeated", error=str(result))
        elif isinstance(result, Exception):
            log.error("session_operation_failed", exc_info=result)
