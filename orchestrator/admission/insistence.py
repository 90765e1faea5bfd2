"""Sends a call again that its tenant's limits did not let through: for work that has time."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from contract.calls import ToolResult
from contract.errors import ErrorCode
from orchestrator.admission.base import NOT_ADMITTED

MAX_PAUSE_S = 5.0


async def until_admitted(send: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
    """The result of a call, once it has been let through. One that admission refuses has not been sent, so nothing happens twice; one whose tool says
    that it is asked too often has been."""
    while True:
        result = await send()
        retry_after_s = result.metadata.get("retry_after_s")
        is_refused = result.error_code is ErrorCode.RATE_LIMITED and NOT_ADMITTED.items() <= result.metadata.items()
        if not is_refused or not isinstance(retry_after_s, int | float):
            return result
        await asyncio.sleep(min(MAX_PAUSE_S, max(0.0, retry_after_s)) * random.uniform(1.0, 1.5))
