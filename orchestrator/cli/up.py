"""`toolcrew up`: run a whole deployment on this host, in the foreground."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.cli.runner import Json, refuse_key, run_work
from toolcrew.orchestrator.operations.local_stack import WORKERS_ONLY, StackInfo, keep, print_json

_STACK_END_LOST = (
    "stopping: running calls are stopped, and the sessions and the embedded Redis with its tenants, API keys, runs and "
    "batches are deleted"
)
_STACK_END_KEPT = (
    "stopping: running calls are stopped and the sessions of this stack are deleted; "
    "tenants, API keys, runs and batches are kept"
)


def up(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Store tenants, API keys, runs, batches, uploads and checkpoints in this folder.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="The port of the API. Default: any free port.")
    ] = None,
    workers_only: Annotated[
        bool, typer.Option(WORKERS_ONLY, help="Start Redis and workers, without Flower and the API.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start Redis, workers, Flower and the API here, until Ctrl-C.

    Without --data, all tenants, API keys, runs and batches are deleted at the end. Data in a Redis that
    TOOLCREW_REDIS_URL names is kept. Open sessions always end.
    """

    async def work() -> int:
        settings = load_settings()
        refuse_key(settings)
        is_kept = settings.redis_url is not None or data is not None
        if as_json:
            return await keep(settings, print_json, until_eof=False, data=data, port=port, workers_only=workers_only)
        show, show_end = partial(_print_stack, is_kept=is_kept), partial(_print_stack_end, is_kept=is_kept)
        return await keep(
            settings,
            show,
            until_eof=False,
            announce_end=show_end,
            data=data,
            port=port,
            workers_only=workers_only,
        )

    raise typer.Exit(run_work(work(), as_json))


def _print_stack_end(*, is_kept: bool) -> None:
    typer.echo(_STACK_END_KEPT if is_kept else _STACK_END_LOST, err=True)


def _print_stack(stack: StackInfo, *, is_kept: bool) -> None:
    typer.echo("the stack is up; Ctrl-C stops it")
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
    if stack.workspace_store is not None:
        typer.echo(f"  export TOOLCREW_WORKSPACE_STORE='{stack.workspace_store}'")
    typer.echo("  toolcrew call bash_tool command='uname -a'")
    if stack.api_url is not None:
        typer.echo("or from a program with toolcrew.Client:")
        typer.echo(f"  export TOOLCREW_URL='{stack.api_url}' TOOLCREW_API_KEY='{stack.api_key}'")
