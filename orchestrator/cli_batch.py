"""`toolcrew batch`: files of many instructions, worked to a row each; submitted, watched, gone on with, cancelled."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from contract.clock import format_instant
from contract.errors import ConfigError
from orchestrator.batch_runs import BatchRuns, RowPaths, Shift
from orchestrator.batches.happening_files import HappeningFile, read_happenings
from orchestrator.batches.happenings import Happening
from orchestrator.batches.items import FailureKind, RunLimits
from orchestrator.batches.lines import load_lines
from orchestrator.batches.live_display import open_display
from orchestrator.batches.report import build_report
from orchestrator.batches.row_files import RowFiles
from orchestrator.batches.rows import build_row, build_row_line
from orchestrator.cli_runner import EXIT_INTERRUPTED, Json, Tenant, open_client, run_work
from orchestrator.runs.batches import new_batch_id
from orchestrator.runs.records import BatchDefaults, BatchRecord, BatchState
from orchestrator.terminal import escape_controls

batch_app = typer.Typer(no_args_is_help=True, help="Files of many instructions, worked to a row each.")

BatchId = Annotated[str, typer.Argument(help="The batch, as `submit` printed it.")]
Output = Annotated[Path, typer.Option("--output", help="Where rows of successes go, as items end.")]
Errors = Annotated[Path | None, typer.Option("--errors", help="Where rows of failures go. Else OUT.errors.jsonl beside the output.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", min=1, max=10_000, help="Items at a time. Else 16.")]
EXIT_FAILED = 1


@batch_app.command("submit")
def submit(
    file: Annotated[Path, typer.Argument(help="JSON lines: {id, instruction, workspace}, or OpenAI's batch lines.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Where rows of successes go, as items end. Needed but with --detach.")
    ] = None,
    errors: Errors = None,
    concurrency: Concurrency = None,
    batch: Annotated[
        str | None, typer.Option("--id", help="The batch's id: submitting the same file under it again goes on with it.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Of the lines that name none.")] = None,
    dialect: Annotated[str | None, typer.Option("--dialect", help="native, tags, json, or auto.")] = None,
    artifacts: Annotated[Path | None, typer.Option("--artifacts", help="The folder for the files that lines ask to be copied out.")] = None,
    max_iterations: Annotated[int | None, typer.Option("--max-iterations", min=1, help="Of the lines that say none.")] = None,
    max_wall: Annotated[float | None, typer.Option("--max-wall", help="Seconds an item may work, its setting up not counted.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    max_cost: Annotated[float | None, typer.Option("--max-cost", help="Needs --prices.")] = None,
    prices: Annotated[str | None, typer.Option("--prices", help="IN/OUT: what a million tokens cost.")] = None,
    retries: Annotated[
        int, typer.Option("--retries", min=0, max=20, help="How often an item is begun anew after an infrastructure failure.")
    ] = 2,
    detach: Annotated[bool, typer.Option("--detach", help="Only queue it: other orchestrators work it.")] = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Work every line of a file to a row. Prints the batch's id first. Exit code 0 when all succeeded, 1 when some failed, 130 interrupted."""

    async def work() -> int:
        read = await asyncio.to_thread(load_lines, file)
        if output is None and not detach:
            raise typer.BadParameter("give --output OUT.jsonl, or --detach to leave the work to other orchestrators")
        limits = RunLimits(max_iterations=max_iterations, max_wall_s=max_wall, max_tokens=max_tokens, max_cost=max_cost)
        prompt, completion = _parse_prices(prices)
        defaults = BatchDefaults(
            model=model,
            dialect=dialect,
            limits=limits,
            prompt_price=prompt,
            completion_price=completion,
            retries=retries,
            artifacts=str(artifacts.resolve()) if artifacts is not None else None,
        )
        async with open_client(tenant) as client:
            runs = client.batch_runs()
            chosen = batch or new_batch_id()
            with ExitStack() as stack:
                paths = RowPaths(output, errors) if output is not None else None
                rows = stack.enter_context(runs.open_rows(paths, chosen, read)) if paths is not None else None
                await runs.batches.submit(read, batch=chosen, concurrency=concurrency, defaults=defaults, name=file.name)
                _print_id(chosen, as_json)
                if detach or paths is None or rows is None:
                    return 0
                return await _work(runs, chosen, paths, rows, concurrency, as_json)

    raise typer.Exit(run_work(work(), as_json))


