"""`toolcrew tenants`: who is served, what each may have, and the keys by which programs show for whom they call."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from contract.clock import format_instant
from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.tenancy import DEFAULT_TENANT, TenantPolicy
from orchestrator.cli.access import open_deployment
from orchestrator.cli.policy_options import apply_options, policy_lines, read_policy, with_policy_options
from orchestrator.cli.runner import Json, run_work
from orchestrator.terminal.output import escape_controls, table_rows
from store.api_keys import ApiKeyRecord, Role
from store.catalog import check_tools
from store.overview import OverviewReader, TenantSummary

tenants_app = typer.Typer(no_args_is_help=True, help="Who is served, and what each may have.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys: who may call for which tenant.")
tenants_app.add_typer(keys_app, name="keys")

Name = Annotated[str, typer.Argument(help="The tenant.")]
Source = Annotated[
    Path | None, typer.Option("--from", help="A JSON file with all of the policy; other options change what it says.")
]
Unset = Annotated[
    list[str] | None, typer.Option("--unset", help="An option that is to be as by default again, by its name.")
]


@tenants_app.command("ls")
def tenants_ls(as_json: Json = False) -> None:
    """Every registered tenant, and the default one. Until the first is registered, any name is served as the default
    one.
    """

    async def work() -> tuple[dict[str, TenantPolicy | ConfigError], dict[str, TenantSummary]]:
        async with open_deployment("operator") as deployment:
            policies = {DEFAULT_TENANT: TenantPolicy(), **await deployment.tenants.all()}
            reader = OverviewReader(deployment.redis, deployment.broker.deployment, deployment.signing_keys)
            return policies, {tenant.tenant: tenant for tenant in (await reader.read()).tenants}

    found, looks = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps([_tenant_json(name, policy) for name, policy in found.items()]))
        return
    columns = ("name", "weight", "in-flight", "waiting", "rate", "sandboxes", "class", "state", "tools")
    _print(table_rows([_row(name, policy, looks.get(name)) for name, policy in found.items()], columns))


@tenants_app.command("add")
@with_policy_options
def tenants_add(name: Name, *, given: Mapping[str, Any], source: Source = None, as_json: Json = False) -> None:
    """Register a tenant. From the first one on only registered ones, and the default one, are served."""

    async def work() -> tuple[TenantPolicy, bool, list[str]]:
        policy = apply_options(read_policy(source) if source is not None else TenantPolicy(), given)
        async with open_deployment("admin") as deployment:
            is_first = not set(await deployment.tenants.all()) - {DEFAULT_TENANT}
            warnings = await check_tools(deployment.redis, deployment.broker.deployment, name, policy)
            await deployment.tenants.add(name, policy)
            return policy, is_first, warnings

    policy, is_first, warnings = run_work(work(), as_json)
    _warn(warnings)
    _print_policy(f"{name} is registered", name, policy, as_json)
    if is_first and not as_json:
        typer.echo(f"it is the first: from now on only registered tenants and {DEFAULT_TENANT} are served", err=True)


@tenants_app.command("set")
@with_policy_options
def tenants_set(
    name: Name, *, given: Mapping[str, Any], source: Source = None, unset: Unset = None, as_json: Json = False
) -> None:
    """Change what a tenant may have, within 2 seconds everywhere. What is not named stays as it is."""

    async def work() -> tuple[TenantPolicy, list[str]]:
        if source is None and not unset and all(value is None for value in given.values()):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, "nothing is named that is to be changed: see `toolcrew tenants set --help`"
            )
        async with open_deployment("admin") as deployment:
            # Only what is given now: a tool that was removed since must not stop other changes.
            wanted = apply_options(read_policy(source) if source is not None else TenantPolicy(), given, unset or ())
            warnings = await check_tools(deployment.redis, deployment.broker.deployment, name, wanted)
            if source is None:
                return await deployment.tenants.change(
                    name, lambda policy: apply_options(policy, given, unset or ())
                ), warnings
            await deployment.tenants.replace(name, wanted)
            return wanted, warnings

    policy, warnings = run_work(work(), as_json)
    _warn(warnings)
    _print_policy(f"{name} has now", name, policy, as_json)


@tenants_app.command("rm")
def tenants_rm(name: Name, as_json: Json = False) -> None:
    """Remove a tenant and revoke its API keys. Its open sessions expire. The name cannot be registered again: the
    tenant's data may still be stored.
    """

    async def work() -> int:
        async with open_deployment("admin") as deployment:
            return await deployment.tenants.remove(name)

    revoked = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"name": name, "revoked_keys": revoked}))
    else:
        typer.echo(f"{name} is removed, and {revoked} API keys of it are revoked; its name cannot be registered again")


@keys_app.command("ls")
def keys_ls(tenant: Annotated[str | None, typer.Argument(help="Of one tenant.")] = None, as_json: Json = False) -> None:
    """The keys, oldest first, by what is kept of them; none can be shown again."""

    async def work() -> dict[str, ApiKeyRecord | ConfigError]:
        async with open_deployment("admin") as deployment:
            if tenant not in (None, DEFAULT_TENANT, *await deployment.tenants.all()):
                raise ToolFailure(ErrorCode.UNKNOWN_TENANT, f"there is no tenant {tenant}: see `toolcrew tenants ls`")
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
    _print(table_rows(shown, ("id", "tenant", "role", "name", "tail", "created", "expires", "state")))


@keys_app.command("add")
def keys_add(
    tenant: Annotated[str, typer.Argument(help="The tenant that the key is for.")],
    role: Annotated[
        Role,
        typer.Option(
            "--role", help="tenant: calls for this tenant; operator: for any; admin: also sets what tenants may have."
        ),
    ] = "tenant",
    name: Annotated[str, typer.Option("--name", help="Whose key it is, for recognition.")] = "",
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", help="How long it holds: 90d, 12h, 30m, 60s. Else until it is revoked."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it, this one time: on stdout, and nothing else there."""

    async def work() -> dict[str, Any]:
        ttl_s = _parse_duration(expires_in) if expires_in is not None else None
        async with open_deployment("admin") as deployment:
            made = await deployment.keys.add(tenant, role, name=name, ttl_s=ttl_s)
        return {"key": made.text, **_key_json(made.id, made.record)}

    made = run_work(work(), as_json)
    typer.echo(json.dumps(made) if as_json else made["key"])
    if not as_json:
        until = f"until {made['expires']}" if made["expires"] else "until it is revoked"
        typer.echo(
            f"key {made['id']} of tenant {tenant}, role {role}, {until}; keep it now, it is not shown again", err=True
        )


