"""`toolcrew traces`: show and export the traces of runs."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.cli.run_files import write_private
from toolcrew.orchestrator.cli.runner import Json, run_work
from toolcrew.orchestrator.cli.trace_printer import TracePrinter, build_json
from toolcrew.orchestrator.terminal.output import escape_controls
from toolcrew.orchestrator.traces.export_atif import build_atif
from toolcrew.orchestrator.traces.export_otel import build_otel
from toolcrew.orchestrator.traces.page import build_page
from toolcrew.orchestrator.traces.reading import Trace, find_attempts, load_trace

traces_app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The id of a run, or the path of its trace.")]
RunTenant = Annotated[str | None, typer.Option("--tenant", help="The tenant of the run. Default: any tenant.")]


@traces_app.command("show")
def traces_show(
    name: Name,
    full: Annotated[
        bool, typer.Option("--full", help="Print full texts and the messages that were sent to the model.")
    ] = False,
    tenant: RunTenant = None,
    as_json: Json = False,
) -> None:
    """Show the steps, calls, approvals, results and durations of a run."""
    trace = _load(name, tenant, as_json)
    if as_json:
        typer.echo(json.dumps(build_json(trace)))
    else:
        TracePrinter(Console(highlight=False), is_full=full).show(trace)


@traces_app.command("export")
def traces_export(
    name: Name,
    to: Annotated[
        Literal["html", "atif", "otel"],
        typer.Option(
            "--to",
            help="html: a page that needs no network; atif: the Agent Trajectory Interchange Format; otel: OTLP JSON.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write. Default: stdout.")] = None,
    with_content: Annotated[
        bool, typer.Option("--with-content", help="otel: include texts, arguments and results.")
    ] = False,
    tenant: RunTenant = None,
) -> None:
    """Export the trace of a run as a page, an ATIF trajectory or OpenTelemetry spans."""
    trace = _load(name, tenant, False)
    if to == "html":
        text = build_page(trace)
    else:
        document = build_atif(trace) if to == "atif" else build_otel(trace, with_content=with_content)
        text = json.dumps(document, indent=2 if output is not None else None)
    for fault in trace.faults():
        typer.echo(f"toolcrew: {escape_controls(fault)}", err=True)
    if output is None:
        typer.echo(text)
    else:
        run_work(_write(output, text + "\n"), False)
        typer.echo(f"wrote {output}", err=True)


def _load(name: str, tenant: str | None, as_json: bool) -> Trace:
    async def work() -> Trace:
        trace = load_trace(_find(name, tenant))
        if not trace.events:
            raise ConfigError(f"{trace.path} contains no trace: give the trace file of a run")
        return trace

    return run_work(work(), as_json)


def _find(name: str, tenant: str | None) -> Path:
    """Return the trace of a run. If an item has several attempts, return the last one and list the others on stderr."""
    *earlier, last = find_attempts(load_settings().traces, name, tenant)
    if earlier:
        note = (
            f"this is the last of {len(earlier) + 1} attempts; give the path of another one to see it: "
            f"{', '.join(map(str, earlier))}"
        )
        typer.echo(f"toolcrew: {escape_controls(note)}", err=True)
    return last


async def _write(path: Path, text: str) -> None:
    await asyncio.to_thread(write_private, path, text)