@batch_app.command("resume")
def resume(
    batch: BatchId,
    output: Output,
    errors: Errors = None,
    concurrency: Concurrency = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Go on with a batch: what waits or was interrupted is worked, what failed for the infrastructure begun anew. Exit codes as `submit`."""
    raise typer.Exit(run_work(_go_on(batch, None, RowPaths(output, errors), concurrency, tenant, as_json), as_json))


@batch_app.command("retry")
def retry(
    batch: BatchId,
    output: Output,
    errors_only: Annotated[bool, typer.Option("--errors", help="Begin failed items anew; which: --kinds.")] = False,
    kinds: Annotated[
        str, typer.Option("--kinds", help="Of model, tool, infrastructure, input, cancelled, with commas; or all.")
    ] = "infrastructure",
    errors: Annotated[
        Path | None, typer.Option("--errors-file", help="Where rows of failures go. Else OUT.errors.jsonl beside the output.")
    ] = None,
    concurrency: Concurrency = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Begin failed items anew, by default those that failed for the infrastructure. Exit codes as `submit`."""

    async def work() -> int:
        if not errors_only:
            raise typer.BadParameter("say what to retry: --errors")
        return await _go_on(batch, _parse_kinds(kinds), RowPaths(output, errors), concurrency, tenant, as_json)

    raise typer.Exit(run_work(work(), as_json))


@batch_app.command("status")
def status(batch: BatchId, tenant: Tenant = None, as_json: Json = False) -> None:
    """How a batch stands."""

    async def work() -> dict[str, Any]:
        async with open_client(tenant) as client:
            runs = client.batch_runs()
            return _status_json(batch, await runs.batches.status(batch), await runs.queue.counts(runs.tenant, batch))

    told = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps(told))
        return
    for name, value in told.items():
        if value not in (None, {}):
            typer.echo(escape_controls(f"{name:<12}{value if not isinstance(value, dict) else json.dumps(value)}"))


@batch_app.command("cancel")
def cancel(batch: BatchId, tenant: Tenant = None, as_json: Json = False) -> None:
    """Begin nothing of a batch any more, and end what runs. It can be gone on with."""

    async def work() -> int:
        async with open_client(tenant) as client:
            return await client.batch_runs().batches.cancel(batch)

    waited = run_work(work(), as_json)
    typer.echo(
        json.dumps({"batch": batch, "not_begun": waited}) if as_json else f"{batch} is being cancelled; {waited} items had not been begun"
    )


