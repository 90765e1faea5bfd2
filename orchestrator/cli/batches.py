"""`toolcrew batches`: submits, lists, shows, resumes and cancels batches."""

import asyncio
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contract.calls import MAX_BLOB_BYTES
from contract.errors import ConfigError
from contract.run_events import FailureKind
from orchestrator.batches.detached import check_detached
from orchestrator.batches.lines import BatchFile, load_lines
from orchestrator.batches.stored_files import StoredFiles
from orchestrator.batches.transfers import find_local_workspaces, upload_workspaces
from orchestrator.cli.batches_options import (
    GivenLimits,
    build_defaults,
    check_lines,
    check_models,
    parse_kinds,
    prepare_artifacts,
)
from orchestrator.cli.batches_shift import Interrupts, find_rows, place_of, work_batch
from orchestrator.cli.batches_views import (
    BatchId,
    Errors,
    JsonAsItGoes,
    batches_export,
    batches_list,
    batches_show,
)
from orchestrator.cli.runner import Json, Tenant, open_client, open_pool_client, run_work
from orchestrator.runs.batch_runs import RowPaths
from orchestrator.runs.batches import check_batch_id, new_batch_id
from orchestrator.sdk.client import ToolClient
from orchestrator.settings import OrchestratorSettings, load_settings
from orchestrator.terminal.commands import build_command, build_resubmission
from orchestrator.terminal.output import escape_controls
from store.archives.files import MAX_WORKSPACE_BYTES
from store.batches import BatchDefaults

batches_app = typer.Typer(no_args_is_help=True, help="Run many instructions from a file, and follow them.")

Output = Annotated[
    Path | None, typer.Option("--output", help="Where rows of successes go, as items end. Else where they went before.")
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=10_000,
        help="Items at a time, over all orchestrators. Else as before, and 16 at first.",
    ),
]


@batches_app.command("submit")
def submit(
    file: Annotated[Path, typer.Argument(help="JSON lines: {id, instruction, workspace}, or OpenAI's batch lines.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where rows of successes go, as items end. Needed, except with --detach."),
    ] = None,
    errors: Errors = None,
    concurrency: Concurrency = None,
    batch: Annotated[
        str | None,
        typer.Option("--id", help="The batch's id: submitting the same file under it again goes on with it."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Of the lines that name none.")] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", help="native, tags, json, or auto; of the lines that name none.")
    ] = None,
    artifacts: Annotated[
        Path | None, typer.Option("--artifacts", help="The folder for the files that lines ask to be copied out.")
    ] = None,
    max_iterations: Annotated[
        int | None, typer.Option("--max-iterations", min=1, help="Replies of the model; of the lines that say none.")
    ] = None,
    max_wall: Annotated[
        float | None, typer.Option("--max-wall", help="Seconds an item may work, its setting up not counted.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens an item may use, in and out.")
    ] = None,
    max_cost: Annotated[float | None, typer.Option("--max-cost", help="What an item may cost. Needs --prices.")] = None,
    prices: Annotated[str | None, typer.Option("--prices", help="IN/OUT: what a million tokens cost.")] = None,
    retries: Annotated[
        int,
        typer.Option(
            "--retries", min=0, max=20, help="How often an item is begun anew after an infrastructure failure."
        ),
    ] = 2,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help=(
                "Calls that need approval wait for a decision (`toolcrew approvals list`); else as TOOLCREW_APPROVALS "
                "says where it runs."
            ),
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Only queue it: other orchestrators work it.")] = False,
    tenant: Tenant = None,
    as_json: JsonAsItGoes = False,
) -> None:
    """Work every line of a file to a row. Prints the batch's id first.

    Exit code 0 when all succeeded, 1 when some failed or it could not be begun, 130 interrupted, 143 told to stop.
    """
    if output is None and not detach:
        raise typer.BadParameter("give --output OUT.jsonl, or --detach to leave the work to other orchestrators")
    if output is None and errors is not None:
        raise typer.BadParameter("--errors goes with --output: give that, too")
    limits = GivenLimits(max_iterations, max_wall, max_tokens, max_cost, prices)
    defaults = build_defaults(
        limits, model=model, dialect=dialect, retries=retries, artifacts=artifacts, asks_people=ask
    )
    paths = RowPaths(output, errors) if output is not None else None

    async def work() -> int:
        settings = load_settings()
        read = await _read(file, batch, defaults, settings, is_detached=detach)
        for warning in [] if detach else check_models(read, defaults, settings):
            _warn(warning)
        async with open_client(tenant) as client:
            for warning in await client.batch_runs().check_tools(read, str(file)):
                _warn(warning)
            if detach and find_local_workspaces(read.items):
                read = await upload_workspaces(read, StoredFiles.of(settings), client.tenant)
            return await _submit(
                client, read, batch or new_batch_id(), file.name, paths, concurrency, defaults, detach, as_json
            )

    raise typer.Exit(run_work(work(), as_json))


@batches_app.command("resume")
def resume(
    batch: BatchId,
    retry: Annotated[
        str | None,
        typer.Option(
            "--retry",
            metavar="KINDS",
            help="Start only failed items again: model, tool, infrastructure, input, cancelled, with commas; or all.",
        ),
    ] = None,
    output: Output = None,
    errors: Errors = None,
    concurrency: Concurrency = None,
    tenant: Tenant = None,
    as_json: JsonAsItGoes = False,
) -> None:
    """Resume a batch in its files: items that wait, and those that were interrupted or cancelled or that failed because
    of the infrastructure.

    Exit codes as `submit`.
    """
    kinds = parse_kinds(retry) if retry is not None else None
    raise typer.Exit(run_work(_go_on(batch, kinds, output, errors, concurrency, tenant, as_json), as_json))


