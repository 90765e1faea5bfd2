"""Calls by their ids over HTTP: the history of a call in every process, and ending a call."""

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.access_views import Page
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.api.access import AnyCaller, Caller
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, page_from
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem
from toolcrew.orchestrator.sdk.call_control import SHORT_LOOKUP_S, CallControl
from toolcrew.store.call_reader import CallLife, ListedCall

router = APIRouter(prefix="/v1/calls", tags=["calls"], responses=responses())

CallId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Kill(BaseModel):
    """A request to kill a call. `reason`: the text that the caller of the call reads."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=500)


class KillResult(BaseModel):
    """The state of the call. `already_ended`: the call had already ended before the request."""

    id: str
    state: str
    error_code: str | None
    already_ended: bool


@router.get("")
async def list_calls(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 50) -> Page[ListedCall]:
    """List the tenant's calls: waiting calls with the reason, then running calls, then recently ended calls."""
    app_state = caller.app_state
    async with app_state.call_searches.enter(caller.identity.key_id):
        page = await app_state.parts.pool.calls.read_page([caller.tenant], limit, decode_cursor(cursor))
    return page_from(page.data, page.next_position)


@router.get("/{call_id}", responses=responses(404))
async def get_call(call_id: CallId, caller: AnyCaller) -> dict[str, Any]:
    """Return all information about a call.

    The fields include where the call waits or runs, since when, its host and its sandbox, and its result while the
    result is stored. Information about calls is stored for a day.
    """
    call = await _life(caller, call_id)
    if call is None:
        raise _unknown(caller, call_id)
    fields = call.model_dump(mode="json")
    return fields if caller.is_operator else {name: value for name, value in fields.items() if name != "flower_url"}


@router.post("/{call_id}/kill", responses=responses(404))
async def kill_call(call_id: CallId, body: Kill, caller: AnyCaller) -> KillResult:
    """Kill a call. A waiting call never starts. A running call ends with all its processes.

    The caller of the call receives the error CANCELLED.
    """
    app_state = caller.app_state
    # A search for a call without a record reads all waiting calls. The short limit keeps such requests from occupying
    # the service.
    lookup_s = SHORT_LOOKUP_S if await _life(caller, call_id) is None else None
    try:
        killed = await CallControl(app_state.parts.pool, app_state.settings.deployment).kill(
            caller.tenant, call_id, caller.identity.actor(), body.reason, lookup_s=lookup_s
        )
    except ToolFailure as failure:
        if failure.code is ErrorCode.INVALID_ARGUMENTS:
            raise _unknown(caller, call_id) from failure
        raise
    return KillResult(
        id=call_id,
        state=killed.record.state.value,
        error_code=killed.record.code or None,
        already_ended=killed.already_ended,
    )


async def _life(caller: Caller, call_id: str) -> CallLife | None:
    app_state = caller.app_state
    async with app_state.call_searches.enter(caller.identity.key_id):
        return await app_state.parts.pool.calls.read(caller.tenant, call_id)


def _unknown(caller: Caller, call_id: str) -> ApiProblem:
    return ApiProblem(
        ApiCode.NOT_FOUND,
        f"call {call_id} of tenant {caller.tenant} was not found: check the id. Calls are stored for a day",
    )
