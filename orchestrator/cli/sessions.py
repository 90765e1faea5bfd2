"""`toolcrew sessions`: open, list, use and close sessions that outlive the command."""

import asyncio
import json
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, ExecResult
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.session_locations import MAX_FORKS
from toolcrew.contract.session_spec import DEFAULT_TTL_S, MAX_TTL_S, SessionSpec
from toolcrew.contract.session_views import OpenSession
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.cli.clients import open_running
from toolcrew.orchestrator.cli.runner import (
    EXIT_ERROR,
    Json,
    OnlyTenant,
    Output,
    Tenant,
    as_command,
    list_json,
    list_output,
    run_work,
)
from toolcrew.orchestrator.cli.session_options import with_session_options
from toolcrew.orchestrator.cli.session_ports import sessions_forward
from toolcrew.orchestrator.cli.session_shell import sessions_processes, sessions_shell
from toolcrew.orchestrator.sdk.tenant_client import TenantSession
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.orchestrator.terminal.output import escape_controls

sessions_app = typer.Typer(no_args_is_help=True)
sessions_app.command("forward")(sessions_forward)
sessions_app.command("processes")(sessions_processes)
sessions_app.command("shell")(sessions_shell)

EXIT_NOT_RUN = 125
"""Exit code if the program was not run; `docker run` uses the same code."""
EXIT_SIGNAL = 128
Id = Annotated[str, typer.Argument(help="The id of the session.")]
Cursor = Annotated[str | None, typer.Option("--cursor", help="The `next_cursor` of the previous page.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Largest number of sessions to list.")]
_REMOTE = re.compile(r"([A-Za-z0-9_-]{1,64}):(.*)", re.DOTALL)
_COLUMNS = ("id", "tenant", "state", "host", "image", "opened", "ttl", "checkpoint", "fence")


@sessions_app.command("list")
@as_command
async def sessions_list(
    cursor: Cursor = None, limit: Limit = 50, tenant: OnlyTenant = None, as_json: Json = False
) -> Output:
    """List the open sessions of all tenants, newest first. A tenant's key lists only its own sessions."""
    async with open_running("sessions", tenant) as client:
        page = await client.sessions(tenant, cursor=cursor, limit=limit)
    notes = []
    if page.cursor is not None:
        options = ["--limit", str(limit), "--cursor", page.cursor]
        more = build_command("sessions", "list", *options, tenant=tenant or DEFAULT_TENANT)
        notes = [f"there are more sessions: `{more}`"]
    data = list_json("sessions", [session.model_dump(mode="json") for session in page.sessions], page.cursor)
    rows = [_row(session) for session in page.sessions]
    return list_output(data, rows, _COLUMNS, empty="no session is open", notes=notes)


