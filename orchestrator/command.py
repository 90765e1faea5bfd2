"""`toolcrew`: the first page of its help, and the modules of its commands.

A module is imported when its command runs: importing the modules of all commands takes longer than most commands.
Each command makes one library call. An error is one sentence on stderr, or one object on stdout with --json.
"""

import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import version
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from toolcrew.contract.startup import importing_program


class _CommandSource(NamedTuple):
    """Location of the code of a command, or of a group of commands."""

    module: str
    name: str
    help: str


START, WORK, OPERATE = "Start here", "Runs, sessions and tools", "Operate a deployment"
"""Sections of the help, in this order. Every command is in one section."""
COMMANDS: dict[str, dict[str, _CommandSource]] = {
    START: {
        "up": _CommandSource("cli.up", "up", "Start Redis, workers, Flower and the API here, until Ctrl-C."),
        "run": _CommandSource("cli.run", "run", "Run an agent on one instruction and print its answer."),
        "call": _CommandSource("cli.call", "call", "Call one tool and print its result."),
        "doctor": _CommandSource("cli.doctor", "doctor", "Check this host and the deployment."),
        "batches": _CommandSource("cli.batches", "batches_app", "Run many instructions from a file, and follow them."),
    },
    WORK: {
        "sessions": _CommandSource("cli.sessions", "sessions_app", "Open, list, use and close sessions (sandboxes)."),
        "runs": _CommandSource(
            "cli.runs", "runs_app", "List, show, follow, fork and cancel runs that programs started."
        ),
        "calls": _CommandSource("cli.calls", "calls_app", "List, show and kill calls."),
        "approvals": _CommandSource(
            "cli.approvals", "approvals_app", "List the calls that wait for a decision, and decide."
        ),
        "traces": _CommandSource("cli.traces", "traces_app", "Show and export the traces of runs."),
        "tools": _CommandSource("cli.tools", "tools_app", "List, show, enable and disable tools."),
        "skills": _CommandSource("cli.skills", "skills_app", "List, check, install and remove skills."),
    },
    OPERATE: {
        "hosts": _CommandSource("cli.hosts", "hosts_app", "List workers, and take hosts out of service."),
        "tenants": _CommandSource("cli.tenants", "tenants_app", "List, register, change and pause tenants."),
        "keys": _CommandSource("cli.keys", "keys_app", "Create, list and revoke API keys."),
        "models": _CommandSource("cli.models", "models_app", "List, set and remove model endpoints."),
        "secrets": _CommandSource("cli.secrets", "secrets_app", "Set, list and revoke secrets that sandboxes use."),
        "changes": _CommandSource("cli.changes", "changes_app", "List who changed what."),
        "config": _CommandSource(
            "cli.config", "config_app", "Show settings, write Redis users, re-sign stored records."
        ),
        "serve": _CommandSource("serve", "serve_app", "Run a service: the API, an MCP server, batches, a worker."),
    },
}
_SHELL_ADVICE = "give one. If $(...) or a variable gives it, look at that command or variable alone"
_PLACES = {name: place for places in COMMANDS.values() for name, place in places.items()}


class Commands(TyperGroup):
    """All commands; each is imported when it is first looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_PLACES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in _PLACES:
            self.commands[cmd_name] = _import_command(cmd_name, _PLACES[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # typer suggests only names of commands that are imported.
        if args[0] not in _PLACES:
            nearest = get_close_matches(args[0], _PLACES, 1)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{nearest[0]}'?" if nearest else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as raised:
            # typer's error for an option without its value has a private class.
            error: Any = raised
            if "requires an argument" in str(getattr(error, "message", "")) and hasattr(error, "option_name"):
                error.message = f"{error.option_name} got no value; {_SHELL_ADVICE}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of all commands without the frames of typer, so that it fits a terminal of 28 lines."""
        typer.echo("Usage: toolcrew COMMAND ...  (toolcrew COMMAND --help shows its options)\n")
        for part, places in COMMANDS.items():
            typer.echo(f"{part}:")
            for name, place in places.items():
                typer.echo(f"  {name:<10} {place.help}")


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line."""
    # The command prints the error itself; a log line would print it twice.
    logging.getLogger("toolcrew").setLevel(logging.CRITICAL)
    app()


def import_all() -> TyperGroup:
    """Return the group of all commands, with their modules imported. For generated pages and tests."""
    root = get_command(app)
    assert isinstance(root, Commands)
    for name in _PLACES:
        root.get_command(None, name)
    return root


def _import_command(name: str, place: _CommandSource) -> TyperCommand | TyperGroup:
    with importing_program():
        defined = getattr(import_module(f"toolcrew.orchestrator.{place.module}"), place.name)
    # typer builds commands only as children of a Typer.
    parent = typer.Typer(pretty_exceptions_enable=False)
    parent.callback()(lambda: None)
    if isinstance(defined, typer.Typer):
        parent.add_typer(defined, name=name, help=place.help)
    else:
        parent.command(name)(defined)
    group = get_command(parent)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    _complete(command)
    return command


def _complete(command: Any) -> None:
    """Refuse empty values. Join the lines of each paragraph of the help, which typer breaks where the code does, and
    remove the type <bool> of options that take no value.
    """
    for param in command.params:
        param.callback = partial(_refuse_empty, param.callback)
    paragraphs = cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(text.splitlines()) for text in paragraphs)
    for option in [*command.params, command.get_help_option(typer.Context(command))]:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""
    for inner in command.commands.values() if isinstance(command, TyperGroup) else ():
        _complete(inner)


def _refuse_empty(check: Callable[[Any, Any, Any], Any] | None, ctx: Any, param: Any, value: Any) -> Any:
    """Return the value that `check` makes of the value. Raises BadParameter for an empty text: no name and no id is
    empty, and a shell passes an empty text for a command or a variable that gives nothing.
    """
    is_list = isinstance(value, list | tuple)
    # The arguments of another program may be empty.
    is_foreign = is_list and ctx.ignore_unknown_options
    if "" in (value if is_list else (value,)) and param.default != "" and not is_foreign:
        raise typer.BadParameter(f"it got an empty value; {_SHELL_ADVICE}", ctx, param)
    return value if check is None else check(ctx, param, value)


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
