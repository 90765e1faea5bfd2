"""`toolcrew run`: run an agent on one instruction in a new session."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from toolcrew.contract.errors import ConfigError, OperatorError, ToolFailure
from toolcrew.contract.run_events import CallFinished, RunEvent
from toolcrew.contract.run_spec import RunBody, RunLimits
from toolcrew.contract.session_spec import DEFAULT_TTL_S, MAX_TTL_S, SessionSpec
from toolcrew.contract.session_views import Checkpoint
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.cli.access import is_over_http
from toolcrew.orchestrator.cli.approvals import asks_elsewhere
from toolcrew.orchestrator.cli.batches_options import check_format
from toolcrew.orchestrator.cli.clients import open_tenant_client, show_waiting
from toolcrew.orchestrator.cli.limit_options import with_common_limits
from toolcrew.orchestrator.cli.run_files import RunFiles
from toolcrew.orchestrator.cli.runner import (
    EXIT_ERROR,
    EXIT_LIMIT,
    EXIT_REFUSED,
    Json,
    Tenant,
    exit_code_of,
    fail,
    run_work,
)
from toolcrew.orchestrator.cli.session_options import with_session_options
from toolcrew.orchestrator.loop.limits import StopReason
from toolcrew.orchestrator.sdk.tenant_client import TenantSession
from toolcrew.orchestrator.terminal.output import RunPrinter, escape_controls
from toolcrew.store.run_records import DurableRun, RunEnd


class WorkspaceSaver:
    """Saves a session when its run has ended: a copy of the workspace in a local folder, a checkpoint, both, or
    nothing. A copy that fails is reported in `failure`, so that the answer is not lost.
    """

    def __init__(self, folder: Path | None, wants_checkpoint: bool) -> None:
        self._folder = folder
        self._wants_checkpoint = wants_checkpoint
        self._skipped: list[str] = []
        self._checkpoint: Checkpoint | None = None
        self.failure: ToolFailure | OperatorError | None = None

    async def save(self, session: TenantSession) -> None:
        """Copy the workspace and take the checkpoint, as requested. Tries both, even if one fails."""
        for work in (self._save_checkpoint, self._save_copy):
            try:
                await work(session)
            except (ToolFailure, OperatorError) as failure:
                self.failure = failure

    async def _save_checkpoint(self, session: TenantSession) -> None:
        if self._wants_checkpoint:
            self._checkpoint = await session.checkpoint()

    async def _save_copy(self, session: TenantSession) -> None:
        if self._folder is None:
            return
        try:
            self._skipped = await session.export(self._folder)
        except OSError as error:
            raise ConfigError(
                f"/workspace cannot be copied to {self._folder} ({error}): give another folder"
            ) from error

    def lines(self) -> list[str]:
        """Return the lines for the terminal that say what was saved or what failed."""
        lines = []
        if self._checkpoint is not None:
            lines.append(f"checkpoint {self._checkpoint.id} ({self._checkpoint.bytes} bytes)")
        if self._skipped:
            lines.append(
                f"not copied, because they point out of the workspace or are not files: {', '.join(self._skipped)}"
            )
        if self.failure is not None:
            lines.append(f"toolcrew: the run has ended, but the workspace was not saved completely: {self.failure}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the command's JSON object that say what was saved."""
        fields: dict[str, Any] = {} if self._checkpoint is None else {"checkpoint": self._checkpoint.model_dump()}
        if self._skipped:
            fields["not_copied"] = self._skipped
        if self.failure is not None:
            fields["error"] = {"code": self.failure.code.value, "message": str(self.failure)}
        return fields


def check_store() -> None:
    """Raise ConfigError if a checkpoint would be deleted together with the embedded stack of this command."""
    settings = load_settings()
    if settings.redis_url is None and settings.workspace_store is None and not is_over_http():
        raise ConfigError(
            "the checkpoint would be deleted with the embedded stack of this command: set TOOLCREW_WORKSPACE_STORE to "
            "a folder for it, or TOOLCREW_REDIS_URL to a pool"
        )


