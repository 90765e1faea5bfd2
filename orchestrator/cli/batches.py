"""`toolcrew batches`: submit, list, show, resume, cancel and delete batches."""

import asyncio
import json
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ConfigError, ToolcrewError
from toolcrew.contract.file_ids import MAX_WORKSPACE_BYTES
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.run_spec import RunLimits
from toolcrew.contract.settings import OrchestratorSettings, load_settings
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.batches.detached import check_detached
from toolcrew.orchestrator.batches.lines import BadBatch, BatchFile, ErrorCollector, load_lines
from toolcrew.orchestrator.batches.model_check import check_models
from toolcrew.orchestrator.batches.stored_files import StoredFiles
from toolcrew.orchestrator.batches.transfers import find_local_workspaces, upload_workspaces
from toolcrew.orchestrator.cli.batches_options import (
    build_defaults,
    build_model_test,
    check_lines,
    find_model_warnings,
    parse_kinds,
    parse_webhook,
    prepare_artifacts,
)
from toolcrew.orchestrator.cli.batches_rollouts import batches_rollouts
from toolcrew.orchestrator.cli.batches_run import BatchInterrupts, build_row_location, find_rows, run_batch
from toolcrew.orchestrator.cli.batches_views import (
    BatchId,
    Errors,
    JsonAsItGoes,
    batches_export,
    batches_list,
    batches_show,
)
from toolcrew.orchestrator.cli.clients import open_client, open_pool_client, open_running
from toolcrew.orchestrator.cli.limit_options import with_limits
from toolcrew.orchestrator.cli.runner import Json, Output, Tenant, as_command, run_work
from toolcrew.orchestrator.cli.session_options import Options
from toolcrew.orchestrator.runs.batches import check_batch_id, new_batch_id
from toolcrew.orchestrator.runs.client_batches import RowPaths
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.terminal.commands import build_command, build_resubmission
from toolcrew.orchestrator.terminal.output import escape_controls
from toolcrew.store.batches import BatchDefaults

batches_app = typer.Typer(no_args_is_help=True)

RowsFile = Annotated[
    Path | None,
    typer.Option("--output", help="The file for rows of successful items. Default: the file that was used before."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        min=1,
        max=10_000,
        help="Items that run at the same time, in all orchestrators. Default of `submit`: 16; of `resume`: no change.",
    ),
]


