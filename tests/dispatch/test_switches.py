"""Switching tools off and on, for all tenants or for one: in workers, dispatchers and lists, and without Redis."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_call, build_context, build_spec
from tests.support.records.fakes import (
    AnsweringTransport,
    FakeSandboxClient,
    MemoryBlobs,
    MemoryLedger,
    StaticCatalog,
    build_executor,
)
from tests.support.redis.switched_pool import SwitchedPool
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import switches_key
from toolcrew.contract.registry import SWITCHES_FRESH_S, Switch, ToolRegistry, find_switch, parse_switches
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.api_keys import ApiKeys, Credential
from toolcrew.store.connection import open_redis
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.tools import RedisSwitches, WorkerSwitches, build_switch
from toolcrew.workers.executor import CallPolicy
from toolcrew.workers.tools.base import Outcome, WorkerTool

pytestmark = pytest.mark.usefixtures("quiet_logs")

OFF = Switch(by="ada", at=1_700_000_000, reason="it is being repaired")


@pytest.fixture
async def switches(redis_server: RedisProcess) -> AsyncIterator[RedisSwitches]:
    client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    yield RedisSwitches(client, "test", KEY)
    await client.aclose()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingRedis:
    """Counts HGETALL requests for a hash, or does not reply."""

    def __init__(self) -> None:
        self.hash: dict[bytes, bytes] = {}
        self.reads = 0
        self.is_away = False

    def hgetall(self, _: str) -> dict[bytes, bytes]:
        self.reads += 1
        if self.is_away:
            raise redis.ConnectionError("away")
        return dict(self.hash)


async def test_deployments_do_not_share_switches(switches: RedisSwitches, redis_server: RedisProcess) -> None:
    await switches.turn_off("echo", OFF)
    with redis_server.client() as client:
        assert WorkerSwitches(client, "other", KEY).find("echo", "acme") is None


def test_worker_reads_switches_at_most_once_per_second() -> None:
    client, clock = CountingRedis(), Clock()
    switches_cache = WorkerSwitches(client, "test", KEY, clock)  # type: ignore[arg-type]
    for _ in range(100):
        switches_cache.find("echo", "acme")
    assert client.reads == 1
    clock.now += SWITCHES_FRESH_S
    switches_cache.find("echo", "acme")
    assert client.reads == 2


def test_worker_that_cannot_read_switches_runs_nothing() -> None:
    client, clock = CountingRedis(), Clock()
    switches_cache = WorkerSwitches(client, "test", KEY, clock)  # type: ignore[arg-type]
    switches_cache.find("echo", "acme")
    client.is_away = True
    clock.now += SWITCHES_FRESH_S
    with pytest.raises(BrokerUnavailable, match="was not run"):
        switches_cache.find("echo", "acme")


async def test_orchestrator_switch_operations_fail_without_redis() -> None:
    client = redis.asyncio.Redis(host="127.0.0.1", port=1, retry=None)
    unreachable = RedisSwitches(client, "test", KEY)
    with pytest.raises(BrokerUnavailable):
        await unreachable.switches()
    with pytest.raises(BrokerUnavailable, match="not enabled"):
        await unreachable.turn_off("echo", OFF)
    with pytest.raises(BrokerUnavailable, match="not enabled"):
        await unreachable.turn_on("echo")
    await client.aclose()


async def test_written_switch_is_not_reported_as_failed(switches: RedisSwitches) -> None:
    class WriteOnly(redis.asyncio.Redis):
        def hgetall(self, *_: Any) -> Any:
            raise redis.ConnectionError("away")

    write_only = RedisSwitches(WriteOnly(connection_pool=switches._client.connection_pool), "test", KEY)
    await write_only.turn_off("echo", OFF)
    assert await switches.switches() == {"echo": OFF}
    assert await write_only.turn_on("echo")


def test_oversized_switch_reason_is_refused() -> None:
    with pytest.raises(ToolFailure) as refused:
        build_switch("ada", "x" * 2000)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


class MemorySwitches:
    """Switches in a dict."""

    def __init__(self, **off: Switch) -> None:
        self.off = off

    def find(self, name: str, tenant: str) -> Switch | None:
        return find_switch(self.off, name, tenant)

    async def switches(self) -> dict[str, Switch]:
        return self.off


class Harness:
    """An executor whose one tool counts its runs."""

    def __init__(self, switches_cache: MemorySwitches | None = None, **spec: Any) -> None:
        self.runs = 0
        self.ledger = MemoryLedger()
        self.registry = ToolRegistry([WorkerTool(build_spec(**spec), self._run)])
        self.executor = build_executor(
            self.registry,
            FakeSandboxClient(),
            self.ledger,
            MemoryBlobs(),
            {"host": "h", "queue": "q"},
            policy=CallPolicy(self.registry, switches_cache),
        )

    def _run(self, *_: Any) -> Outcome:
        self.runs += 1
        return Outcome("ran")


def test_worker_refuses_a_disabled_tool_until_it_is_enabled() -> None:
    switches_cache = MemorySwitches(echo=OFF)
    harness = Harness(switches_cache)
    refused = harness.executor.execute(build_call(), build_context())
    assert (refused.error_code, refused.error, harness.runs) == (ErrorCode.TOOL_DISABLED, OFF.refusal("echo"), 0)
    switches_cache.off.clear()
    assert harness.executor.execute(build_call(call_id="call-2"), build_context()).success


def test_worker_refuses_a_tool_disabled_in_its_registry() -> None:
    harness = Harness()
    harness.registry.disable("echo")
    assert harness.executor.execute(build_call(), build_context()).error_code is ErrorCode.TOOL_DISABLED
    harness.registry.enable("echo")
    assert harness.executor.execute(build_call(call_id="call-2"), build_context()).success


def test_switches_do_not_stop_session_verbs() -> None:
    verb = "session.close"
    harness = Harness(MemorySwitches(**{verb: OFF}), name=verb, audience="session")
    assert harness.executor.execute(build_call(verb), build_context()).success


def answer_ran(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="ran")


async def dispatch(name: str, switches_cache: Any, audience: Any = "model") -> tuple[ToolResult, int]:
    transport, catalog = (
        AnsweringTransport(answer_ran),
        StaticCatalog(build_spec("echo"), build_spec("session.close", audience="session")),
    )
    dispatcher = Dispatcher(
        transport, TenantCatalog(catalog), KEY, queue_wait_s=60, rules=CallRules(switches=switches_cache)
    )
    result = await dispatcher.dispatch(Request(build_call(name), "acme", "s1", "q", audience=audience))
    return result, len(transport.deliveries)


class UnavailableSwitches:
    async def switches(self) -> dict[str, Switch]:
        raise BrokerUnavailable("Redis is away")


@pytest.mark.parametrize(
    ("name", "switches", "code"),
    [
        ("echo", MemorySwitches(echo=OFF), ErrorCode.TOOL_DISABLED),
        ("nothing", MemorySwitches(nothing=OFF), ErrorCode.TOOL_NOT_FOUND),
        ("echo", UnavailableSwitches(), ErrorCode.BROKER_UNAVAILABLE),
    ],
    ids=["disabled tool", "unknown tool", "unreadable switches"],
)
async def test_dispatcher_refuses_a_disabled_or_unknown_tool(name: str, switches: Any, code: ErrorCode) -> None:
    result, sent = await dispatch(name, switches)
    assert (result.error_code, sent) == (code, 0)
    assert code is not ErrorCode.TOOL_DISABLED or result.error == OFF.refusal("echo")


@pytest.fixture
def fresh_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of the switches."""
    monkeypatch.setattr("toolcrew.store.tools.SWITCHES_FRESH_S", 0.0)


