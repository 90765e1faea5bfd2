"""Tool calls over HTTP: one tool run once in a session, its result whole or its output as it comes."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from contract.calls import MAX_TIMEOUT_S, ToolResult
from contract.errors import ErrorCode
from orchestrator.admission import WaitNotice, report_waiting, was_not_admitted
from orchestrator.api.access import AnyCaller, find_caller
from orchestrator.api.exact_json import dump_exactly
from orchestrator.api.idempotency import note_undone
from orchestrator.api.problem_handlers import responses
from orchestrator.api.sessions import SESSION_ID, SessionId
from orchestrator.api.sse import MEDIA_TYPE, EventStream, ServerEvent
from orchestrator.dispatch.sessions import Session
from orchestrator.http.body_limits import find_header
from orchestrator.http.problems import REDIS_AWAY

WAITING_PIECES = 32
"""Of output that the client has not taken: then the call is held up for a while, and the rest is in the result
alone.
"""
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            "The result; with `Accept: text/event-stream` events `waiting` (the call has no slot yet, and why) and "
            "`output`, then one `result`."
        ),
        "content": {MEDIA_TYPE: {}},
    }
}


class NewCall(BaseModel):
    """`call_id`: the same never runs twice within a day; None: a new one, or one made of the Idempotency-Key."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    call_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


class _StraightRoute(APIRoute):
    """A plain call, one without a query or an Idempotency-Key and with nothing wrong, goes straight to its tool:
    gathering what `call_tool` is given takes FastAPI nearly half of a request's processor time. Every other one goes
    FastAPI's way, which also says what is wrong with it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        in_full = super().get_route_handler()

        async def handle(request: Request) -> Response:
            wanted = await _plain_call(request)
            if wanted is None:
                return await in_full(request)
            return await call_tool(request.path_params["session_id"], wanted, await find_caller(request), request)

        return handle


async def _plain_call(request: Request) -> NewCall | None:
    """None for a request that is to be looked at in full. What was read of its body is kept for that."""
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
        # Of the wrong shape, no JSON, nested too deeply, or no longer there.
        return None


router = APIRouter(prefix="/v1/sessions", tags=["calls"], responses=responses(), route_class=_StraightRoute)


@router.post("/{session_id}/calls", response_model=ToolResult, responses={**responses(404), **_STREAM})
async def call_tool(
    session_id: SessionId,
    wanted: NewCall,
    caller: AnyCaller,
    request: Request,
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> Response:
    """Run a tool once. The answer is 200 whatever became of the tool: `success` and `error_code` tell that.

    With `Accept: text/event-stream` its output comes while it runs; a client that goes ends the call.
    """
    call_id = wanted.call_id or (_call_id(caller.identity.key_id, idempotency_key) if idempotency_key else None)
    if MEDIA_TYPE in request.headers.get("accept", ""):
        session = await caller.client.session(session_id)
        return EventStream(caller.streams.counted(_stream(session, wanted, call_id)))
    known, name = caller.app_state.sessions, (caller.tenant, session_id, caller.identity.key_id)
    session = await known.find(name, lambda: caller.client.session(session_id))
    result = await session.call(wanted.name, wanted.arguments, timeout_s=wanted.timeout_s, call_id=call_id)
    if result.error_code is ErrorCode.SESSION_NOT_FOUND:
        known.forget(name)
        # Raises, as for one that never was.
        await caller.client.session(session_id)
    if was_not_admitted(result):
        note_undone(request.scope)
    return Response(_dump(result), media_type="application/json")


async def _stream(session: Session, wanted: NewCall, call_id: str | None) -> AsyncIterator[ServerEvent]:
    pieces = asyncio.Queue[ServerEvent](WAITING_PIECES)

    async def on_output(stream: str, text: str) -> None:
        await pieces.put(ServerEvent("output", {"stream": stream, "text": text}))

    def on_waiting(notice: WaitNotice) -> None:
        # The call has no output yet: there is room.
        pieces.put_nowait(ServerEvent("waiting", {"reason": notice.reason.value, "message": notice.message}))

    async def work() -> None:
        with report_waiting(on_waiting):
            result = await session.call(
                wanted.name, wanted.arguments, timeout_s=wanted.timeout_s, call_id=call_id, on_output=on_output
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
                working.result()
                continue
            event = taking.result()
            yield event
            if event.event == "result":
                return
    finally:
        # The client has gone: its call is ended as Ctrl-C ends one.
        ending = [task for task in (taking, working) if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def _dump(result: ToolResult) -> bytes:
    """Where the service's Redis is, is not the client's to know."""
    if result.error_code is ErrorCode.BROKER_UNAVAILABLE:
        result = result.model_copy(update={"error": REDIS_AWAY})
    return dump_exactly(result.model_dump(mode="json"))


def _call_id(key_id: str, idempotency_key: str) -> str:
    """A request that is sent again asks about the same call."""
    return hashlib.sha256(f"call\0{key_id}\0{idempotency_key}".encode()).hexdigest()[:32]
