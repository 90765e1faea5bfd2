"""The API as a separate service on a real Redis, and clients with keys of every role."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from pydantic import SecretStr

from tests.support.stack.waiting import wait_until_async
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.api.service import ApiService
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants

READY_S = 90.0
ROLES = {
    "acme": ("acme", "tenant"),
    "rival": ("rival", "tenant"),
    "operator": ("default", "operator"),
    "admin": ("default", "admin"),
}
"""The clients of a harness: client name to the tenant and the role of its key."""


def api_settings(redis_url: str, **fields: Any) -> OrchestratorSettings:
    """Return settings that ignore the environment and contain only the defaults and `fields`."""
    return OrchestratorSettings.model_validate(
        {"redis_url": SecretStr(redis_url), "api_key": None, "api_rate": 10_000.0, **fields}
    )


# Without `verify=False` each client would read all certificate authorities, which takes 16 ms.
class ApiHarness:
    """A running service. `clients`: keyed by the names in ROLES; `anonymous` is a client without a key. `keys`: the text
    of each client's key.
    """

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self.url = url
        self.keys = keys
        self.anonymous = httpx.AsyncClient(verify=False, base_url=url, timeout=60)
        self.clients = {name: self.client(key) for name, key in keys.items()}

    def client(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=False, base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {key}"}
        )

    def __getitem__(self, name: str) -> httpx.AsyncClient:
        return self.clients[name]

    async def close(self) -> None:
        for client in (self.anonymous, *self.clients.values()):
            await client.aclose()


async def make_keys(redis_url: str) -> dict[str, str]:
    """Create the tenants acme and rival, and one key for each of ROLES."""
    broker = api_settings(redis_url).broker()
    client = open_redis(broker)
    try:
        tenants, keys = (
            RedisTenants(client, broker.deployment, broker.signing_keys()),
            ApiKeys(client, broker.deployment, broker.signing_keys()),
        )
        for name in ("acme", "rival"):
            await tenants.add(name, TenantPolicy())
        return {name: (await keys.add(tenant, role, name=name)).text for name, (tenant, role) in ROLES.items()}  # type: ignore[arg-type]
    finally:
        await client.aclose()


@asynccontextmanager
async def serving(settings: OrchestratorSettings, *, concurrency: int = 0) -> AsyncIterator[str]:
    """Run a service with these settings. Yields the service's address as soon as the service is connected."""
    addresses: asyncio.Queue[str] = asyncio.Queue()
    service = ApiService(settings, "127.0.0.1", 0, concurrency, announce=addresses.put_nowait)
    running = asyncio.create_task(service.run())
    try:
        getting = asyncio.create_task(addresses.get())
        await asyncio.wait((running, getting), timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            getting.cancel()
            running.result()
        yield getting.result()
    finally:
        service.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@asynccontextmanager
async def open_api(redis_url: str, *, concurrency: int = 0, **fields: Any) -> AsyncIterator[ApiHarness]:
    """Open a service on an empty Redis. `concurrency`: of the orchestrator inside the service; 0 means no
    orchestrator.
    """
    keys = await make_keys(redis_url)
    async with serving(api_settings(redis_url, **fields), concurrency=concurrency) as url:
        harness = ApiHarness(url, keys)
        try:
            await wait_until_async(
                lambda: (
                    httpx.get(f"{url}/v1/tools", headers={"Authorization": f"Bearer {keys['admin']}"}, verify=False)
                    .json()
                    .get("code")
                    != "NOT_READY"
                ),
                READY_S,
                "the API was not connected",
            )
            yield harness
        finally:
            await harness.close()
