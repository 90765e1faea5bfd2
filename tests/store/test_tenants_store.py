"""The tenants in Redis and the SDK for tenants: changes, caches, outages, and clients with API keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import redis
import redis.asyncio
from pydantic import SecretStr
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY as KEYS
from tests.support.records.builders import build_spec
from toolcrew.concurrency.tasks import SharedReads
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import catalog_key, tenants_key
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import Catalog, seal_catalog
from toolcrew.contract.tenancy import (
    MAX_POLICY_BYTES,
    POLICY_FRESH_S,
    VERSION_FIELD,
    CommandRule,
    TenantPolicy,
    seal_policy,
)
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import MAX_CACHED_POLICIES, PolicyCache, RedisTenants, StoredPolicy, WorkerTenants

KEY = tenants_key("test")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def client(redis_server: RedisProcess) -> AsyncIterator["redis.asyncio.Redis"]:
    client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    yield client
    await client.aclose()


@pytest.fixture
def tenants(client: "redis.asyncio.Redis") -> RedisTenants:
    return RedisTenants(client, "test", KEYS)


def count_commands(server: RedisProcess) -> dict[str, int]:
    with server.client() as client:
        stats: Any = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(facts["calls"]) for name, facts in stats.items()}


async def failure_of(work: Any) -> ErrorCode:
    with pytest.raises(ToolFailure) as failed:
        await work
    return failed.value.code


async def test_unknown_tenants_are_refused_after_the_first_registration(tenants: RedisTenants) -> None:
    assert await tenants.policy("anybody") == TenantPolicy()
    await tenants.change("default", lambda policy: policy.model_copy(update={"weight": 2.0}))
    assert (await tenants.policy("anybody")).weight == 2
    await tenants.add("acme", TenantPolicy())
    assert await failure_of(tenants.policy("anybody")) is ErrorCode.UNKNOWN_TENANT
    assert (await tenants.policy("default")).weight == 2
    await tenants.add("zeta", TenantPolicy())
    for name in ("zeta", "acme"):
        await tenants.remove(name)
        assert await failure_of(tenants.policy(name)) is ErrorCode.UNKNOWN_TENANT
    assert await failure_of(tenants.policy("anybody")) is ErrorCode.UNKNOWN_TENANT
    assert (await tenants.policy("default")).weight == 2


async def test_name_of_a_removed_tenant_stays_reserved(tenants: RedisTenants) -> None:
    await tenants.add("acme", TenantPolicy(weight=3))
    await tenants.remove("acme")
    with_new_secret = RedisTenants(
        tenants._client, tenants._deployment, SigningKeys.of("a new secret", (), tenants._deployment)
    )
    for work in (
        lambda: tenants.add("acme", TenantPolicy()),
        lambda: tenants.replace("acme", TenantPolicy()),
        lambda: tenants.change("acme", lambda policy: policy),
        lambda: with_new_secret.add("acme", TenantPolicy()),
        lambda: with_new_secret.replace("acme", TenantPolicy()),
    ):
        with pytest.raises(ToolFailure, match="the name stays reserved: choose another name"):
            await work()
    assert await failure_of(tenants.remove("acme")) is ErrorCode.UNKNOWN_TENANT
    assert (
        await failure_of(ApiKeys(tenants._client, tenants._deployment, tenants._signing).add("acme"))
        is ErrorCode.UNKNOWN_TENANT
    )
    assert dict(await tenants.all()) == {"default": TenantPolicy()}


async def test_lost_tenants_in_redis_stop_every_call(tenants: RedisTenants) -> None:
    await tenants.add("acme", TenantPolicy())
    await tenants.policy("acme")
    await tenants._client.delete(tenants._key)
    tenants._cache.confirm(None, tenants._cache.clock())
    for name in ("acme", "anybody", "default"):
        with pytest.raises(ConfigError, match="Redis has lost the registered tenants"):
            await tenants.policy(name)


async def test_invalid_tenant_changes_are_refused(tenants: RedisTenants) -> None:
    await tenants.add("acme", TenantPolicy())
    for work, code in (
        (tenants.add("acme", TenantPolicy()), ErrorCode.INVALID_ARGUMENTS),
        (tenants.add("default", TenantPolicy()), ErrorCode.INVALID_ARGUMENTS),
        (tenants.add(VERSION_FIELD, TenantPolicy()), ErrorCode.INVALID_ARGUMENTS),
        (tenants.add("a:b\n", TenantPolicy()), ErrorCode.INVALID_ARGUMENTS),
        (tenants.add("beta", TenantPolicy(is_removed=True)), ErrorCode.INVALID_ARGUMENTS),
        (tenants.change("unknown", lambda policy: policy), ErrorCode.UNKNOWN_TENANT),
        (tenants.replace("unknown", TenantPolicy()), ErrorCode.UNKNOWN_TENANT),
        (tenants.remove("unknown"), ErrorCode.UNKNOWN_TENANT),
        (tenants.remove(VERSION_FIELD), ErrorCode.INVALID_ARGUMENTS),
        (tenants.remove("default"), ErrorCode.INVALID_ARGUMENTS),
    ):
        assert await failure_of(work) is code
    assert list(await tenants.all()) == ["default", "acme"]


async def test_oversized_policy_is_not_stored(tenants: RedisTenants) -> None:
    rules = tuple(CommandRule(action="deny", argv_prefix=("x" * 256,) * 8) for _ in range(1000))
    assert len(TenantPolicy(commands=rules).model_dump_json()) > MAX_POLICY_BYTES
    assert await failure_of(tenants.add("acme", TenantPolicy(commands=rules))) is ErrorCode.INVALID_ARGUMENTS
    assert dict(await tenants.all()) == {"default": TenantPolicy()}


async def test_concurrent_changes_are_not_lost(client: "redis.asyncio.Redis") -> None:
    stores = [RedisTenants(client, "test", KEYS) for _ in range(2)]
    await stores[0].add("acme", TenantPolicy(in_flight=1))

    def one_more(policy: TenantPolicy) -> TenantPolicy:
        return policy.model_copy(update={"in_flight": policy.in_flight + 1})

    await asyncio.gather(*(store.change("acme", one_more) for store in stores for _ in range(5)))
    assert (await stores[0].policy("acme")).in_flight == 11


async def test_policy_change_is_seen_after_the_cache_expires(
    tenants: RedisTenants, client: "redis.asyncio.Redis", redis_server: RedisProcess
) -> None:
    await tenants.add("acme", TenantPolicy())
    clock, other = Clock(), RedisTenants(client, "test", KEYS)
    with redis_server.client() as blocking:
        worker = WorkerTenants(blocking, "test", KEYS, clock)
        assert worker.policy("acme") == await other.policy("acme") == TenantPolicy()
        await tenants.change("acme", lambda policy: policy.model_copy(update={"tools": ()}))
        assert worker.policy("acme").tools is (await other.policy("acme")).tools is None
        clock.now += POLICY_FRESH_S
        other._cache._requested_at -= POLICY_FRESH_S
        assert worker.policy("acme").tools == (await other.policy("acme")).tools == ()
        await tenants.remove("acme")
        await tenants.add("zeta", TenantPolicy())
        clock.now += POLICY_FRESH_S
        with pytest.raises(ToolFailure, match="tenant acme was removed"):
            worker.policy("acme")


async def test_deployments_do_not_share_tenants(tenants: RedisTenants, redis_server: RedisProcess) -> None:
    await tenants.add("acme", TenantPolicy(weight=3))
    with redis_server.client() as blocking:
        assert WorkerTenants(blocking, "live", KEYS).policy("acme").weight == 1


async def test_policy_of_another_release_is_refused(tenants: RedisTenants, redis_server: RedisProcess) -> None:
    with redis_server.client() as blocking:
        blocking.hset(KEY, "acme", KEYS.seal("policy acme", '{"speed": 9}'))
        with pytest.raises(ConfigError, match="speed"):
            WorkerTenants(blocking, "test", KEYS).policy("acme")
        with pytest.raises(ConfigError, match="speed"):
            await tenants.policy("acme")
        with pytest.raises(ConfigError, match="speed"):
            await tenants.change("acme", lambda policy: policy)
        assert isinstance((await tenants.all())["acme"], ConfigError)
        await tenants.replace("acme", TenantPolicy())
        assert WorkerTenants(blocking, "test", KEYS).policy("acme") == await tenants.policy("acme") == TenantPolicy()


async def test_policy_reads_fail_without_redis() -> None:
    unreachable = redis.asyncio.Redis(port=1, retry=AsyncRetry(NoBackoff(), 0))
    for work in (
        RedisTenants(unreachable, "test", KEYS).policy("acme"),
        RedisTenants(unreachable, "test", KEYS).add("acme", TenantPolicy()),
    ):
        with pytest.raises(BrokerUnavailable):
            await work
    with pytest.raises(BrokerUnavailable):
        WorkerTenants(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)), "test", KEYS).policy("acme")


async def test_full_redis_refuses_tenant_changes(tenants: RedisTenants, client: "redis.asyncio.Redis") -> None:
    await client.config_set("maxmemory", "1")
    try:
        with pytest.raises(BrokerUnavailable, match="acme was not changed"):
            await tenants.add("acme", TenantPolicy())
    finally:
        await client.config_set("maxmemory", "0")


async def test_concurrent_policy_reads_share_one_request(tenants: RedisTenants, redis_server: RedisProcess) -> None:
    await tenants.add("acme", TenantPolicy())
    before = count_commands(redis_server)
    await asyncio.gather(*(tenants.policy("acme") for _ in range(1000)))
    after = count_commands(redis_server)
    assert after["hget"] - before.get("hget", 0) == 1
    assert after["hmget"] - before.get("hmget", 0) == 1


async def test_cache_refresh_reads_do_not_grow_with_tenants(
    client: "redis.asyncio.Redis", redis_server: RedisProcess
) -> None:
    await client.hset(
        KEY,
        mapping={f"t{number}": seal_policy(KEYS, f"t{number}", TenantPolicy()) for number in range(10_000)}
        | {VERSION_FIELD: "v"},
    )  # type: ignore[misc]
    clock = Clock()
    with redis_server.client() as blocking:
        worker = WorkerTenants(blocking, "test", KEYS, clock)
        for number in range(1000):
            worker.policy(f"t{number}")
        before = count_commands(redis_server)
        clock.now += POLICY_FRESH_S
        for number in range(1000):
            worker.policy(f"t{number}")
        after = count_commands(redis_server)
    assert (after["hget"] - before["hget"], after["hmget"] - before["hmget"]) == (1, 0)


def build_stored_policy(version: bytes, weight: int, tenant: str = "acme") -> StoredPolicy:
    return StoredPolicy(version, seal_policy(KEYS, tenant, TenantPolicy(weight=weight)).encode(), None, 2)


def test_outdated_reply_does_not_replace_a_newer_policy() -> None:
    cache = PolicyCache(KEYS, Clock())
    cache.confirm(b"new", requested_at=101)
    cache.learn("acme", build_stored_policy(b"new", 2), requested_at=101)
    assert cache.learn("acme", build_stored_policy(b"old", 1), requested_at=100).weight == 1
    cache.confirm(b"old", requested_at=100)
    policy = cache.find("acme")
    assert policy.weight == 2


def test_policy_cache_is_bounded() -> None:
    cache = PolicyCache(KEYS, Clock())
    for number in range(MAX_CACHED_POLICIES + 10):
        cache.learn(f"t{number}", build_stored_policy(b"v", 2, f"t{number}"), requested_at=100)
    assert (cache.find("t9"), cache.find("t10") is None) == (None, False)


async def test_cancelled_reader_does_not_cancel_a_shared_read() -> None:
    reads, gate, started = SharedReads[int](), asyncio.Event(), 0

    async def read() -> int:
        nonlocal started
        started += 1
        await gate.wait()
        return 7

    first, second = asyncio.create_task(reads.read("a", read)), asyncio.create_task(reads.read("a", read))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == 7
    assert started == 1
    assert await reads.read("a", read) == 7
    assert started == 2


async def test_failed_shared_read_fails_every_reader() -> None:
    async def read() -> int:
        raise BrokerUnavailable("away")

    reads = SharedReads[int]()
    results = await asyncio.gather(*(reads.read("a", read) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in results] == [BrokerUnavailable] * 3


class Harness:
    """A pool that publishes three tools, with the tenants acme and zeta. No worker serves its queues."""

    def __init__(self, url: str) -> None:
        self.settings = OrchestratorSettings(redis_url=SecretStr(url))
        self.redis = open_redis(self.settings.broker())
        self.tenants = RedisTenants(self.redis, "default", self.settings.broker().signing_keys())
        self.keys = ApiKeys(self.redis, "default", self.settings.broker().signing_keys())

    async def add_tools_and_tenants(self) -> None:
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
    await harness.add_tools_and_tenants()
    yield harness
    await harness.redis.aclose()


async def refusal_of(connecting: AbstractAsyncContextManager[ToolClient]) -> ErrorCode:
    with pytest.raises(ToolFailure) as refused:
        async with connecting:
            pass
    return refused.value.code


async def test_only_operator_keys_can_act_for_another_tenant(harness: Harness) -> None:
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


async def test_client_cannot_open_a_session_for_another_tenant(harness: Harness) -> None:
    async with harness.connect((await harness.keys.add("acme")).text) as client:
        with pytest.raises(ToolFailure) as refused:
            await client.open_session(tenant="zeta")
    assert refused.value.code is ErrorCode.PERMISSION_DENIED
