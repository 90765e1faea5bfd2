"""Shared parts of the `toolcrew` commands: the client, interruption by signals, error messages and exit codes."""

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
"""EXIT_COMMAND: the call succeeded, but the command that the tool ran ended with another exit code than 0."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="The tenant. Default: the tenant of TOOLCREW_API_KEY, or `default`.")
]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")]

T = TypeVar("T")


def refuse_key(settings: OrchestratorSettings) -> None:
    """Raises ConfigError if TOOLCREW_API_KEY is set. For commands that start a process with the secrets of the
    deployment: an API key does not limit such a process.
    """
    if settings.api_key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is set, and this command starts a process that works for every tenant: unset the key"
        )


@asynccontextmanager
async def open_client(tenant: str | None = None, *, needs_workers: bool = True) -> AsyncIterator[ToolClient]:
    """Open a client of the pool that TOOLCREW_REDIS_URL names, for `tenant` or the tenant of TOOLCREW_API_KEY. Without
    that variable, start an embedded stack for this command.
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
            "TOOLCREW_API_KEY is a key of a running pool: set TOOLCREW_REDIS_URL to that pool, or unset the key to "
            "start an embedded stack"
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
async def open_running(kind: str, tenant: str | None, *, needs_workers: bool = False) -> AsyncIterator[ToolClient]:
    """Open a client of the pool that TOOLCREW_REDIS_URL names. `kind`: the objects of the command, for the message of
    the ConfigError that is raised if the variable is not set.
    """
    if load_settings().redis_url is None:
        raise ConfigError(
            f"TOOLCREW_REDIS_URL is not set, and an embedded stack that ends with this command has no {kind}: set "
            "it (`toolcrew up` prints it)"
        )
    async with open_client(tenant, needs_workers=needs_workers) as client:
        yield client


@asynccontextmanager
async def open_pool_client(tenant: str | None = None, *, needs_workers: bool = False) -> AsyncIterator[ToolClient]:
    """Open a client for commands about stored batches. Raises ConfigError if TOOLCREW_REDIS_URL is not set: a new
    embedded stack has no batches.
    """
    if load_settings().redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set. Set it to the Redis of the pool that stores the batch (`toolcrew up` "
            "prints it). To continue a batch that ran on an embedded stack, submit its file again with the same --id "
            "and --output"
        )
    async with open_client(tenant, needs_workers=needs_workers) as client:
        yield client


def run_work(work: Coroutine[Any, Any, T], as_json: bool, *, reports_waiting: bool = False) -> T:
    """Return the result of a command. An error of toolcrew ends the command with a message and an exit code. Ctrl-C
    ends it after its sandbox has been removed.

    `reports_waiting`: print on stderr why a call waits for a slot, each reason once.
    """
    try:
        with report_waiting(once_per_reason(_print_notice)) if reports_waiting else nullcontext():
            return asyncio.run(_run_until_signal(work))
    except _StoppedBySignal as stopped:
        fail("stopped by a signal; running work has been stopped", "CANCELLED", 128 + stopped.number, as_json)
    except KeyboardInterrupt:
        fail("interrupted; running work has been stopped", "CANCELLED", EXIT_INTERRUPTED, as_json)
    except OperatorError as error:
        fail(str(error), error.code.value, EXIT_ERROR, as_json)
    except ToolFailure as failure:
        code = exit_code_of(failure.code)
        fail(failure.message + suggest_nearest(failure.metadata), failure.code.value, code, as_json)


def exit_code_of(error_code: str | None) -> int:
    """Return the exit code for the error of a call or run."""
    return EXIT_REFUSED if error_code in (ErrorCode.PERMISSION_DENIED, ErrorCode.SECURITY_REFUSED) else EXIT_ERROR


def print_lines(lines: list[str]) -> None:
    """Print lines on stdout, escaped: workers, tenants and models may have put control characters into them."""
    for line in lines:
        typer.echo(escape_controls(line))


def _print_notice(notice: WaitNotice) -> None:
    typer.echo(f"toolcrew: {escape_controls(notice.message)}", err=True)


def suggest_nearest(metadata: Mapping[str, object]) -> str:
    """Return the end of a message that lists names similar to a name that was not found, or ""."""
    nearest = metadata.get("nearest")
    return (
        f"; similar names: {', '.join(str(name) for name in nearest)}" if isinstance(nearest, list) and nearest else ""
    )


class _StoppedBySignal(Exception):
    """The process received SIGTERM or SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def _run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    # SIGTERM and SIGHUP cancel the work like Ctrl-C, so that the work removes its sandbox.
    task, signals = asyncio.ensure_future(work), list[int]()

    def stop(number: int) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if signals:
            raise _StoppedBySignal(signals[0]) from None
        raise


def fail(message: str, code: str, exit_code: int, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps({"error": {"code": code, "message": message}}))
    else:
        typer.echo(f"toolcrew: {escape_controls(message)}", err=True)
    raise typer.Exit(exit_code)
