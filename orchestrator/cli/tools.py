"""`toolcrew tools`: lists the tools of the pool, and turns them off and on."""

import json
from typing import Annotated, Any

import typer

from contract.clock import format_instant
from contract.errors import ConfigError
from contract.registry import Switch, ToolState
from contract.tool_pages import render_tool
from orchestrator.cli.runner import Json, Tenant, open_client, print_lines, run_work
from orchestrator.settings import load_settings
from orchestrator.terminal.output import table_rows

tools_app = typer.Typer(no_args_is_help=True, help="List, show, enable and disable tools.")

Name = Annotated[str, typer.Argument(help="The tool.")]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="For this tenant alone. Default: for every tenant.")]


@tools_app.command("list")
def tools_list(tenant: Tenant = None, as_json: Json = False) -> None:
    """List the tools of the pool with their state for the tenant: enabled, disabled, or forbidden by its policy.

    A model gets those that are enabled.
    """

    async def work() -> list[ToolState]:
        async with open_client(tenant) as client:
            return await client.tool_states()

    rows = [state_json(state) for state in run_work(work(), as_json)]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    short = [{**row, "description": str(row["description"]).split(". ")[0]} for row in rows]
    print_lines(table_rows(short, ("name", "state", "pool", "description")))


@tools_app.command("show")
def tools_show(name: Name, tenant: Tenant = None, as_json: Json = False) -> None:
    """Show a tool: whether it is enabled for the tenant, its description, parameters, limits and flags.

    Operators see for which tenants it is disabled.
    """

    async def work() -> tuple[ToolState, dict[str, Switch]]:
        async with open_client(tenant) as client:
            others = await client.switched_tenants(name) if (await client.actor()).role != "tenant" else {}
            return await client.tool_state(name), others

    state, others = run_work(work(), as_json)
    if as_json:
        typer.echo(
            json.dumps(
                state_json(state) | {"tenants": {tenant: _switch_json(switch) for tenant, switch in others.items()}}
            )
        )
        return
    head, *rest = state_lines(state)
    print_lines([head, *(f"for tenant {tenant}: {_told(switch)}" for tenant, switch in others.items()), *rest])


@tools_app.command("disable")
def tools_disable(
    name: Name,
    reason: Annotated[str | None, typer.Option("--reason", help="The reason; a caller of the tool reads it.")] = None,
    tenant: OnlyTenant = None,
    as_json: Json = False,
) -> None:
    """Disable a tool for every tenant, or for one, within 2 seconds."""

    async def work() -> ToolState | None:
        _require_pool()
        async with open_client() as client:
            return await client.disable(name, reason=reason, tenant=tenant)

    _print_switched(name, "disabled", tenant, run_work(work(), as_json), as_json)


@tools_app.command("enable")
def tools_enable(name: Name, tenant: OnlyTenant = None, as_json: Json = False) -> None:
    """Enable a tool again: for every tenant for which it was not disabled alone, or for one of these."""

    async def work() -> ToolState | None:
        _require_pool()
        async with open_client() as client:
            return await client.enable(name, tenant=tenant)

    _print_switched(name, "enabled", tenant, run_work(work(), as_json), as_json)


def state_json(state: ToolState) -> dict[str, Any]:
    """A tool with its state as one object; `switch` says who turned it off, when and why, `scope` for whom."""
    spec = state.spec.model_dump(mode="json")
    switch = _switch_json(state.switch) if state.switch is not None else None
    return {"name": state.name, "state": state.state, **spec, "switch": switch, "scope": state.scope}


def _switch_json(switch: Switch) -> dict[str, Any]:
    return switch.model_dump() | {"at": format_instant(switch.at)}


def state_lines(state: ToolState) -> list[str]:
    """A tool's page for people, headed by its state."""
    switch, head = state.switch, f"{state.name} is {state.state}"
    if not state.is_allowed:
        head += " for this tenant by its policy (toolcrew tenants set TENANT --tools NAMES)"
    if switch is not None:
        head += f"{' for this tenant' if state.scope == 'tenant' else ''}: {_told(switch)}"
    return [head, "", *render_tool(state.spec).rstrip("\n").split("\n")]


def _told(switch: Switch) -> str:
    why = f" ({switch.reason})" if switch.reason else ""
    return f"turned off by {switch.by or 'somebody'} at {format_instant(switch.at)}{why}"


def _require_pool() -> None:
    """Raises ConfigError without a pool that outlives this command."""
    if load_settings().redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set, and a switch of a stack that ends with this command would mean nothing: "
            "set it"
        )


def _print_switched(name: str, now: str, tenant: str | None, state: ToolState | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(state_json(state) if state is not None else {"name": name, "state": now}))
        return
    told = f"{name} is {now}" + (f" for tenant {tenant}" if tenant is not None else "")
    if state is None:
        told += ", and no worker serves it now"
    elif state.state != now:
        # Turned on where the other kind of switch keeps it off.
        told += (
            ", and it stays off for everybody"
            if state.scope == "everywhere"
            else f", and it stays off for {tenant or 'this tenant'} alone"
        )
    print_lines([told])
