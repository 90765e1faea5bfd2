"""Calls by their ids over HTTP: the life of one through every process, and its end from outside."""

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from contract.errors import ErrorCode, ToolFailure
from orchestrator.api.access import AnyCaller, Caller
from orchestrator.api.paging import Limit
from orchestrator.api.problem_handlers import responses
from orchestrator.http.problems import ApiCode, ApiProblem
from orchestrator.sdk.call_control import SHORT_LOOKUP_S, CallControl
from store.call_life import CallLife, CallLives
from store.call_list import CallList

router = APIRouter(prefix="/v1/calls", tags=["calls"], responses=responses())

CallId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Kill(BaseModel):
    """`reason`: what its caller reads."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", max_length=500)


class Killed(BaseModel):
    """How the call stands now. `was_over`: it had ended before anybody killed it."""

    call: str
    state: str
    error_code: str | None
    was_over: bool


class ListedCallView(BaseModel):
    """A call of a list. `state`: waiting (for a slot), queued, running, or how it ended; `reason`: why it waits for a
    slot (paused, in_flight, rate, slots). `since`: of the state, ISO 8601.
    """

    call: str
    tenant: str
    tool: str | None
    state: str
    reason: str | None
    session: str | None
    host: str | None
    error_code: str | None
    since: str | None


class CallListView(BaseModel):
    """`has_more`: there are calls that are not in the list."""

    data: list[ListedCallView]
    has_more: bool


@router.get("")
async def list_calls(caller: AnyCaller, limit: Limit = 50) -> CallListView:
    """List the tenant's calls: those that wait first, with the reason, then those that run, then those that ended
    lately.
    """
    app_state = caller.app_state
    async with app_state.looks.turn(caller.identity.key_id):
        page = await CallList(app_state.parts.pool.redis, app_state.settings.deployment).read([caller.tenant], limit)
    return CallListView.model_validate({"data": [one.to_json() for one in page.calls], "has_more": page.has_more})


@router.get("/{call_id}", responses=responses(404))
async def get_call(call_id: CallId, caller: AnyCaller) -> dict[str, Any]:
    """All that is known of a call: where it waits or runs, since when, on which host and in which sandbox, and its
    result while that is kept. Calls are remembered for a day."""
    life = await _life(caller, call_id)
    if life is None:
        raise _unknown(caller, call_id)
    told = life.to_json()
    return told if caller.is_operator else {name: value for name, value in told.items() if name != "flower_url"}


@router.post("/{call_id}/kill", responses=responses(404))
async def kill_call(call_id: CallId, wanted: Kill, caller: AnyCaller) -> Killed:
    """End a call, wherever it is: one that waits never begins, one that runs is killed with all that it started. Its
    caller gets CANCELLED.
    """
    app_state = caller.app_state
    # Whoever asks for calls that never were does not hold a request for as long as one may be looked for that waits.
    lookup_s = SHORT_LOOKUP_S if await _life(caller, call_id) is None else None
    try:
        killed = await CallControl(app_state.parts.pool, app_state.settings.deployment).kill(
            caller.tenant, call_id, caller.identity.actor(), wanted.reason, lookup_s=lookup_s
        )
    except ToolFailure as failure:
        if failure.code is ErrorCode.INVALID_ARGUMENTS:
            raise _unknown(caller, call_id) from failure
        raise
    return Killed(
        call=call_id, state=killed.record.state.value, error_code=killed.record.code or None, was_over=killed.was_over
    )


async def _life(caller: Caller, call_id: str) -> CallLife | None:
    app_state = caller.app_state
    lives = CallLives(
        app_state.parts.pool.redis,
        app_state.settings.deployment,
        app_state.settings.broker().signing_keys(),
        app_state.settings.flower_url,
    )
    async with app_state.looks.turn(caller.identity.key_id):
        return await lives.read(caller.tenant, call_id)


def _unknown(caller: Caller, call_id: str) -> ApiProblem:
    return ApiProblem(
        ApiCode.NOT_FOUND,
        f"nothing is known of call {call_id} of tenant {caller.tenant}: calls are remembered for a day",
    )
