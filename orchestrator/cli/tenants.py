"""`toolcrew tenants`: register, change, pause and remove tenants."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.plurals import count
from toolcrew.contract.tenancy import DEFAULT_TENANT, TenantPolicy
from toolcrew.orchestrator.cli.access import Deployment, open_deployment
from toolcrew.orchestrator.cli.policy_options import apply_options, policy_lines, read_policy, with_policy_options
from toolcrew.orchestrator.cli.runner import Json, Output, as_command, list_json, list_output
from toolcrew.orchestrator.cli.usage import tenants_usage
from toolcrew.orchestrator.terminal.output import escape_controls
from toolcrew.store.hosts import check_tenant_class
from toolcrew.store.overview import OverviewReader, TenantSummary
from toolcrew.store.tools import check_tools

tenants_app = typer.Typer(no_args_is_help=True)
tenants_app.command("usage")(tenants_usage)

Name = Annotated[str, typer.Argument(help="The tenant.")]
Source = Annotated[
    Path | None, typer.Option("--from", help="A JSON file with the whole policy. Other options override its fields.")
]
Unset = Annotated[list[str] | None, typer.Option("--unset", help="The name of an option to reset to its default.")]


@tenants_app.command("list")
@as_command
async def tenants_list(as_json: Json = False) -> Output:
    """List the registered tenants and the default one.

    Until the first tenant is registered, every tenant name is served like the default tenant.
    """
    async with open_deployment("operator") as deployment:
        policies = await deployment.tenants.all()
        reader = OverviewReader(deployment.redis, deployment.broker.deployment, deployment.signing_keys)
        summaries = {tenant.tenant: tenant for tenant in (await reader.read()).tenants}
    columns = ("name", "weight", "in-flight", "waiting", "rate", "sandboxes", "class", "state", "tools")
    rows = [_row(name, policy, summaries.get(name)) for name, policy in policies.items()]
    data = list_json("tenants", [_tenant_json(name, policy) for name, policy in policies.items()])
    return list_output(data, rows, columns)


@tenants_app.command("add")
@with_policy_options
@as_command
async def tenants_add(
    name: Name, *, policy_values: Mapping[str, Any], source: Source = None, as_json: Json = False
) -> Output:
    """Register a tenant. After the first one, only registered tenants and the default tenant are served."""
    policy = apply_options(read_policy(source) if source is not None else TenantPolicy(), policy_values)
    async with open_deployment("admin") as deployment:
        is_first = not set(await deployment.tenants.all()) - {DEFAULT_TENANT}
        warnings = await _check_policy(deployment, name, policy)
        await deployment.tenants.add(name, policy)
    _warn(warnings)
    first = f"this is the first tenant: from now on only registered tenants and {DEFAULT_TENANT} are served"
    head = [f"{name} is registered", *policy_lines(policy)]
    return Output(_tenant_json(name, policy), head, [first] if is_first else [])


@tenants_app.command("set")
@with_policy_options
@as_command
async def tenants_set(
    name: Name, *, policy_values: Mapping[str, Any], source: Source = None, unset: Unset = None, as_json: Json = False
) -> Output:
    """Change the policy of a tenant. Options that are not given keep their values.

    Every process applies the change within 2 seconds.
    """
    if source is None and not unset and all(value is None for value in policy_values.values()):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "no change was given: see `toolcrew tenants set --help`")
    async with open_deployment("admin") as deployment:
        # Check only the options of this command: a tool that was removed later must not block other changes.
        policy = apply_options(
            read_policy(source) if source is not None else TenantPolicy(), policy_values, unset or ()
        )
        warnings = await _check_policy(deployment, name, policy)
        if source is None:
            policy = await deployment.tenants.change(
                name, lambda policy: apply_options(policy, policy_values, unset or ())
            )
        else:
            await deployment.tenants.replace(name, policy)
    _warn(warnings)
    return Output(_tenant_json(name, policy), [f"{name} is changed. Its policy:", *policy_lines(policy)])


@tenants_app.command("remove")
@as_command
async def tenants_remove(name: Name, as_json: Json = False) -> Output:
    """Remove a tenant and revoke its API keys.

    Its open sessions expire. The name cannot be registered again, because data of the tenant may still be stored.
    """
    async with open_deployment("admin") as deployment:
        revoked = await deployment.tenants.remove(name)
    keys = count(revoked, "API key is", "API keys are")
    line = f"{name} is removed and its {keys} revoked; the name cannot be registered again"
    return Output({"name": name, "revoked_keys": revoked}, [line])


@tenants_app.command("pause")
@as_command
async def tenants_pause(
    tenant: Name,
    reason: Annotated[str, typer.Option("--reason", help="The reason. A caller whose wait times out reads it.")] = "",
    as_json: Json = False,
) -> Output:
    """Pause a tenant: start no new calls, runs or batch items.

    Running work finishes. Sessions stay open for their time to live.
    """
    async with open_deployment("operator") as deployment:
        policy = await deployment.tenants.pause(tenant, reason)
        is_open = not set(await deployment.tenants.all()) - {DEFAULT_TENANT}
    everybody = f"no tenant is registered, so every tenant name is served as {DEFAULT_TENANT} and is paused"
    return Output(
        {"name": tenant, "is_paused": policy.is_paused, "pause_reason": policy.pause_reason},
        [f"{tenant} is paused: no new work starts until `toolcrew tenants resume {tenant}`"],
        [everybody] if is_open and tenant == DEFAULT_TENANT else [],
    )


@tenants_app.command("resume")
@as_command
async def tenants_resume(tenant: Name, as_json: Json = False) -> Output:
    """Resume a paused tenant. Every process applies the change within 2 seconds."""
    async with open_deployment("operator") as deployment:
        policy = await deployment.tenants.resume(tenant)
    return Output({"name": tenant, "is_paused": policy.is_paused}, [f"{tenant} is resumed"])


async def _check_policy(deployment: Deployment, name: str, policy: TenantPolicy) -> list[str]:
    """Return warnings about the tools and the class of a policy. Raises ToolFailure: one of them does not exist."""
    warnings = await check_tools(deployment.redis, deployment.broker.deployment, name, policy)
    return warnings + await check_tenant_class(
        deployment.redis, deployment.broker.deployment, policy.sandbox.tenant_class
    )


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
