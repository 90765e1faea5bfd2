"""`toolcrew`: thin, one library call a command. Errors are one sentence on stderr; with --json an object on stdout."""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from contract.calls import MAX_TIMEOUT_S, ToolResult
from contract.errors import ConfigError, ErrorCode, OperatorError, ToolFailure
from orchestrator.cli.approve import approve_app, asks_elsewhere
from orchestrator.cli.audit import audit
from orchestrator.cli.batch import batch_app
from orchestrator.cli.calls import calls_app, kill, open_running
from orchestrator.cli.config import config_app
from orchestrator.cli.doctor import doctor
from orchestrator.cli.hosts import hosts_list, worker_drain, worker_status
from orchestrator.cli.metrics import metrics_print
from orchestrator.cli.pause import pause, resume
from orchestrator.cli.redis import redis_app
from orchestrator.cli.runner import (
    EXIT_COMMAND,
    EXIT_ERROR,
    EXIT_LIMIT,
    EXIT_REFUSED,
    Json,
    Tenant,
    open_client,
    refuse_key,
    run_work,
    suggest_nearest,
)
from orchestrator.cli.runs import runs_app
from orchestrator.cli.sessions import session_app
from orchestrator.cli.skills import skills_app
from orchestrator.cli.tenants import tenants_app
from orchestrator.cli.tools import tools_app
from orchestrator.cli.trace import trace_app
from orchestrator.cli.traced import Leaving
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.sessions import Checkpoint, Session, build_call
from orchestrator.loop.agent import RunResult
from orchestrator.loop.events import CallFinished, RunEvent
from orchestrator.loop.limits import ReActOptions, StopReason
from orchestrator.operations.local_stack import StackInfo, keep, print_json
from orchestrator.settings import child_environment, load_settings, program
from orchestrator.terminal.output import LiveOutput, RunView, escape_controls, format_times

HELP = (
    "Runs the tools of LLM agents at scale, on the pool that TOOLCREW_REDIS_URL names; without it run, call, tools and "
    "batch submit start one of their own."
)

_STACK_END_LOST = (
    "stopping: running calls are stopped, and the sessions and the embedded Redis with its tenants, API keys, runs and "
    "batches are deleted"
)
_STACK_END_KEPT = (
    "stopping: running calls are stopped and the sessions of this stack are deleted; "
    "tenants, API keys, runs and batches are kept"
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=HELP, pretty_exceptions_enable=False)
worker_app = typer.Typer(no_args_is_help=True, help="Workers: starting this host's, and taking any out of service.")
WORK, OPERATE, SET_UP = "Run agents and tools", "Operate a deployment", "Set up a deployment"
"""The parts of the help, in which every command has a place."""
_GROUPS = {
    WORK: {"batch": batch_app, "runs": runs_app, "session": session_app, "approve": approve_app, "trace": trace_app},
    OPERATE: {"worker": worker_app, "calls": calls_app, "tools": tools_app, "tenants": tenants_app},
    SET_UP: {"skills": skills_app, "redis": redis_app, "config": config_app},
}
for part, groups in _GROUPS.items():
    for group_name, group in groups.items():
        app.add_typer(group, name=group_name, rich_help_panel=part)

Workspace = Annotated[
    Path | None,
    typer.Option("--workspace", help="A folder, an archive (tar, tar.gz, ..., zip) or a git bundle to begin with."),
]
Restore = Annotated[str | None, typer.Option("--restore", help="A checkpoint to begin with, by its id.")]
Network = Annotated[
    Literal["none", "egress"] | None,
    typer.Option("--network", help="egress: the hosts that the operator allows. Else as the tenant's class says."),
]


def main() -> None:
    """Entry point of the command."""
    # What goes wrong is said once, as the command's own sentence.
    logging.getLogger("orchestrator").setLevel(logging.CRITICAL)
    app()


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"toolcrew {version('toolcrew')}")
        raise typer.Exit


@app.callback()
def begin(
    is_version_asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version, and end.")
    ] = False,
) -> None:
    """What holds for every command."""


