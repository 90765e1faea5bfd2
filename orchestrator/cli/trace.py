"""`toolcrew trace`: shows, exports and counts what runs have left behind."""

import asyncio
import json
import webbrowser
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from contract.errors import ConfigError
from orchestrator.cli.runner import Json, run_work
from orchestrator.cli.traced import write_private
from orchestrator.settings import load_settings
from orchestrator.terminal.output import escape_controls, table_rows
from orchestrator.traces.export_atif import build_atif
from orchestrator.traces.export_otel import build_otel
from orchestrator.traces.page import build_page
from orchestrator.traces.reading import Trace, find_attempts, find_trace, list_traces, load_trace
from orchestrator.traces.stats import TraceStats, gather_stats
from orchestrator.traces.text_view import build_json, build_lines

trace_app = typer.Typer(
    no_args_is_help=True,
    help="Traces: what each run did, line by line; exported and counted.",
)

Name = Annotated[str, typer.Argument(help="A run's id, or the path of its trace.")]
Whose = Annotated[str | None, typer.Option("--tenant", help="Whose run it is. Else any tenant's.")]


@trace_app.command("show")
def trace_show(
    name: Name,
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing, and show what was sent to the model.")] = False,
    tenant: Whose = None,
    as_json: Json = False,
) -> None:
    """One run: its steps, calls, approvals, results and clocks."""
    trace = _load(name, tenant, as_json)
    if as_json:
        typer.echo(json.dumps(build_json(trace)))
    else:
        for line in build_lines(trace, is_full=full):
            typer.echo(line)


@trace_app.command("view")
def trace_view(
    name: Name,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where the page goes. Else beside the trace.")
    ] = None,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
    tenant: Whose = None,
    as_json: Json = False,
) -> None:
    """One run as an HTML page that needs no network."""
    trace = _load(name, tenant, as_json)
    page = output or trace.path.with_suffix(".html")
    run_work(_write(page, build_page(trace)), as_json)
    typer.echo(json.dumps({"page": str(page)}) if as_json else f"wrote {page}")
    if opens and not as_json:
        webbrowser.open(page.resolve().as_uri())


@trace_app.command("stats")
def trace_stats(
    names: Annotated[list[str] | None, typer.Argument(help="Runs, or paths of traces. Else all there are.")] = None,
    tenant: Whose = None,
    as_json: Json = False,
) -> None:
    """Figures over many runs: tools with errors and times, tokens, cost, how runs ended."""

    async def work() -> TraceStats:
        folder = load_settings().traces
        paths = [find_trace(folder, name, tenant) for name in names] if names else list_traces(folder, tenant)
        return gather_stats(paths)

    stats = run_work(work(), as_json).to_json()
    if as_json:
        typer.echo(json.dumps(stats))
        return
    for line in _stats_lines(stats):
        typer.echo(escape_controls(line))


@trace_app.command("export")
def trace_export(
    name: Name,
    to: Annotated[
        Literal["atif", "otel"],
        typer.Option("--to", help="atif: a trajectory; otel: spans as OTLP JSON."),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file. Else stdout.")] = None,
    with_content: Annotated[
        bool, typer.Option("--with-content", help="otel: texts, arguments and results, too.")
    ] = False,
    tenant: Whose = None,
) -> None:
    """Export one run as an ATIF trajectory or as OpenTelemetry spans."""
    trace = _load(name, tenant, False)
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
            raise ConfigError(f"{trace.path} has no line of a trace: give the file of a run")
        return trace

    return run_work(work(), as_json)


def _find(name: str, tenant: str | None) -> Path:
    """The trace of a run; of an item that was begun anew the last one, and on stderr that there are others."""
    found = find_attempts(load_settings().traces, name, tenant)
    if note := found.note():
        typer.echo(f"toolcrew: {escape_controls(note)}", err=True)
    return found.path


async def _write(path: Path, text: str) -> None:
    await asyncio.to_thread(write_private, path, text)


def _stats_lines(stats: dict[str, Any]) -> list[str]:
    ends = ", ".join(f"{count} {reason}" for reason, count in stats["stop_reasons"].items())
    lines = [f"{stats['runs']} runs, {stats['steps']} steps" + (f": {ends}" if ends else "")]
    if stats["unfinished"]:
        lines.append(f"{stats['unfinished']} have no end: they still run, or whoever ran them died")
    if stats["faulty"]:
        lines.append(f"of {stats['faulty']} not all lines can be read: `toolcrew trace show RUN` says why")
    cost = f", cost {stats['cost']:.4f}" if stats["cost"] is not None else ""
    lines.append(f"{stats['prompt_tokens']} + {stats['completion_tokens']} tokens{cost}")
    rows = [
        {"tool": name, **told, "p50": _seconds(told["p50_s"]), "p95": _seconds(told["p95_s"])}
        for name, told in stats["tools"].items()
    ]
    return [*lines, *(table_rows(rows, ("tool", "count", "errors", "p50", "p95")) if rows else [])]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
