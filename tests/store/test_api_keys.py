"""API keys: the stored fields and the access of a key. A wrong, expired or revoked key gives no access."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY as KEYS
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.names import api_keys_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.store.api_keys import KEY_FRESH_S, MAX_CACHED_KEYS, ApiKeyRecord, ApiKeys, Credential, Identity
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants

KEY = api_keys_key("test")


KEY_FORM = re.compile(r"tc_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")


class WallClock:
    """A clock of Unix seconds."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """Tenants and keys of a deployment with one tenant, acme."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.clock = WallClock()
        self.tenants = RedisTenants(client, "test", KEYS)
        self.keys = ApiKeys(client, "test", KEYS, self.clock)

    def other_process(self) -> ApiKeys:
        """Return the keys as another process sees them."""
        return ApiKeys(self.client, "test", KEYS, self.clock)


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    harness = Harness(client)
    await harness.tenants.add("acme", TenantPolicy())
    yield harness
    await client.aclose()


async def failure_of(work: Any) -> ErrorCode:
    with pytest.raises(ToolFailure) as failed:
        await work
    return failed.value.code


def expire_cache(keys: ApiKeys) -> None:
    """Age the cached keys by the cache's maximum age."""
    for key_id, (record, requested_at) in keys._cache.items():
        keys._cache[key_id] = (record, requested_at - KEY_FRESH_S)


async def test_a_key_authenticates_its_tenant_and_role(harness: Harness) -> None:
    created = await harness.keys.add("acme", "operator", name="ci")
    assert KEY_FORM.fullmatch(created.text)
    assert await harness.other_process().authenticate(created.text) == Identity("acme", "operator", created.id)
    assert (await harness.keys.authenticate((await harness.keys.add("default")).text)).tenant == "default"


@pytest.mark.parametrize(
    "change", ["", "x", "tc__", "TC", "cut", "long", "last", "space", "newline", "unknown", "huge", "nul", "half"]
)
async def test_an_altered_key_is_refused(harness: Harness, change: str) -> None:
    text = (await harness.keys.add("acme")).text
    altered = {
        "TC": text.upper(),
        "cut": text[:-1],
        "long": text + "A",
        "last": text[:-1] + ("A" if text[-1] != "A" else "B"),
        "space": f" {text}",
        "newline": f"{text}\n",
        "unknown": f"tc_{'0' * 16}_{text[-43:]}",
        "huge": text + "A" * 1_000_000,
        "nul": text + "\0",
        "half": text[:-1] + "\ud800",
    }.get(change, change)
    assert await failure_of(harness.keys.authenticate(altered)) is ErrorCode.UNAUTHENTICATED


async def test_a_key_is_valid_until_it_expires(harness: Harness) -> None:
    text = (await harness.keys.add("acme", ttl_s=60)).text
    harness.clock.now += 59.9
    assert (await harness.keys.authenticate(text)).tenant == "acme"
    harness.clock.now += 0.1
    assert await failure_of(harness.keys.authenticate(text)) is ErrorCode.UNAUTHENTICATED


async def test_a_revoked_key_is_refused_elsewhere_after_the_cache_expires(harness: Harness) -> None:
    created, other = await harness.keys.add("acme"), harness.other_process()
    await other.authenticate(created.text)
    assert await harness.keys.revoke(created.id)
    assert not await harness.keys.revoke(created.id)
    assert await failure_of(harness.keys.authenticate(created.text)) is ErrorCode.UNAUTHENTICATED
    expire_cache(other)
    assert await failure_of(other.authenticate(created.text)) is ErrorCode.UNAUTHENTICATED


async def test_removing_a_tenant_revokes_its_keys_and_reserves_its_name(harness: Harness) -> None:
    await harness.tenants.add("zeta", TenantPolicy())
    revoked, valid = [await harness.keys.add("acme") for _ in range(3)], await harness.keys.add("zeta")
    await harness.client.hset(KEY, "junk", "{")  # type: ignore[misc]
    assert await harness.tenants.remove("acme") == 3
    assert await failure_of(harness.tenants.add("acme", TenantPolicy())) is ErrorCode.INVALID_ARGUMENTS
    for created in revoked:
        assert await failure_of(harness.other_process().authenticate(created.text)) is ErrorCode.UNAUTHENTICATED
    assert (await harness.other_process().authenticate(valid.text)).tenant == "zeta"


