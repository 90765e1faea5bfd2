"""`toolcrew batch work`: an orchestrator in the foreground that works the batches of every tenant."""

import asyncio
import signal
from typing import Annotated

import typer

from orchestrator.cli.runner import run_work
from orchestrator.logs import configure_logging
from orchestrator.runs.batch_service import BatchService
from orchestrator.settings import load_settings

CONCURRENCY = 64


def work(
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            min=1,
            max=10_000,
            help="Items at a time here; a batch's own limit holds over all orchestrators.",
        ),
    ] = CONCURRENCY,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="Serve this tenant, and others that are given so. Else all.")
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", min=0.0, max=86_400.0, help="Seconds that running items have to end when it is told to stop."
        ),
    ] = 60.0,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Write each run down in TOOLCREW_TRACES.")
    ] = True,
) -> None:
    """Work what is submitted with --detach, of every tenant, until SIGTERM or Ctrl-C.

    Then running items are ended first; a second time stops now. What has not ended goes to another orchestrator, or to
    the next start.
    """

    async def serve() -> None:
        settings = load_settings()
        configure_logging(settings)
        service = BatchService(settings, concurrency, tuple(tenant or ()), grace, traces)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.interrupt)
        await service.run()

    run_work(serve(), as_json=False)
