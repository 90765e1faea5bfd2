"""Waits until Redis is back: for work that has time, and would otherwise be begun anew, or fail for what is over in a moment."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from contract.errors import BrokerUnavailable
from store.tasks import Backoff
from telemetry.logs import get_logger

log = get_logger(__name__)

OUTAGE_S = 120.0
"""So long Redis may be away before what waits for it fails."""

Thing = TypeVar("Thing")


async def outlast(work: Callable[[], Awaitable[Thing]], limit_s: float = OUTAGE_S) -> Thing:
    """What `work` gives, which is done again as long as Redis does not answer it. Raises as it does; BrokerUnavailable after `limit_s`."""
    until = Backoff(limit_s)
    while True:
        try:
            return await work()
        except BrokerUnavailable as error:
            log.warning("redis_awaited", error=str(error))
            if not await until.wait():
                raise
