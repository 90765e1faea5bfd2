"""`toolcrew call`: call one tool, in an open session or in a new one."""

import json
import sys
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.session_spec import EMPTY_SESSION, SessionSpec
from toolcrew.orchestrator.cli.clients import open_running, open_tenant_client, show_waiting
from toolcrew.orchestrator.cli.runner import EXIT_COMMAND, Json, Tenant, exit_code_of, run_work, suggest_nearest
from toolcrew.orchestrator.cli.session_options import OPTION_NAMES, with_session_options
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.sessions.session import build_call
from toolcrew.orchestrator.terminal.output import LiveOutput, escape_controls, format_times


def check_session_id(text: str | None) -> str | None:
    """Return the id. Raises BadParameter for the next argument, which the option gets when $(...) gave nothing."""
    if text is not None and "=" in text:
        raise typer.BadParameter(
            f"'{text[:100]}' is no id. If $(...) gives the id, look at that command alone: it printed none"
        )
    return text


@with_session_options
def call(
    name: Annotated[str, typer.Argument(help="The name of the tool.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="k=v pairs, or @file.json, or - to read JSON from stdin.")
    ] = None,
    *,
    spec: SessionSpec,
    session_id: Annotated[
        str | None,
        typer.Option(
            "--session",
            callback=check_session_id,
            help="An open session to run the call in. Default: a new session for this call.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, max=LONGEST_TIMEOUT_S, help="Seconds the call may run.")
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Show output on stderr while the tool runs. Default: if stderr is a terminal and --json is not given.",
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Call one tool and print its result.

    The result goes to stdout; a terminal shows it with control characters escaped. Exit code 0: the call succeeded; 1:
    the call failed; 3: the call was refused; 4: the command that the tool ran ended with another exit code than 0.
    """
    console = Console(stderr=True)
    is_live = live if live is not None else console.is_terminal and not as_json

    async def work() -> ToolResult:
        values, is_text = parse_arguments(arguments or [])
        call = build_call(name, values)
        if isinstance(call, ToolResult):
            return call
        if session_id is not None and spec != EMPTY_SESSION:
            raise ConfigError(
                f"--session cannot be combined with {OPTION_NAMES}, which apply to a new session: leave one of them out"
            )
        async with AsyncExitStack() as opened:
            if session_id is not None:
                client = await opened.enter_async_context(open_running("sessions", tenant))
                session = await client.session(session_id, tenant=tenant)
            else:
                client = await opened.enter_async_context(open_tenant_client(tenant))
                session = await opened.enter_async_context(await client.open_session_from(spec))
            with ExitStack() as stack:
                on_output = stack.enter_context(LiveOutput(console)).show if is_live else None
                request = Request(call, session.tenant, session.id, timeout_s=timeout, text_arguments=is_text)
                return await session.send(request, on_output)

    with show_waiting():
        result = run_work(work(), as_json)
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        _print_result(result)
    raise typer.Exit(_call_exit_code(result))


def parse_arguments(texts: list[str]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a call, and whether they are text that the schema may convert. Raises
    ToolFailure(INVALID_ARGUMENTS).
    """
    if len(texts) == 1 and (texts[0] == "-" or texts[0].startswith("@")):
        return _read_json(texts[0]), False
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name in values:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"'{name}' is given twice: give it once")
        if not equals or not name:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"'{text}' is not k=v: write name=value, or give @file.json, or - for JSON on stdin",
            )
        values[name] = value
    return values, True


def _read_json(source: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source[1:]).read_text()
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the arguments are not valid JSON ({error}): give one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, 'the arguments are JSON, but not an object: write {"NAME": VALUE}'
        )
    return value


def _print_result(result: ToolResult) -> None:
    if not result.success:
        typer.echo(escape_controls(result.text() + suggest_nearest(result.metadata)), err=True)
    elif sys.stdout.isatty():
        typer.echo(escape_controls(result.text()), nl=not result.text().endswith("\n"))
    else:
        sys.stdout.buffer.write(result.text().encode(errors="replace"))
        sys.stdout.flush()
    if failure := _command_failure(result):
        typer.echo(f"the command ended with {failure}", err=True)
    typer.echo(format_times(result), err=True)


def _command_failure(result: ToolResult) -> str:
    """Return how the command of the tool failed; "" if it succeeded or the tool runs no command."""
    code, signal = result.metadata.get("exit_code"), result.metadata.get("signal")
    return f"exit code {code}" if code else f"signal {signal}" if signal else ""


def _call_exit_code(result: ToolResult) -> int:
    if result.success:
        return EXIT_COMMAND if _command_failure(result) else 0
    return exit_code_of(result.error_code)
