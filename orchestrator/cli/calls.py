"""`toolcrew calls`: list calls, show one call, and end one."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from orchestrator.cli.clients import open_running
from orchestrator.cli.runner import Json, Tenant, run_work
from orchestrator.sdk.call_control import KilledCall
from orchestrator.terminal.output import escape_controls, table_rows
from store.call_life import CallLife
from store.call_list import CallPage

calls_app = typer.Typer(no_args_is_help=True)
CallName = Annotated[
    str, typer.Argument(help="The id of the call from results or logs, or the id of its task in Flower.")
]


@calls_app.command("list")
def calls_list(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Largest number of calls to list.")] = 50,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """List waiting calls with the reason, then running calls, then calls that ended in the last day."""

    async def work() -> CallPage:
        async with open_running("calls", tenant) as client:
            return await client.list_calls(tenant, limit)

    page = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"calls": [call.to_json() for call in page.calls], "has_more": page.has_more}))
        return
    if not page.calls:
        typer.echo("no call waits or runs, and no call ended in the last day")
        return
    columns = ("call", "tool", "tenant", "state", "reason", "since", "host", "error_code")
    for line in table_rows([call.to_json() for call in page.calls], columns):
        typer.echo(escape_controls(line))
    if page.has_more:
        typer.echo("there are more calls: raise --limit to list them", err=True)


@calls_app.command("show")
def calls_show(call_id: CallName, tenant: Tenant = None, as_json: Json = False) -> None:
    """Show the state of a call, where and when it waited and ran, its session and its outcome.

    Calls are stored for one day. Without --tenant, all tenants are searched; with a tenant's key, only that tenant.
    """

    async def work() -> CallLife:
        async with open_running("calls", tenant) as client:
            return await client.call_history(call_id, tenant)

    fields = run_work(work(), as_json).to_json()
    if as_json:
        typer.echo(json.dumps(fields))
        return
    for name, value in _flatten(fields).items():
        typer.echo(escape_controls(f"{name:<21}{value}"))


@calls_app.command("kill")
def calls_kill(
    call_id: CallName,
    reason: Annotated[str, typer.Option("--reason", help="The reason. The caller reads it.")] = "",
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Stop a call that waits or runs, and return when it has ended.

    The caller receives CANCELLED with the name of the key and the reason.
    """

    async def work() -> tuple[KilledCall, str]:
        async with open_running("calls", tenant) as client:
            return await client.kill_call(call_id, tenant=tenant, reason=reason), call_id

    killed, name = run_work(work(), as_json)
    state, code = killed.record.state.value, killed.record.code
    if as_json:
        typer.echo(json.dumps({"call": name, "state": state, "error_code": code or None, "was_over": killed.was_over}))
    else:
        outcome = f"{state}, {code}" if code else state
        verb = "had already ended" if killed.was_over else "has ended"
        typer.echo(escape_controls(f"{name} {verb} ({outcome})"))


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            lines |= _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            lines[prefix + name] = value
    return lines
