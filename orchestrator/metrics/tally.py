"""What this process counts, and the task that brings it into the deployment's sums about once a second."""

import asyncio
import secrets

from contract.errors import BrokerUnavailable
from contract.metric_counts import ABSORB_LUA, Counts
from contract.names import counted_key, metrics_key
from orchestrator.loop.events import OnEvent
from orchestrator.metrics.call_meter import CallMeter
from orchestrator.metrics.run_meter import Replay, RunMeter
from store.connection import RedisClient, broker_errors
from store.tasks import cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

FLUSH_S = 1.0
LAST_FLUSH_S = 3.0
"""How long the end of a program waits for a Redis that is away."""


class Tally:
    """Redis may be away for any time: what was counted meanwhile is sent when it is back. Only what a killed process had not sent is lost."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self.counts = Counts()
        self.calls = CallMeter(self.counts)
        self._keys = [metrics_key(deployment), counted_key(deployment, secrets.token_hex(8))]
        self._absorb = client.register_script(ABSORB_LUA)
        self._task: asyncio.Task[None] | None = None
        self._is_told = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="metrics-tally")

    async def aclose(self) -> None:
        """Send what is left."""
        if self._task is not None:
            await cancel_all((self._task,))
        try:
            async with asyncio.timeout(LAST_FLUSH_S):
                await self.flush()
        except (BrokerUnavailable, TimeoutError) as error:
            log.warning("metrics_lost", error=str(error) or type(error).__name__)

    def watch_run(self, tell: OnEvent, book: Replay | None) -> OnEvent:
        """What a run tells is counted, and then told `tell`. `book`: of a run that is remembered."""
        return RunMeter(self.counts, self.calls, tell, book).on_event

    async def flush(self) -> None:
        """Send what has changed. Raises BrokerUnavailable."""
        while (sending := self.counts.pending()) is not None:
            with broker_errors("the metrics were not counted"):
                await self._absorb(keys=self._keys, args=list(sending.arguments))
            self.counts.settle(sending)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
                self._is_told = False
            except BrokerUnavailable as error:
                if not self._is_told:
                    log.warning("metrics_wait_for_redis", error=str(error))
                self._is_told = True
