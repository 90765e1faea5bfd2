"""Authenticates a request by its API key and checks the rate of the key, before the body is read."""

from starlette.types import Scope

from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.http.app_state import AppState
from toolcrew.orchestrator.http.body_limits import BODY_OWNER, find_header
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.store.api_keys import Identity

MAX_KEY_CHARS = 256
NO_KEY = "the API key is missing: send it as `Authorization: Bearer KEY` (`toolcrew keys create TENANT` creates one)"
CLOSE = {"Connection": "close"}
"""Headers of a rejection that is sent before the body is read."""
_IDENTITY = "toolcrew.identity"
"""Key in the ASGI scope of a request for its Identity. Set after the request counted towards the rate of its key."""


def check_length(scope: Scope) -> None:
    """Raise ApiProblem for a request that has both Content-Length and Transfer-Encoding.

    A proxy in front may use the header that this server ignores and see a different body, which enables request
    smuggling.
    """
    length, coding = find_header(scope, b"content-length"), find_header(scope, b"transfer-encoding")
    if length is not None and coding is not None:
        raise ApiProblem(
            ApiCode.MALFORMED_REQUEST, "the request has both Content-Length and Transfer-Encoding: send one of them"
        )


async def identify(app_state: AppState, scope: Scope) -> Identity:
    """Return the identity of a request's API key.

    The first call for a request counts the request towards the rate of the key. Raises ToolFailure(UNAUTHENTICATED),
    BrokerUnavailable, and ApiProblem for a missing key or too many requests.
    """
    identity = scope.get(_IDENTITY)
    if isinstance(identity, Identity):
        return identity
    # The scope stores the result, so that the middleware and the route authenticate and count the request only once.
    identity = await app_state.parts.keys.authenticate(read_bearer_key(scope))
    app_state.rates.take(identity.key_id)
    scope[_IDENTITY], scope[BODY_OWNER] = identity, name_body_owner(identity)
    return identity


def name_body_owner(identity: Identity) -> str:
    """Return the owner of a request body, whose memory limit the body counts for: the tenant of a tenant's key, or the
    id of an operator's key.
    """
    return f"tenant {identity.tenant}" if identity.role == "tenant" else f"key {identity.key_id}"


def read_bearer_key(scope: Scope) -> str:
    """Return the API key of a request. Raises ApiProblem when the request has no key."""
    kind, _, key = (find_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise ApiProblem(ErrorCode.UNAUTHENTICATED, NO_KEY)
    # No valid key is longer. The limit bounds the work for a hostile header.
    return key.strip()[:MAX_KEY_CHARS]
