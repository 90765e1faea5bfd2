"""`toolcrew serve api` as a whole: the server, and the orchestrator that works what is started over it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from contract.errors import OperatorError
from orchestrator.api.api_state import ApiState
from orchestrator.api.app import build_app
from orchestrator.http.app_state import ConnectedParts
from orchestrator.http.server import UvicornServer
from orchestrator.runs.run_service import RunService, Stopping, open_runner
from orchestrator.settings import OrchestratorSettings
from telemetry.logs import get_logger

log = get_logger(__name__)

GRACE_S = 10.0
"""How long runs may go on once the service is told to stop. Those that have not ended are given back."""

AGAIN_S = 30.0


class ApiService:
    """`concurrency`: runs and batch items at a time here; 0: none."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        host: str,
        port: int,
        concurrency: int,
        announce: Callable[[str], None] = lambda _: None,
        *,
        has_traces: bool = True,
    ) -> None:
        """`announce`: told the address when it serves; `has_traces`: each run is written down. Raises ConfigError for
        settings with which nothing can be served.
        """
        self._settings = settings
        self._concurrency = concurrency
        self._tell = announce
        self._has_traces = has_traces
        app_state = ApiState(settings)
        app_state.check()
        self._server = UvicornServer(build_app(app_state, self._orchestrator), host, port, self._announce)

    def stop(self) -> None:
        """Take no new requests, and end."""
        self._server.stop()

    async def run(self) -> None:
        """Until stopped."""
        await self._server.run()
        log.info("stopped")

    @asynccontextmanager
    async def _orchestrator(self, parts: ConnectedParts) -> AsyncIterator[None]:
        """Works runs while the service is connected; what has not ended by its end is given back, for another process
        to go on with.
        """
        if self._concurrency == 0:
            yield
            return
        stopping = Stopping()
        working = asyncio.create_task(self._work(parts, stopping))
        try:
            yield
        finally:
            stopping.interrupt()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self, parts: ConnectedParts, stopping: Stopping) -> None:
        """Until it is to stop. A model that refuses this process is asked again after a while: the API serves on, and
        others may work what is started.
        """
        while not stopping.draining.is_set():
            try:
                async with open_runner(
                    self._settings, parts.pool, self._concurrency, has_traces=self._has_traces
                ) as runner:
                    await RunService(runner, GRACE_S, stopping).run()
            except OperatorError as error:
                log.error("api_orchestrator_ended", error=str(error), again_in_s=AGAIN_S)
            except Exception:
                # the edge of the orchestrator: whatever ends it, the API would go on starting runs that nobody works,
                # and nobody would know
                log.exception("api_orchestrator_broke_off", again_in_s=AGAIN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await stopping.draining.wait()

    def _announce(self, address: str) -> None:
        log.info("api_serving", address=address, concurrency=self._concurrency)
        self._tell(address)
