"""The views of `toolcrew batches`: list, show and export."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import RunEvent
from toolcrew.contract.run_views import BatchStatus
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.batches.displays import Display, DisplayedBatch, LogDisplay
from toolcrew.orchestrator.batches.event_files import read_batch_events
from toolcrew.orchestrator.batches.live_progress import open_display
from toolcrew.orchestrator.batches.report import build_report
from toolcrew.orchestrator.batches.stored_files import StoredFiles
from toolcrew.orchestrator.batches.transfers import download_artifacts
from toolcrew.orchestrator.cli.clients import find_tenants, open_pool_client, open_running
from toolcrew.orchestrator.cli.runner import Json, OnlyTenant, Output, Tenant, as_command, list_json, list_output
from toolcrew.orchestrator.runs.client_batches import RowPaths
from toolcrew.orchestrator.sdk.tenant_client import TenantClient
from toolcrew.store.batches import RowLocation

BatchId = Annotated[str, typer.Argument(help="The id of the batch, as `submit` and `list` print it.")]
Errors = Annotated[
    Path | None,
    typer.Option("--errors", help="The file for rows of failed items. Default: OUT.errors.jsonl next to the output."),
]
JsonAsItGoes = Annotated[
    bool, typer.Option("--json", help="Print each event as one JSON object per line; the last has the type summary.")
]
_COLUMNS = ("tenant", "id", "status", "total", "completed", "failed", "waiting", "running", "created", "name")


@as_command
async def batches_list(tenant: OnlyTenant = None, as_json: Json = False) -> Output:
    """List the batches of the last 30 days of all tenants, newest first.

    A tenant's key lists only its own batches.
    """
    async with open_running("batches", tenant) as client:
        found = [
            {"tenant": name, **_describe(status)}
            for name in await find_tenants(client, tenant)
            for status in await client.batch_views.list(name)
        ]
    found.sort(key=lambda status: str(status["created_at"]), reverse=True)
    rows = [
        {**status, **status["request_counts"], "created": status["created_at"], "name": status["name"] or ""}
        for status in found
    ]
    return list_output(list_json("batches", found), rows, _COLUMNS, empty="no batch was submitted in the last 30 days")


def _describe(status: BatchStatus, rows: RowLocation | None = None) -> dict[str, Any]:
    """Return the status of a batch, and where its rows are."""
    return {**status.model_dump(mode="json"), "rows": rows.model_dump() if rows is not None else None}


@as_command
async def batches_show(
    batch: BatchId,
    logs: Annotated[
        bool, typer.Option("--logs", help="Print the latest failures, retries and notices of the batch instead.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "-f", "--follow", help="Show the progress of the batch instead, like `submit`, until it has ended."
        ),
    ] = False,
    tenant: Tenant = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --logs or --follow, one object per line.")
    ] = False,
) -> Output | None:
    """Show the counts and the state of a batch, or its events."""

    def open_log(displayed: DisplayedBatch) -> Display:
        if follow or as_json:
            return open_display(displayed, Console(), as_json=as_json)
        return LogDisplay(displayed, sys.stdout, has_past=True)

    if logs or follow:
        async with open_pool_client(tenant) as pool_client:
            await pool_client.batch_runs().show(batch, open_log, follow=follow)
        return None
    async with open_running("batches", tenant) as client:
        fields = _describe(*await client.batch_views.get(batch))
    shown = {name: value for name, value in fields.items() if name != "request_counts"}
    shown["items"] = ", ".join(f"{count} {name}" for name, count in fields["request_counts"].items())
    shown["failed"] = ", ".join(f"{count} {kind}" for kind, count in fields["failed"].items())
    if (rows := fields["rows"]) is not None:
        shown["rows"] = f"{rows['output']}, {rows['errors']} on {rows['host']}"
    return Output(fields, [f"{name:<12}{value}" for name, value in shown.items() if value not in (None, "")])


@as_command
async def batches_export(
    batch: BatchId,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the rows to this file. Default: print all of them.")
    ] = None,
    errors: Errors = None,
    artifacts: Annotated[
        Path | None,
        typer.Option(
            "--artifacts",
            help="Also copy the artifacts of a detached batch from the store into this folder, one folder per item.",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write a report to this file: a page with plots that needs no network."),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            "--events",
            help="With --html: the file of events that `submit` wrote, OUT.events.jsonl. Default: the latest "
            "events, from Redis.",
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output | None:
    """Print or write the rows of finished items, or write a report."""
    if errors is not None and output is None:
        raise typer.BadParameter("--errors needs --output: without it all rows are printed")
    if events is not None and page is None:
        raise typer.BadParameter("--events needs --html: only a report reads them")
    if page is not None:
        await _export_report(batch, page, events, tenant)
        if output is None and artifacts is None:
            return Output({"id": batch, "page": str(page)}, [str(page)])
    if output is None and artifacts is None:
        async with open_running("batches", tenant) as reader:
            await _print_rows(reader, batch)
        return None
    stored = StoredFiles.of(load_settings()) if artifacts is not None else None
    async with open_pool_client(tenant) as client:
        runs = client.batch_runs()
        if artifacts is not None and stored is not None:
            async for outcome in runs.outcomes(batch):
                await download_artifacts(outcome, stored, runs.tenant, artifacts)
        if output is None and page is None:
            await _print_rows(client, batch)
            return None
        written: dict[str, Any] = {"page": str(page)} if page is not None else {}
        if output is not None:
            with await runs.open_rows_again(RowPaths(output, errors), batch) as rows:
                written["rows"] = await runs.write_rows(batch, rows)
    notes = [count(written["rows"], "row")] if "rows" in written else []
    return Output({"id": batch, **written}, [str(page)] if page is not None else [], notes)


async def _print_rows(client: TenantClient, batch: str) -> None:
    async for line in client.batch_views.lines(batch):
        typer.echo(line, nl=False)


async def _export_report(batch: str, page: Path, events: Path | None, tenant: str | None) -> None:
    if events is not None:
        await asyncio.to_thread(_write_page, page, batch, tenant or DEFAULT_TENANT, read_batch_events(events))
        return
    async with open_pool_client(tenant) as client:
        runs = client.batch_runs()
        total = (await runs.batches.status(batch)).total
        await asyncio.to_thread(_write_page, page, batch, runs.tenant, await runs.batch_events(batch), total)


def _write_page(page: Path, batch: str, tenant: str, batch_events: Iterable[RunEvent], total: int = 0) -> None:
    text = build_report(batch_events, title=f"Batch {batch}", batch=batch, tenant=tenant, total=total)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written ({error.strerror or error}): give another path") from error
