"""Opens the client of a command: for the pool that TOOLCREW_REDIS_URL names, for the HTTP API at TOOLCREW_URL, or for
an embedded stack.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

import typer

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import load_settings
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.admission import WaitNotice, once_per_reason, report_waiting
from toolcrew.orchestrator.cli.access import is_over_http, open_deployment, refuse_over_http
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sdk.tenant_client import TenantClient
from toolcrew.orchestrator.terminal.output import escape_controls


@asynccontextmanager
async def open_tenant_client(tenant: str | None = None, *, needs_workers: bool = True) -> AsyncIterator[TenantClient]:
    """Open a client for a command that a tenant may use: of the pool if TOOLCREW_REDIS_URL is set, else of the HTTP API
    if TOOLCREW_URL is set, else of an embedded stack.
    """
    if is_over_http():
        # Imported here, because most commands of an operator do not use it.
        from toolcrew.orchestrator.sdk.http_tenant_client import HttpTenantClient

        async with HttpTenantClient.connect(load_settings(), tenant=tenant) as client:
            yield client
    else:
        async with open_client(tenant, needs_workers=needs_workers) as pool_client:
            yield pool_client


@asynccontextmanager
async def open_client(tenant: str | None = None, *, needs_workers: bool = True) -> AsyncIterator[ToolClient]:
    """Open a client of the pool that TOOLCREW_REDIS_URL names, for `tenant` or the tenant of TOOLCREW_API_KEY. Without
    that variable, start an embedded stack for this command.
    """
    refuse_over_http("this command")
    settings = load_settings()
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    if settings.redis_url is not None:
        async with ToolClient.connect(
            settings=settings, api_key=key, tenant=tenant, needs_workers=needs_workers
        ) as client:
            yield client
    elif key is not None:
        raise ConfigError(
            "TOOLCREW_API_KEY is a key of a running pool: set TOOLCREW_REDIS_URL to that pool, or unset the key to "
            "start an embedded stack"
        )
    else:
        typer.echo(
            "TOOLCREW_REDIS_URL is not set: starting an embedded stack for this command (`toolcrew up` keeps one "
            "running)",
            err=True,
        )
        async with ToolClient.embedded(settings=settings, tenant=tenant or DEFAULT_TENANT, workers_only=True) as client:
            yield client


@asynccontextmanager
async def open_running(kind: str, tenant: str | None, *, needs_workers: bool = False) -> AsyncIterator[TenantClient]:
    """Open a client of a running pool or of the HTTP API. Prints why calls wait. Raises ConfigError if neither
    TOOLCREW_REDIS_URL nor TOOLCREW_URL is set; `kind` names the objects of the command in its message.
    """
    if load_settings().redis_url is None and not is_over_http():
        raise ConfigError(
            f"TOOLCREW_REDIS_URL is not set, and an embedded stack that ends with this command has no {kind}: set "
            "it (`toolcrew up` prints it), or TOOLCREW_URL and TOOLCREW_API_KEY"
        )
    with show_waiting():
        async with open_tenant_client(tenant, needs_workers=needs_workers) as client:
            yield client


@asynccontextmanager
async def open_pool_client(tenant: str | None = None, *, needs_workers: bool = False) -> AsyncIterator[ToolClient]:
    """Open a client for commands about stored batches. Raises ConfigError if TOOLCREW_REDIS_URL is not set: a new
    embedded stack has no batches.
    """
    refuse_over_http("this command")
    if load_settings().redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set. Set it to the Redis of the pool that stores the batch (`toolcrew up` "
            "prints it). To continue a batch that ran on an embedded stack, submit its file again with the same --id "
            "and --output"
        )
    async with open_client(tenant, needs_workers=needs_workers) as client:
        yield client


async def find_tenants(client: TenantClient, tenant: str | None) -> list[str]:
    """Return the tenant of the option or of a tenant's key; for operators, all tenants. Over HTTP: that of the key."""
    if tenant is not None or is_over_http() or (await client.actor()).role == "tenant":
        return [client.tenant]
    async with open_deployment("operator") as deployment:
        return sorted({client.tenant, *(await deployment.tenants.all_with_active())[1]})


def show_waiting() -> AbstractContextManager[None]:
    """Context manager that prints on stderr why calls of the block wait. Prints each reason once."""

    def print_notice(notice: WaitNotice) -> None:
        typer.echo(f"toolcrew: {escape_controls(notice.message)}", err=True)

    return report_waiting(once_per_reason(print_notice))
