"""`toolcrew doctor`: what this host and its deployment can promise."""

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
            "--only", help="host: engine, image and kernel here; deployment: what TOOLCREW_REDIS_URL names. Else both."
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Open a session on each host, too, and run a program in it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this host and the deployment.

    Each problem has a line that says how to fix it.

    On this host: engine, image and kernel. In the deployment: Redis, workers, queues, tools, tenants, API keys, Flower,
    the API, model and tracing. Exit code 1 when something is broken.
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
