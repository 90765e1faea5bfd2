"""`toolcrew runs`: list, show, follow, fork and cancel the runs that programs started on a pool."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer

from toolcrew.contract.access_views import Page
from toolcrew.contract.clock import with_instants
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_views import DurableRunState, RunView
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.cli.clients import find_tenants, open_running
from toolcrew.orchestrator.cli.runner import Json, OnlyTenant, Output, Tenant, as_command, list_json, list_output
from toolcrew.orchestrator.sdk.tenant_client import TenantRuns
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.orchestrator.terminal.output import escape_controls

runs_app = typer.Typer(no_args_is_help=True)
RunName = Annotated[str, typer.Argument(help="The id of the run, as `list` shows it.")]
_COLUMNS = ("id", "tenant", "state", "created", "attempt", "session", "instruction")
_MAX_CHARS = 60
_TEXTS = ("text", "message", "reason", "answer", "instruction", "step", "characters", "state")


@runs_app.command("list")
@as_command
async def runs_list(
    state: Annotated[DurableRunState | None, typer.Option("--state", help="Only runs in this state.")] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=200, help="Largest number of runs to list.")] = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", help="The `next_cursor` of the previous page.")] = None,
    tenant: OnlyTenant = None,
    as_json: Json = False,
) -> Output:
    """List the runs of the last 30 days of all tenants, newest first. A tenant's key lists only its own runs.

    With --tenant, long lists have pages. Runs of batches are not listed: see `toolcrew batches`.
    """
    async with open_running("runs", tenant) as client:
        tenants = await find_tenants(client, tenant)
        if cursor is not None and len(tenants) > 1:
            raise typer.BadParameter("--cursor needs --tenant: only the list of one tenant has pages")
        runs = client.run_views
        pages = [await runs.list(cursor=cursor, limit=limit, state=state, tenant=name) for name in tenants]
    page = pages[0] if len(pages) == 1 else merge_pages(pages, limit)
    views = [run.model_dump(mode="json") for run in page.data]
    rows = [{**view, "created": view["created_at"], "instruction": _first_line(view["instruction"])} for view in views]
    notes = []
    if page.next_cursor is None and len(page.data) == limit:
        notes = ["there may be more runs: raise --limit, or choose a tenant with --tenant"]
    if page.next_cursor is not None:
        options = [*(("--state", state.value) if state is not None else ()), "--limit", str(limit)]
        options += ["--cursor", page.next_cursor]
        more = build_command("runs", "list", *options, "--tenant", tenants[0])
        notes = [f"there may be more runs: `{more}`"]
    return list_output(
        list_json("runs", views, page.next_cursor),
        rows,
        _COLUMNS,
        empty="no run of the last 30 days matches",
        notes=notes,
    )


def merge_pages(pages: Sequence[Page[RunView]], limit: int) -> Page[RunView]:
    """Return the newest runs of several tenants as one page, which has no next one."""
    runs = sorted((run for page in pages for run in page.data), key=lambda run: -run.created_at)
    return Page(data=runs[:limit])


@asynccontextmanager
async def open_runs(tenant: str | None) -> AsyncIterator[TenantRuns]:
    """Open the runs of the tenant. The error for a run that does not exist names the command that lists runs."""
    try:
        async with open_running("runs", tenant) as client:
            yield client.run_views
    except ToolFailure as failure:
        if failure.code is not ErrorCode.FILE_NOT_FOUND:
            raise
        listing = build_command("runs", "list", tenant=tenant or DEFAULT_TENANT)
        raise ToolFailure(failure.code, f"{failure.message} (`{listing}`)") from failure


@runs_app.command("show")
@as_command
async def runs_show(
    run: RunName,
    transcript: Annotated[bool, typer.Option("--transcript", help="Also print the messages of the run.")] = False,
    events: Annotated[
        bool, typer.Option("--events", help="Print the events of the run instead, one per line.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Print the events of the run instead, one per line, until it has ended."),
    ] = False,
    after: Annotated[str, typer.Option("--after", help="Only events after the event with this id.")] = "",
    tenant: Tenant = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --events or --follow, one per line.")
    ] = False,
) -> Output | None:
    """Show the state of a run and its outcome, or its events."""
    async with open_runs(tenant) as runs:
        if events or follow:
            async for event, text in runs.follow(run, after) if follow else runs.stored_events(run, after):
                fields = json.loads(text)
                typer.echo(
                    json.dumps({"id": event, **with_instants(fields)})
                    if as_json
                    else escape_controls(_describe_event(event, fields))
                )
            return None
        found = await runs.get(run)
        messages = list(await runs.transcript(run)) if transcript else []
    lines = [*describe_run(found), *(json.dumps(message, ensure_ascii=False) for message in messages)]
    return Output(found.model_dump(mode="json") | ({"transcript": messages} if transcript else {}), lines)


@runs_app.command("fork")
@as_command
async def runs_fork(
    run: RunName,
    step: Annotated[int, typer.Option("--step", min=0, help="Number of steps that the new runs share with RUN.")],
    count: Annotated[int, typer.Option("--count", min=1, max=MAX_FORKS, help="Number of new runs.")] = 1,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Start runs that share the first steps of a run, and print their ids.

    They continue from the session as it was after these steps. RUN must have been started with --keep-states.
    """
    async with open_runs(tenant) as runs:
        forks = await runs.fork(run, step=step, n=count)
    return Output(list_json("runs", [fork.model_dump(mode="json") for fork in forks]), [fork.id for fork in forks])


@runs_app.command("cancel")
@as_command
async def runs_cancel(run: RunName, tenant: Tenant = None, as_json: Json = False) -> Output:
    """Cancel a run. A run that waits ends at once, any other within 2 seconds."""
    async with open_runs(tenant) as runs:
        record = await runs.cancel(run)
    state = record.state.value if record.state.is_final else "is being cancelled"
    return Output(record.model_dump(mode="json"), [f"{record.id} {state}"])


def describe_run(run: RunView) -> list[str]:
    """Return the fields of the run and of its end that have a value, one per line."""
    lines = []
    for name, value in run.model_dump(mode="json").items():
        if value is None or value in ("", [], {}):
            continue
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
        lines.append(f"{name:<18}{text}")
    return lines


def _describe_event(event: str, fields: dict[str, Any]) -> str:
    call, result = fields.get("call") or {}, fields.get("result") or {}
    name = call.get("name") or result.get("name") or fields.get("call_id")
    outcome = result.get("error_code") or ("ok" if result else None)
    texts = [str(fields[field]) for field in _TEXTS if fields.get(field) is not None]
    parts = [str(part) for part in (name, outcome, *texts) if part]
    return f"{event:<18} {fields.get('type', ''):<16} {_first_line(' '.join(parts), 2 * _MAX_CHARS)}".rstrip()


def _first_line(text: str, max_chars: int = _MAX_CHARS) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 3] + "..."