class Keeping:
    """What `run` keeps of a session when the run has ended: a copy of the workspace in a folder here, a checkpoint,
    both, or neither. What cannot be kept is reported in `failure`, and the answer is not lost.
    """

    def __init__(self, folder: Path | None, wants_checkpoint: bool) -> None:
        self._folder = folder
        self._wants_checkpoint = wants_checkpoint
        self._skipped: list[str] = []
        self._checkpoint: Checkpoint | None = None
        self.failure: ToolFailure | OperatorError | None = None

    async def keep(self, session: Session) -> None:
        """Try both, even if one fails."""
        for work in (self._keep_checkpoint, self._keep_copy):
            try:
                await work(session)
            except (ToolFailure, OperatorError) as failure:
                self.failure = failure

    async def _keep_checkpoint(self, session: Session) -> None:
        if self._wants_checkpoint:
            self._checkpoint = await session.checkpoint()

    async def _keep_copy(self, session: Session) -> None:
        if self._folder is None:
            return
        try:
            self._skipped = await session.export(self._folder)
        except OSError as error:
            raise ConfigError(
                f"/workspace cannot be copied to {self._folder} ({error}): give another folder"
            ) from error

    def lines(self) -> list[str]:
        """For people."""
        kept, lines = self._checkpoint, []
        if kept is not None:
            lines.append(f"checkpoint {kept.id} ({kept.bytes} bytes)")
        if self._skipped:
            lines.append(f"not copied, as they lead out or are no files: {', '.join(self._skipped)}")
        if self.failure is not None:
            lines.append(f"toolcrew: the run has ended, and not all that was asked for was kept: {self.failure}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For the command's object."""
        found: dict[str, Any] = {} if self._checkpoint is None else {"checkpoint": asdict(self._checkpoint)}
        if self._skipped:
            found["not_copied"] = self._skipped
        if self.failure is not None:
            found["error"] = {"code": self.failure.code.value, "message": str(self.failure)}
        return found


def check_store() -> None:
    """Raises ConfigError when a checkpoint would go with the stack of this command."""
    settings = load_settings()
    if settings.redis_url is None and settings.workspace_store is None:
        raise ConfigError(
            "a checkpoint would go with the stack of this command: set TOOLCREW_WORKSPACE_STORE to a folder that keeps "
            "it, or TOOLCREW_REDIS_URL to a pool"
        )


@app.command(rich_help_panel=WORK)
def run(
    text: Annotated[str, typer.Argument(help="The instruction.")],
    workspace: Workspace = None,
    restore: Restore = None,
    network: Network = None,
    save_workspace: Annotated[
        Path | None, typer.Option("--save-workspace", help="Copy /workspace here when the run has ended.")
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Keep a checkpoint when the run has ended; its id is told on stderr.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A name at OPENAI_BASE_URL. Without one also local or scripted, which are shipped with toolcrew.",
        ),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", help="native, tags, json, or auto: what the model can do.")
    ] = None,
    max_iterations: Annotated[int, typer.Option("--max-iterations", min=1, help="How often the model may reply.")] = 5,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The run's trajectory as a file, as `toolcrew trace export RUN --to atif` gives it."
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Work one instruction to an answer: steps on stderr, the answer on stdout.

    Exit code 0 answered, 1 error, 2 limit reached, 3 answered though a call was refused.
    """
    view, refused, keeping = RunView(Console(stderr=True)), list[str](), Keeping(save_workspace, checkpoint)
    leavings: list[Leaving] = []

    def on_event(event: RunEvent) -> None:
        leavings[0].on_event(event)
        if isinstance(event, CallFinished) and event.result.metadata.get("was_refused"):
            refused.append(event.result.call_id)
        if not as_json:
            view.on_event(event)

    async def work() -> RunResult:
        if checkpoint:
            check_store()
        leavings.append(leaving := Leaving(output))
        view.asks_elsewhere = asks_elsewhere()
        async with (
            open_client(tenant) as client,
            await client.open_session(workspace, restore=restore, network=network) as session,
        ):
            options = ReActOptions(max_iterations=max_iterations)
            try:
                result = await client.run(
                    text,
                    session=session,
                    model=model,
                    dialect=dialect,
                    options=options,
                    on_event=on_event,
                    shows_output=not as_json,
                    has_trace=True,
                )
            finally:
                leaving.leave(session.tenant)
            await keeping.keep(session)
            return result

    try:
        result = run_work(work(), as_json, reports_waiting=True)
    finally:
        _tell(leavings, as_json)
    typer.echo(
        json.dumps(_run_json(result) | leavings[0].to_json() | keeping.to_json())
        if as_json
        else escape_controls(result.answer)
    )
    if not as_json:
        for line in keeping.lines():
            typer.echo(escape_controls(line), err=True)
    is_kept = keeping.failure is None and (output is None or leavings[0].failure is None)
    raise typer.Exit(_exit_code(result.stop_reason, is_refused=bool(refused)) if is_kept else EXIT_ERROR)


@app.command(rich_help_panel=WORK)
def call(
    name: Annotated[str, typer.Argument(help="The tool.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="k=v pairs, or @file.json, or - for JSON on stdin.")
    ] = None,
    workspace: Workspace = None,
    restore: Restore = None,
    network: Network = None,
    session_id: Annotated[
        str | None,
        typer.Option("--session", help="An open session to run it in, which stays open. Else one for this call alone."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, max=MAX_TIMEOUT_S, help="Seconds the call may run.")
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Output on stderr while the tool runs. Else: when stderr is a terminal, without --json.",
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Run one tool once, through the whole path. The result goes to stdout, unchanged where that is not a terminal.

    Exit code 0 when the call succeeded, 1 when it failed, 3 when it was refused, 4 when the command that it ran ended
    with another exit code than 0.
    """
    console = Console(stderr=True)
    is_live = live if live is not None else console.is_terminal and not as_json

    async def work() -> ToolResult:
        values, is_text = parse_arguments(arguments or [])
        call = build_call(name, values)
        if isinstance(call, ToolResult):
            return call
        if session_id is not None and (workspace, restore, network) != (None, None, None):
            raise ConfigError(
                "an open session has its files and its network: leave --workspace, --restore and --network out, or "
                "--session"
            )
        async with AsyncExitStack() as opened:
            if session_id is not None:
                client = await opened.enter_async_context(open_running("sessions", tenant))
                session = await client.session(session_id, tenant=tenant)
            else:
                client = await opened.enter_async_context(open_client(tenant))
                session = await opened.enter_async_context(
                    await client.open_session(workspace, restore=restore, network=network)
                )
            with ExitStack() as stack:
                on_output = stack.enter_context(LiveOutput(console)).show if is_live else None
                request = Request(call, session.tenant, session.id, timeout_s=timeout, text_arguments=is_text)
                return await session.send(request, on_output)

    result = run_work(work(), as_json, reports_waiting=True)
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        _print_result(result)
    raise typer.Exit(_call_exit_code(result))


@app.command(rich_help_panel=SET_UP)
def up(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Keep tenants, API keys, runs, batches and checkpoints here."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="The port of the API. Default: any free port.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run Redis, sandboxd, workers, Flower and the API in the foreground, until Ctrl-C.

    Without --data everything is deleted when it ends: tenants, API keys, runs, batches. A Redis that TOOLCREW_REDIS_URL
    names is kept. Open sessions always end.
    """

    async def work() -> int:
        settings = load_settings()
        refuse_key(settings)
        is_kept = settings.redis_url is not None or data is not None
        if as_json:
            return await keep(settings, print_json, until_eof=False, data=data, port=port)
        show, show_end = partial(_print_stack, is_kept=is_kept), partial(_print_stack_end, is_kept=is_kept)
        return await keep(settings, show, until_eof=False, announce_end=show_end, data=data, port=port)

    raise typer.Exit(run_work(work(), as_json))


@worker_app.command("start")
def worker_start(
    kind: Annotated[
        Literal["sandbox", "web"] | None, typer.Option("--kind", help="sandbox, or web. Else TOOLCREW_WORKER_KIND.")
    ] = None,
) -> None:
    """A Celery worker in the foreground. Settings: TOOLCREW_REDIS_URL, TOOLCREW_SECRET.

    Of the kind sandbox, beside this host's sandboxd (TOOLCREW_SANDBOXD_SOCKET); or web, with the network and without
    sandboxes.
    """

    async def check() -> None:
        refuse_key(load_settings())

    run_work(check(), as_json=False)
    environment = {"TOOLCREW_WORKER_KIND": kind} if kind is not None else {}
    command = program("workers")
    os.execve(command[0], command, child_environment(environment))


worker_app.command("status")(worker_status)
worker_app.command("drain")(worker_drain)
_OPERATING: dict[str, Callable[..., None]] = {
    "hosts": hosts_list,
    "kill": kill,
    "pause": pause,
    "resume": resume,
    "audit": audit,
    "metrics": metrics_print,
    "doctor": doctor,
}
for command_name, command in _OPERATING.items():
    app.command(command_name, rich_help_panel=OPERATE)(command)


def parse_arguments(texts: list[str]) -> tuple[dict[str, Any], bool]:
    """Arguments of a call, and whether they are text that the schema may coerce. Raises
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
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the arguments cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "the arguments must be one JSON object")
    return value


def _tell(leavings: list[Leaving], as_json: bool) -> None:
    """What was left of a run; also of one that broke off."""
    for leaving in leavings:
        for line in [] if as_json else leaving.lines():
            typer.echo(escape_controls(line), err=True)


def _print_result(result: ToolResult) -> None:
    if not result.success:
        typer.echo(escape_controls(result.text() + suggest_nearest(result.metadata)), err=True)
    elif sys.stdout.isatty():
        typer.echo(escape_controls(result.text()))
    else:
        sys.stdout.buffer.write(result.text().encode(errors="replace"))
        sys.stdout.flush()
    if how := _command_failure(result):
        typer.echo(f"the command ended with {how}", err=True)
    typer.echo(format_times(result), err=True)


def _command_failure(result: ToolResult) -> str:
    """Return how the command that the tool ran failed; empty when it did not, or when the tool runs none."""
    code, signal = result.metadata.get("exit_code"), result.metadata.get("signal")
    return f"exit code {code}" if code else f"signal {signal}" if signal else ""


def _call_exit_code(result: ToolResult) -> int:
    if result.success:
        return EXIT_COMMAND if _command_failure(result) else 0
    return (
        EXIT_REFUSED if result.error_code in (ErrorCode.PERMISSION_DENIED, ErrorCode.SECURITY_REFUSED) else EXIT_ERROR
    )


def _exit_code(reason: StopReason, *, is_refused: bool) -> int:
    if reason.is_limit:
        return EXIT_LIMIT
    if reason is not StopReason.ANSWERED:
        return EXIT_ERROR
    return EXIT_REFUSED if is_refused else 0


def _run_json(result: RunResult) -> dict[str, Any]:
    return {
        "run": result.run,
        "answer": result.answer,
        "stop_reason": result.stop_reason.value,
        "steps": result.steps,
        "usage": {"prompt_tokens": result.usage.prompt_tokens, "completion_tokens": result.usage.completion_tokens},
        "clocks": result.clocks.model_dump(),
        "transcript": list(result.transcript),
    }


def _print_stack_end(*, is_kept: bool) -> None:
    typer.echo(_STACK_END_KEPT if is_kept else _STACK_END_LOST, err=True)


def _print_stack(stack: StackInfo, *, is_kept: bool) -> None:
    typer.echo("the stack is up; Ctrl-C takes it down")
    if not is_kept:
        typer.echo(
            "WARNING: Ctrl-C also deletes its tenants, API keys, runs and batches. To keep them, give a folder with "
            "--data"
        )
    if stack.flower_url is not None:
        typer.echo(f"  Flower    {stack.flower_url}")
    if stack.api_url is not None:
        typer.echo(f"  API       {stack.api_url}  (key: {stack.api_key})")
    typer.echo(f"  sandboxd  {stack.sandboxd_socket}")
    typer.echo(f"  logs      {stack.logs}")
    typer.echo("use it from another terminal:")
    typer.echo(f"  export TOOLCREW_REDIS_URL='{stack.redis_url}'")
    typer.echo("  toolcrew call bash_tool command='uname -a'")
