"""Tool calls over HTTP: run one tool in a session, and return its result or stream its output."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.admission import WaitNotice, report_waiting, was_not_admitted
from toolcrew.orchestrator.api.access import AnyCaller, find_caller
from toolcrew.orchestrator.api.exact_json import dump_exactly
from toolcrew.orchestrator.api.idempotency import IdempotencyKey, find_call_id, mark_not_done
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.api.sessions import SESSION_ID, SessionId, use_session
from toolcrew.orchestrator.api.sse import MEDIA_TYPE, EventStream, ServerEvent
from toolcrew.orchestrator.http.body_limits import find_header
from toolcrew.orchestrator.http.problems import REDIS_AWAY
from toolcrew.orchestrator.sessions.session import Session

WAITING_PIECES = 32
"""Limit of output pieces that wait because the client reads too slowly.

At the limit the call waits for the client for a limited time. After that, further output is only in the result.
"""
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            "The result. With `Accept: text/event-stream`: events `waiting` (the call has no slot yet; with the "
            "reason) and `output`, then one `result`."
        ),
        "content": {MEDIA_TYPE: {}},
    }
}


class NewCall(BaseModel):
    """A tool call. `timeout_s`: limit of the call in seconds; null: the limit of the tool.

    `call_id`: a call with this id runs at most once within a day, and goes on when the client disconnects; the same
    request waits for it, or gets its result for an hour. null: a new id, or one that is derived from the
    Idempotency-Key.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)
    call_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


class _StraightRoute(APIRoute):
    """Route that passes a plain call directly to `call_tool`.

    A plain call is a valid request without query parameters and without Idempotency-Key. FastAPI's own handling takes
    nearly half of the processor time of such a request. All other requests use FastAPI's handling, which also reports
    validation errors.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        in_full = super().get_route_handler()

        async def handle(request: Request) -> Response:
            body = await _plain_call(request)
            if body is None:
                return await in_full(request)
            return await call_tool(request.path_params["session_id"], body, await find_caller(request), request)

        return handle


async def _plain_call(request: Request) -> NewCall | None:
    """Return the call of a plain request, or None for any other request.

    Starlette caches the body, so that FastAPI can read the same body afterwards.
    """
    scope = request.scope
    is_plain = (
        not scope["query_string"]
        and find_header(scope, b"content-type") == b"application/json"
        and find_header(scope, b"idempotency-key") is None
        and re.fullmatch(SESSION_ID, request.path_params["session_id"]) is not None
    )
    if not is_plain:
        return None
    try:
        return NewCall.model_validate(await request.json())
    except (ValueError, RecursionError, ClientDisconnect):
        # The body has a wrong shape, is not JSON, is nested too deeply, or the client disconnected.
        return None


router = APIRouter(prefix="/v1/sessions", tags=["calls"], responses=responses(), route_class=_StraightRoute)


@router.post("/{session_id}/calls", response_model=ToolResult, responses={**responses(404), **_STREAM})
async def call_tool(
    session_id: SessionId,
    body: NewCall,
    caller: AnyCaller,
    request: Request,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Run a tool once. The status is 200 even if the tool fails: `success` and `error_code` contain the outcome.

    With `Accept: text/event-stream` the response streams the output while the tool runs. Such a call ends when the
    client disconnects, unless it has a `call_id` or an Idempotency-Key.
    """
    call_id = body.call_id or find_call_id("call", caller.identity.key_id, idempotency_key)
    if MEDIA_TYPE in request.headers.get("accept", ""):
        session = await use_session(caller, session_id)
        return EventStream(caller.event_streams.counted(_stream(session, body, call_id)))
    sessions, name = caller.app_state.sessions, (caller.tenant, session_id, caller.identity.key_id)
    session = await sessions.find(name, lambda: caller.client.session(session_id))
    await caller.record_foreign_action("session.use", session_id)
    result = await session.call(body.name, body.arguments, timeout_s=body.timeout_s, call_id=call_id)
    if result.error_code is ErrorCode.SESSION_NOT_FOUND:
        sessions.forget(name)
        # Raises the same error as for a session that never existed.
        await caller.client.session(session_id)
    if was_not_admitted(result):
        mark_not_done(request.scope)
    return Response(_dump(result), media_type="application/json")


async def _stream(session: Session, body: NewCall, call_id: str | None) -> AsyncIterator[ServerEvent]:
    pieces = asyncio.Queue[ServerEvent](WAITING_PIECES)

    async def on_output(stream: str, text: str) -> None:
        await pieces.put(ServerEvent("output", {"stream": stream, "text": text}))

    def on_waiting(notice: WaitNotice) -> None:
        # The call has no output yet, so the queue has room.
        pieces.put_nowait(ServerEvent("waiting", {"reason": notice.reason.value, "message": notice.message}))

    async def work() -> None:
        with report_waiting(on_waiting):
            result = await session.call(
                body.name, body.arguments, timeout_s=body.timeout_s, call_id=call_id, on_output=on_output
            )
        await pieces.put(ServerEvent("result", _dump(result).decode()))

    working = asyncio.ensure_future(work())
    taking: asyncio.Future[ServerEvent] | None = None
    try:
        while True:
            taking = asyncio.ensure_future(pieces.get())
            await asyncio.wait((taking, working), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                # If `work` has ended and no event waits, this line raises the error of `work`. Otherwise the last event
                # is already in the queue.
                working.result()
                continue
            event = taking.result()
            yield event
            if event.event == "result":
                return
    finally:
        # The client has disconnected. Cancellation ends a call whose id is new, as Ctrl-C ends a call in a terminal.
        ending = [task for task in (taking, working) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def _dump(result: ToolResult) -> bytes:
    """Encode a result as JSON. The address of the service's Redis is removed from error messages."""
    if result.error_code is ErrorCode.BROKER_UNAVAILABLE:
        result = result.model_copy(update={"error": REDIS_AWAY})
    return dump_exactly(result.model_dump(mode="json"))
