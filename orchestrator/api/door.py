"""The door to the API: who has no key gets nothing in, not even a body to be read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.errors import ErrorCode, OperatorError, ToolFailure
from orchestrator.api.house import House
from orchestrator.api.limits import find_header, refuse
from orchestrator.api.problems import ApiCode, ApiProblem, response_to

MAX_KEY_CHARS = 256
NO_KEY = "an API key is needed: send it as `Authorization: Bearer KEY` (toolcrew tenants keys add TENANT makes one)"
_CLOSE = {"Connection": "close"}


class Door:
    """Looks at the key of whoever sends a body before it is read, so that bodies lie in memory only for those who may send some; and refuses a request
    whose length is told in two ways, which whoever stands in front may have read the other way."""

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
            raise ApiProblem(ApiCode.MALFORMED_REQUEST, "Content-Length and Transfer-Encoding are both there: send one of them")
        if (length or coding) and scope["path"].startswith("/v1/"):
            await self._house.parts.keys.authenticate(bearer_of(scope))


def bearer_of(scope: Scope) -> str:
    """The key of a request. Raises ApiProblem when there is none."""
    kind, _, key = (find_header(scope, b"authorization") or b"").decode("latin-1").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise ApiProblem(ErrorCode.UNAUTHENTICATED, NO_KEY)
    return key.strip()[:MAX_KEY_CHARS]
