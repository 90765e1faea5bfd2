"""Identifies who sends a request by its API key, and checks the rate of the key, before its body is read."""

from starlette.types import Scope

from contract.errors import ErrorCode
from orchestrator.http.app_state import AppState
from orchestrator.http.body_limits import BODY_OWNER, find_header
from orchestrator.http.problems import ApiCode, ApiProblem
from store.api_keys import Identity

MAX_KEY_CHARS = 256
NO_KEY = "an API key is needed: send it as `Authorization: Bearer KEY` (`toolcrew keys create TENANT` makes one)"
CLOSE = {"Connection": "close"}
"""Headers of a refusal that is sent before the body was read."""
_IDENTITY = "toolcrew.identity"
"""In the scope of a request: its Identity, once the request was counted towards the rate of its key."""


def check_length(scope: Scope) -> None:
    """Raises ApiProblem for a request that gives its length in two ways: a proxy may have read it the other way."""
    length, coding = find_header(scope, b"content-length"), find_header(scope, b"transfer-encoding")
    if length is not None and coding is not None:
        raise ApiProblem(
            ApiCode.MALFORMED_REQUEST, "Content-Length and Transfer-Encoding are both there: send one of them"
        )


async def identify(app_state: AppState, scope: Scope) -> Identity:
    """Return the identity that the key of a request stands for. The first call for a request counts it towards the
    rate of the key.

    Raises ToolFailure(UNAUTHENTICATED), ApiProblem for no key or too many requests, BrokerUnavailable.
    """
    known = scope.get(_IDENTITY)
    if isinstance(known, Identity):
        return known
    identity = await app_state.parts.keys.authenticate(read_bearer_key(scope))
    app_state.rates.take(identity.key_id)
    scope[_IDENTITY], scope[BODY_OWNER] = identity, name_body_owner(identity)
    return identity


def name_body_owner(identity: Identity) -> str:
    """Return the owner that a body counts for: the tenant of a tenant's key, or the key of an operator."""
    return f"tenant {identity.tenant}" if identity.role == "tenant" else f"key {identity.key_id}"


def read_bearer_key(scope: Scope) -> str:
    """Return the key of a request. Raises ApiProblem when there is none."""
    kind, _, key = (find_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise ApiProblem(ErrorCode.UNAUTHENTICATED, NO_KEY)
    return key.strip()[:MAX_KEY_CHARS]