@keys_app.command("rm")
def keys_rm(
    key_id: Annotated[str, typer.Argument(help="The key's id, as ls shows it.")], as_json: Json = False
) -> None:
    """Revoke a key: within 2 seconds it opens nothing any more."""

    async def work() -> None:
        async with open_deployment("admin") as deployment:
            if not await deployment.keys.revoke(key_id):
                raise ToolFailure(
                    ErrorCode.INVALID_ARGUMENTS, f"there is no key {key_id[:64]}: see `toolcrew tenants keys ls`"
                )

    run_work(work(), as_json)
    typer.echo(json.dumps({"id": key_id, "state": "revoked"}) if as_json else f"{key_id} is revoked")


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        typer.echo(escape_controls(f"toolcrew: {warning}"), err=True)


def _tenant_json(name: str, policy: TenantPolicy | ConfigError) -> dict[str, Any]:
    told = {"policy": policy.model_dump(mode="json")} if isinstance(policy, TenantPolicy) else {"error": str(policy)}
    return {"name": name, **told}


def _row(name: str, policy: TenantPolicy | ConfigError, look: TenantSummary | None) -> dict[str, Any]:
    if isinstance(policy, ConfigError):
        return {"name": name, "tools": f"nothing: {policy}"}
    return {
        "name": name,
        "weight": f"{policy.weight:g}",
        "in-flight": f"{look.held if look is not None else 0}/{policy.in_flight}",
        "waiting": f"{look.waiting if look is not None else 0}/{policy.queued}",
        "rate": "-" if policy.rate_per_s is None else f"{policy.rate_per_s:g}",
        "sandboxes": policy.sandboxes,
        "class": policy.sandbox.tenant_class,
        "state": "paused" if policy.is_paused else "served",
        "tools": "all" if policy.tools is None else ", ".join(policy.tools) or "none",
    }


def _print_policy(head: str, name: str, policy: TenantPolicy, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_tenant_json(name, policy)))
    else:
        _print([head, *policy_lines(policy)])


def _key_json(key_id: str, key: ApiKeyRecord | ConfigError) -> dict[str, Any]:
    if isinstance(key, ConfigError):
        return {"id": key_id, "state": str(key)}
    is_over = key.expires_at is not None and key.expires_at <= datetime.now(UTC).timestamp()
    told = {"id": key_id, "tenant": key.tenant, "role": key.role, "name": key.name, "tail": key.tail}
    return {
        **told,
        "created": _when(key.created_at),
        "expires": _when(key.expires_at),
        "state": "expired" if is_over else "valid",
    }


def _when(at: float | None) -> str | None:
    return None if at is None else format_instant(at)


def _parse_duration(text: str) -> float:
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if found is None:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"--expires-in: '{text[:32]}' is no duration: write 90d, 12h, 30m or 60s"
        )
    return float(int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]])


def _print(lines: list[str]) -> None:
    """Names that others gave are shown escaped."""
    for line in lines:
        typer.echo(escape_controls(line))
