"""Permanent change of a secret: long-lived records are signed again, so that the old secret can be removed."""

import asyncio
import json

import pytest
import redis.asyncio
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.redis.redis_harness import broker_for
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.model_endpoints import ModelEndpoint
from toolcrew.contract.names import api_keys_key
from toolcrew.contract.registry import Switch
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.specs import SkillSummary
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.command import app
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.secrets import SecretStore
from toolcrew.store.skills import SkillStore
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.tools import RedisSwitches

D = "default"
OLD = SigningKeys.of("the-old-secret", deployment=D)
NEW = SigningKeys.of("the-new-secret", deployment=D)
SKILL = SkillSummary(name="own", description="Does it.", digest="0" * 64, files=1, bytes=1)
ENDPOINT = ModelEndpoint(base_url="http://127.0.0.1:1/v1", model="m")
POLICY, OFF = TenantPolicy(tools=("read_tool",)), Switch(by="root", at=1.0, reason="not today")


async def fill(client: "redis.asyncio.Redis") -> str:
    """Store records that the old secret signed. Return the text of an API key."""
    await RedisTenants(client, D, OLD).add("acme", POLICY)
    await RedisSwitches(client, D, OLD).turn_off("echo", OFF)
    await SkillStore(client, D, OLD).install("acme", SKILL, b"files")
    await ModelEndpoints(client, D, OLD).set("fast", ENDPOINT, "acme")
    for owner in (None, "acme"):
        await SecretStore(client, D, OLD).set(owner, "TOKEN", "a-stored-secret")
    return (await ApiKeys(client, D, OLD).add("acme", "operator")).text


def test_resealed_records_need_no_old_secret(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare() -> str:
        client = open_redis(broker_for(redis_server.url))
        try:
            text = await fill(client)
            await client.hset(api_keys_key(D), "f" * 16, '{"tenant": "default", "role": "admin"}')  # type: ignore[misc]
            with pytest.raises(ConfigError):
                await ApiKeys(client, D, NEW).authenticate(text)
            return text
        finally:
            await client.aclose()

    async def check(text: str) -> None:
        client = open_redis(broker_for(redis_server.url))
        try:
            assert (await ApiKeys(client, D, NEW).authenticate(text)).role == "operator"
            assert await RedisTenants(client, D, NEW).policy("acme") == POLICY
            assert list(await SkillStore(client, D, NEW).all("acme")) == ["own"]
            assert await RedisSwitches(client, D, NEW).switches() == {"echo": OFF}
            assert await ModelEndpoints(client, D, NEW).all() == {"acme/fast": ENDPOINT}
            for owner in (None, "acme"):
                secret = await SecretStore(client, D, NEW).get(owner, "TOKEN")
                assert (secret.value if secret else None) == "a-stored-secret"
            with pytest.raises(ConfigError, match="cannot be verified"):
                await ApiKeys(client, D, NEW).authenticate(f"tc_{'f' * 16}_{'A' * 43}")
        finally:
            await client.aclose()

    text = asyncio.run(prepare())
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TOOLCREW_SECRET", "the-new-secret")
    monkeypatch.setenv("TOOLCREW_SECRETS_PREVIOUS", '["the-old-secret"]')
    done = CliRunner().invoke(app, ["config", "reseal", "--json"])
    assert json.loads(done.stdout) == {"signed": 7, "refused": [f"API key {'f' * 16}"]}
    assert json.loads(CliRunner().invoke(app, ["config", "reseal", "--json"]).stdout)["signed"] == 0
    asyncio.run(check(text))
