"""`toolcrew tools`: list the tools of a pool, and enable or disable them."""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.registry import Switch, ToolState
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tool_pages import render_tool
from toolcrew.orchestrator.cli.access import is_over_http
from toolcrew.orchestrator.cli.clients import open_tenant_client
from toolcrew.orchestrator.cli.runner import Json, Output, Tenant, as_command, list_json
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool
from toolcrew.orchestrator.models.weights import load_weights
from toolcrew.orchestrator.terminal.output import table_rows

tools_app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The tool.")]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="Only for this tenant. Default: for every tenant.")]


@tools_app.command("list")
@as_command
async def tools_list(
    tenant: Tenant = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Show the tokens of each tool in a request, as the local model counts them."),
    ] = False,
    as_json: Json = False,
) -> Output:
    """List the tools of the pool with their state for the tenant: enabled, disabled, or forbidden by its policy.

    A model receives only the enabled tools.
    """
    async with open_tenant_client(tenant) as client:
        states = await client.tool_states()
    rows = [state_json(state) for state in states]
    if tokens:
        counts = await _count_tokens(states)
        rows = [{**row, "tokens": count} for row, count in zip(rows, counts, strict=True)]
    short = [{**row, "description": str(row["description"]).split(". ")[0]} for row in rows]
    table = table_rows(short, ("name", "state", "pool", *(("tokens",) if tokens else ()), "description"))
    total = [f"{sum(row['tokens'] for row in rows)} tokens together"] if tokens else []
    return Output(list_json("tools", rows), [*table, *total])


async def _count_tokens(states: Sequence[ToolState]) -> list[int]:
    # Imported here, because the OpenAI SDK takes a second to import.
    from toolcrew.orchestrator.models.local import LocalModelServer

    settings = load_settings()
    weights = await asyncio.to_thread(load_weights, user_file=settings.model_file, cache_dir=settings.model_folder)
    texts = [json.dumps(convert_to_openai_tool(state.spec), separators=(",", ":")) for state in states]
    async with LocalModelServer(weights) as server:
        return await server.count_tokens(texts)


@tools_app.command("show")
@as_command
async def tools_show(name: Name, tenant: Tenant = None, as_json: Json = False) -> Output:
    """Show a tool: its state for the tenant, its description, parameters, limits and flags.

    Operators also see for which tenants the tool is disabled.
    """
    async with open_tenant_client(tenant) as client:
        others = await client.switched_tenants(name) if (await client.actor()).role != "tenant" else {}
        state = await client.tool_state(name)
    head, *rest = state_lines(state)
    return Output(
        state_json(state) | {"tenants": {tenant: _switch_json(switch) for tenant, switch in others.items()}},
        [head, *(f"for tenant {tenant}: {_describe_switch(switch)}" for tenant, switch in others.items()), *rest],
    )


@tools_app.command("disable")
@as_command
async def tools_disable(
    name: Name,
    reason: Annotated[str | None, typer.Option("--reason", help="The reason. A caller of the tool reads it.")] = None,
    tenant: OnlyTenant = None,
    as_json: Json = False,
) -> Output:
    """Disable a tool for every tenant or for one. Every process applies the change within 2 seconds."""
    _require_pool()
    async with open_tenant_client() as client:
        return _describe_change(name, "disabled", tenant, await client.disable(name, reason=reason, tenant=tenant))


@tools_app.command("enable")
@as_command
async def tools_enable(name: Name, tenant: OnlyTenant = None, as_json: Json = False) -> Output:
    """Enable a tool again, for every tenant or for one.

    Without --tenant, the tool stays disabled for tenants for which it was disabled separately.
    """
    _require_pool()
    async with open_tenant_client() as client:
        return _describe_change(name, "enabled", tenant, await client.enable(name, tenant=tenant))


def state_json(state: ToolState) -> dict[str, Any]:
    """Return a tool with its state as one object. `switch`: the person who disabled the tool, the time and the reason.
    `scope`: the tenants for which the tool is disabled.
    """
    spec = state.spec.model_dump(mode="json")
    switch = _switch_json(state.switch) if state.switch is not None else None
    return {"name": state.name, "state": state.state, **spec, "switch": switch, "scope": state.scope}


def _switch_json(switch: Switch) -> dict[str, Any]:
    return switch.model_dump() | {"at": format_instant(switch.at)}


def state_lines(state: ToolState) -> list[str]:
    """Return the lines of a tool for the terminal; the first line is its state."""
    switch, head = state.switch, f"{state.name} is {state.state}"
    if not state.is_allowed:
        head += " for this tenant by its policy (toolcrew tenants set TENANT --tools NAMES)"
    if switch is not None:
        head += f"{' for this tenant' if state.scope == 'tenant' else ''}: {_describe_switch(switch)}"
    return [head, "", *render_tool(state.spec).rstrip("\n").split("\n")]


def _describe_switch(switch: Switch) -> str:
    reason = f" ({switch.reason})" if switch.reason else ""
    return f"disabled by {switch.by or 'an unknown user'} at {format_instant(switch.at)}{reason}"


def _require_pool() -> None:
    """Check that the pool outlives this command. Raises ConfigError if it does not."""
    if load_settings().redis_url is None and not is_over_http():
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set, and a change in an embedded stack would end with this command: set it to "
            "a pool"
        )


def _describe_change(name: str, now: str, tenant: str | None, state: ToolState | None) -> Output:
    line = f"{name} is {now}" + (f" for tenant {tenant}" if tenant is not None else "")
    if state is None:
        line += ", but no running worker serves it"
    elif state.state != now:
        # A tool has two switches, one for all tenants and one per tenant; the other switch still disables it.
        line += (
            ", but it stays disabled for every tenant"
            if state.scope == "everywhere"
            else f", but it stays disabled for {tenant or 'this tenant'}"
        )
    return Output(state_json(state) if state is not None else {"name": name, "state": now}, [line])
