"""`toolcrew tools`: what the workers can run, and turning it off and on."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from contract.errors import ConfigError
from contract.registry import ToolState
from orchestrator.cli_runner import Json, open_client, run_work
from orchestrator.settings import load_settings
from orchestrator.terminal import escape_controls, table_rows

tools_app = typer.Typer(no_args_is_help=True, help="What the workers can run.")

Name = Annotated[str, typer.Argument(help="The tool.")]


@tools_app.command("ls")
def tools_ls(as_json: Json = False) -> None:
    """Every tool of the pool, on or off. A model is told of those that are enabled."""

    async def work() -> list[ToolState]:
        async with open_client() as client:
            return await client.tool_states()

    rows = [state_json(state) for state in run_work(work(), as_json)]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    short = [{**row, "description": str(row["description"]).split(". ")[0]} for row in rows]
    _print(table_rows(short, ("name", "state", "pool", "description")))


@tools_app.command("show")
def tools_show(name: Name, as_json: Json = False) -> None:
    """One tool: description, parameters, limits, flags, and whether it is enabled."""

    async def work() -> ToolState:
        async with open_client() as client:
            return await client.tool_state(name)

    state = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps(state_json(state)))
        return
    _print(state_lines(state))


@tools_app.command("disable")
def tools_disable(
    name: Name,
    reason: Annotated[str | None, typer.Option("--reason", help="Told to whoever calls the tool nevertheless.")] = None,
    as_json: Json = False,
) -> None:
    """Turn a tool off for the whole deployment, within 2 seconds and until it is enabled again."""

    async def work() -> ToolState:
        _require_pool()
        async with open_client() as client:
            return await client.disable(name, reason=reason)

    _print_switched(name, run_work(work(), as_json), as_json)


@tools_app.command("enable")
def tools_enable(name: Name, as_json: Json = False) -> None:
    """Turn a tool on again."""

    async def work() -> ToolState | None:
        _require_pool()
        async with open_client() as client:
            return await client.enable(name)

    _print_switched(name, run_work(work(), as_json), as_json)


def state_json(state: ToolState) -> dict[str, Any]:
    """A tool with its state as one object; `switch` says who turned it off, when and why."""
    spec = state.spec.model_dump(mode="json")
    return {"name": state.name, "state": state.state, **spec, "switch": state.switch.model_dump() if state.switch is not None else None}


def state_lines(state: ToolState) -> list[str]:
    """A tool with its state as lines for people."""
    spec, switch = state.spec, state.switch
    flags = [flag for flag in ("requires_permission", "dangerous", "read_only", "idempotent") if getattr(spec, flag)]
    default = f"{spec.timeout_s:g} s" if spec.timeout_s is not None else "the caller's default"
    lines = [f"{spec.name}  {state.state}  pool {spec.pool}"]
    if switch is not None:
        at = datetime.fromtimestamp(switch.at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        lines.append(f"turned off by {switch.by or 'somebody'} at {at}" + (f": {switch.reason}" if switch.reason else ""))
    lines += [
        "",
        spec.description,
        "",
        f"limits  time {default}, at most {spec.max_timeout_s:g} s",
        f"flags   {', '.join(flags) or 'none'}",
        "",
    ]
    rows = _parameter_rows(state)
    return lines + (table_rows(rows, ("parameter", "type", "default", "also", "description")) if rows else ["no parameters"])


def _parameter_rows(state: ToolState) -> list[dict[str, Any]]:
    schema, aliases = state.spec.parameters, state.spec.aliases
    properties, required = schema.get("properties"), schema.get("required")
    rows = []
    for name, about in (properties if isinstance(properties, dict) else {}).items():
        known: dict[str, Any] = about if isinstance(about, dict) else {}
        is_required = isinstance(required, list) and name in required
        rows.append(
            {
                "parameter": name,
                "type": _type_words(known),
                "default": "required" if is_required else json.dumps(known["default"]) if "default" in known else "",
                "also": ", ".join(alias for alias, canonical in aliases.items() if canonical == name),
                "description": " ".join(str(known.get("description", "")).split()),
            }
        )
    return rows


def _type_words(schema: dict[str, Any]) -> str:
    """A parameter's type in a few words."""
    if isinstance(schema.get("enum"), list):
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kinds = schema.get("type", "any")
    return " | ".join(str(kind) for kind in kinds) if isinstance(kinds, list) else str(kinds)


def _require_pool() -> None:
    """Raises ConfigError without a pool that outlives this command."""
    if load_settings().redis_url is None:
        raise ConfigError("TOOLCREW_REDIS_URL is not set, and a switch of a stack that ends with this command would mean nothing: set it")


def _print_switched(name: str, state: ToolState | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(state_json(state) if state is not None else {"name": name, "state": "enabled"}))
    elif state is None:
        _print([f"{name} is enabled, and no worker serves it now"])
    else:
        _print([f"{name} is {state.state}"])


def _print(lines: list[str]) -> None:
    """What workers publish is shown escaped: not every tool is ours."""
    for line in lines:
        typer.echo(escape_controls(line))
