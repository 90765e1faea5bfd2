"""`toolcrew pause` and `toolcrew resume`: letting nothing of a tenant begin, for a while."""

import json
from typing import Annotated

import typer

from contract.tenancy import DEFAULT_TENANT, TenantPolicy
from orchestrator.cli.access import open_deployment
from orchestrator.cli.runner import Json, run_work

Name = Annotated[str, typer.Argument(help="The tenant.")]


def pause(
    tenant: Name,
    reason: Annotated[str, typer.Option("--reason", help="Why; whoever waits too long reads it.")] = "",
    as_json: Json = False,
) -> None:
    """Begin none of a tenant's calls, runs and batch items any more. What runs goes on to its end, sessions stay for
    their time to live.
    """

    async def work() -> tuple[TenantPolicy, bool]:
        async with open_deployment("operator") as deployment:
            policy = await deployment.tenants.pause(tenant, reason)
            return policy, not set(await deployment.tenants.all()) - {DEFAULT_TENANT}

    policy, is_open = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"name": tenant, "is_paused": policy.is_paused, "pause_reason": policy.pause_reason}))
        return
    typer.echo(f"{tenant} is paused: nothing of it begins, until `toolcrew resume {tenant}`")
    if is_open and tenant == DEFAULT_TENANT:
        typer.echo(
            f"no tenant is registered, and every name is served as {DEFAULT_TENANT}: all of them are paused", err=True
        )


def resume(tenant: Name, as_json: Json = False) -> None:
    """Let a tenant go on, within 2 seconds."""

    async def work() -> TenantPolicy:
        async with open_deployment("operator") as deployment:
            return await deployment.tenants.resume(tenant)

    policy = run_work(work(), as_json)
    typer.echo(json.dumps({"name": tenant, "is_paused": policy.is_paused}) if as_json else f"{tenant} goes on")