@batches_app.command("submit")
@with_limits
def submit(
    file: Annotated[Path, typer.Argument(help="JSON lines: {id, instruction, workspace}, or OpenAI's batch lines.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The file for rows of successful items. Required without --detach."),
    ] = None,
    errors: Errors = None,
    concurrency: Concurrency = None,
    batch: Annotated[
        str | None,
        typer.Option("--id", help="The id of the batch. Submit the same file with the same id to continue the batch."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model for lines that name none.")] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", help="native, tags, json, or auto, for lines that name none.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="The tools and texts for the model: small, standard, or auto (default)."),
    ] = None,
    artifacts: Annotated[
        Path | None, typer.Option("--artifacts", help="The folder for the artifacts that lines ask for.")
    ] = None,
    options: Options = None,
    limits: RunLimits,
    prices: Annotated[
        str | None, typer.Option("--prices", help="IN/OUT: the prices of a million prompt and completion tokens.")
    ] = None,
    retries: Annotated[
        int,
        typer.Option("--retries", min=0, max=20, help="New attempts of an item after infrastructure failures."),
    ] = 2,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help=(
                "Let calls that need approval wait for a decision (`toolcrew approvals list`). Default: "
                "TOOLCREW_APPROVALS of the orchestrator that runs the item."
            ),
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Only queue the batch; other orchestrators run it.")] = False,
    webhook: Annotated[
        str | None, typer.Option("--webhook", help="The URL that is notified at the end of a detached batch.")
    ] = None,
    webhook_secret: Annotated[
        Path | None, typer.Option("--webhook-secret", help="The file with the secret that signs the webhook.")
    ] = None,
    tenant: Tenant = None,
    as_json: JsonAsItGoes = False,
) -> None:
    """Run every line of a file and write one row for each. Prints the batch's id first.

    Exit code 0: all items succeeded; 1: some failed, or the batch could not start; 130: interrupted; 143: terminated.
    """
    _check_exists(file)
    if output is None and not detach:
        raise typer.BadParameter(
            "no output was given: give --output OUT.jsonl, or --detach to let other orchestrators run the batch"
        )
    if output is None and errors is not None:
        raise typer.BadParameter("--errors needs --output: give both")
    receiver = parse_webhook(webhook, webhook_secret, is_detached=detach)
    defaults = build_defaults(
        limits,
        prices=prices,
        model=model,
        dialect=dialect,
        profile=profile,
        retries=retries,
        artifacts=artifacts,
        options=options,
        asks_people=ask,
    )
    paths = RowPaths(output, errors) if output is not None else None

    async def work() -> int:
        settings = load_settings()
        try:
            read = await _read_file(file, batch, defaults, settings, is_detached=detach)
        except BadBatch as error:
            raise await _add_tool_errors(error, tenant) from None
        warnings = [] if detach else find_model_warnings(read, defaults, settings)
        for warning in warnings:
            _warn(warning)
        async with open_client(tenant) as client:
            serves = build_model_test(settings, is_detached=detach)
            await client.batch_runs().check_models(read, defaults, str(file), serves)
            await client.batch_runs().check_limits(read, defaults, str(file))
            for warning in await client.batch_runs().check_tools(read, str(file)):
                _warn(warning)
            if detach and find_local_workspaces(read.items):
                read = await upload_workspaces(read, StoredFiles.of(settings), client.tenant, client.stored_bytes)
            return await _submit(
                client,
                read,
                batch or new_batch_id(),
                file.name,
                paths,
                concurrency,
                defaults,
                detach,
                as_json,
                receiver,
                tuple(warnings),
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
            help="Retry only items with these kinds of failure: model, tool, grader, infrastructure, input, cancelled, "
            "or all.",
        ),
    ] = None,
    output: RowsFile = None,
    errors: Errors = None,
    concurrency: Concurrency = None,
    tenant: Tenant = None,
    as_json: JsonAsItGoes = False,
) -> None:
    """Resume a batch: run waiting items, and retry items that were interrupted, were cancelled or failed because of the
    infrastructure.

    The exit codes are those of `submit`.
    """
    kinds = parse_kinds(retry) if retry is not None else None
    raise typer.Exit(run_work(_resume_batch(batch, kinds, output, errors, concurrency, tenant, as_json), as_json))


@batches_app.command("cancel")
@as_command
async def cancel(batch: BatchId, tenant: Tenant = None, as_json: Json = False) -> Output:
    """Cancel a batch: stop running items and start no others. `resume` continues it."""
    async with open_running("batches", tenant) as client:
        waiting = await client.batch_views.cancel(batch)
    line = f"{batch} is being cancelled; {count(waiting, 'item')} had not started"
    return Output({"id": batch, "not_begun": waiting}, [line])


@batches_app.command("delete")
@as_command
async def delete(batch: BatchId, tenant: Tenant = None, as_json: Json = False) -> Output:
    """Delete an ended batch with its items and results from Redis."""
    async with open_running("batches", tenant) as client:
        await client.batch_views.delete(batch)
    return Output({"id": batch}, [f"{batch} is deleted"])


batches_app.command("list")(batches_list)
batches_app.command("show")(batches_show)
batches_app.command("export")(batches_export)
batches_app.command("rollouts")(batches_rollouts)


async def _read_file(
    file: Path, batch: str | None, defaults: BatchDefaults, settings: OrchestratorSettings, *, is_detached: bool
) -> BatchFile:
    """Read the file, and check everything that does not need a pool."""
    if batch is not None:
        check_batch_id(batch)
    if is_detached and settings.redis_url is None:
        raise ConfigError(
            "--detach needs the orchestrators of a pool: set TOOLCREW_REDIS_URL, or leave --detach out to run the "
            "batch here"
        )
    uploads = is_detached and settings.workspace_store is not None
    max_bytes = MAX_WORKSPACE_BYTES if uploads else MAX_BLOB_BYTES
    errors = ErrorCollector()
    try:
        read = await asyncio.to_thread(load_lines, file, max_bytes=max_bytes)
    except BadBatch as error:
        if error.file is None:
            raise
        read, errors = error.file, ErrorCollector(error)
    if is_detached:
        with errors.check():
            check_detached(read, defaults.artifacts, file.name, uploads=uploads)
    errors.raise_if_any()
    check_lines(read, defaults, is_detached=is_detached)
    if settings.redis_url is None:
        # An embedded stack has no model endpoints.
        check_models(read, str(file), defaults, {}, None, ())
    if defaults.artifacts is not None:
        await asyncio.to_thread(prepare_artifacts, Path(defaults.artifacts))
    return read


