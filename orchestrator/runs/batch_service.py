"""Orchestrator service of `toolcrew serve batches`. Executes runs and detached batches of all tenants until it is
stopped.
"""

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import OrchestratorSettings, load_tracing_settings
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection, wait_for_pool
from toolcrew.orchestrator.runs.run_service import RunService, StopPhases, open_runner
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


@dataclass
class BatchService:
    """Configuration and state of the service.

    `concurrency`: runs at a time in this process. `tenants`: tenants that are served; empty: all tenants. `grace_s`:
    time in seconds in which running runs can end after the first `interrupt`. `has_traces`: write a trace of each
    run.
    """

    settings: OrchestratorSettings
    concurrency: int
    tenants: tuple[str, ...] = ()
    grace_s: float = 60.0
    has_traces: bool = True
    _stopping: StopPhases = field(default_factory=StopPhases)

    def interrupt(self) -> None:
        """Stop the service. The first call starts no more runs. The second call returns the running runs to the queue
        at once.
        """
        self._stopping.interrupt()

    async def run(self) -> None:
        """Serve until interrupted. Waits for a pool that is not up yet. Raises ConfigError for wrong settings, because
        waiting does not help then.
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

    async def _pool(self, stack: AsyncExitStack) -> PoolConnection | None:
        """Open the pool when Redis answers and a worker is up. Return None if interrupted before that."""
        return await wait_for_pool(stack, self.settings, self._stopping.draining)

    def _runner(self, pool: PoolConnection) -> AbstractAsyncContextManager[Runner]:
        """Return the runner of the service."""
        return open_runner(self.settings, pool, self.concurrency, tenants=self.tenants, has_traces=self.has_traces)


def _check(settings: OrchestratorSettings) -> None:
    """Raise ConfigError for settings that waiting does not fix."""
    if settings.api_key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is set, but this command serves every tenant with the deployment's own secret: unset it "
            "(`toolcrew batches resume BATCH` runs a batch of one tenant)"
        )
    if settings.redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set, and a stack that ends with this command has no batches to serve: set it to "
            "the pool's Redis"
        )
    settings.broker().signing_keys()
    load_tracing_settings()