@pytest.fixture
def pool(redis_server: RedisProcess, fresh_switches: None) -> SwitchedPool:
    return SwitchedPool(
        redis_server, *(WorkerTool(build_spec(name), lambda *_: Outcome("ran")) for name in ("echo", "other"))
    )


@pytest.fixture
async def client(pool: SwitchedPool) -> AsyncIterator[ToolClient]:
    """Return a client of the tenant acme, with the pool's own secrets."""
    async with pool.client() as opened:
        yield opened


async def call(client: ToolClient, name: str = "echo") -> ErrorCode | None:
    async with await client.open_session() as session:
        return (await session.call(name, {})).error_code


async def test_tool_disabled_for_one_tenant_is_enabled_for_others(client: ToolClient) -> None:
    state = await client.disable("echo", reason="no", tenant="acme")
    assert (state.state, state.scope) == ("disabled", "tenant")
    assert await call(client) is ErrorCode.TOOL_DISABLED
    assert await call(client, "other") is None
    assert [spec.name for spec in await client.tools()] == ["other"]
    assert (await client.tool_state("echo", "neighbour")).state == "enabled"
    assert [state.scope for state in await client.tool_states("neighbour")] == [None, None]
    state = await client.enable("echo", tenant="acme")
    assert state.state == "enabled"
    assert await call(client) is None


