"""`toolcrew config`: what the environment sets."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from orchestrator.cli.runner import EXIT_ERROR, Json, run_work
from orchestrator.operations.setting_list import read_settings
from orchestrator.terminal.output import escape_controls

config_app = typer.Typer(no_args_is_help=True, help="Settings, which are all environment variables.")

MAX_CHARS = 100
"""Of a value in a terminal; --json gives all of it."""


@config_app.command("show")
def config_show(
    origin: Annotated[
        bool, typer.Option("--origin", help="Say of each where it comes from, and what it is by default.")
    ] = False,
    is_set: Annotated[bool, typer.Option("--set", help="Only those that the environment sets.")] = False,
    as_json: Json = False,
) -> None:
    """Every setting of every process of this release, as this environment makes it; secrets are masked.

    A process elsewhere has an environment of its own: ask it there. Exit code 1 when a process would not start with
    these settings.
    """
    told = run_work(read_settings(), as_json)
    if is_set:
        told = [{**one, "settings": [row for row in one["settings"] if row["origin"] != "default"]} for one in told]
    if as_json:
        typer.echo(json.dumps({"processes": told}))
    else:
        for line in _lines(told, has_origin=origin):
            typer.echo(escape_controls(line))
    raise typer.Exit(EXIT_ERROR if any(one["problem"] for one in told) else 0)


def _lines(told: list[dict[str, Any]], *, has_origin: bool) -> Iterator[str]:
    width = max((len(row["name"]) for one in told for row in one["settings"]), default=0)
    for number, one in enumerate(told):
        if number:
            yield ""
        yield f"{one['process']}:"
        if one["problem"]:
            yield f"  would not start: {one['problem']}"
        for row in one["settings"]:
            yield f"  {row['name']:<{width}}  {_value(row)}{_origin(row) if has_origin else ''}"


def _value(row: Mapping[str, Any]) -> str:
    value = row["value"]
    if value is None:
        return "(not set)"
    text = str(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} [{len(text)} characters; --json has all]"


def _origin(row: Mapping[str, Any]) -> str:
    if row["origin"] == "default":
        return "  [default]"
    default = row["default"]
    return f"  [{row['origin']}; default: {'(none)' if default is None else default}]"
