"""Tools over HTTP: list the tools with their states, and enable and disable tools."""

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.access_views import DisabledTool, Page, ToolView
from toolcrew.contract.clock import format_instant
from toolcrew.contract.registry import ToolState
from toolcrew.orchestrator.api.access import AnyCaller, OperatorCaller
from toolcrew.orchestrator.api.paging import Cursor, Limit, page_of
from toolcrew.orchestrator.api.problem_handlers import responses

router = APIRouter(prefix="/v1/tools", tags=["tools"], responses=responses())


class ToolChange(BaseModel):
    """A change of a tool's state. `tenant`: the only tenant that the change affects; null: all tenants."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool
    reason: str | None = Field(default=None, max_length=1000)
    tenant: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")


@router.get("")
async def list_tools(caller: AnyCaller, cursor: Cursor = None, limit: Limit = 100) -> Page[ToolView]:
    """List every tool that the workers publish, enabled or disabled, by name."""
    return page_of([view_tool(state) for state in await caller.client.tool_states()], cursor, limit)


@router.get("/{name}", responses=responses(404))
async def get_tool(name: str, caller: AnyCaller) -> ToolView:
    """Return one tool with its parameters and state."""
    return view_tool(await caller.client.tool_state(name))


@router.patch(
    "/{name}",
    response_model=ToolView,
    responses={**responses(404), 204: {"description": "The change is stored, and no worker serves the tool now"}},
)
async def change_tool(name: str, change: ToolChange, caller: OperatorCaller) -> ToolView | Response:
    """Enable or disable a tool, for all tenants or for one tenant.

    The change reaches every worker within 2 seconds. The audit log contains the change.
    """
    client = caller.client
    if change.enabled:
        state = await client.enable(name, tenant=change.tenant)
    else:
        state = await client.disable(
            name, reason=change.reason, by=caller.identity.actor().label(), tenant=change.tenant
        )
    return view_tool(state) if state is not None else Response(status_code=204)


def view_tool(state: ToolState) -> ToolView:
    """Build the view of a tool for clients."""
    spec, switch = state.spec, state.switch
    fields = spec.model_dump(include=set(ToolView.model_fields) - {"state", "off"})
    off = DisabledTool(by=switch.by, at=format_instant(switch.at), reason=switch.reason) if switch is not None else None
    return ToolView(**fields, state=state.state, off=off)
