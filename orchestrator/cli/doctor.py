"""`toolcrew doctor`: check this host and its deployment."""

import json
from typing import Annotated, Literal

import typer

from orchestrator.cli.runner import EXIT_ERROR, Json, run_work
from orchestrator.operations.doctor import examine
from orchestrator.operations.findings import Report
from orchestrator.settings import load_settings
from orchestrator.terminal.output import escape_controls


def doctor(
    only: Annotated[
        Literal["host", "deployment"] | None,
        typer.Option(
            "--only",
            help="host: check this host; deployment: check what TOOLCREW_REDIS_URL names. Default: both.",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also open a session on each host and run a program in it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this host and the deployment.

    Each problem is printed with its fix.

    On this host: engine, image and kernel. In the deployment: Redis, workers, queues, tools, tenants, API keys, Flower,
    the API, model and tracing. Exit code 1: something is broken.
    """

    async def work() -> Report:
        return await examine(load_settings(), only or "all", is_deep=deep)

    report = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        for line in [*report.lines(), *report.promise_lines()]:
            typer.echo(escape_controls(line))
    raise typer.Exit(0 if report.is_healthy else EXIT_ERROR)
