"""`toolcrew keys`: create, list and revoke API keys. A key says for which tenant a program calls."""

import json
import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from contract.clock import format_instant
from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.tenancy import DEFAULT_TENANT
from orchestrator.cli.access import open_deployment
from orchestrator.cli.runner import Json, print_lines, run_work
from orchestrator.terminal.output import table_rows
from store.api_keys import ApiKeyRecord, Role

keys_app = typer.Typer(no_args_is_help=True)


@keys_app.command("list")
def keys_list(
    tenant: Annotated[str | None, typer.Argument(help="Only the keys of this tenant.")] = None, as_json: Json = False
) -> None:
    """List the API keys, oldest first. The text of a key cannot be shown again."""

    async def work() -> dict[str, ApiKeyRecord | ConfigError]:
        async with open_deployment("admin") as deployment:
            if tenant not in (None, DEFAULT_TENANT, *await deployment.tenants.all()):
                raise ToolFailure(
                    ErrorCode.UNKNOWN_TENANT, f"tenant {tenant} does not exist: see `toolcrew tenants list`"
                )
            return await deployment.keys.all()

    found = run_work(work(), as_json).items()
    rows = [
        _key_json(key_id, key)
        for key_id, key in found
        if tenant is None or (isinstance(key, ApiKeyRecord) and key.tenant == tenant)
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    shown = [{name: "-" if value in (None, "") else value for name, value in row.items()} for row in rows]
    print_lines(table_rows(shown, ("id", "tenant", "role", "name", "tail", "created", "expires", "state")))


@keys_app.command("create")
def keys_create(
    tenant: Annotated[str, typer.Argument(help="The tenant that the key is for.")],
    role: Annotated[
        Role,
        typer.Option(
            "--role",
            help="tenant: call for this tenant; operator: call for every tenant; admin: also change tenants and keys.",
        ),
    ] = "tenant",
    name: Annotated[str, typer.Option("--name", help="A name that describes the key.")] = "",
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", help="Lifetime of the key: 90d, 12h, 30m or 60s. Default: until it is revoked."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a key and print it on stdout. It cannot be printed again."""

    async def work() -> dict[str, Any]:
        ttl_s = _parse_duration(expires_in) if expires_in is not None else None
        async with open_deployment("admin") as deployment:
            created = await deployment.keys.add(tenant, role, name=name, ttl_s=ttl_s)
        return {"key": created.text, **_key_json(created.id, created.record)}

    created = run_work(work(), as_json)
    typer.echo(json.dumps(created) if as_json else created["key"])
    if not as_json:
        until = f"until {created['expires']}" if created["expires"] else "until it is revoked"
        typer.echo(
            f"key {created['id']} of tenant {tenant}, role {role}, {until}; store it now: it cannot be shown again",
            err=True,
        )


@keys_app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `list` shows it.")], as_json: Json = False
) -> None:
    """Revoke a key. Every process rejects it within 2 seconds."""

    async def work() -> None:
        async with open_deployment("admin") as deployment:
            if not await deployment.keys.revoke(key_id):
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS, f"there is no key {key_id[:64]}: see `toolcrew keys list`"
                )

    run_work(work(), as_json)
    typer.echo(json.dumps({"id": key_id, "state": "revoked"}) if as_json else f"{key_id} is revoked")


def _key_json(key_id: str, key: ApiKeyRecord | ConfigError) -> dict[str, Any]:
    if isinstance(key, ConfigError):
        return {"id": key_id, "state": str(key)}
    is_over = key.expires_at is not None and key.expires_at <= datetime.now(UTC).timestamp()
    fields = {"id": key_id, "tenant": key.tenant, "role": key.role, "name": key.name, "tail": key.tail}
    return {
        **fields,
        "created": _format_optional(key.created_at),
        "expires": _format_optional(key.expires_at),
        "state": "expired" if is_over else "valid",
    }


def _format_optional(at: float | None) -> str | None:
    return None if at is None else format_instant(at)


def _parse_duration(text: str) -> float:
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if found is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"--expires-in: '{text[:32]}' is not a duration: write 90d, 12h, 30m or 60s"
        )
    return float(int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]])