async def _add_tool_errors(bad: BadBatch, tenant: str | None) -> BadBatch:
    """Return the errors of a file with the errors that only a pool can find: names of tools, arguments of calls."""
    errors = ErrorCollector(bad)
    if bad.file is not None:
        # Only a running pool is used: starting an embedded stack takes longer than correcting the file. If no pool
        # answers, the errors that were found are more useful than the reason.
        with suppress(ToolcrewError), errors.check():
            async with open_pool_client(tenant) as client:
                await client.batch_runs().check_tools(bad.file, bad.name)
    return errors.found or bad


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
    webhook: Webhook | None,
    warnings: tuple[str, ...],
) -> int:
    runs, console = client.batch_runs(), Console(stderr=True)
    with ExitStack() as stack:
        rows = stack.enter_context(runs.open_rows(paths, batch, read)) if paths is not None else None
        interrupts = _handle_signals(batch, runs.tenant, console, is_kept=client.stack is None)
        _print_id(batch, as_json)
        await runs.batches.submit(
            read,
            batch=batch,
            concurrency=concurrency,
            defaults=defaults,
            name=name,
            is_detached=is_detached,
            webhook=webhook,
        )
        if paths is not None and rows is not None:
            await runs.queue.batches.set_row_location(runs.tenant, batch, build_row_location(paths))
            await runs.recall(batch, rows)
        if is_detached or paths is None or rows is None:
            status = build_command("batches", "show", batch, tenant=runs.tenant)
            logs = build_command("batches", "show", "-f", batch, tenant=runs.tenant)
            console.print(f"queued; `{status}` and `{logs}` show its progress", highlight=False, soft_wrap=True)
            return 0
        return await run_batch(
            runs,
            batch,
            paths,
            rows,
            interrupts,
            console,
            is_kept=client.stack is None,
            as_json=as_json,
            printed_warnings=warnings,
        )


async def _resume_batch(
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
            interrupts = _handle_signals(batch, runs.tenant, console, is_kept=True)
            _print_id(batch, as_json)
            await runs.queue.batches.set_row_location(runs.tenant, batch, build_row_location(paths))
            if concurrency is not None:
                await runs.queue.batches.set_concurrency(runs.tenant, batch, concurrency)
            await runs.recall(batch, rows)
            await (runs.batches.resume(batch) if kinds is None else runs.batches.resume(batch, kinds))
            return await run_batch(runs, batch, paths, rows, interrupts, console, is_kept=True, as_json=as_json)


def _handle_signals(batch: str, tenant: str, console: Console, *, is_kept: bool) -> BatchInterrupts:
    advice = f"`{build_command('batches', 'resume', batch, tenant=tenant)}` continues it"
    if not is_kept:
        advice = (
            f"to continue, submit the same file again with `{build_resubmission(batch, tenant)}` and the same --output"
        )

    def leave(code: int) -> None:
        console.show_cursor(True)
        sys.stdout.flush()
        os._exit(code)

    interrupts = BatchInterrupts(
        advice, lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True), leave
    )
    interrupts.listen()
    return interrupts


def _check_exists(file: Path) -> None:
    """Raise BadParameter if the input file does not exist."""
    try:
        file.stat()
    except FileNotFoundError:
        raise typer.BadParameter(f"the input file {file} does not exist: check the path") from None
    except (OSError, ValueError):
        return  # `load_lines` reports it.


def _warn(message: str) -> None:
    typer.echo(escape_controls(f"toolcrew: warning: {message}"), err=True)


def _print_id(batch: str, as_json: bool) -> None:
    typer.echo(json.dumps({"type": "batch", "id": batch}) if as_json else batch)
    sys.stdout.flush()
