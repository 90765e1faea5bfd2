"""The SDK for tenants: a client with an API key acts for its tenant until the key is revoked. Models see only the
tools that the tenant may use.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from pydantic import SecretStr

from contract.errors import ErrorCode, ToolFailure
from contract.names import catalog_key
from contract.specs import Catalog, seal_catalog
from contract.tenancy import TenantPolicy
from orchestrator.sdk.client import ToolClient
from orchestrator.settings import OrchestratorSettings
from store.api_keys import ApiKeys
from store.connection import open_redis
from store.tenants import RedisTenants
from tests.builders import build_spec
from tests.conftest import RedisProcess


class Harness:
    """A pool that publishes three tools, with the tenants acme and zeta. No worker serves its queues."""

    def __init__(self, url: str) -> None:
        self.settings = OrchestratorSettings(redis_url=SecretStr(url))
        self.redis = open_redis(self.settings.broker())
        self.tenants = RedisTenants(self.redis, "default", self.settings.broker().signing_keys())
        self.keys = ApiKeys(self.redis, "default", self.settings.broker().signing_keys())

    async def furnish(self) -> None:
        specs = tuple(build_spec(name) for name in ("bash_tool", "grep_tool", "read_tool"))
        await self.redis.set(
            catalog_key("default", "sandbox"),
            seal_catalog(self.settings.broker().signing_keys(), "sandbox", Catalog(tools=specs)),
        )
        await self.tenants.add("acme", TenantPolicy(tools=("read_*", "grep_tool")))
        await self.tenants.add("zeta", TenantPolicy())

    def connect(self, api_key: str | None = None, **fields: Any) -> AbstractAsyncContextManager[ToolClient]:
        return ToolClient.connect(settings=self.settings, api_key=api_key, **fields)


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    harness = Harness(redis_server.url)
    await harness.furnish()
    yield harness
    await harness.redis.aclose()


async def refusal_of(connecting: AbstractAsyncContextManager[ToolClient]) -> ErrorCode:
    with pytest.raises(ToolFailure) as refused:
        async with connecting:
            pass
    return refused.value.code


async def test_a_client_is_not_another_tenants_unless_its_role_is_for_all(harness: Harness) -> None:
    assert (
        await refusal_of(harness.connect((await harness.keys.add("acme")).text, tenant="zeta"))
        is ErrorCode.PERMISSION_DENIED
    )
    assert (
        await refusal_of(harness.connect((await harness.keys.add("acme")).text, tenant="default"))
        is ErrorCode.PERMISSION_DENIED
    )
    operator = (await harness.keys.add("acme", "operator")).text
    for tenant in ("zeta", "default"):
        async with harness.connect(operator, tenant=tenant) as client:
            assert client.tenant == tenant


async def test_a_session_is_not_another_tenants(harness: Harness) -> None:
    async with harness.connect((await harness.keys.add("acme")).text) as client:
        with pytest.raises(ToolFailure) as refused:
            await client.open_session(tenant="zeta")
    assert refused.value.code is ErrorCode.PERMISSION_DENIED
