"""How a command of `toolcrew` does its work: the client it uses, what interrupts it, its errors as one sentence and an
exit code.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from contract.tenancy import DEFAULT_TENANT
from orchestrator.admission import WaitNotice, once_per_reason, report_waiting
from orchestrator.sdk.client import ToolClient
from orchestrator.settings import OrchestratorSettings, load_settings
from orchestrator.terminal.output import escape_controls

EXIT_ERROR, EXIT_LIMIT, EXIT_REFUSED, EXIT_COMMAND, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
"""EXIT_COMMAND: the call succeeded, and the command that it ran ended with another exit code than 0."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="For whom. Else the tenant of TOOLCREW_API_KEY, or default.")
]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="Only those of this tenant.")]

T = TypeVar("T")


def refuse_key(settings: OrchestratorSettings) -> None:
    """Raises ConfigError for commands that start a process with the deployment's own secrets: no key limits what that
    process may do.
    """
    if settings.api_key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is set, and this command starts a process that works for every tenant: unset the key"
        )


@asynccontextmanager
async def open_client(tenant: str | None = None, *, needs_workers: bool = True) -> AsyncIterator[ToolClient]:
    """The pool that TOOLCREW_REDIS_URL names, for that tenant or the one of TOOLCREW_API_KEY; else an embedded stack
    for this command.
    """
    settings = load_settings()
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    if settings.redis_url is not None:
        async with ToolClient.connect(
            settings=settings, api_key=key, tenant=tenant, needs_workers=needs_workers
        ) as client:
            yield client
    elif key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is a key of a running pool: set TOOLCREW_REDIS_URL to that, or unset the key to start a "
            "stack of your own"
        )
    else:
        typer.echo(
            "TOOLCREW_REDIS_URL is not set: starting an embedded stack for this command (`toolcrew up` keeps one "
            "running)",
            err=True,
        )
        async with ToolClient.embedded(settings=settings, tenant=tenant or DEFAULT_TENANT, workers_only=True) as client:
            yield client


@asynccontextmanager
async def open_running(what: str, tenant: str | None, *, needs_workers: bool = False) -> AsyncIterator[ToolClient]:
    """A client of the pool that TOOLCREW_REDIS_URL names, for commands about `what` is there. Raises ConfigError when
    none is named.
    """
    if load_settings().redis_url is None:
        raise ConfigError(
            f"TOOLCREW_REDIS_URL is not set, and {what} of a stack that ends with this command would be nobody's: set "
            "it (`toolcrew up` prints it)"
        )
    async with open_client(tenant, needs_workers=needs_workers) as client:
        yield client


@asynccontextmanager
async def open_pool_client(tenant: str | None = None, *, needs_workers: bool = False) -> AsyncIterator[ToolClient]:
    """As `open_client`, for commands to which a stack of their own could tell nothing; of most of them Redis knows all.
    Raises ConfigError when no pool is named."""
    if load_settings().redis_url is None:
        raise ConfigError(
            "batches are kept in the Redis of a pool, and TOOLCREW_REDIS_URL names none: set it (`toolcrew up` prints "
            "it). A batch that ran on a stack of its own is gone on with by submitting its file again with the same "
            "--id and --output"
        )
    async with open_client(tenant, needs_workers=needs_workers) as client:
        yield client


def run_work(work: Coroutine[Any, Any, T], as_json: bool, *, reports_waiting: bool = False) -> T:
    """The command's result; our own errors end it with a sentence and an exit code, Ctrl-C after everything was taken
    down.

    `reports_waiting`: print on stderr why a call waits for a slot, each reason once.
    """
    try:
        with report_waiting(once_per_reason(_print_notice)) if reports_waiting else nullcontext():
            return asyncio.run(_until_told(work))
    except _ToldToStop as told:
        fail("told to stop; what was running has been stopped", "CANCELLED", 128 + told.number, as_json)
    except KeyboardInterrupt:
        fail("interrupted; what was running has been stopped", "CANCELLED", EXIT_INTERRUPTED, as_json)
    except OperatorError as error:
        fail(str(error), error.code.value, EXIT_ERROR, as_json)
    except ToolFailure as failure:
        code = EXIT_REFUSED if failure.code in (ErrorCode.PERMISSION_DENIED, ErrorCode.SECURITY_REFUSED) else EXIT_ERROR
        fail(failure.message + suggest_nearest(failure.metadata), failure.code.value, code, as_json)


def print_lines(lines: list[str]) -> None:
    """Print lines on stdout, escaped: workers, tenants and models chose some of their words."""
    for line in lines:
        typer.echo(escape_controls(line))


def _print_notice(notice: WaitNotice) -> None:
    typer.echo(f"toolcrew: {escape_controls(notice.message)}", err=True)


def suggest_nearest(metadata: Mapping[str, object]) -> str:
    """Return the end of a sentence that names what is like the name that was not found, or nothing."""
    nearest = metadata.get("nearest")
    return f"; there are {', '.join(str(name) for name in nearest)}" if isinstance(nearest, list) and nearest else ""


class _ToldToStop(Exception):
    """SIGTERM or SIGHUP came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def _until_told(work: Coroutine[Any, Any, T]) -> T:
    """The work's result. SIGTERM and SIGHUP cancel it as Ctrl-C does, so that it takes its sandbox down."""
    task, told = asyncio.ensure_future(work), list[int]()

    def stop(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if told:
            raise _ToldToStop(told[0]) from None
        raise


def fail(message: str, code: str, exit_code: int, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps({"error": {"code": code, "message": message}}))
    else:
        typer.echo(f"toolcrew: {escape_controls(message)}", err=True)
    raise typer.Exit(exit_code)
