"""Sends a call again that its tenant's limits did not let through: for work that has time."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from contract.calls import ToolResult
from orchestrator.admission.base import was_not_admitted

MAX_PAUSE_S = 5.0


async def until_admitted(send: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
    """The result of a call, once it has been let through."""
    while True:
        result = await send()
        retry_after_s = result.metadata.get("retry_after_s")
        if not was_not_admitted(result) or not isinstance(retry_after_s, int | float):
            return result
        await asyncio.sleep(min(MAX_PAUSE_S, max(0.0, retry_after_s)) * random.uniform(1.0, 1.5))