async def test_tool_states_mark_tools_that_a_policy_forbids(redis_server: RedisProcess, client: ToolClient) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.url) as opened:
        await RedisTenants(opened, "default", KEY).add("acme", TenantPolicy(tools=("ec*",)))
    client._tenants._cache.forget()
    assert [(state.name, state.state) for state in await client.tool_states()] == [
        ("echo", "enabled"),
        ("other", "forbidden"),
    ]
    assert (await client.tool_state("other")).state == "forbidden"
    assert {state.state for state in await client.tool_states("default")} == {"enabled"}
    assert [spec.name for spec in await client.tools()] == ["echo"]


async def test_worker_refuses_a_tool_disabled_for_a_tenant(pool: SwitchedPool, client: ToolClient) -> None:
    await client.disable("echo", tenant="acme")
    client._dispatcher._rules = replace(client._dispatcher._rules, switches=None)
    assert await call(client) is ErrorCode.TOOL_DISABLED
    switches_cache = WorkerSwitches(pool.redis, "default", KEY)
    assert switches_cache.find("echo", build_context().tenant) is not None
    assert switches_cache.find("echo", "neighbour") is None


async def test_tenant_and_global_switches_are_independent(client: ToolClient) -> None:
    await client.disable("echo", reason="own", tenant="acme")
    await client.disable("echo", reason="all")
    assert (await client.tool_state("echo")).scope == "everywhere"
    state = await client.enable("echo")
    assert (state.state, state.scope, state.switch and state.switch.reason) == ("disabled", "tenant", "own")
    assert (await client.tool_state("echo", "neighbour")).state == "enabled"
    await client.disable("echo")
    state = await client.enable("echo", tenant="acme")
    assert state.scope == "everywhere"


async def test_switched_tenants_lists_tenants_with_a_disabled_tool(client: ToolClient) -> None:
    await client.disable("echo", tenant="acme")
    await client.disable("echo", tenant="beta")
    await client.disable("other", tenant="beta")
    await client.disable("echo")
    assert list(await client.switched_tenants("echo")) == ["acme", "beta"]


@pytest.mark.parametrize("data", [b"junk", b"", b'{"by": 3}', b'{"at": 1e300}', b"[]", b'{"unknown": 1}', b"\xff"])
def test_unreadable_switch_disables_its_tool(data: bytes) -> None:
    for name in (b"acme/echo", b"echo"):
        assert find_switch(parse_switches(KEY, {name: data}), "echo", "acme") is not None


async def test_switch_for_an_unknown_tenant_is_refused(pool: SwitchedPool, client: ToolClient) -> None:
    async with redis.asyncio.Redis.from_url(pool.broker.redis_url.get_secret_value()) as opened:
        await RedisTenants(opened, "default", KEY).add("acme", TenantPolicy())
    for work in (client.disable("echo", tenant="unknown"), client.enable("echo", tenant="unknown")):
        with pytest.raises(ToolFailure) as refused:
            await work
        assert refused.value.code is ErrorCode.UNKNOWN_TENANT
    assert pool.redis.hgetall(switches_key("default")) == {}


async def test_removing_a_tenant_removes_its_switches(pool: SwitchedPool) -> None:
    async with redis.asyncio.Redis.from_url(pool.broker.redis_url.get_secret_value()) as opened:
        tenants, switches = RedisTenants(opened, "default", KEY), RedisSwitches(opened, "default", KEY)
        for name in ("acme", "acme2"):
            await tenants.add(name, TenantPolicy())
            await switches.turn_off("echo", OFF, name)
        await switches.turn_off("echo", OFF)
        await tenants.remove("acme")
        assert sorted(await opened.hkeys(switches_key("default"))) == [b"acme2/echo", b"echo"]


async def test_tenant_key_reads_its_own_states_and_changes_none(pool: SwitchedPool, client: ToolClient) -> None:
    async with redis.asyncio.Redis.from_url(pool.broker.redis_url.get_secret_value()) as opened:
        await RedisTenants(opened, "default", KEY).add("acme", TenantPolicy())
        keys = ApiKeys(opened, "default", KEY)
        api_key = await keys.add("acme", "tenant", name="ann")
        await client.disable("echo", tenant="acme")
        client._credential = Credential(keys, api_key.text)
        assert (await client.tool_state("echo")).scope == "tenant"
        forbidden = (
            client.enable("echo", tenant="acme"),
            client.enable("echo"),
            client.disable("other", tenant="acme"),
            client.disable("other", tenant="neighbour"),
            client.tool_states("neighbour"),
            client.tool_state("echo", "neighbour"),
            client.switched_tenants("echo"),
            client.audit(),
        )
        for work in forbidden:
            with pytest.raises(ToolFailure) as refused:
                await work
            assert refused.value.code is ErrorCode.PERMISSION_DENIED
        assert list(await opened.hkeys(switches_key("default"))) == [b"acme/echo"]
