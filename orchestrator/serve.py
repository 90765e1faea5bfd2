"""`toolcrew serve`: starts the services. Only this module imports both the CLI and the services."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, Protocol

import typer

from toolcrew.contract.extras import explain_missing
from toolcrew.contract.programs import program
from toolcrew.contract.settings import child_environment, load_settings
from toolcrew.contract.startup import importing_program
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.cli.clients import open_tenant_client
from toolcrew.orchestrator.cli.runner import Tenant, refuse_key, run_work
from toolcrew.orchestrator.logs import configure_logging
from toolcrew.orchestrator.runs.batch_service import BatchService
from toolcrew.store.audit import local_actor

CONCURRENCY = 64

serve_app = typer.Typer(no_args_is_help=True)


@serve_app.command("api")
def serve_api(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all addresses, behind a TLS proxy.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8080,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            min=0,
            max=10_000,
            help="Concurrent runs and batch items in this process; 0: other processes run them.",
        ),
    ] = CONCURRENCY,
    previews_port: Annotated[
        int,
        typer.Option(
            "--previews-port",
            min=1,
            max=65535,
            help="With --previews-url: port of the previews, on the same address as --port.",
        ),
    ] = 8081,
    previews_url: Annotated[
        str | None,
        typer.Option(
            "--previews-url",
            help="Serve previews of ports at addresses below this one, such as https://previews.example.org, behind a "
            "TLS proxy. Default: no previews.",
        ),
    ] = None,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Write a trace of each run to TOOLCREW_TRACES.")
    ] = True,
) -> None:
    """Serve the HTTP API and its pages, and process their runs, until SIGTERM or Ctrl-C.

    Create API keys with `toolcrew keys create TENANT`. Several processes can serve one deployment.
    """
    # Imported here because importing the server takes longer than most other commands.
    with importing_program():
        from toolcrew.orchestrator.api.service import ApiService

    async def work() -> None:
        settings = load_settings()
        configure_logging(settings, "api")
        previews = (previews_url, previews_port) if previews_url is not None else None
        service = ApiService(settings, host, port, concurrency, previews=previews, has_traces=traces)
        await _run_until_signal(service)

    run_work(work(), as_json=False)


@serve_app.command("mcp")
def serve_mcp(
    http: Annotated[
        int | None,
        typer.Option(
            "--http", min=0, max=65535, help="Serve streamable HTTP on this port; 0: any free port. Default: stdio."
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="With --http: address to listen on.")] = "127.0.0.1",
    origin: Annotated[
        list[str] | None,
        typer.Option(
            "--origin", help="With --http: also allow pages of this origin (https://name[:port]). Repeatable."
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", help="Over stdio: run calls in this open session. Default: a new session per connection."
        ),
    ] = None,
    tenant: Tenant = None,
) -> None:
    """Serve the pool's tools over the Model Context Protocol: to one client over stdin and stdout, or over HTTP.

    The server stops on SIGTERM or at the end of stdin.

    Over HTTP, the API key identifies the tenant (`toolcrew keys create TENANT`). Over stdio, set --tenant or
    TOOLCREW_API_KEY.
    """
    if http is None:
        _refuse_with("--http", {"--origin": bool(origin), "--host": host != "127.0.0.1"})
        run_work(_over_stdio(tenant, session), as_json=False)
    else:
        _refuse_with("stdio (leave --http out)", {"--tenant": tenant is not None, "--session": session is not None})
        run_work(_over_http(host, http, origin or []), as_json=False)


@serve_app.command("e2b")
def serve_e2b(
    session: Annotated[str, typer.Option("--session", help="The open session that clients use as their sandbox.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on, on 127.0.0.1.")] = 49983,
    tenant: Tenant = None,
) -> None:
    """Serve an open session to E2B's clients in debug mode (E2B_DEBUG=true) on this machine, until SIGTERM or Ctrl-C.

    Clients need no key: every user of this machine can use the session.
    """
    with importing_program():
        from toolcrew.orchestrator.e2b.debug_service import DebugService

    async def work() -> None:
        settings = load_settings().with_secret()
        refuse_key(settings)
        configure_logging(settings, "e2b")
        await _run_until_signal(DebugService(settings, tenant or DEFAULT_TENANT, session, local_actor(), port))

    run_work(work(), as_json=False)


@serve_app.command("batches")
def serve_batches(
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            min=1,
            max=10_000,
            help="Concurrent items in this process. The limit of a batch applies to all orchestrators together.",
        ),
    ] = CONCURRENCY,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="Serve only this tenant. Repeatable. Default: all tenants.")
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", min=0.0, max=86_400.0, help="Seconds that running items have to finish after a stop signal."
        ),
    ] = 60.0,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Write a trace of each run to TOOLCREW_TRACES.")
    ] = True,
) -> None:
    """Run the batches of all tenants that are submitted with --detach, until SIGTERM or Ctrl-C.

    After a signal, running items finish first; a second signal stops at once. Another orchestrator, or the next start,
    continues unfinished items.
    """

    async def serve() -> None:
        settings = load_settings()
        configure_logging(settings)
        service = BatchService(settings, concurrency, tuple(tenant or ()), grace, traces)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, service.interrupt)
        await service.run()

    run_work(serve(), as_json=False)


@serve_app.command("worker")
def serve_worker(
    kind: Annotated[
        Literal["sandbox", "web"] | None, typer.Option("--kind", help="sandbox, or web. Default: TOOLCREW_WORKER_KIND.")
    ] = None,
) -> None:
    """Run a Celery worker of TOOLCREW_REDIS_URL.

    A worker of the kind sandbox runs next to this host's sandboxd (TOOLCREW_SANDBOXD_SOCKET). A worker of the kind web
    has network access and no sandboxes.
    """

    async def check() -> None:
        refuse_key(load_settings())

    run_work(check(), as_json=False)
    environment = {"TOOLCREW_WORKER_KIND": kind} if kind is not None else {}
    command = program("toolcrew.workers")
    os.execve(command[0], command, child_environment(environment))


async def _over_stdio(tenant: str | None, session: str | None) -> None:
    with _explain_missing_extra(), importing_program():
        from toolcrew.orchestrator.mcp.stdio import serve_stdio
    settings = load_settings()
    configure_logging(settings, "mcp")
    async with open_tenant_client(tenant) as client:
        await serve_stdio(client, settings, session)


async def _over_http(host: str, port: int, origins: list[str]) -> None:
    with _explain_missing_extra(), importing_program():
        from toolcrew.orchestrator.mcp.http_service import McpService
    settings = load_settings()
    configure_logging(settings, "mcp")
    await _run_until_signal(McpService(settings, host, port, origins))


@contextmanager
def _explain_missing_extra() -> Iterator[None]:
    """Raise ConfigError for an import of a package whose extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise explain_missing(error) from error


class _Service(Protocol):
    def stop(self) -> None: ...

    async def run(self) -> None: ...


async def _run_until_signal(service: _Service) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, service.stop)
    await service.run()


def _refuse_with(transport: str, options: dict[str, bool]) -> None:
    """Raise typer.BadParameter for options that only another transport supports."""
    for name, is_set in options.items():
        if is_set:
            raise typer.BadParameter(f"{name} works only with {transport}; remove the option", param_hint=name)
