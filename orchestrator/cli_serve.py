"""`toolcrew serve`: what runs as a service and is asked over a protocol of others."""

import asyncio
import signal
from typing import Annotated

import typer

from orchestrator.cli_runner import run_work
from orchestrator.logs import configure_logging
from orchestrator.settings import load_settings

CONCURRENCY = 64

serve_app = typer.Typer(no_args_is_help=True, help="Run as a service.")


@serve_app.callback()
def serve() -> None:
    """Run as a service."""


@serve_app.command("api")
def serve_api(
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; 0.0.0.0 for all, behind a proxy that speaks TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8080,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=0, max=10_000, help="Runs and batch items at a time here; 0: others work them.")
    ] = CONCURRENCY,
    traces: Annotated[bool, typer.Option("--traces/--no-traces", help="Write each run down in TOOLCREW_TRACES.")] = True,
) -> None:
    """The HTTP API and its pages, and an orchestrator that works what is started there, until SIGTERM or Ctrl-C.

    Keys for it: `toolcrew tenants keys add TENANT`. Any number of them may serve one deployment.
    """
    # Not at the top: no other command needs the server, and loading it takes longer than they do.
    from orchestrator.api.service import ApiService

    async def work() -> None:
        settings = load_settings()
        configure_logging(settings, "api")
        service = ApiService(settings, host, port, concurrency)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        await service.run()

    run_work(work(), as_json=False)
