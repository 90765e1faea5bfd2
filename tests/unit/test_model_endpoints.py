"""Model endpoints as data: their records in Redis, who sees which, and what a reply costs."""

import json
import re
import shlex
from pathlib import Path

import pytest
import redis.asyncio
from pydantic import ValidationError
from typer.testing import CliRunner

from contract.errors import ConfigError, ErrorCode, ToolFailure
from contract.functions.completions import Usage
from contract.model_endpoints import ENDPOINTS_FRESH_S, ModelEndpoint, seal_endpoint
from contract.names import model_endpoints_key
from contract.signing import SigningKeys
from contract.tenancy import TenantPolicy
from orchestrator.command import app
from store.model_endpoints import ModelEndpoints
from store.tenants import RedisTenants
from tests.builders import KEY
from tests.conftest import RedisProcess

FAST = ModelEndpoint(base_url="http://127.0.0.1:1/v1", model="m-1")
OWN = ModelEndpoint(base_url="https://models.acme.example/v1", model="m-2", secret="ACME_KEY", context_tokens=8192)


def test_the_cost_of_a_reply_follows_the_prices() -> None:
    usage = Usage(prompt_tokens=1_000_000, completion_tokens=500_000, cached_tokens=400_000)
    prices = {"prompt_price": 1.0, "completion_price": 4.0}
    assert FAST.cost_of(usage) is None
    assert FAST.model_copy(update=prices).cost_of(usage) == pytest.approx(3.0)
    assert FAST.model_copy(update={**prices, "cached_price": 0.25}).cost_of(usage) == pytest.approx(2.7)


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "http://user:word@127.0.0.1/v1"},
        {"base_url": "http://127.0.0.1/v1?key=word"},
        {"base_url": "file:///etc/passwd"},
        {"prompt_price": 1.0},
        {"cached_price": 1.0},
        {"concurrency": 0},
        {"secret": "sk-a key.with/other signs"},
    ],
)
def test_a_record_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelEndpoint.model_validate({**FAST.model_dump(), **fields})


async def test_a_tenant_sees_its_own_endpoints_before_those_of_the_deployment(client: "redis.asyncio.Redis") -> None:
    endpoints = ModelEndpoints(client, "d", KEY)
    await RedisTenants(client, "d", KEY).add("acme", TenantPolicy())
    await endpoints.set("fast", FAST)
    await endpoints.set("slow", FAST)
    await endpoints.set("fast", OWN, "acme")
    found = {tenant: await endpoints.of(tenant) for tenant in ("acme", "rival")}
    assert {(name, one.id) for name, one in found["acme"].items() if not isinstance(one, ConfigError)} == {
        ("fast", "acme/fast"),
        ("slow", "slow"),
    }
    assert [stored.endpoint for name in ("fast", "none") if (stored := await endpoints.find("acme", name))] == [OWN]
    assert [stored.endpoint for name in ("fast", "none") if (stored := await endpoints.find("rival", name))] == [FAST]
    await RedisTenants(client, "d", KEY).remove("acme")
    assert set(await client.hkeys(model_endpoints_key("d"))) == {b"fast", b"slow"}  # type: ignore[misc]


async def test_another_process_sees_a_change_when_its_copy_is_old(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("store.model_endpoints.time.monotonic", lambda: now[0])
    mine, other = ModelEndpoints(client, "d", KEY), ModelEndpoints(client, "d", KEY)
    assert await other.find("acme", "fast") is None
    await mine.set("fast", FAST)
    assert await other.find("acme", "fast") is None
    now[0] += ENDPOINTS_FRESH_S
    assert await other.find("acme", "fast") is not None
    assert await mine.remove("fast")
    assert not await mine.remove("fast")
    assert await mine.find("acme", "fast") is None


async def test_fallbacks_exist_and_end(client: "redis.asyncio.Redis") -> None:
    endpoints = ModelEndpoints(client, "d", KEY)
    await endpoints.set("a", FAST)
    await endpoints.set("b", FAST.model_copy(update={"fallback": "a"}))
    for name, fallback in (("c", "none"), ("a", "a"), ("a", "b")):
        with pytest.raises(ToolFailure) as refused:
            await endpoints.set(name, FAST.model_copy(update={"fallback": fallback}))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    with pytest.raises(ToolFailure, match="fallback of b"):
        await endpoints.remove("a")
    await RedisTenants(client, "d", KEY).add("acme", TenantPolicy())
    with pytest.raises(ToolFailure) as unknown:
        await endpoints.set("a", FAST, "unknown")
    assert unknown.value.code is ErrorCode.UNKNOWN_TENANT


@pytest.mark.parametrize("keys", [SigningKeys.of("a guess"), SigningKeys.of("k" * 32, deployment="another")])
async def test_a_forged_endpoint_is_not_used(client: "redis.asyncio.Redis", keys: SigningKeys) -> None:
    await client.hset(model_endpoints_key("d"), "fast", seal_endpoint(keys, "fast", FAST))  # type: ignore[misc]
    copied = seal_endpoint(KEY, "acme/fast", OWN)
    await client.hset(model_endpoints_key("d"), "rival/fast", copied)  # type: ignore[misc]
    endpoints = ModelEndpoints(client, "d", KEY)
    for tenant in ("acme", "rival"):
        with pytest.raises(ConfigError, match="cannot be verified"):
            await endpoints.find(tenant, "fast")


PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text().partition("## Model endpoints")[2]


def test_every_command_of_the_page_works(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.txt").write_text("sk-canary-1234567890\n")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    outputs = [CliRunner().invoke(app, shlex.split(command)[1:]) for command in commands]
    assert [(done.exit_code, done.output) for done in outputs if done.exit_code != 0] == []
    listed = json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).stdout)
    assert [(row["name"], row["secret"], row["concurrency"], row["fallback"]) for row in listed] == [
        ("fast", "FAST_KEY", 40, "slow"),
        ("slow", None, None, None),
    ]
    unset = CliRunner().invoke(app, ["models", "set", "fast", "--unset", "fallback", "--unset", "rpm", "--json"])
    assert (json.loads(unset.stdout)["fallback"], json.loads(unset.stdout)["requests_per_minute"]) == (None, None)
    wrong = CliRunner().invoke(app, ["models", "set", "new", "--url", "http://user:word@host/v1", "--model", "m"])
    assert (wrong.exit_code, "--url" in wrong.output, "word" in wrong.output) == (1, True, False)
    assert CliRunner().invoke(app, ["models", "remove", "slow"]).exit_code == 0
    assert "sk-canary" not in "".join(done.output for done in outputs)
