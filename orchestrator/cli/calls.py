"""`toolcrew calls`: list calls, show one call, and end one."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.cli.clients import open_running
from toolcrew.orchestrator.cli.runner import Json, OnlyTenant, Output, Tenant, as_command, list_json, list_output
from toolcrew.orchestrator.terminal.commands import build_command

calls_app = typer.Typer(no_args_is_help=True)
CallName = Annotated[
    str, typer.Argument(help="The id of the call from results or logs, or the id of its task in Flower.")
]


@calls_app.command("list")
@as_command
async def calls_list(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Largest number of calls to list.")] = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", help="The `next_cursor` of the previous page.")] = None,
    tenant: OnlyTenant = None,
    as_json: Json = False,
) -> Output:
    """List waiting calls with the reason, then running calls, then calls that ended in the last day."""
    async with open_running("calls", tenant) as client:
        page = await client.list_calls(tenant, limit, cursor)
    rows = [call.model_dump(mode="json") for call in page.data]
    columns = ("id", "tool", "tenant", "state", "reason", "since", "host", "error_code")
    return list_output(
        list_json("calls", rows, page.next_position),
        rows,
        columns,
        empty="no call waits or runs, and no call ended in the last day",
        notes=[_describe_next(limit, page.next_position, tenant)] if page.next_position is not None else [],
    )


@calls_app.command("show")
@as_command
async def calls_show(call_id: CallName, tenant: Tenant = None, as_json: Json = False) -> Output:
    """Show the state of a call, where and when it waited and ran, its session and its outcome.

    Calls are stored for one day. Without --tenant, all tenants are searched; with a tenant's key, only that tenant.
    """
    async with open_running("calls", tenant) as client:
        fields = await client.call_fields(call_id, tenant)
    return Output(fields, [f"{name:<21}{value}" for name, value in _flatten(fields).items()])


@calls_app.command("kill")
@as_command
async def calls_kill(
    call_id: CallName,
    reason: Annotated[str, typer.Option("--reason", help="The reason. The caller reads it.")] = "",
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Kill a call that waits or runs, and return when it has ended.

    The caller receives CANCELLED with the name of the key and the reason.
    """
    async with open_running("calls", tenant) as client:
        killed = await client.kill_call(call_id, tenant=tenant, reason=reason)
    state, code = killed.record.state.value, killed.record.code
    verb = "had already ended" if killed.already_ended else "has ended"
    return Output(
        {"id": call_id, "state": state, "error_code": code or None, "already_ended": killed.already_ended},
        [f"{call_id} {verb} ({f'{state}, {code}' if code else state})"],
    )


def _describe_next(limit: int, position: str, tenant: str | None) -> str:
    more = build_command("calls", "list", "--limit", str(limit), "--cursor", position, tenant=tenant or DEFAULT_TENANT)
    return f"there are more calls: `{more}`"


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            lines |= _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            lines[prefix + name] = value
    return lines
