"""`toolcrew serve batches`: an orchestrator as a service of its own, which works what others have handed over, of every
tenant, until it is told to stop.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field

from contract.errors import BrokerUnavailable, ConfigError
from orchestrator.dispatch.pool_connection import PoolConnection, open_pool
from orchestrator.runs.run_service import RunService, Stopping, open_runner
from orchestrator.runs.runner import Runner
from orchestrator.settings import OrchestratorSettings
from telemetry.logs import get_logger
from telemetry.settings import load_tracing_settings

log = get_logger(__name__)

POOL_AGAIN_S = 2.0
"""How often it is looked for a pool that is not there yet."""


@dataclass
class BatchService:
    """`concurrency`: runs at a time here. `tenants`: those that are served; none: all. `grace_s`: how long what runs
    may go on after the first `interrupt`; what has not ended by then is given back, for another process to go on with.
    `has_traces`: each run is written down."""

    settings: OrchestratorSettings
    concurrency: int
    tenants: tuple[str, ...] = ()
    grace_s: float = 60.0
    has_traces: bool = True
    _stopping: Stopping = field(default_factory=Stopping)

    def interrupt(self) -> None:
        """The first time: begin nothing any more. The second time: give back what runs, now."""
        self._stopping.interrupt()

    async def run(self) -> None:
        """Until it was interrupted. Raises ConfigError for settings with which nothing can be served; a pool that is
        not there is waited for.
        """
        _check(self.settings)
        async with AsyncExitStack() as stack:
            pool = await self._pool(stack)
            if pool is None:
                return
            runner = await stack.enter_async_context(self._runner(pool))
            log.info(
                "serving",
                orchestrator=runner.queue.owner,
                concurrency=self.concurrency,
                tenants=",".join(self.tenants) or "all",
            )
            await RunService(runner, self.grace_s, self._stopping).run()
        log.info("stopped", orchestrator=runner.queue.owner)

    def _runner(self, pool: PoolConnection) -> AbstractAsyncContextManager[Runner]:
        return open_runner(self.settings, pool, self.concurrency, tenants=self.tenants, has_traces=self.has_traces)

    async def _pool(self, stack: AsyncExitStack) -> PoolConnection | None:
        """The pool, as soon as Redis answers and a worker is there; None when it is interrupted before."""
        told = ""
        while not self._stopping.draining.is_set():
            try:
                return await stack.enter_async_context(
                    open_pool(self.settings.broker(), queue_wait_s=self.settings.queue_wait_s, settings=self.settings)
                )
            except (BrokerUnavailable, ConfigError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("pool_not_there", error=told)
            with suppress(TimeoutError):
                async with asyncio.timeout(POOL_AGAIN_S):
                    await self._stopping.draining.wait()
        return None


def _check(settings: OrchestratorSettings) -> None:
    """Raises ConfigError for what waiting does not mend."""
    if settings.api_key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is set, and a key is one tenant's, while this serves every tenant with the deployment's "
            "own secret: unset it (`toolcrew batches resume BATCH` works a batch of one tenant)"
        )
    if settings.redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set, and a stack that ends with this command has no batches to serve: set it to "
            "the pool's Redis"
        )
    settings.broker().signing_keys()
    load_tracing_settings()
