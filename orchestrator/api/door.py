"""Checks the key of a request, and its rate, before its body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.errors import ErrorCode, OperatorError, ToolFailure
from orchestrator.api.house import House
from orchestrator.api.limits import BODY_OWNER, find_header, refuse
from orchestrator.api.problems import ApiCode, ApiProblem, response_to
from store.api_keys import Identity

MAX_KEY_CHARS = 256
NO_KEY = "an API key is needed: send it as `Authorization: Bearer KEY` (`toolcrew tenants keys add TENANT` makes one)"
_CLOSE = {"Connection": "close"}
_IDENTITY = "toolcrew.identity"
"""In the scope of a request: who its key stands for, once its rate has been counted."""


class Door:
    """Checks the key and the rate of each request with a body, and names the owner of the body (BodyLimits). Pages
    check their logins (PageRoute).

    A request that gives its length in two ways is refused: a proxy may have read it the other way.
    """

    def __init__(self, app: ASGIApp, house: House) -> None:
        self._app = app
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._check(scope)
            except (ApiProblem, ToolFailure, OperatorError) as error:
                await refuse(response_to(error, scope["path"], headers=_CLOSE), receive, send)
                return
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        length, coding = find_header(scope, b"content-length"), find_header(scope, b"transfer-encoding")
        if length is not None and coding is not None:
            raise ApiProblem(
                ApiCode.MALFORMED_REQUEST, "Content-Length and Transfer-Encoding are both there: send one of them"
            )
        if (length or coding) and scope["path"].startswith("/v1/"):
            await identify(self._house, scope)


async def identify(house: House, scope: Scope) -> Identity:
    """Return who the key of a request stands for. The first time that this is asked, the request counts towards the
    key's rate.

    Raises ToolFailure(UNAUTHENTICATED), ApiProblem for no key or too many requests, BrokerUnavailable.
    """
    known = scope.get(_IDENTITY)
    if isinstance(known, Identity):
        return known
    identity = await house.parts.keys.authenticate(bearer_of(scope))
    house.rates.take(identity.key_id)
    scope[_IDENTITY], scope[BODY_OWNER] = identity, body_owner(identity)
    return identity


def body_owner(identity: Identity) -> str:
    """Return in whose share a body counts: all keys of a tenant have one share, and the key of an operator has its
    own.
    """
    return f"tenant {identity.tenant}" if identity.role == "tenant" else f"key {identity.key_id}"


def bearer_of(scope: Scope) -> str:
    """The key of a request. Raises ApiProblem when there is none."""
    kind, _, key = (find_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise ApiProblem(ErrorCode.UNAUTHENTICATED, NO_KEY)
    return key.strip()[:MAX_KEY_CHARS]
