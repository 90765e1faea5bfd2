"""The service for E2B's clients in debug mode: one open session in the place of a sandbox, on this machine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Mount

from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dispatch.pool_connection import open_pool
from toolcrew.orchestrator.e2b.envd import Envd
from toolcrew.orchestrator.e2b.sandbox import EnvdSandbox
from toolcrew.orchestrator.http.server import UvicornServer
from toolcrew.orchestrator.streams import Streams, StreamTarget
from toolcrew.store.audit import Actor
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

ENVD_PORT = 49983
"""The port at which clients in debug mode expect the server of a sandbox."""
_LOOPBACK = "127.0.0.1"
# A page of another name that resolves to this machine must not reach the sandbox.
_HOSTS = ("localhost", _LOOPBACK)


def build_debug_app(envd: Envd) -> Starlette:
    """Return the application that serves one sandbox to programs of this machine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        envd.close()

    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS), www_redirect=False)
    return Starlette(routes=[Mount("/", app=envd)], middleware=[guard], lifespan=lifespan)


class DebugService:
    """Serves the open session `session` of a tenant until it is stopped. `actor`: the author in the audit log."""

    def __init__(self, settings: OrchestratorSettings, tenant: str, session: str, actor: Actor, port: int) -> None:
        self._settings = settings
        self._target = StreamTarget(tenant, session, actor)
        self._port = port
        self._server: UvicornServer | None = None

    def stop(self) -> None:
        """Stop: accept no new requests, and end."""
        if self._server is not None:
            self._server.stop()

    async def run(self) -> None:
        """Serve until stopped. Raises ToolFailure(SESSION_NOT_FOUND), OperatorError."""
        settings = self._settings
        async with open_pool(settings.broker(), queue_wait_s=settings.queue_wait_s, settings=settings) as pool:
            await pool.dispatcher.locator.location(self._target.tenant, self._target.session)
            streams = Streams(pool, settings.deployment)
            try:
                app = build_debug_app(Envd(EnvdSandbox(streams, self._target)))
                self._server = UvicornServer(app, _LOOPBACK, self._port, self._announce)
                await self._server.run()
            finally:
                await streams.close()

    def _announce(self, address: str) -> None:
        log.info("e2b_ready", address=address, session=self._target.session)
