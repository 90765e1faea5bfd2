"""`toolcrew calls`: lists calls, shows the life of one, and ends one."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from orchestrator.cli.runner import Json, Tenant, open_running, run_work
from orchestrator.sdk.call_control import KilledCall
from orchestrator.terminal.output import escape_controls, table_rows
from store.call_life import CallLife
from store.call_list import CallPage

calls_app = typer.Typer(no_args_is_help=True, help="List, show and end calls.")
CallName = Annotated[
    str, typer.Argument(help="The id of the call in results, logs and Flower; or the id of its task in Flower.")
]


@calls_app.command("list")
def calls_list(
    most: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many at most.")] = 50,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """List the calls that wait, with the reason, then those that run and those that ended lately."""

    async def work() -> CallPage:
        async with open_running("calls", tenant) as client:
            return await client.list_calls(tenant, most)

    page = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"calls": [one.to_json() for one in page.calls], "has_more": page.has_more}))
        return
    if not page.calls:
        typer.echo("no call waits or runs, and none ended within a day")
        return
    columns = ("call", "tool", "tenant", "state", "reason", "since", "host", "error_code")
    for line in table_rows([one.to_json() for one in page.calls], columns):
        typer.echo(escape_controls(line))
    if page.has_more:
        typer.echo("there are more: see --limit", err=True)


@calls_app.command("show")
def calls_show(call_id: CallName, tenant: Tenant = None, as_json: Json = False) -> None:
    """Show the life of a call: its state, where it waits or ran and when, its session and its outcome.

    Calls are kept for a day. Without --tenant all tenants are searched; with a tenant's key only its own calls.
    """

    async def work() -> CallLife:
        async with open_running("calls", tenant) as client:
            return await client.call_life(call_id, tenant)

    told = run_work(work(), as_json).to_json()
    if as_json:
        typer.echo(json.dumps(told))
        return
    for name, value in _flat(told).items():
        typer.echo(escape_controls(f"{name:<21}{value}"))


@calls_app.command("kill")
def calls_kill(
    call_id: CallName,
    reason: Annotated[str, typer.Option("--reason", help="Why; the call's caller reads it.")] = "",
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """End a call that waits or runs, and wait until it has ended.

    Its caller gets CANCELLED, with the name of the key and the reason.
    """

    async def work() -> tuple[KilledCall, str]:
        async with open_running("calls", tenant) as client:
            return await client.kill_call(call_id, tenant=tenant, reason=reason), call_id

    killed, name = run_work(work(), as_json)
    state, code = killed.record.state.value, killed.record.code
    if as_json:
        typer.echo(json.dumps({"call": name, "state": state, "error_code": code or None, "was_over": killed.was_over}))
    else:
        how = f"{state}, {code}" if code else state
        typer.echo(
            escape_controls(f"{name} had ended before ({how})" if killed.was_over else f"{name} has ended ({how})")
        )


def _flat(told: Mapping[str, Any], head: str = "") -> dict[str, Any]:
    """What is known, one line each."""
    lines: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, Mapping):
            lines |= _flat(value, f"{head}{name}.")
        elif value is not None:
            lines[head + name] = value
    return lines