@batches_app.command("cancel")
def cancel(batch: BatchId, tenant: Tenant = None, as_json: Json = False) -> None:
    """Begin nothing of a batch any more, and end what runs. `resume` goes on with it."""

    async def work() -> int:
        async with open_pool_client(tenant) as client:
            return await client.batch_runs().batches.cancel(batch)

    waited = run_work(work(), as_json)
    typer.echo(
        json.dumps({"batch": batch, "not_begun": waited})
        if as_json
        else f"{batch} is being cancelled; {waited} items had not been begun"
    )


batches_app.command("list")(batches_list)
batches_app.command("show")(batches_show)
batches_app.command("export")(batches_export)


async def _read(
    file: Path, batch: str | None, defaults: BatchDefaults, settings: OrchestratorSettings, *, is_detached: bool
) -> BatchFile:
    """Read the file, and check all that can be wrong before there is a pool."""
    if batch is not None:
        check_batch_id(batch)
    if is_detached and settings.redis_url is None:
        raise ConfigError(
            "--detach leaves the work to the orchestrators of a pool: set TOOLCREW_REDIS_URL, or leave it out to work "
            "it here"
        )
    uploads = is_detached and settings.workspace_store is not None
    max_bytes = MAX_WORKSPACE_BYTES if uploads else MAX_BLOB_BYTES
    read = await asyncio.to_thread(load_lines, file, max_bytes=max_bytes)
    if is_detached:
        check_detached(read, defaults.artifacts, file.name, uploads=uploads)
    check_lines(read, defaults, is_detached=is_detached)
    if defaults.artifacts is not None:
        await asyncio.to_thread(prepare_artifacts, Path(defaults.artifacts))
    return read


async def _submit(
    client: ToolClient,
    read: BatchFile,
    batch: str,
    name: str,
    paths: RowPaths | None,
    concurrency: int | None,
    defaults: BatchDefaults,
    is_detached: bool,
    as_json: bool,
) -> int:
    runs, console = client.batch_runs(), Console(stderr=True)
    with ExitStack() as stack:
        rows = stack.enter_context(runs.open_rows(paths, batch, read)) if paths is not None else None
        interrupts = _listen(batch, runs.tenant, console, is_kept=client.stack is None)
        _print_id(batch, as_json)
        await runs.batches.submit(
            read, batch=batch, concurrency=concurrency, defaults=defaults, name=name, is_detached=is_detached
        )
        if paths is not None and rows is not None:
            await runs.queue.note_rows(runs.tenant, batch, place_of(paths))
            await runs.recall(batch, rows)
        if is_detached or paths is None or rows is None:
            status = build_command("batches", "show", batch, tenant=runs.tenant)
            logs = build_command("batches", "show", "-f", batch, tenant=runs.tenant)
            console.print(f"queued; `{status}` and `{logs}` show how it stands", highlight=False, soft_wrap=True)
            return 0
        return await work_batch(
            runs, batch, paths, rows, interrupts, console, is_kept=client.stack is None, as_json=as_json
        )


async def _go_on(
    batch: str,
    kinds: list[FailureKind] | None,
    output: Path | None,
    errors: Path | None,
    concurrency: int | None,
    tenant: str | None,
    as_json: bool,
) -> int:
    async with open_pool_client(tenant, needs_workers=True) as client:
        runs, console = client.batch_runs(), Console(stderr=True)
        record = await runs.batches.status(batch)
        paths = find_rows(batch, record.rows, output, errors)
        with await runs.open_rows_again(paths, batch) as rows:
            interrupts = _listen(batch, runs.tenant, console, is_kept=True)
            _print_id(batch, as_json)
            await runs.queue.note_rows(runs.tenant, batch, place_of(paths))
            if concurrency is not None:
                await runs.queue.set_concurrency(runs.tenant, batch, concurrency)
            await runs.recall(batch, rows)
            await (runs.batches.resume(batch) if kinds is None else runs.batches.resume(batch, kinds))
            return await work_batch(runs, batch, paths, rows, interrupts, console, is_kept=True, as_json=as_json)


def _listen(batch: str, tenant: str, console: Console, *, is_kept: bool) -> Interrupts:
    again = f"`{build_command('batches', 'resume', batch, tenant=tenant)}` goes on with it"
    if not is_kept:
        again = (
            f"submitting the same file again with `{build_resubmission(batch, tenant)}` and the same --output goes on "
            "with it"
        )

    def leave(code: int) -> None:
        console.show_cursor(True)
        sys.stdout.flush()
        os._exit(code)

    interrupts = Interrupts(
        again, lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True), leave
    )
    interrupts.listen()
    return interrupts


def _warn(message: str) -> None:
    typer.echo(escape_controls(f"toolcrew: warning: {message}"), err=True)


def _print_id(batch: str, as_json: bool) -> None:
    typer.echo(json.dumps({"type": "batch", "batch": batch}) if as_json else batch)
    sys.stdout.flush()
