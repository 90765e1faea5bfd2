"""WebSockets of the API: who may open one, how it ends, and events in text messages.

Invariant: a WebSocket is served only with an API key in its header, or with the login of a page of this site. Another
site that a browser shows cannot open one, because its Origin is another.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import Field, ValidationError
from starlette.responses import Response

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.calls import R, Record
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.orchestrator.api.access import Caller, select_tenant
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.pages.logins import NotLoggedIn, find_login
from toolcrew.orchestrator.api.pages.people import check_origin
from toolcrew.orchestrator.api.sandbox_streams import SessionStreams, use_streams
from toolcrew.orchestrator.http.authentication import NO_KEY, identify, read_bearer_key
from toolcrew.orchestrator.http.problems import ApiProblem, build_response, response_to
from toolcrew.orchestrator.http.web_sockets import LOST
from toolcrew.store.api_keys import Credential, Identity
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

NORMAL, INTERNAL_ERROR = 1000, 1011
KEY_CHECK_S = 5.0
"""Seconds between two checks of the key of a WebSocket, which can be open for days."""
_STATUSES_AS_CODES = frozenset({401, 403, 404, 409, 429, 503})
"""Statuses of problems whose close code is 4000 more."""
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class SocketOptions(Record):
    """Query parameters of every WebSocket."""

    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None


Options = TypeVar("Options", bound=SocketOptions)


async def serve_socket(
    socket: WebSocket,
    session_id: str,
    kind: type[Options],
    serve: Callable[[SessionStreams, Options], Coroutine[Any, Any, None]],
) -> None:
    """Serve a WebSocket of a session until it ends. `kind`: the record of its query parameters. A problem is sent as
    an event, and then the connection is closed with its code.
    """
    await socket.accept()
    with suppress(WebSocketDisconnect):
        try:
            app_state, identity, credential = await _authenticate(socket)
            options = parse_options(kind, _read_query(socket))
            caller = select_tenant(app_state, identity, credential, options.tenant)
            streams = await use_streams(caller, _check_session_id(session_id))
            await run_until_first_ends(socket, serve(streams, options), _check_key(caller))
        except (ApiProblem, ToolFailure, OperatorError) as error:
            await _close_with(socket, response_to(error, socket.url.path))
        except WebSocketDisconnect:
            raise
        except Exception as error:
            # the edge of a WebSocket: the text of the error may contain data of other tenants, so it goes to the log
            log.error(
                "api_failed", method="WEBSOCKET", path=socket.url.path[:200], error=type(error).__name__, exc_info=error
            )
            await _close_with(socket, build_response(ErrorCode.INTERNAL, "the service failed: see its log"))
        else:
            await socket.close(NORMAL)


async def send_event(socket: WebSocket, event: str, **fields: Any) -> None:
    """Send an event as a text message."""
    await socket.send_text(json.dumps({"event": event, **fields}, separators=(",", ":")))


def parse_options(kind: type[R], fields: Any) -> R:
    """Return what a client has sent. `fields`: an object, or its JSON. Raises ToolFailure."""
    try:
        return kind.model_validate_json(fields) if isinstance(fields, str) else kind.model_validate(fields)
    except ValidationError as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, describe_invalid(error, kind)) from None


async def run_until_first_ends(socket: WebSocket, *duties: Coroutine[Any, Any, None]) -> None:
    """Run the duties of a WebSocket until the first one ends or fails, or the connection is lost."""
    tasks = [asyncio.ensure_future(duty) for duty in (*duties, _wait_for_loss(socket))]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
    for task in ended:
        task.result()


async def _wait_for_loss(socket: WebSocket) -> None:
    """Wait until the connection is lost. A duty that waits for the sandbox does not read, and would not notice."""
    lost: asyncio.Event = socket.scope["state"][LOST]
    await lost.wait()
    raise WebSocketDisconnect


async def _check_key(caller: Caller) -> None:
    """Check the key now and then. Raises ToolFailure when it was revoked."""
    while True:
        await asyncio.sleep(KEY_CHECK_S)
        with suppress(BrokerUnavailable):  # an unavailable Redis does not end the connection of a valid key
            await caller.credential.check(caller.tenant)


async def _authenticate(socket: WebSocket) -> tuple[ApiState, Identity, Credential]:
    """Return the identity of the key in the header, or of the login of a page of this site. Raises ApiProblem,
    ToolFailure, BrokerUnavailable.
    """
    app_state = socket.app.state.app_state
    assert isinstance(app_state, ApiState)
    if "authorization" in socket.headers:
        identity = await identify(app_state, socket.scope)
        return app_state, identity, Credential(app_state.parts.keys, read_bearer_key(socket.scope))
    if "origin" in socket.headers or "cookie" in socket.headers:
        # Before the login, so that another site does not learn whether there is one.
        check_origin(socket, app_state.settings)
    try:
        login = await find_login(socket, app_state)
    except NotLoggedIn:
        raise ApiProblem(ErrorCode.UNAUTHENTICATED, NO_KEY) from None
    app_state.rates.take(login.identity.key_id)
    return app_state, login.identity, login.credential


def _read_query(socket: WebSocket) -> dict[str, str]:
    items = socket.query_params.multi_items()
    if len(items) != len(dict(items)):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "a query parameter was sent twice: send it once")
    return dict(items)


def _check_session_id(session_id: str) -> str:
    if not _SESSION_ID.fullmatch(session_id):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, "the id of the session is invalid: use the id of the response that opened it"
        )
    return session_id


async def _close_with(socket: WebSocket, response: Response) -> None:
    """Send a problem, and close the connection with the code of its status."""
    status = response.status_code
    await send_event(socket, "error", **json.loads(bytes(response.body)))
    code = (
        4000 + status
        if status in _STATUSES_AS_CODES
        else INTERNAL_ERROR
        if status == 500
        else 4400
        if status < 500
        else 4503
    )
    await socket.close(code)
