"""`toolcrew changes`: list the entries of the audit."""

import json
from typing import Annotated, Any

import typer

from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.cli.access import refuse_over_http
from toolcrew.orchestrator.cli.clients import open_client
from toolcrew.orchestrator.cli.runner import Json, Output, as_command, list_json, list_output
from toolcrew.store.audit import ACTIONS, MAX_PAGE, AuditAction, AuditEntry

Tenants = Annotated[str | None, typer.Option("--tenant", help="Only changes that concern this tenant.")]
Actions = Annotated[
    list[str] | None,
    typer.Option(
        "--action", help="Only these actions, such as tool.disable. Separate them with commas, or repeat the option."
    ),
]
Number = Annotated[int, typer.Option("-n", "--number", min=1, max=100_000, help="Largest number of entries to list.")]


changes_app = typer.Typer(no_args_is_help=True)


@changes_app.callback()
def changes() -> None:
    """List who changed what."""


@changes_app.command("list")
@as_command
async def changes_list(
    tenant: Tenants = None,
    action: Actions = None,
    number: Number = 50,
    cursor: Annotated[str | None, typer.Option("--cursor", help="The `next_cursor` of the previous page.")] = None,
    as_json: Json = False,
) -> Output:
    """List changes of tools, tenants, keys, approvals, hosts and calls, newest first. Needs an operator's key."""
    refuse_over_http("this command")
    if load_settings().redis_url is None:
        raise ConfigError("TOOLCREW_REDIS_URL is not set. Set it to the Redis of the pool whose audit you want to read")
    actions, entries = _parse_actions(action or []), list[AuditEntry]()
    async with open_client(needs_workers=False) as client:
        log = await client.audit()
        while len(entries) < number:
            page = await log.read(cursor, min(MAX_PAGE, number - len(entries)), tenant=tenant, actions=actions)
            entries += page.entries
            if (cursor := page.cursor) is None:
                break
    data = list_json("changes", [entry.model_dump(mode="json") for entry in entries], cursor)
    columns = ("at", "actor", "role", "action", "tenant", "target", "details")
    return list_output(data, [_row(entry) for entry in entries], columns, empty="no change matches")


def _parse_actions(texts: list[str]) -> tuple[AuditAction, ...]:
    names = {part.strip() for text in texts for part in text.split(",")}
    unknown = sorted(names - set(ACTIONS))
    if unknown:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"there is no action '{unknown[0][:64]}'. Use one of {', '.join(ACTIONS)}"
        )
    return tuple(action for action in ACTIONS if action in names)


def _quote_value(value: str) -> str:
    # Quotes keep the parts of a line apart and an entry on one line: a reason may contain spaces and line feeds.
    return value if value.isprintable() and value and " " not in value else json.dumps(value, ensure_ascii=False)


def _row(entry: AuditEntry) -> dict[str, Any]:
    details = "  ".join(f"{name}={_quote_value(value)}" for name, value in entry.details.items())
    return {
        "at": format_instant(entry.at),
        "actor": entry.actor.label().replace("\n", " "),
        "role": entry.actor.role,
        "action": entry.action,
        "tenant": entry.tenant or "-",
        "target": entry.target.replace("\n", " ") or "-",
        "details": details,
    }
