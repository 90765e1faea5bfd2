"""The way into the MCP server over HTTP: which pages may call, and who shows which key, before a body is read."""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from orchestrator.api.door import bearer_of, identify
from orchestrator.api.house import House
from orchestrator.api.limits import find_header, refuse
from orchestrator.api.problems import ApiCode, ApiProblem, response_to
from orchestrator.approvals import Approver
from orchestrator.approvals.asking import choose_pool_approver, open_approvals
from orchestrator.mcp.calls import Caller
from orchestrator.mcp.leases import KeyLeases
from store.api_keys import Credential

CALLER = "toolcrew.mcp.caller"
"""In the scope of a request that came in: its Caller."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLOSE = {"Connection": "close"}


class Origins:
    """Which pages in browsers may call. A program sends no Origin; a page always does, and may be anybody's."""

    def __init__(self, host: str, allowed: Sequence[str]) -> None:
        """`host`: what is listened on. Raises ConfigError for an origin that is none."""
        self._is_local = host in _LOOPBACK
        self.allowed = frozenset(_parse_origin(text) for text in allowed)

    def check(self, scope: Scope) -> None:
        """Raises ApiProblem(PERMISSION_DENIED)."""
        origin = find_header(scope, b"origin")
        if origin is not None and not self._may(origin.decode("latin-1")):
            raise ApiProblem(
                ErrorCode.PERMISSION_DENIED,
                "pages of this Origin may not call: send none, or have the service started with --origin for it",
            )
        host = (find_header(scope, b"host") or b"").decode("latin-1")
        if self._is_local and _name_of(f"//{host}") not in _LOOPBACK:
            # A name of somebody else's that leads here: then a browser takes his pages for ours.
            raise ApiProblem(
                ErrorCode.PERMISSION_DENIED,
                "this service is asked as localhost or 127.0.0.1 alone: use that as its address",
            )

    def _may(self, origin: str) -> bool:
        return origin.lower() in self.allowed or (self._is_local and _name_of(origin) in _LOOPBACK)


class Door:
    """Lets in whoever may call, with his Caller in the scope."""

    def __init__(self, app: ASGIApp, house: House, origins: Origins) -> None:
        self._app, self._house, self._origins = app, house, origins
        self._approver: Approver | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._origins.check(scope)
            if (
                find_header(scope, b"content-length") is not None
                and find_header(scope, b"transfer-encoding") is not None
            ):
                raise ApiProblem(
                    ApiCode.MALFORMED_REQUEST, "Content-Length and Transfer-Encoding are both there: send one of them"
                )
            scope[CALLER] = await self._find_caller(scope)
            if scope["method"] != "POST":
                raise ApiProblem(
                    ApiCode.METHOD_NOT_ALLOWED,
                    "MCP is asked by POST here: there is no stream to get",
                    headers={"Allow": "POST"},
                )
        except (ApiProblem, ToolFailure, OperatorError) as error:
            await refuse(response_to(error, scope["path"], headers=_CLOSE), receive, send)
            return
        await self._app(scope, receive, send)

    async def _find_caller(self, scope: Scope) -> Caller:
        house = self._house
        identity = await identify(house, scope)
        credential = Credential(house.parts.keys, bearer_of(scope))
        session = scope["path_params"].get("session")
        if session is not None and not _SESSION.fullmatch(session):
            raise ApiProblem(
                ErrorCode.SESSION_NOT_FOUND, "no session has a name like that: use the id of one that is open, /mcp/ID"
            )
        client = house.client(identity.tenant, credential, key=identity.key_id)
        leases = KeyLeases(house.sessions, client, identity.key_id)
        asks_client = house.settings.approvals == "ask"
        approver = None if asks_client else self._approver_of(house)
        return Caller(client, leases, f"{identity.tenant}/{identity.key_id}", asks_client, approver, session)

    def _approver_of(self, house: House) -> Approver:
        """One, whose every look is for all that wait."""
        if self._approver is None:
            questions = open_approvals(house.settings, house.parts.pool.redis, house.parts.pool.keys)
            self._approver = choose_pool_approver(house.settings, questions, is_interactive=False)
        return self._approver


def _parse_origin(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
        raise ConfigError(f"--origin {text} is no origin: write it as https://name or https://name:port")
    return text.lower()


def _name_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
