"""`toolcrew tenants`: register, change, pause and remove tenants."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.tenancy import DEFAULT_TENANT, TenantPolicy
from orchestrator.cli.access import open_deployment
from orchestrator.cli.policy_options import apply_options, policy_lines, read_policy, with_policy_options
from orchestrator.cli.runner import Json, print_lines, run_work
from orchestrator.cli.usage import tenants_usage
from orchestrator.terminal.output import escape_controls, table_rows
from store.catalog import check_tools
from store.overview import OverviewReader, TenantSummary

tenants_app = typer.Typer(no_args_is_help=True)
tenants_app.command("usage")(tenants_usage)

Name = Annotated[str, typer.Argument(help="The tenant.")]
Source = Annotated[
    Path | None, typer.Option("--from", help="A JSON file with the whole policy. Other options override its fields.")
]
Unset = Annotated[list[str] | None, typer.Option("--unset", help="The name of an option to reset to its default.")]


@tenants_app.command("list")
def tenants_list(as_json: Json = False) -> None:
    """List the registered tenants and the default one.

    Until the first tenant is registered, every tenant name is served like the default tenant.
    """

    async def work() -> tuple[dict[str, TenantPolicy | ConfigError], dict[str, TenantSummary]]:
        async with open_deployment("operator") as deployment:
            policies = {DEFAULT_TENANT: TenantPolicy(), **await deployment.tenants.all()}
            reader = OverviewReader(deployment.redis, deployment.broker.deployment, deployment.signing_keys)
            return policies, {tenant.tenant: tenant for tenant in (await reader.read()).tenants}

    policies, summaries = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps([_tenant_json(name, policy) for name, policy in policies.items()]))
        return
    columns = ("name", "weight", "in-flight", "waiting", "rate", "sandboxes", "class", "state", "tools")
    print_lines(table_rows([_row(name, policy, summaries.get(name)) for name, policy in policies.items()], columns))


@tenants_app.command("add")
@with_policy_options
def tenants_add(name: Name, *, policy_values: Mapping[str, Any], source: Source = None, as_json: Json = False) -> None:
    """Register a tenant. After the first one, only registered tenants and the default tenant are served."""

    async def work() -> tuple[TenantPolicy, bool, list[str]]:
        policy = apply_options(read_policy(source) if source is not None else TenantPolicy(), policy_values)
        async with open_deployment("admin") as deployment:
            is_first = not set(await deployment.tenants.all()) - {DEFAULT_TENANT}
            warnings = await check_tools(deployment.redis, deployment.broker.deployment, name, policy)
            await deployment.tenants.add(name, policy)
            return policy, is_first, warnings

    policy, is_first, warnings = run_work(work(), as_json)
    _warn(warnings)
    _print_policy(f"{name} is registered", name, policy, as_json)
    if is_first and not as_json:
        typer.echo(
            f"this is the first tenant: from now on only registered tenants and {DEFAULT_TENANT} are served", err=True
        )


@tenants_app.command("set")
@with_policy_options
def tenants_set(
    name: Name, *, policy_values: Mapping[str, Any], source: Source = None, unset: Unset = None, as_json: Json = False
) -> None:
    """Change the policy of a tenant. Options that are not given keep their values.

    Every process applies the change within 2 seconds.
    """

    async def work() -> tuple[TenantPolicy, list[str]]:
        if source is None and not unset and all(value is None for value in policy_values.values()):
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "no change was given: see `toolcrew tenants set --help`")
        async with open_deployment("admin") as deployment:
            # Check only the options of this command: a tool that was removed later must not block other changes.
            change = apply_options(
                read_policy(source) if source is not None else TenantPolicy(), policy_values, unset or ()
            )
            warnings = await check_tools(deployment.redis, deployment.broker.deployment, name, change)
            if source is None:
                return await deployment.tenants.change(
                    name, lambda policy: apply_options(policy, policy_values, unset or ())
                ), warnings
            await deployment.tenants.replace(name, change)
            return change, warnings

    policy, warnings = run_work(work(), as_json)
    _warn(warnings)
    _print_policy(f"{name} is changed. Its policy:", name, policy, as_json)


@tenants_app.command("remove")
def tenants_remove(name: Name, as_json: Json = False) -> None:
    """Remove a tenant and revoke its API keys.

    Its open sessions expire. The name cannot be registered again, because data of the tenant may still be stored.
    """

    async def work() -> int:
        async with open_deployment("admin") as deployment:
            return await deployment.tenants.remove(name)

    revoked = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"name": name, "revoked_keys": revoked}))
    else:
        typer.echo(f"{name} is removed and its {revoked} API keys are revoked; the name cannot be registered again")


@tenants_app.command("pause")
def tenants_pause(
    tenant: Name,
    reason: Annotated[str, typer.Option("--reason", help="The reason. A caller whose wait times out reads it.")] = "",
    as_json: Json = False,
) -> None:
    """Pause a tenant: start no new calls, runs or batch items.

    Running work finishes. Sessions stay open for their time to live.
    """

    async def work() -> tuple[TenantPolicy, bool]:
        async with open_deployment("operator") as deployment:
            policy = await deployment.tenants.pause(tenant, reason)
            return policy, not set(await deployment.tenants.all()) - {DEFAULT_TENANT}

    policy, is_open = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"name": tenant, "is_paused": policy.is_paused, "pause_reason": policy.pause_reason}))
        return
    typer.echo(f"{tenant} is paused: no new work starts until `toolcrew tenants resume {tenant}`")
    if is_open and tenant == DEFAULT_TENANT:
        typer.echo(
            f"no tenant is registered, so every tenant name is served as {DEFAULT_TENANT} and is paused", err=True
        )


@tenants_app.command("resume")
def tenants_resume(tenant: Name, as_json: Json = False) -> None:
    """Resume a paused tenant. Every process applies the change within 2 seconds."""

    async def work() -> TenantPolicy:
        async with open_deployment("operator") as deployment:
            return await deployment.tenants.resume(tenant)

    policy = run_work(work(), as_json)
    typer.echo(json.dumps({"name": tenant, "is_paused": policy.is_paused}) if as_json else f"{tenant} is resumed")


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        typer.echo(escape_controls(f"toolcrew: {warning}"), err=True)


def _tenant_json(name: str, policy: TenantPolicy | ConfigError) -> dict[str, Any]:
    fields = {"policy": policy.model_dump(mode="json")} if isinstance(policy, TenantPolicy) else {"error": str(policy)}
    return {"name": name, **fields}


def _row(name: str, policy: TenantPolicy | ConfigError, summary: TenantSummary | None) -> dict[str, Any]:
    if isinstance(policy, ConfigError):
        return {"name": name, "tools": f"nothing: {policy}"}
    return {
        "name": name,
        "weight": f"{policy.weight:g}",
        "in-flight": f"{summary.held if summary is not None else 0}/{policy.in_flight}",
        "waiting": f"{summary.waiting if summary is not None else 0}/{policy.queued}",
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
        print_lines([head, *policy_lines(policy)])
