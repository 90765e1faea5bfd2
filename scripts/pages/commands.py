"""Build docs/commands.md from the commands: every command with its purpose, arguments and options."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from toolcrew.orchestrator.cli.runner import EXIT_COMMAND, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_LIMIT, EXIT_REFUSED
from toolcrew.orchestrator.command import import_all

_KINDS = {int: "NUMBER", float: "NUMBER", Path: "PATH"}
PAGE = "commands.md"
INTRO = f"""\
# Commands

Made from the commands by `scripts/reference.py`; `toolcrew COMMAND --help` prints the same. [Settings](settings.md) lists the environment variables.

Listings take `--json` and print `{{"runs": [...], "next_cursor": null}}`, with the name of their items; times are ISO 8601, UTC. An error is one sentence on stderr that says what to do; with `--json` it is an object on stdout,
`{{"error": {{"code": ..., "message": ...}}}}` ([errors.md](errors.md)).

| exit code | means |
|---|---|
| 0 | success |
| {EXIT_ERROR} | the command failed |
| {EXIT_LIMIT} | a limit of the run was reached; or the command line cannot be read |
| {EXIT_REFUSED} | a call was refused: by a person, a rule or a policy |
| {EXIT_COMMAND} | `toolcrew call`: the call succeeded, and the command that it ran ended with another exit code than 0 |
| {EXIT_INTERRUPTED} | interrupted by Ctrl-C, after what ran was stopped |
| 129, 143 | the same by SIGHUP, SIGTERM |

Where a command differs it says so below.

## Which commands need only an address and a key?

Set `TOOLCREW_URL` and `TOOLCREW_API_KEY` to use the [HTTP API](api.md). If `TOOLCREW_REDIS_URL` is set too, commands use Redis. Without both, `call`, `run`, `tools`, `skills` and `models` start an embedded stack.

| commands | with `TOOLCREW_URL` |
|---|---|
| `call`, `run` | yes; `--workspace` takes a folder; `run` is executed by the orchestrators of the service |
| `sessions` | yes; `exec --live` prints at the end |
| `calls`, `runs`, `tools list` and `show`, `skills list`, `models list`, `tenants usage`, `keys show` | yes; `runs show --events` after the end of the run only |
| `batches list`, `show`, `cancel`, `delete`, and `export` to stdout | yes; without `--logs`, `--follow` and files |
| `serve mcp` over stdio | yes; calls that need approval ask the client, not the queue |
| `tools enable` and `disable` | yes, with an operator's key |
| `batches submit`, `resume` and `rollouts`, `skills install` and `remove`, `approvals`, `secrets` | no; use `toolcrew.Client` |
| `tenants`, `keys`, `hosts`, `models set`, `config`, `doctor`, `serve`, `up` and the rest | no: they are for operators. An operator's key can send many of the same requests ([HTTP API](http-api.md)) |
"""


def build_page() -> str:
    """Return the text of the page."""
    return INTRO + "".join(_section(path, command) for path, command in _leaves("toolcrew", import_all()))


def _leaves(path: str, command: TyperCommand | TyperGroup) -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    """Yield every command without subcommands, in the order of the listing."""
    if not isinstance(command, TyperGroup):
        yield path, command
        return
    for name in sorted(command.commands):
        inner = command.commands[name]
        if isinstance(inner, TyperCommand | TyperGroup) and not inner.hidden:
            yield from _leaves(f"{path} {name}", inner)


def _section(path: str, command: TyperCommand | TyperGroup) -> str:
    arguments = [param for param in command.params if isinstance(param, TyperArgument)]
    options = [param for param in command.params if isinstance(param, TyperOption) and not param.hidden]
    usage = " ".join([path, *([] if not options else ["[OPTIONS]"]), *(_metavar(argument) for argument in arguments)])
    rows = [f"| `{_metavar(argument)}` |  | {_cell(getattr(argument, 'help', None))} |\n" for argument in arguments]
    rows += [f"| {_names(option)} | {_default(option)} | {_cell(option.help)} |\n" for option in options]
    table = "\n| option | default | means |\n|---|---|---|\n" + "".join(rows) if rows else ""
    return f"\n## {path}\n\n`{usage}`\n\n{inspect.cleandoc(command.help or '')}\n{table}"


def _metavar(argument: TyperArgument) -> str:
    name = (argument.metavar or argument.name or "").upper().strip("[]")
    many = "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _names(option: TyperOption) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    value = "\\|".join(_words_of(option.type_descriptor.annotation)) if option.metavar is None else option.metavar
    return f"{names} {value}" + (" (repeatable)" if option.multiple else "")


def _words_of(kind: Any) -> list[str]:
    """Return the possible values of a parameter, or its type."""
    kinds = [arg for arg in get_args(kind) if arg is not type(None)]
    if get_origin(kind) is Literal:
        return [str(value) for value in kinds]
    return _words_of(kinds[0]) if kinds else [_KINDS.get(kind, "TEXT")]


def _default(option: TyperOption) -> str:
    value = option.default
    if option.required:
        return "must be given"
    return "" if value in (None, False, (), [], "") or callable(value) else f"`{value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ").replace("[", "\\[")