@with_session_options
@with_common_limits
def run(
    text: Annotated[str, typer.Argument(help="The instruction.")],
    *,
    spec: SessionSpec,
    save_workspace: Annotated[
        Path | None, typer.Option("--save-workspace", help="Copy /workspace to this folder when the run has ended.")
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Save a checkpoint when the run has ended, and print its id on stderr.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A model endpoint, or a model at OPENAI_BASE_URL. Without that URL: `local` or `scripted`, "
            "shipped with toolcrew.",
        ),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", help="The tool call format of the model: native, tags, json, or auto.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="The tools and texts for the model: small, standard, or auto (default)."),
    ] = None,
    limits: RunLimits,
    keep_states: Annotated[
        bool,
        typer.Option("--keep-states", help="Keep the session's state after each step, so that the run can be forked."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the trajectory to this file, as `toolcrew traces export RUN --to atif` does.",
        ),
    ] = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Run an agent on one instruction and print its answer.

    Steps are printed on stderr, the answer on stdout. If both are a terminal, the answer is printed once.

    Exit code 0: answered; 1: error; 2: limit reached; 3: answered, but a call was refused.
    """
    check_format(dialect, profile)
    view, refused, saver = RunPrinter(Console(stderr=True)), list[str](), WorkspaceSaver(save_workspace, checkpoint)
    run_files: list[RunFiles] = []

    def on_event(event: RunEvent) -> None:
        run_files[0].on_event(event)
        if isinstance(event, CallFinished) and event.result.metadata.get("was_refused"):
            refused.append(event.result.call_id)
        if not as_json:
            view.on_event(event)

    body = RunBody(
        instruction=text,
        model=model or load_settings().model,
        dialect=cast(Any, dialect),
        profile=cast(Any, profile),
        limits=limits,
        keep_states=keep_states,
    )
    ttl_s = MAX_TTL_S if keep_states else DEFAULT_TTL_S

    async def work() -> tuple[DurableRun, Sequence[dict[str, Any]]]:
        if checkpoint:
            check_store()
        if keep_states and load_settings().redis_url is None and not is_over_http():
            raise ConfigError(
                "the states would be deleted with the embedded stack of this command: set TOOLCREW_REDIS_URL to a pool"
            )
        run_files.append(files := RunFiles(output))
        view.asks_elsewhere = asks_elsewhere()
        async with (
            open_tenant_client(tenant) as client,
            await client.open_session_from(spec.model_copy(update={"ttl_s": ttl_s})) as session,
        ):
            try:
                result = await client.run_views.execute(body, session.id, on_event)
            finally:
                files.write(session.tenant)
            await saver.save(session)
            return result, await client.run_views.transcript(result.id) if as_json else ()

    try:
        with show_waiting():
            result, transcript = run_work(work(), as_json)
    finally:
        _print_files(run_files, as_json)
    end = result.end or RunEnd()
    if end.stop_reason is None and end.failure is not None:
        fail(end.failure.message, end.failure.code, exit_code_of(end.failure.code), as_json)
    if as_json:
        typer.echo(json.dumps(_run_json(result.id, end, transcript) | run_files[0].to_json() | saver.to_json()))
    else:
        # On a terminal, the answer is there already if stderr goes to the same terminal.
        if not (sys.stdout.isatty() and view.has_shown(end.answer)):
            typer.echo(escape_controls(end.answer))
        for line in saver.lines():
            typer.echo(escape_controls(line), err=True)
    is_saved = saver.failure is None and (output is None or run_files[0].failure is None)
    reason = StopReason(end.stop_reason) if end.stop_reason is not None else StopReason.ANSWERED
    raise typer.Exit(_exit_code(reason, is_refused=bool(refused)) if is_saved else EXIT_ERROR)


def _print_files(run_files: list[RunFiles], as_json: bool) -> None:
    # Print the lines also after a failure of the run, because the trace shows the cause.
    for files in run_files:
        for line in [] if as_json else files.lines():
            typer.echo(escape_controls(line), err=True)


def _exit_code(reason: StopReason, *, is_refused: bool) -> int:
    if reason.is_limit:
        return EXIT_LIMIT
    if reason is not StopReason.ANSWERED:
        return EXIT_ERROR
    return EXIT_REFUSED if is_refused else 0


def _run_json(run: str, end: RunEnd, transcript: Sequence[dict[str, Any]]) -> dict[str, Any]:
    fields = end.model_dump(include={"answer", "stop_reason", "steps", "usage", "clocks", "call_usage", "sandbox_s"})
    return {"id": run, **fields, "transcript": list(transcript)}