async def test_a_key_for_an_unknown_tenant_or_with_invalid_fields_is_refused(harness: Harness) -> None:
    assert await failure_of(harness.keys.add("unknown")) is ErrorCode.UNKNOWN_TENANT
    assert await failure_of(harness.keys.add("a:b")) is ErrorCode.INVALID_ARGUMENTS
    assert await failure_of(harness.keys.add("acme", name="n" * 129)) is ErrorCode.INVALID_ARGUMENTS
    assert await failure_of(harness.keys.add("acme", ttl_s=1e300)) is ErrorCode.INVALID_ARGUMENTS
    assert await harness.keys.all() == {}


@pytest.mark.parametrize("forgery", ["unsigned", "another secret", "copied", "changed"])
async def test_a_forged_record_authenticates_no_key_and_can_be_removed(harness: Harness, forgery: str) -> None:
    """The attacker writes to Redis, has no secret, and has a key of its own tenant."""
    attacker_key = await harness.keys.add("acme")
    stored_record: Any = await harness.client.hget(KEY, attacker_key.id)  # type: ignore[misc]
    record = (
        stored_record.decode()
        .split(".", 2)[2]
        .replace('"tenant"', '"admin"', 1)
        .replace('"tenant":"acme"', '"tenant":"default"')
    )
    forged = {
        "unsigned": record,
        "another secret": SigningKeys.of("a guess").seal(f"api-key {'0' * 16}", record),
        "copied": stored_record,
        "changed": stored_record.decode().replace('"role":"tenant"', '"role":"admin"'),
    }[forgery]
    target = "0" * 16 if forgery != "changed" else attacker_key.id
    await harness.client.hset(KEY, target, forged)  # type: ignore[misc]
    text = f"tc_{target}_{attacker_key.text.split('_', 2)[2]}" if forgery != "changed" else attacker_key.text
    elsewhere = harness.other_process()
    with pytest.raises(ConfigError, match=f"cannot be verified.*keys revoke {target}.*create another.*TOOLCREW_SECRET"):
        await elsewhere.authenticate(text)
    with pytest.raises(ConfigError, match="cannot be verified"):
        await elsewhere.recall(target)
    assert await elsewhere.revoke(target)
    assert await failure_of(elsewhere.authenticate(text)) is ErrorCode.UNAUTHENTICATED


async def test_concurrent_authentications_with_one_key_read_redis_once(
    harness: Harness, redis_server: RedisProcess
) -> None:
    text, other = (await harness.keys.add("acme")).text, harness.other_process()
    with redis_server.client() as client:
        client.config_resetstat()
        await asyncio.gather(*(other.authenticate(text) for _ in range(1000)))
        result: Any = client.info("commandstats")
    assert result["cmdstat_hget"]["calls"] == 1


async def test_the_key_cache_is_bounded(harness: Harness) -> None:
    text = (await harness.keys.add("acme")).text
    record = ApiKeyRecord(tenant="acme", role="tenant", digest="0" * 64, tail="abcd", created_at=0)
    harness.keys._cache = {str(number): (record, 0.0) for number in range(MAX_CACHED_KEYS)}
    await harness.keys.authenticate(text)
    assert len(harness.keys._cache) == MAX_CACHED_KEYS


async def test_a_tenant_credential_is_refused_for_another_tenant(harness: Harness) -> None:
    for role, code in (("tenant", ErrorCode.PERMISSION_DENIED), ("operator", None), ("admin", None)):
        credential = Credential(harness.keys, (await harness.keys.add("acme", role)).text)  # type: ignore[arg-type]
        assert (await credential.check("acme")).role == role
        if code is None:
            assert (await credential.check("other")).tenant == "acme"
        else:
            assert await failure_of(credential.check("other")) is code


@given(st.text(max_size=80))
def test_text_that_is_not_a_key_is_refused_without_reading_redis(text: str) -> None:
    keys = ApiKeys(None, "test", KEYS)  # type: ignore[arg-type]  # Redis is not read
    with pytest.raises(ToolFailure):
        asyncio.run(keys.authenticate(text))


async def test_a_credential_is_refused_after_its_key_is_revoked(harness: Harness) -> None:
    created = await harness.keys.add("acme")
    credential = Credential(harness.keys, created.text)
    await credential.check("acme")
    await harness.keys.revoke(created.id)
    assert await failure_of(credential.check("acme")) is ErrorCode.UNAUTHENTICATED
    assert created.text not in repr(credential)