@batch_app.command("results")
def results(
    batch: BatchId,
    output: Annotated[
        Path | None, typer.Option("--output", help="Into this file, and failures beside it. Else all rows on stdout.")
    ] = None,
    errors: Errors = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """The rows of what has ended so far."""

    async def work() -> int:
        async with open_client(tenant) as client:
            runs = client.batch_runs()
            if output is None:
                return await _print_rows(runs, batch)
            rows = await runs.open_rows_again(RowPaths(output, errors), batch)
            with rows:
                return await runs.write_rows(batch, rows)

    count = run_work(work(), as_json)
    if output is not None:
        typer.echo(json.dumps({"batch": batch, "rows": count}) if as_json else f"{count} rows", err=not as_json)


@batch_app.command("logs")
def logs(
    batch: BatchId,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the batch has ended.")] = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """What has happened in a batch of late; with -f, what happens."""

    async def work() -> None:
        async with open_client(tenant) as client:
            runs = client.batch_runs()
            await runs.tell(batch, lambda watched: open_display(watched, Console(), as_json=as_json), follow=follow)

    run_work(work(), as_json)


@batch_app.command("report")
def report(
    batch: BatchId,
    page: Annotated[Path, typer.Option("-o", "--html", help="Where the page goes.")],
    events: Annotated[
        Path | None,
        typer.Option(
            "--events", help="out.events.jsonl, as `submit` wrote it. Else what Redis still has, which for large batches is not all."
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """A page of what happened, with plots, in one file that needs nothing else."""

    async def work() -> None:
        if events is not None:
            await asyncio.to_thread(_write_page, page, batch, read_happenings(events))
            return
        async with open_client(tenant) as client:
            runs = client.batch_runs()
            total = (await runs.batches.status(batch)).total
            await asyncio.to_thread(_write_page, page, batch, await runs.happenings(batch), total)

    run_work(work(), as_json)
    typer.echo(json.dumps({"batch": batch, "page": str(page)}) if as_json else str(page))


def _write_page(page: Path, batch: str, happenings: Iterable[Happening], total: int = 0) -> None:
    text = build_report(happenings, title=f"Batch {batch}", batch=batch, total=total)
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written ({error.strerror or error}): give another place for it") from error


async def _go_on(
    batch: str, kinds: list[FailureKind] | None, paths: RowPaths, concurrency: int | None, tenant: str | None, as_json: bool
) -> int:
    async with open_client(tenant) as client:
        runs = client.batch_runs()
        with await runs.open_rows_again(paths, batch) as rows:
            await (runs.batches.resume(batch) if kinds is None else runs.batches.resume(batch, kinds))
            _print_id(batch, as_json)
            return await _work(runs, batch, paths, rows, concurrency, as_json)


async def _work(runs: BatchRuns, batch: str, paths: RowPaths, rows: RowFiles, concurrency: int | None, as_json: bool) -> int:
    """Work a batch, and show it; the first Ctrl-C lets what runs end, the second stops now."""
    console, shifts = Console(stderr=True), list[Shift]()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if not shifts:
            return
        if shifts[0].is_drained:
            shifts[0].stop()
            return
        shifts[0].drain()
        running = shifts[0].runner.running
        console.print(
            f"interrupted: {running} running items are finished first; again to stop now. "
            f"Either way `toolcrew batch resume {batch}` goes on with it",
            highlight=False,
        )

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        with HappeningFile(paths.happenings) as kept:
            record, summary = await runs.work(
                batch,
                lambda watched: open_display(watched, console, as_json=as_json),
                rows=rows,
                kept=kept,
                concurrency=concurrency,
                on_shift=shifts.append,
            )
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if record.state not in (BatchState.COMPLETED, BatchState.CANCELLED):
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failed or record.succeeded < record.total else 0


async def _print_rows(runs: BatchRuns, batch: str) -> int:
    count = 0
    async for outcome in runs.outcomes(batch):
        typer.echo(build_row_line(build_row(outcome)).decode(), nl=False)
        count += 1
    return count


def _print_id(batch: str, as_json: bool) -> None:
    typer.echo(json.dumps({"type": "batch", "batch": batch}) if as_json else batch)
    sys.stdout.flush()


def _status_json(batch: str, record: BatchRecord, counts: Mapping[str, int]) -> dict[str, Any]:
    failed = {kind.value: count for kind, count in record.failed.items() if count}
    return {
        "id": batch,
        "status": record.state.value,
        "name": record.name or None,
        "request_counts": {"total": record.total, "completed": record.succeeded, "failed": sum(failed.values()), **counts},
        "failed": failed,
        "concurrency": record.concurrency,
        "created_at": format_instant(record.created_at),
        "ended_at": format_instant(record.ended_at) if record.ended_at else None,
    }


def _parse_prices(text: str | None) -> tuple[float | None, float | None]:
    if text is None:
        return None, None
    try:
        prompt, completion = (float(part) for part in text.split("/"))
    except ValueError:
        raise typer.BadParameter("--prices is IN/OUT, as 0.15/0.60: what a million tokens cost") from None
    return prompt, completion


def _parse_kinds(text: str) -> list[FailureKind]:
    if text == "all":
        return list(FailureKind)
    try:
        return [FailureKind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--kinds is one or more of {', '.join(FailureKind)}, with commas between, or all") from None
