"""Model endpoints as data: their records in Redis, who sees which, what a reply costs, and the limits that
orchestrators share.
"""

import asyncio
import json
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import redis.asyncio
from pydantic import ValidationError
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.model_endpoints import (
    ENDPOINTS_FRESH_S,
    EndpointBlocked,
    ModelEndpoint,
    RequestLease,
    seal_endpoint,
)
from toolcrew.contract.names import model_endpoints_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.command import app
from toolcrew.store import model_limits
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.model_limits import SharedLimits
from toolcrew.store.tenants import RedisTenants

FAST = ModelEndpoint(base_url="http://127.0.0.1:1/v1", model="m-1")
OWN = ModelEndpoint(base_url="https://models.acme.example/v1", model="m-2", secret="ACME_KEY", context_tokens=8192)


def test_reply_cost_follows_the_prices() -> None:
    usage = TokenUsage(prompt_tokens=1_000_000, completion_tokens=500_000, cached_tokens=400_000)
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
def test_invalid_endpoint_record_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelEndpoint.model_validate({**FAST.model_dump(), **fields})


async def test_endpoint_of_a_tenant_overrides_that_of_the_deployment(client: "redis.asyncio.Redis") -> None:
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


async def test_endpoint_change_is_seen_after_the_cache_expires(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("toolcrew.store.model_endpoints.time.monotonic", lambda: now[0])
    first, other = ModelEndpoints(client, "d", KEY), ModelEndpoints(client, "d", KEY)
    assert await other.find("acme", "fast") is None
    await first.set("fast", FAST)
    assert await other.find("acme", "fast") is None
    now[0] += ENDPOINTS_FRESH_S
    assert await other.find("acme", "fast") is not None
    assert await first.remove("fast")
    assert not await first.remove("fast")
    assert await first.find("acme", "fast") is None


async def test_missing_or_cyclic_fallback_is_refused(client: "redis.asyncio.Redis") -> None:
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
async def test_forged_or_copied_endpoint_record_is_refused(client: "redis.asyncio.Redis", keys: SigningKeys) -> None:
    await client.hset(model_endpoints_key("d"), "fast", seal_endpoint(keys, "fast", FAST))  # type: ignore[misc]
    copied = seal_endpoint(KEY, "acme/fast", OWN)
    await client.hset(model_endpoints_key("d"), "rival/fast", copied)  # type: ignore[misc]
    endpoints = ModelEndpoints(client, "d", KEY)
    for tenant in ("acme", "rival"):
        with pytest.raises(ConfigError, match="cannot be verified"):
            await endpoints.find(tenant, "fast")


PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text().partition("## Model endpoints")[2]


def test_documented_model_endpoint_commands_work(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.txt").write_text("sk-canary-1234567890\n")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    outputs = [CliRunner().invoke(app, shlex.split(command)[1:]) for command in commands]
    assert [(done.exit_code, done.output) for done in outputs if done.exit_code != 0] == []
    listed = json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).stdout)["models"]
    assert [(row["name"], row["secret"], row["concurrency"], row["fallback"]) for row in listed] == [
        ("fast", "FAST_KEY", 40, "slow"),
        ("slow", None, None, None),
    ]
    unset = CliRunner().invoke(app, ["models", "set", "fast", "--unset", "fallback", "--unset", "rpm", "--json"])
    assert (json.loads(unset.stdout)["fallback"], json.loads(unset.stdout)["requests_per_minute"]) == (None, None)
    invalid = CliRunner().invoke(app, ["models", "set", "new", "--url", "http://user:word@host/v1", "--model", "m"])
    assert (invalid.exit_code, "--url" in invalid.output, "word" in invalid.output) == (1, True, False)
    assert CliRunner().invoke(app, ["models", "remove", "slow"]).exit_code == 0
    assert "sk-canary" not in "".join(done.output for done in outputs)


# Limits that orchestrators share


pytestmark = pytest.mark.usefixtures("quiet_logs")

Build = Callable[..., SharedLimits]


@pytest.fixture
def build(client: "redis.asyncio.Redis") -> Build:
    """Return a factory of limits as different processes have them."""

    def build(**bounds: int) -> SharedLimits:
        endpoint = ModelEndpoint(base_url="http://127.0.0.1:1/v1", model="m").model_copy(update=bounds)
        return SharedLimits(client, "d", "fast", endpoint, jitter=lambda: 0.0)

    return build


async def acquire(limits: SharedLimits, tokens: int = 0, max_wait_s: float = 60.0) -> RequestLease:
    return await limits.acquire(lambda: tokens, max_wait_s)


async def test_block_applies_to_every_orchestrator(build: Build) -> None:
    one, two = build(), build()
    await one.block(30.0, "rate_limit")
    await two.block(0.1, "down")
    for limits in (one, two):
        with pytest.raises(EndpointBlocked) as blocked:
            await acquire(limits, max_wait_s=5.0)
        assert blocked.value.reason == "rate_limit"
        assert 25 < blocked.value.remaining_s <= 30