@sessions_app.command("open")
@with_session_options
@as_command
async def sessions_open(
    *,
    spec: SessionSpec,
    ttl: Annotated[
        float,
        typer.Option("--ttl", min=1, max=MAX_TTL_S, help="Close the session after this many seconds without a call."),
    ] = DEFAULT_TTL_S,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Open a session and print its id."""
    async with open_running("sessions", tenant, needs_workers=True) as client:
        session = await client.open_session_from(spec.model_copy(update={"ttl_s": ttl}))
        info = await session.info()
    place = {"host": info.host, "image": info.image, "network": info.network}
    return Output({"id": session.id, "tenant": session.tenant, **place, **info.options.model_dump()}, [session.id])


@sessions_app.command("ttl")
@as_command
async def sessions_ttl(
    session_id: Id,
    seconds: Annotated[float, typer.Argument(min=1, max=MAX_TTL_S, help="Seconds without a call.")],
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Change how long a session stays open without a call. The time begins again."""
    async with open_running("sessions", tenant) as client:
        await (await client.session(session_id, tenant=tenant)).set_ttl(seconds)
    return Output({"id": session_id, "ttl_s": seconds}, [session_id])


@sessions_app.command("fork")
@as_command
async def sessions_fork(
    session_id: Id,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=MAX_FORKS, help="Number of new sessions.")] = 1,
    leave_jobs: Annotated[
        bool, typer.Option("--leave-jobs", help="Leave background jobs in SESSION_ID. Default: refuse to fork.")
    ] = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Make sessions with the files and the shell of a session, and print their ids."""
    async with open_running("sessions", tenant, needs_workers=True) as client:
        forks = await (await client.session(session_id)).fork(number, leave_jobs=leave_jobs)
    ids = [fork.id for fork in forks]
    return Output({"sessions": ids}, ids)


@sessions_app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def sessions_exec(
    session_id: Id,
    argv: Annotated[
        list[str],
        typer.Argument(
            help="The program and its arguments, run without a shell. Put options of exec before SESSION_ID."
        ),
    ],
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="The folder to run the program in.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, max=LONGEST_TIMEOUT_S, help="Seconds the program may run.")
    ] = 30,
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Read stdin to its end and pass it to the program.")
    ] = False,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live", help="Show output as text while the program runs. Default: if stdout is a terminal."
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Run a program in a session.

    Exit code: that of the program; 128 plus the signal number if a signal ended the program; 125 if the program was not
    run.
    """
    printer, command = _OutputPrinter(), argv[1:] if argv[0] == "--" else argv
    if not command:
        raise typer.BadParameter("no program was given: put the program and its arguments after --")
    is_live = (live if live is not None else sys.stdout.isatty()) and not as_json

    async def work() -> ExecResult:
        content = sys.stdin.buffer.read() if stdin else b""
        async with open_running("sessions", tenant) as client:
            session = await client.session(session_id, tenant=tenant)
            on_output = printer.show if is_live else None
            return await session.exec(command, stdin=content, cwd=cwd, timeout_s=timeout, on_output=on_output)

    try:
        result = run_work(work(), as_json)
    except typer.Exit as stop:
        raise typer.Exit(EXIT_NOT_RUN if stop.exit_code == EXIT_ERROR else stop.exit_code) from None
    code = result.returncode if result.returncode >= 0 else EXIT_SIGNAL - result.returncode
    if as_json:
        texts = {"stdout": result.stdout.decode(errors="replace"), "stderr": result.stderr.decode(errors="replace")}
        typer.echo(
            json.dumps(
                {
                    "returncode": result.returncode,
                    **texts,
                    "truncated": result.truncated,
                    "timed_out": _was_killed(result),
                }
            )
        )
    else:
        printer.print_rest(result)
    raise typer.Exit(code)


