"""Service of `toolcrew serve mcp --http`. It stores no state of clients, so any number of replicas can serve the same
clients.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.http.app_state import AppState, ConnectedParts
from toolcrew.orchestrator.http.body_limits import JSON_BYTES, BodyLimits
from toolcrew.orchestrator.http.server import UvicornServer
from toolcrew.orchestrator.mcp.calls import Context, McpCaller
from toolcrew.orchestrator.mcp.http_authentication import CALLER, McpAuthentication, Origins
from toolcrew.orchestrator.mcp.server import build_server
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

_SEAL = "mcp approval"
_PAGE_HEADERS = ("Authorization", "Content-Type", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Last-Event-ID")


class McpService:
    """Process of the service. `origins`: origins of browser pages that may call, in addition to pages of this
    machine.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        host: str,
        port: int,
        origins: Sequence[str] = (),
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the service. `announce` receives the address when the service is ready. Raises ConfigError for
        invalid settings.
        """
        self._on_address = announce
        app_state = AppState(settings)
        app_state.check()
        self._server = UvicornServer(build_app(app_state, Origins(host, origins)), host, port, self._announce)

    def stop(self) -> None:
        """Stop accepting requests, and end."""
        self._server.stop()

    async def run(self) -> None:
        """Serve until stopped."""
        await self._server.run()
        log.info("stopped")

    def _announce(self, address: str) -> None:
        log.info("mcp_serving", transport="http", address=f"{address}/mcp")
        self._on_address(address)


def build_app(app_state: AppState, origins: Origins) -> ASGIApp:
    """Return the application of one process."""
    settings = app_state.settings
    server = build_server(
        _find_caller,
        keys=_sealing_keys(settings.broker()),
        approval_wait_s=settings.approval_wait_s,
        audience=f"toolcrew/{settings.deployment}",
    )
    # Keep no state, also for clients with an earlier version of MCP that expect some: another replica would not have
    # it.
    manager = StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=JSON_BYTES)
    authenticated = McpAuthentication(BodyLimits(StreamableHTTPASGIApp(manager), path_limits=()), app_state, origins)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with app_state.open(_no_work), manager.run():
            yield

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        return (
            PlainTextResponse("ok\n")
            if app_state.is_connected
            else PlainTextResponse("Redis has not answered yet\n", 503)
        )

    routes = [
        Route("/mcp", authenticated),
        Route("/mcp/{session}", authenticated),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
    ]
    # A browser first asks without a key whether a page may call.
    pages = Middleware(
        CORSMiddleware, allow_origins=sorted(origins.allowed), allow_methods=["POST"], allow_headers=_PAGE_HEADERS
    )
    app = Starlette(routes=routes, lifespan=lifespan, middleware=[pages] if origins.allowed else [])
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _no_work(_: ConnectedParts) -> AsyncIterator[None]:
    yield


def _find_caller(ctx: Context) -> McpCaller:
    """Return the caller that McpAuthentication put into the scope."""
    request = ctx.request
    assert isinstance(request, Request)
    caller = request.scope[CALLER]
    assert isinstance(caller, McpCaller)
    return caller


def _sealing_keys(broker: BrokerSettings) -> list[bytes]:
    """Return keys that protect the questions to clients. They derive from the deployment's keys, so that every replica
    can read what another one has sealed.
    """
    keys = broker.signing_keys()
    return [bytes.fromhex(key.sign(_SEAL, b"")) for key in (keys.current, *keys.previous)]