@pytest.mark.parametrize(
    ("bounds", "cause"),
    [
        ({"concurrency": 1}, "concurrency limit 1"),
        ({"requests_per_minute": 1}, "limit of 1 requests per minute"),
        ({"tokens_per_minute": 5}, "limit of 5 tokens per minute"),
    ],
)
async def test_waiting_request_reports_its_limit(
    build: Build, monkeypatch: pytest.MonkeyPatch, bounds: dict[str, int], cause: str
) -> None:
    monkeypatch.setattr(model_limits, "WAIT_NOTICE_S", 0.05)
    limits, causes = build(**bounds), asyncio.Queue[str]()
    await limits.acquire(lambda: 5, 60.0, causes.put_nowait)
    assert causes.empty()
    waiting = [asyncio.create_task(limits.acquire(lambda: 5, 60.0, causes.put_nowait)) for _ in range(2)]

    assert [await asyncio.wait_for(causes.get(), SOON_S) for _ in waiting] == [cause] * 2

    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_request_waits_for_a_short_block_and_reports_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_limits, "WAIT_NOTICE_S", 0.05)
    one, two, causes = build(), build(), list[str]()
    began = asyncio.get_running_loop().time()
    await one.block(0.3, "rate_limit")
    await two.acquire(lambda: 0, 60.0, causes.append)
    assert asyncio.get_running_loop().time() - began >= 0.3
    assert causes == ["the rate limit of its server"]


async def test_concurrency_limit_is_shared_by_all_orchestrators(build: Build) -> None:
    running, most = 0, 0

    async def work(limits: SharedLimits) -> None:
        nonlocal running, most
        lease = await acquire(limits)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await limits.release(lease, 0)

    processes = [build(concurrency=3) for _ in range(3)]
    await asyncio.gather(*(work(limits) for limits in processes for _ in range(8)))
    assert most == 3


async def test_lease_of_a_killed_process_expires_and_a_renewed_one_does_not(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "LEASE_S", 0.4)
    killed, living, waiting = (build(concurrency=2) for _ in range(3))
    await acquire(killed)
    killed._renewing.cancel()
    lease = await acquire(living)
    third = asyncio.create_task(acquire(waiting))
    await asyncio.wait_for(asyncio.shield(third), SOON_S)
    fourth = asyncio.create_task(acquire(build(concurrency=2)))
    await asyncio.wait((fourth,), timeout=1.0)
    assert not fourth.done()
    await living.release(lease, 0)
    await asyncio.wait_for(fourth, SOON_S)


async def test_cancelled_request_leaves_no_lease(build: Build, client: "redis.asyncio.Redis") -> None:
    limits = build(concurrency=1)
    lease = await acquire(limits)
    waiting = [asyncio.create_task(acquire(build(concurrency=1))) for _ in range(3)]
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await limits.release(lease, 0)
    await asyncio.wait_for(acquire(build(concurrency=1)), SOON_S)
    assert await client.zcard("toolcrew:d:model-limits:fast:leases") == 1


async def test_cancellation_that_the_client_loses_ends_a_waiting_request(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12, `asyncio.wait_for` in the client loses a cancellation that arrives with its result."""
    limits, asked = build(concurrency=1), asyncio.Event()

    async def lose_cancellation(_client: object, **_: object) -> list[bytes]:
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return [b"busy", b"0", b"concurrency"]

    monkeypatch.setattr(model_limits._ACQUIRE, "run", lose_cancellation)
    waiting = asyncio.create_task(acquire(limits))
    await asyncio.wait_for(asked.wait(), 10)
    waiting.cancel()
    await asyncio.wait((waiting,), timeout=10)
    is_cancelled = waiting.cancelled()
    waiting.cancel()
    assert is_cancelled


@pytest.mark.parametrize(
    ("bounds", "tokens"),
    [({"requests_per_minute": 3}, 0), ({"tokens_per_minute": 300}, 100)],
    ids=["requests", "tokens"],
)
async def test_rate_per_minute_is_limited(
    build: Build, client: "redis.asyncio.Redis", bounds: dict[str, int], tokens: int
) -> None:
    processes = [build(**bounds) for _ in range(2)]
    for number in range(3):
        await acquire(processes[number % 2], tokens)
    fourth = asyncio.create_task(acquire(processes[1], tokens))
    await asyncio.wait((fourth,), timeout=0.5)
    assert not fourth.done()
    # A minute later: the script drops the seconds that have left the window.
    window = "toolcrew:d:model-limits:fast:window"
    for field, count in (await client.hgetall(window)).items():  # type: ignore[misc]
        await client.hset(window, field[:1] + str(int(field[1:]) - 60).encode(), count)  # type: ignore[misc]
        await client.hdel(window, field)  # type: ignore[misc]
    await asyncio.wait_for(fourth, SOON_S)


async def test_counted_tokens_replace_the_estimate(build: Build, client: "redis.asyncio.Redis") -> None:
    limits = build(tokens_per_minute=1000)
    for counted in (10, 20):
        await limits.release(await acquire(limits, 900), counted)
    await limits.release(await acquire(limits, 900), 2000)
    delayed_request = asyncio.create_task(acquire(limits, 1))
    await asyncio.wait((delayed_request,), timeout=0.5)
    assert not delayed_request.done()
    delayed_request.cancel()
    large = SharedLimits(client, "d", "other", ModelEndpoint(base_url="http://a", model="m", tokens_per_minute=1000))
    await asyncio.wait_for(acquire(large, 5000), SOON_S)