@sessions_app.command("copy")
@as_command
async def sessions_copy(
    source: Annotated[str, typer.Argument(help="A local file or folder, or SESSION:PATH.")],
    target: Annotated[str, typer.Argument(help="SESSION:PATH, or a local path.")],
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Copy a file or a folder of at most 64 MiB into a session or out of one.

    If the target is a folder, the copy is put into it. Otherwise the copy gets the name of the target.
    """
    inner, outer = _parse_remote(source), _parse_remote(target)
    if (inner is None) == (outer is None):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "exactly one of the two paths must be in a session: write it as SESSION:PATH, and the local path as ./PATH",
        )
    remote = inner or outer
    assert remote is not None
    async with open_running("sessions", tenant) as client:
        session = await client.session(remote[0], tenant=tenant)
        if inner is not None:
            copied = await _copy_out(session, inner[1], Path(target))
        else:
            copied = await _copy_in(session, Path(source), remote[1])
    left_out = ", ".join(copied["left_out"])
    notes = [f"not copied, because they point out of it or are special files: {left_out}"] if left_out else []
    return Output(copied, notes=notes)


@sessions_app.command("close")
@as_command
async def sessions_close(
    session_ids: Annotated[list[str], typer.Argument(help="The ids of the sessions.")],
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Close sessions and remove their sandboxes and files. Tries every session, even if one fails."""
    closed: list[str] = []
    failed: dict[str, str] = {}
    async with open_running("sessions", tenant) as client:
        for name in dict.fromkeys(session_ids):
            try:
                await (await client.session(name, tenant=tenant)).close()
                closed.append(name)
            except (ToolFailure, OperatorError) as error:
                failed[name] = str(error)
    notes = [f"toolcrew: {name}: {message}" for name, message in failed.items()]
    return Output({"closed": closed, "failed": failed}, closed, notes, EXIT_ERROR if failed else 0)


class _OutputPrinter:
    """Prints the output of a program: parts while the program runs, or the whole output at the end."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, stream: str, text: str) -> None:
        """Print a part of the output, escaped on a terminal: the sandbox must not control the terminal."""
        self._is_shown = True
        out = sys.stderr if stream == "stderr" else sys.stdout
        out.write(escape_controls(text) if out.isatty() else text)
        out.flush()

    def print_rest(self, result: ExecResult) -> None:
        """Print the output if no part was printed before; unchanged unless it goes to a terminal."""
        if not self._is_shown:
            for out, data in ((sys.stdout, result.stdout), (sys.stderr, result.stderr)):
                out.buffer.write(escape_controls(data.decode(errors="replace")).encode() if out.isatty() else data)
                out.flush()
        if result.truncated:
            typer.echo(
                "toolcrew: the output was too long and was cut: write it to a file in the session, and copy the file",
                err=True,
            )
        if _was_killed(result):
            typer.echo(
                "toolcrew: the program was stopped at a limit or cancelled: raise --timeout for more time", err=True
            )


def _was_killed(result: ExecResult) -> bool:
    return result.kill is not None and result.returncode < 0


def _row(session: OpenSession) -> dict[str, Any]:
    return {
        "id": session.id,
        "tenant": session.tenant,
        "state": session.state,
        "host": session.host or "-",
        "image": session.image or "-",
        "opened": format_instant(session.opened_at) if session.opened_at else "-",
        "ttl": f"{session.ttl_s:g}",
        "checkpoint": session.checkpoint or "-",
        "fence": session.fence,
    }


def _parse_remote(text: str) -> tuple[str, str] | None:
    """Return the session and the path; None for a local path."""
    found = _REMOTE.fullmatch(text)
    if found is None:
        return None
    if not found[2]:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{text} has no path: write SESSION:/workspace/...")
    return found[1], found[2]


async def _copy_in(session: TenantSession, source: Path, path: str) -> dict[str, Any]:
    name, content = await asyncio.to_thread(_read_source, source)
    is_folder_there = path.endswith("/") or await _is_folder(session, path)
    target = str(PurePosixPath(path) / name) if is_folder_there else path
    if content is None:
        await session.import_folder(source, target)
    else:
        await session.write_file(target, content)
    return {"path": f"{session.id}:{target}", "left_out": []}


async def _copy_out(session: TenantSession, path: str, target: Path) -> dict[str, Any]:
    target = await asyncio.to_thread(_find_target, target, PurePosixPath(path).name, path)
    left_out: list[str] = []
    if await _is_folder(session, path):
        left_out = await session.export(target, path)
    else:
        await asyncio.to_thread(_write, target, await session.read_file(path))
    return {"path": str(target), "left_out": left_out}


async def _is_folder(session: TenantSession, path: str) -> bool:
    return (await session.exec(["test", "-d", path])).returncode == 0


def _read_source(source: Path) -> tuple[str, bytes | None]:
    """Return the name of a local file or folder, and the content of a file."""
    try:
        return source.resolve().name, None if source.is_dir() else source.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{source} cannot be read ({error.strerror}): name a readable local file or folder"
        ) from error


def _find_target(target: Path, name: str, path: str) -> Path:
    """Return the path for a copy of `name`."""
    if not target.is_dir():
        return target
    if name in ("", ".."):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{path} has no file name: give the full path of the target")
    return target / name


def _write(target: Path, data: bytes) -> None:
    try:
        target.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): name another path") from error
