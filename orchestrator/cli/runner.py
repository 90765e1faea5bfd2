"""Shared parts of the `toolcrew` commands: interruption by signals, error messages and exit codes.

Commands without a client start twice as fast with this module alone: `cli.clients` imports the SDK.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.terminal.output import escape_controls, table_rows

EXIT_ERROR, EXIT_LIMIT, EXIT_REFUSED, EXIT_COMMAND, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
"""EXIT_COMMAND: the call succeeded, but the command that the tool ran ended with another exit code than 0."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="The tenant. Default: the tenant of TOOLCREW_API_KEY, or `default`.")
]
OnlyTenant = Annotated[
    str | None,
    typer.Option("--tenant", help="Only this tenant. Default: all tenants, or the tenant of a tenant's key."),
]

P = ParamSpec("P")
T = TypeVar("T")


def refuse_key(settings: OrchestratorSettings) -> None:
    """Refuse to run with TOOLCREW_API_KEY, for commands that start a process with the secrets of the deployment: an API
    key does not limit such a process. Raises ConfigError if it is set.
    """
    if settings.api_key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is set, and this command starts a process that serves every tenant: unset the key"
        )


def run_work(work: Coroutine[Any, Any, T], as_json: bool) -> T:
    """Return the result of a command. An error of toolcrew ends the command with a message and an exit code. Ctrl-C
    ends it after its sandbox has been removed.
    """
    try:
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


@dataclass(frozen=True)
class Output:
    """The output of a command, and its exit code. `data`: the object that --json prints. Without --json, `lines` are
    printed on stdout and `notes` on stderr, with control characters escaped.
    """

    data: Any
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()
    exit_code: int = 0


def list_json(name: str, items: Sequence[Any], next_cursor: str | None = None) -> dict[str, Any]:
    """Return the JSON object of a list: the items below `name`, and the cursor of the next page or None."""
    return {name: list(items), "next_cursor": next_cursor}


def list_output(
    data: dict[str, Any],
    rows: list[dict[str, Any]],
    columns: Sequence[str],
    *,
    empty: str = "",
    notes: Sequence[str] = (),
) -> Output:
    """Return rows as a table. `data`: the result of list_json. `empty`: the line to print if there are no rows; "":
    only the header is printed.
    """
    return Output(data, [empty] if empty and not rows else table_rows(rows, tuple(columns)), notes)


def as_command(work: Callable[P, Coroutine[Any, Any, Output | None]]) -> Callable[P, None]:
    """Return the command that runs `work` and prints the Output that `work` returns. If `work` returns None, it has
    printed its output itself. `work` must have the parameter `as_json`.
    """

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs["as_json"])
        output = run_work(work(*args, **kwargs), as_json)
        if output is None:
            return
        if as_json:
            typer.echo(json.dumps(output.data))
        else:
            print_lines(output.lines)
            for note in output.notes:
                typer.echo(escape_controls(note), err=True)
        raise typer.Exit(output.exit_code)

    return run


def exit_code_of(error_code: str | None) -> int:
    """Return the exit code for the error of a call or run."""
    return EXIT_REFUSED if error_code in (ErrorCode.PERMISSION_DENIED, ErrorCode.SECURITY_REFUSED) else EXIT_ERROR


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout, escaped: workers, tenants and models may have put control characters into them."""
    for line in lines:
        typer.echo(escape_controls(line))


def suggest_nearest(metadata: Mapping[str, object]) -> str:
    """Return text to append to an error message about a name that was not found: the similar names, or ""."""
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
