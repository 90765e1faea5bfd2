"""`toolcrew keys`: create, list and revoke API keys. A key says for which tenant a program calls."""

import re
from typing import Annotated

import typer

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.cli.access import open_deployment
from toolcrew.orchestrator.cli.clients import open_running
from toolcrew.orchestrator.cli.runner import Json, Output, as_command, list_json, list_output
from toolcrew.orchestrator.operations.views import view_key
from toolcrew.store.api_keys import ApiKeyRecord, Role

keys_app = typer.Typer(no_args_is_help=True)


@keys_app.command("list")
@as_command
async def keys_list(
    tenant: Annotated[str | None, typer.Argument(help="Only the keys of this tenant.")] = None, as_json: Json = False
) -> Output:
    """List the API keys, oldest first. The text of a key cannot be shown again."""
    async with open_deployment("admin") as deployment:
        if tenant not in (None, *await deployment.tenants.all()):
            raise ToolFailure(ErrorCode.UNKNOWN_TENANT, f"tenant {tenant} does not exist: see `toolcrew tenants list`")
        found = await deployment.keys.all()
    rows = [
        view_key(key_id, key).model_dump(mode="json")
        for key_id, key in found.items()
        if tenant is None or (isinstance(key, ApiKeyRecord) and key.tenant == tenant)
    ]
    shown = [{name: value or "-" for name, value in row.items()} for row in rows]
    return list_output(
        list_json("keys", rows), shown, ("id", "tenant", "role", "name", "tail", "created_at", "expires_at", "state")
    )


@keys_app.command("show")
@as_command
async def keys_show(as_json: Json = False) -> Output:
    """Show the key in TOOLCREW_API_KEY: its tenant, its role and its end."""
    async with open_running("keys", None) as client:
        fields = (await client.key()).model_dump(mode="json")
    return Output(fields, [f"{name:<12}{value}" for name, value in fields.items() if value not in (None, "")])


@keys_app.command("create")
@as_command
async def keys_create(
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
) -> Output:
    """Create a key and print it on stdout. It cannot be printed again."""
    ttl_s = _parse_duration(expires_in) if expires_in is not None else None
    async with open_deployment("admin") as deployment:
        created = await deployment.keys.add(tenant, role, name=name, ttl_s=ttl_s)
    fields = {"key": created.text, **view_key(created.id, created.record).model_dump(mode="json")}
    until = f"until {fields['expires_at']}" if fields["expires_at"] else "until it is revoked"
    note = f"key {created.id} of tenant {tenant}, role {role}, {until}; store it now: it cannot be shown again"
    return Output(fields, [created.text], [note])


@keys_app.command("revoke")
@as_command
async def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `list` shows it.")], as_json: Json = False
) -> Output:
    """Revoke a key. Every process rejects it within 2 seconds."""
    async with open_deployment("admin") as deployment:
        if not await deployment.keys.revoke(key_id):
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"there is no key {key_id[:64]}: see `toolcrew keys list`")
    return Output({"id": key_id, "state": "revoked"}, [f"{key_id} is revoked"])


def _parse_duration(text: str) -> float:
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if found is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"--expires-in: '{text[:32]}' is not a duration: write 90d, 12h, 30m or 60s"
        )
    return float(int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]])
