"""`toolcrew`: the commands, one module for each noun.

Each command makes one library call. An error is one sentence on stderr, or one object on stdout with --json.
"""

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestrator.cli.approvals import approvals_app
from orchestrator.cli.batches import batches_app
from orchestrator.cli.call import call
from orchestrator.cli.calls import calls_app
from orchestrator.cli.changes import changes_app
from orchestrator.cli.config import config_app
from orchestrator.cli.doctor import doctor
from orchestrator.cli.hosts import hosts_app
from orchestrator.cli.keys import keys_app
from orchestrator.cli.models import models_app
from orchestrator.cli.run import run
from orchestrator.cli.runs import runs_app
from orchestrator.cli.secrets import secrets_app
from orchestrator.cli.sessions import sessions_app
from orchestrator.cli.skills import skills_app
from orchestrator.cli.tenants import tenants_app
from orchestrator.cli.tools import tools_app
from orchestrator.cli.traces import traces_app
from orchestrator.cli.up import up

START, WORK, OPERATE = "Start here", "Runs, sessions and tools", "Operate a deployment"
"""Sections of the help, in this order. Every command is in one section."""
_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    START: {"up": up, "run": run, "call": call, "doctor": doctor, "batches": batches_app},
    WORK: {
        "sessions": sessions_app,
        "runs": runs_app,
        "calls": calls_app,
        "approvals": approvals_app,
        "traces": traces_app,
        "tools": tools_app,
        "skills": skills_app,
    },
    OPERATE: {
        "hosts": hosts_app,
        "tenants": tenants_app,
        "keys": keys_app,
        "models": models_app,
        "secrets": secrets_app,
        "changes": changes_app,
        "config": config_app,
    },
}


class _FirstPage(TyperGroup):
    """Print the help of all commands without the frames of typer, so that it fits a terminal of 28 lines."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        typer.echo("Usage: toolcrew COMMAND ...  (toolcrew COMMAND --help shows its options)\n")
        for part in (START, WORK, OPERATE):
            typer.echo(f"{part}:")
            for name, command in self.commands.items():
                if getattr(command, "rich_help_panel", None) == part:
                    typer.echo(f"  {name:<10} {command.get_short_help_str(66)}")


app = typer.Typer(cls=_FirstPage, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line."""
    # The command prints the error itself; a log line would print it twice.
    logging.getLogger("orchestrator").setLevel(logging.CRITICAL)
    app()


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"toolcrew {version('toolcrew')}")
        raise typer.Exit


@app.callback()
def begin(
    is_version_asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run the tools of LLM agents at scale, on the pool that TOOLCREW_REDIS_URL names.

    Without that variable, `run`, `call`, `tools` and `batches submit` start an embedded pool.
    """


for part, commands in _COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=part)
        else:
            app.command(name, rich_help_panel=part)(command)
