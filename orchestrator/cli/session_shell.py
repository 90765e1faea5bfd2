"""`toolcrew sessions shell`: a program of a session at the user's terminal."""

import asyncio
import shlex
import signal
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ConfigError, ToolcrewError, ToolFailure
from toolcrew.orchestrator.cli.runner import Json, Output, as_command, list_json, list_output, run_work
from toolcrew.orchestrator.sdk.http.async_client import AsyncClient
from toolcrew.orchestrator.sdk.http.async_processes import AsyncProcess, AsyncProcesses
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.orchestrator.terminal.local_terminal import (
    STDERR,
    STDOUT,
    DetachKeys,
    LocalTerminal,
    OutputWriter,
    is_interactive,
    read_input,
    read_size,
)

if TYPE_CHECKING:
    from toolcrew.contract.process_views import ProcessEnd, ProcessView

EXIT_SIGNAL = 128
_SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; fi; exec sh")
_TERM = "xterm-256color"
"""The terminal that the filter of the output knows."""
_HANGUP_S = 5.0
_MAX_CHARS = 100
_COLUMNS = ("process", "pid", "state", "started", "output", "tag", "command")


def sessions_shell(
    session_id: Annotated[str, typer.Argument(help="The id of the session.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The program and its arguments. Put them after --. Default: bash, or sh."),
    ] = None,
    process: Annotated[
        int | None, typer.Option("--process", min=1, help="Attach to this process instead of starting a program.")
    ] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="The folder to run the program in.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="The user to run the program as.")] = None,
) -> None:
    """Open a terminal in a session over TOOLCREW_URL.

    ctrl-p ctrl-q detaches: the program goes on, and --process attaches to it again. Without a terminal, stdin and
    stdout are passed as they are. A terminal does not get what could type input, set the clipboard or change settings.
    Exit code: that of the program; 128 plus the signal number if a signal ended the program.
    """
    argv = command[1:] if command and command[0] == "--" else command
    if argv and process is not None:
        raise typer.BadParameter("give a program or --process, not both")

    async def work() -> int:
        async with AsyncClient() as client:
            processes = client.sessions.get(session_id).processes
            if process is not None:
                info = await processes.attach(process).info()
                shell = _Shell(
                    processes.attach(process, "start"), has_terminal=info.pty is not None and is_interactive()
                )
            else:
                shell = await _start(processes, argv or _SHELL, cwd, user)
            end = await shell.run()
        return _exit_code(end, session_id, shell.attached.process)

    raise typer.Exit(run_work(work(), False))


async def _start(
    processes: AsyncProcesses, argv: "list[str] | tuple[str, ...]", cwd: str | None, user: str | None
) -> "_Shell":
    has_terminal = is_interactive()
    pty = read_size() if has_terminal else None
    env = {"TERM": _TERM} if has_terminal else None
    started = await processes.start(argv, pty=pty, stdin=True, env=env, cwd=cwd, user=user)
    return _Shell(started, has_terminal=has_terminal, is_own=True)


def _exit_code(end: "ProcessEnd | None", session_id: str, process: int) -> int:
    if end is None:
        again = build_command("sessions", "shell", session_id, "--process", str(process))
        typer.echo(f"toolcrew: detached from process {process}; `{again}` attaches again", err=True)
        return 0
    if end.lost_bytes:
        typer.echo(f"toolcrew: {end.lost_bytes} bytes of output were lost", err=True)
    if end.signal is not None:
        return EXIT_SIGNAL + end.signal
    return end.exit_code or 0


@as_command
async def sessions_processes(
    session_id: Annotated[str, typer.Argument(help="The id of the session.")], as_json: Json = False
) -> Output:
    """List the processes of a session that `shell` or a program started, over TOOLCREW_URL."""
    async with AsyncClient() as client:
        found = await client.sessions.get(session_id).processes.list()
    data = list_json("processes", [process.model_dump(mode="json") for process in found])
    return list_output(data, [_row(process) for process in found], _COLUMNS, empty="the session has no process")


def _row(process: "ProcessView") -> dict[str, object]:
    end = process.end
    code = None if end is None else f"signal {end.signal}" if end.signal is not None else f"exit {end.exit_code}"
    return {
        "process": process.process,
        "pid": process.pid,
        "state": code or "running",
        "started": format_instant(process.started_at),
        "output": process.output_bytes,
        "tag": process.tag,
        "command": shlex.join(process.argv)[:_MAX_CHARS],
    }


class _Shell:
    """Connects a process to the standard streams. `is_own`: the process was started for this command."""

    def __init__(self, attached: AsyncProcess, *, has_terminal: bool, is_own: bool = False) -> None:
        self.attached = attached
        self._has_terminal = has_terminal
        self._is_own = is_own
        self._out, self._error = OutputWriter(STDOUT), OutputWriter(STDERR)
        self._resized = asyncio.Event()

    async def run(self) -> "ProcessEnd | None":
        """Return the end of the process; None when the user detaches. A command that is killed hangs up its process,
        as a terminal does that is closed.
        """
        async with self.attached:
            with ExitStack() as stack:
                if self._has_terminal:
                    stack.enter_context(LocalTerminal()).on_resize(self._resized.set)
                try:
                    return await self._relay()
                except asyncio.CancelledError:
                    await self._hang_up()
                    raise
                except OSError as error:
                    await self._hang_up()
                    raise ConfigError(
                        f"the output cannot be written ({error.strerror}): run the command again"
                    ) from error
                finally:
                    with suppress(OSError):
                        await self._out.reset()
                        await self._error.reset()

    async def _relay(self) -> "ProcessEnd | None":
        if self._has_terminal:
            # It may have had another size.
            self._resized.set()
        output, typing = asyncio.ensure_future(self._show_output()), asyncio.ensure_future(self._type())
        resizing = asyncio.ensure_future(self._follow_size())
        try:
            await asyncio.wait({output, typing}, return_when=asyncio.FIRST_COMPLETED)
            has_detached = typing.done() and typing.result()
            if has_detached and not output.done():
                return None
            await output
            return await self.attached.wait()
        finally:
            await cancel_all([output, typing, resizing])

    async def _show_output(self) -> None:
        async for piece in self.attached:
            await (self._error if piece.stream == "stderr" else self._out).write(piece.data)

    async def _type(self) -> bool:
        """Pass the input to the process. Return whether the user wants to detach."""
        keys = DetachKeys()
        # The end of the process ends its output too, which reports the error of a connection.
        with suppress(ToolcrewError):
            while data := await read_input():
                has_detached = False
                if self._has_terminal:
                    data, has_detached = keys.feed(data)
                await self.attached.write(data)
                if has_detached:
                    return True
            if self._has_terminal:
                await self._hang_up()
            else:
                await self.attached.close_stdin()
        return self._has_terminal

    async def _follow_size(self) -> None:
        while True:
            await self._resized.wait()
            self._resized.clear()
            # A process that has just ended has no size.
            with suppress(ToolFailure):
                await self.attached.resize(*read_size())

    async def _hang_up(self) -> None:
        if self._is_own:
            with suppress(ToolcrewError, TimeoutError):
                async with asyncio.timeout(_HANGUP_S):
                    await self.attached.signal(signal.SIGHUP, tree=True)
