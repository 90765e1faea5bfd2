"""Authentication of the MCP server over HTTP. The origin and the key of a request are checked before its body is
read.
"""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.approvals.asking import choose_pool_approver, open_approvals
from toolcrew.orchestrator.http.app_state import AppState
from toolcrew.orchestrator.http.authentication import CLOSE, check_length, identify, read_bearer_key
from toolcrew.orchestrator.http.body_limits import find_header, refuse
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem, response_to
from toolcrew.orchestrator.mcp.calls import McpCaller
from toolcrew.orchestrator.mcp.leases import KeyLeases
from toolcrew.store.api_keys import Credential

CALLER = "toolcrew.mcp.caller"
"""Key in the ASGI scope of an accepted request. The value is the McpCaller of the request."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Origins:
    """Origins of the browser pages that may call. A program sends no Origin. A page always sends one, and its author
    may be an attacker.
    """

    def __init__(self, host: str, allowed: Sequence[str]) -> None:
        """Create the allowed origins. `host`: the address on which the service listens. Raises ConfigError for an
        invalid origin.
        """
        self._is_local = host in _LOOPBACK
        self.allowed = frozenset(_parse_origin(text) for text in allowed)

    def check(self, scope: Scope) -> None:
        """Raise ApiProblem(PERMISSION_DENIED) for a request from a page that may not call."""
        origin = find_header(scope, b"origin")
        if origin is not None and not self._may(origin.decode("latin-1")):
            raise ApiProblem(
                ErrorCode.PERMISSION_DENIED,
                "pages of this Origin may not send requests: omit the Origin header, or start the service with "
                "--origin for it",
            )
        host = (find_header(scope, b"host") or b"").decode("latin-1")
        if self._is_local and _name_of(f"//{host}") not in _LOOPBACK:
            # A foreign name may point to this address. A browser would then treat the foreign pages as pages of this
            # service.
            raise ApiProblem(
                ErrorCode.PERMISSION_DENIED,
                "this service accepts only the names localhost and 127.0.0.1: use one of them as its address",
            )

    def _may(self, origin: str) -> bool:
        return origin.lower() in self.allowed or (self._is_local and _name_of(origin) in _LOOPBACK)


class McpAuthentication:
    """Refuses requests without a valid key or from a foreign page. Puts the McpCaller of other requests into the
    scope.
    """

    def __init__(self, app: ASGIApp, app_state: AppState, origins: Origins) -> None:
        self._app = app
        self._app_state = app_state
        self._origins = origins
        self._approver: Approver | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._origins.check(scope)
            check_length(scope)
            scope[CALLER] = await self._find_caller(scope)
            if scope["method"] != "POST":
                raise ApiProblem(
                    ApiCode.METHOD_NOT_ALLOWED,
                    "this MCP endpoint accepts only POST and has no event stream: send a POST request",
                    headers={"Allow": "POST"},
                )
        except (ApiProblem, ToolFailure, OperatorError) as error:
            await refuse(response_to(error, scope["path"], headers=CLOSE), receive, send)
            return
        await self._app(scope, receive, send)

    async def _find_caller(self, scope: Scope) -> McpCaller:
        app_state = self._app_state
        identity = await identify(app_state, scope)
        credential = Credential(app_state.parts.keys, read_bearer_key(scope))
        session = scope["path_params"].get("session")
        if session is not None and not _SESSION.fullmatch(session):
            raise ApiProblem(
                ErrorCode.SESSION_NOT_FOUND,
                "the session id in the address is invalid: use the id of an open session, /mcp/ID",
            )
        client = app_state.client(identity.tenant, credential, key=identity.key_id)
        leases = KeyLeases(app_state.sessions, client, identity.key_id)
        asks_client = app_state.settings.approvals == "ask"
        approver = None if asks_client else self._approver_of(app_state)
        return McpCaller(client, leases, f"{identity.tenant}/{identity.key_id}", asks_client, approver, session)

    def _approver_of(self, app_state: AppState) -> Approver:
        """Return the approver that all requests share, so that one poll serves all calls that wait."""
        if self._approver is None:
            questions = open_approvals(app_state.settings, app_state.parts.pool.redis, app_state.parts.pool.keys)
            self._approver = choose_pool_approver(app_state.settings, questions, is_interactive=False)
        return self._approver


def _parse_origin(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
        raise ConfigError(f"--origin {text} is not an origin: write it as https://name or https://name:port")
    return text.lower()


def _name_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
