"""`toolcrew serve mcp --http` as a whole. It keeps nothing of anybody: any number of them serve the same."""

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

from contract.settings import BrokerSettings
from orchestrator.http.app_state import AppState, ConnectedParts
from orchestrator.http.body_limits import JSON_BYTES, BodyLimits
from orchestrator.http.server import UvicornServer
from orchestrator.mcp.calls import Caller, Context
from orchestrator.mcp.http_authentication import CALLER, McpAuthentication, Origins
from orchestrator.mcp.server import build_server
from orchestrator.settings import OrchestratorSettings
from telemetry.logs import get_logger

log = get_logger(__name__)

_SEAL = "mcp approval"
_PAGE_HEADERS = ("Authorization", "Content-Type", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Last-Event-ID")


class McpService:
    """One process of it. `origins`: of pages in browsers that may call beside those of this machine."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        host: str,
        port: int,
        origins: Sequence[str] = (),
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`announce`: told the address when it serves. Raises ConfigError for settings with which nothing can be
        served.
        """
        self._tell = announce
        app_state = AppState(settings)
        app_state.check()
        self._server = UvicornServer(build_app(app_state, Origins(host, origins)), host, port, self._announce)

    def stop(self) -> None:
        """Take no new requests, and end."""
        self._server.stop()

    async def run(self) -> None:
        """Until stopped."""
        await self._server.run()
        log.info("stopped")

    def _announce(self, address: str) -> None:
        log.info("mcp_serving", transport="http", address=f"{address}/mcp")
        self._tell(address)


def build_app(app_state: AppState, origins: Origins) -> ASGIApp:
    """The application of one process."""
    settings = app_state.settings
    server = build_server(
        _find_caller,
        keys=_sealing_keys(settings.broker()),
        approval_wait_s=settings.approval_wait_s,
        audience=f"toolcrew/{settings.deployment}",
    )
    # Stateless: what a peer of an earlier revision would have us remember, another replica would not know.
    manager = StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=JSON_BYTES)
    authenticated = McpAuthentication(BodyLimits(StreamableHTTPASGIApp(manager), other=()), app_state, origins)

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
    # A browser asks first, without a key, whether a page may.
    pages = Middleware(
        CORSMiddleware, allow_origins=sorted(origins.allowed), allow_methods=["POST"], allow_headers=_PAGE_HEADERS
    )
    app = Starlette(routes=routes, lifespan=lifespan, middleware=[pages] if origins.allowed else [])
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _no_work(_: ConnectedParts) -> AsyncIterator[None]:
    yield


def _find_caller(ctx: Context) -> Caller:
    """Return the caller that McpAuthentication put in the scope."""
    request = ctx.request
    assert isinstance(request, Request)
    caller = request.scope[CALLER]
    assert isinstance(caller, Caller)
    return caller


def _sealing_keys(broker: BrokerSettings) -> list[bytes]:
    """Made of the deployment's own, so that every replica reads what another has sealed."""
    known = broker.signing_keys()
    return [bytes.fromhex(key.sign(_SEAL, b"")) for key in (known.current, *known.previous)]
