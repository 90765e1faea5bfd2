"""Counts of this process, and the task that adds them to the deployment's sums about once a second."""

import asyncio
import secrets

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.store.connection import RedisClient
from toolcrew.store.metrics import Counts, MetricsStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

FLUSH_S = 1.0
LAST_FLUSH_S = 3.0
"""Seconds that the end of a program waits for Redis to accept the last counts."""


class Tally:
    """Collects counts and sends them to Redis. If Redis does not answer, they are sent later. A killed process loses
    only the counts that it had not sent.
    """

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self.counts = Counts()
        self._store = MetricsStore(client, deployment)
        self._source = secrets.token_hex(8)
        self._task: asyncio.Task[None] | None = None
        self._is_reported = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="metrics-tally")

    async def aclose(self) -> None:
        """Send the remaining counts to Redis and stop."""
        if self._task is not None:
            await cancel_all((self._task,))
        try:
            async with asyncio.timeout(LAST_FLUSH_S):
                await self.flush()
        except (BrokerUnavailable, TimeoutError) as error:
            log.warning("metrics_lost", error=str(error) or type(error).__name__)

    async def flush(self) -> None:
        """Add the counts since the last flush to the sums in Redis. Raises BrokerUnavailable."""
        await self._store.absorb(self._source, self.counts)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
                self._is_reported = False
            except BrokerUnavailable as error:
                if not self._is_reported:
                    log.warning("metrics_wait_for_redis", error=str(error))
                self._is_reported = True
