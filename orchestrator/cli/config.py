"""`toolcrew config`: what the environment sets."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from contract.errors import ConfigError, OperatorError
from contract.setting_rows import build_rows
from orchestrator.cli.runner import EXIT_ERROR, Json, run_work
from orchestrator.settings import child_environment, load_settings, program
from orchestrator.terminal.output import escape_controls
from telemetry.settings import load_tracing_settings

config_app = typer.Typer(no_args_is_help=True, help="Settings, which are all environment variables.")

MAX_CHARS = 100
"""Of a value in a terminal; --json gives all of it."""
ANSWER_S = 30.0
PROCESSES: dict[str, Callable[[], BaseModel]] = {
    "orchestrator": load_settings,
    "tracing, of all": load_tracing_settings,
}


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


async def read_settings() -> list[dict[str, Any]]:
    """Return `process`, `settings` (name, value, default, origin) and `problem` of each process: why it cannot start,
    or "". Raises OperatorError.
    """
    return [_describe(process, load) for process, load in PROCESSES.items()] + await _read_worker_settings()


def _describe(process: str, load: Callable[[], BaseModel]) -> dict[str, Any]:
    try:
        return {"process": process, "problem": "", "settings": [asdict(row) for row in build_rows(load())]}
    except ConfigError as error:
        return {"process": process, "problem": str(error), "settings": []}


async def _read_worker_settings() -> list[dict[str, Any]]:
    """Ask a process of the worker side: neither side knows the other's settings."""
    process = await asyncio.create_subprocess_exec(
        *program("workers.setting_list"),
        env=child_environment({}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            out, err = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise OperatorError(
                f"the workers did not report their settings within {ANSWER_S:g} s: try again when the host is less busy"
            ) from None
        raise
    if process.returncode:
        last_words = err.decode(errors="replace").strip()[-300:]
        raise OperatorError(
            f"the workers did not report their settings ({last_words}): install toolcrew again, with the extra 'worker'"
        )
    return list(json.loads(out))
