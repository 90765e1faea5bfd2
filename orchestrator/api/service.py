"""The service `toolcrew serve api`: the HTTP server, and an orchestrator that processes runs and batches."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from toolcrew.contract.errors import OperatorError
from toolcrew.contract.previews import PreviewSite
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.app import build_app
from toolcrew.orchestrator.api.previews import serve_previews
from toolcrew.orchestrator.http.app_state import ConnectedParts
from toolcrew.orchestrator.http.server import UvicornServer
from toolcrew.orchestrator.runs.run_service import RunService, StopPhases, open_runner
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

GRACE_S = 10.0
"""Time in seconds that runs have to end after the stop signal. Runs that have not ended by then return to the queue."""

RETRY_S = 30.0


class ApiService:
    """API service of one process. `concurrency`: number of concurrent runs and batch items; 0: the service processes no
    runs.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        host: str,
        port: int,
        concurrency: int,
        announce: Callable[[str], None] = lambda _: None,
        *,
        previews: tuple[str, int] | None = None,
        has_traces: bool = True,
    ) -> None:
        """Build the service.

        `announce`: called with the address when the service accepts requests. `previews`: the address of the domain of
        previews, and the port that serves them. `has_traces`: each run writes a trace.

        Raises ConfigError for settings that can never serve a request.
        """
        self._settings = settings
        self._concurrency = concurrency
        self._on_address = announce
        self._has_traces = has_traces
        app_state = ApiState(settings)
        app_state.check()
        if previews is not None:
            app_state.previews = PreviewSite(previews[0])
        self._app_state, self._host = app_state, host
        self._previews_port = previews[1] if previews is not None else 0
        app = build_app(app_state, self._work_while_connected)
        self._server = UvicornServer(app, host, port, self._announce, has_sockets=True)

    def stop(self) -> None:
        """Stop: accept no new requests, and end."""
        self._server.stop()

    async def run(self) -> None:
        """Serve until stopped."""
        await self._server.run()
        log.info("stopped")

    @asynccontextmanager
    async def _work_while_connected(self, parts: ConnectedParts) -> AsyncIterator[None]:
        async with self._orchestrator(parts):
            site = self._app_state.previews
            if site is None:
                yield
                return
            async with serve_previews(site, parts, self._settings.deployment, self._host, self._previews_port):
                yield

    @asynccontextmanager
    async def _orchestrator(self, parts: ConnectedParts) -> AsyncIterator[None]:
        """Process runs while the service is connected.

        Runs that have not ended at the stop are given back, so that another process continues them.
        """
        if self._concurrency == 0:
            yield
            return
        stopping = StopPhases()
        working = asyncio.create_task(self._work(parts, stopping))
        try:
            yield
        finally:
            stopping.interrupt()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self, parts: ConnectedParts, stopping: StopPhases) -> None:
        """Process runs until the service stops.

        After an error, such as a model that refuses this process, the orchestrator starts again after RETRY_S. The API
        keeps serving, and other processes may process the runs.
        """
        while not stopping.draining.is_set():
            try:
                async with open_runner(
                    self._settings, parts.pool, self._concurrency, has_traces=self._has_traces
                ) as runner:
                    await RunService(runner, GRACE_S, stopping).run()
            except OperatorError as error:
                log.error("api_orchestrator_ended", error=str(error), retry_in_s=RETRY_S)
            except Exception:
                # the edge of the orchestrator: without this loop the API would still accept runs after an unhandled
                # error, but no process might run them, and no operator would know
                log.exception("api_orchestrator_failed", retry_in_s=RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await stopping.draining.wait()

    def _announce(self, address: str) -> None:
        log.info("api_serving", address=address, concurrency=self._concurrency)
        self._on_address(address)
