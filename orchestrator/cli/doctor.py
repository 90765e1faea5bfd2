"""`toolcrew doctor`: check this host and its deployment."""

from typing import Annotated, Literal

import typer

from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.cli.runner import EXIT_ERROR, Json, Output, as_command
from toolcrew.orchestrator.operations.doctor import examine


@as_command
async def doctor(
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
) -> Output:
    """Check this host and the deployment.

    Each problem is printed with its fix.

    On this host: engine, image and kernel. In the deployment: Redis, workers, queues, tools, tenants, API keys, Flower,
    the API, model and tracing. Exit code 1: something is broken.
    """
    report = await examine(load_settings(), only or "all", is_deep=deep)
    lines = [*report.lines(), *report.guarantee_lines()]
    return Output(report.to_json(), lines, exit_code=0 if report.is_healthy else EXIT_ERROR)
