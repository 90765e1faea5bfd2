"""`toolcrew serve`: what runs as a service and is asked over a protocol of others."""

import asyncio
import importlib
import signal
from typing import Annotated, Any

import typer

from contract.extras import explain_missing
from orchestrator.cli.runner import Tenant, open_client, run_work
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
        int,
        typer.Option(
            "--concurrency", min=0, max=10_000, help="Runs and batch items at a time here; 0: others work them."
        ),
    ] = CONCURRENCY,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Write each run down in TOOLCREW_TRACES.")
    ] = True,
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


@serve_app.command("mcp")
def serve_mcp(
    http: Annotated[
        int | None,
        typer.Option("--http", min=0, max=65535, help="Serve streamable HTTP on this port; 0: any. Else stdio."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="With --http: the address to listen on.")] = "127.0.0.1",
    origin: Annotated[
        list[str] | None,
        typer.Option(
            "--origin", help="With --http: pages of this origin (https://name[:port]) may call, too. Repeatable."
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", help="Over stdio: the open session that calls are made in. Else one of the connection's own."
        ),
    ] = None,
    tenant: Tenant = None,
) -> None:
    """The pool's tools for clients of the Model Context Protocol: one over stdin and stdout, or any number over HTTP,
    until the end of stdin or SIGTERM.

    Over HTTP an API key says whose tools they are (`toolcrew tenants keys add TENANT`); over stdio --tenant or
    TOOLCREW_API_KEY.
    """
    if http is None:
        _refuse_with("--http", {"--origin": bool(origin), "--host": host != "127.0.0.1"})
        run_work(_over_stdio(tenant, session), as_json=False)
    else:
        _refuse_with("stdio (leave --http out)", {"--tenant": tenant is not None, "--session": session is not None})
        run_work(_over_http(host, http, origin or []), as_json=False)


async def _over_stdio(tenant: str | None, session: str | None) -> None:
    serve_stdio = _load_mcp("stdio").serve_stdio
    settings = load_settings()
    configure_logging(settings, "mcp")
    async with open_client(tenant) as client:
        await serve_stdio(client, settings, session)


async def _over_http(host: str, port: int, origins: list[str]) -> None:
    service_class = _load_mcp("http_service").McpService
    settings = load_settings()
    configure_logging(settings, "mcp")
    service = service_class(settings, host, port, origins)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, service.stop)
    await service.run()


def _load_mcp(name: str) -> Any:
    """A module of the MCP server. Raises ConfigError without the extra."""
    try:
        return importlib.import_module(f"orchestrator.mcp.{name}")
    except ModuleNotFoundError as error:
        raise explain_missing(error) from error


def _refuse_with(wanted: str, given: dict[str, bool]) -> None:
    """Raises typer.BadParameter for options that mean nothing here."""
    for name, is_given in given.items():
        if is_given:
            raise typer.BadParameter(f"{name} means something with {wanted} alone", param_hint=name)
