"""`toolcrew changes`: lists who changed what."""

import json
from typing import Annotated

import typer

from contract.clock import format_instant
from contract.errors import ConfigError, ErrorCode, ToolFailure
from orchestrator.cli.runner import Json, open_client, run_work
from orchestrator.settings import load_settings
from orchestrator.terminal.output import escape_controls, table_rows
from store.audit import ACTIONS, MAX_PAGE, AuditAction, Audited

Tenants = Annotated[str | None, typer.Option("--tenant", help="Only what is about this tenant.")]
Actions = Annotated[
    list[str] | None, typer.Option("--action", help="Only these, as tool.disable; a list with commas, or given again.")
]
Number = Annotated[int, typer.Option("-n", "--number", min=1, max=100_000, help="How many entries.")]


changes_app = typer.Typer(no_args_is_help=True, help="List who changed what.")


@changes_app.callback()
def changes() -> None:
    """List who changed what."""


@changes_app.command("list")
def changes_list(tenant: Tenants = None, action: Actions = None, number: Number = 50, as_json: Json = False) -> None:
    """List who changed tools, tenants, keys, approvals, hosts and calls, the newest change first. For operators."""

    async def work() -> list[Audited]:
        if load_settings().redis_url is None:
            raise ConfigError("the audit is kept in the Redis of a pool, and TOOLCREW_REDIS_URL names none: set it")
        wanted, found, cursor = _parse_actions(action or []), list[Audited](), None
        async with open_client(needs_workers=False) as client:
            log = await client.audit()
            while len(found) < number:
                page = await log.read(cursor, min(MAX_PAGE, number - len(found)), tenant=tenant, actions=wanted)
                found += page.entries
                if (cursor := page.cursor) is None:
                    break
        return found

    found = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps([kept.to_json() | {"at": format_instant(kept.at)} for kept in found]))
        return
    columns = ("at", "actor", "role", "action", "tenant", "target", "details")
    for line in (
        table_rows([_row(kept) for kept in found], columns) if found else ["nothing has been changed yet that fits"]
    ):
        typer.echo(escape_controls(line))


def _parse_actions(texts: list[str]) -> tuple[AuditAction, ...]:
    wanted = {part.strip() for text in texts for part in text.split(",")}
    unknown = sorted(wanted - set(ACTIONS))
    if unknown:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"there is no action '{unknown[0][:64]}': the actions are {', '.join(ACTIONS)}"
        )
    return tuple(action for action in ACTIONS if action in wanted)


def _one_word(value: str) -> str:
    """Quote what has spaces or cannot be printed, so that an entry is one line with clear parts whatever a reason
    contains.
    """
    return value if value.isprintable() and value and " " not in value else json.dumps(value, ensure_ascii=False)


def _row(kept: Audited) -> dict[str, str]:
    entry = kept.entry
    details = "  ".join(f"{name}={_one_word(value)}" for name, value in entry.details.items())
    return {
        "at": format_instant(kept.at),
        "actor": entry.actor.label().replace("\n", " "),
        "role": entry.actor.role,
        "action": entry.action,
        "tenant": entry.tenant or "-",
        "target": entry.target.replace("\n", " ") or "-",
        "details": details,
    }
