"""Switching tools off and on, for all tenants or for one: in workers, dispatchers and lists, and without Redis."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import switches_key
from contract.registry import SWITCHES_FRESH_S, Switch, ToolRegistry, find_switch, parse_switches
from contract.settings import BrokerSettings
from contract.tenancy import TenantPolicy
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from orchestrator.sdk.client import ToolClient
from store.api_keys import ApiKeys, Credential
from store.connection import open_redis
from store.tenants import RedisTenants
from store.tools import RedisSwitches, WorkerSwitches, build_switch
from tests.builders import KEY, build_call, build_context, build_spec
from tests.conftest import RedisProcess
from tests.fakes import AnsweringTransport, FakeSandboxClient, MemoryBlobs, MemoryLedger, StaticCatalog, build_executor
from tests.switched_pool import SwitchedPool
from workers.executor import CallPolicy
from workers.tools.base import Outcome, WorkerTool

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


def test_a_worker_asks_redis_at_most_once_a_second() -> None:
    client, clock = CountingRedis(), Clock()
    board = WorkerSwitches(client, "test", KEY, clock)  # type: ignore[arg-type]
    for _ in range(100):
        board.find("echo", "acme")
    assert client.reads == 1
    clock.now += SWITCHES_FRESH_S
    board.find("echo", "acme")
    assert client.reads == 2


def test_a_worker_that_cannot_ask_runs_nothing() -> None:
    client, clock = CountingRedis(), Clock()
    board = WorkerSwitches(client, "test", KEY, clock)  # type: ignore[arg-type]
    board.find("echo", "acme")
    client.is_away = True
    clock.now += SWITCHES_FRESH_S
    with pytest.raises(BrokerUnavailable, match="was not run"):
        board.find("echo", "acme")


async def test_an_orchestrator_that_cannot_ask_calls_nothing() -> None:
    client = redis.asyncio.Redis(host="127.0.0.1", port=1, retry=None)
    away = RedisSwitches(client, "test", KEY)
    with pytest.raises(BrokerUnavailable):
        await away.switches()
    with pytest.raises(BrokerUnavailable, match="not enabled"):
        await away.turn_off("echo", OFF)
    with pytest.raises(BrokerUnavailable, match="not enabled"):
        await away.turn_on("echo")
    await client.aclose()


async def test_a_set_switch_is_not_reported_as_failed(switches: RedisSwitches) -> None:
    class WriteOnly(redis.asyncio.Redis):
        def hgetall(self, *_: Any) -> Any:
            raise redis.ConnectionError("away")

    one_way = RedisSwitches(WriteOnly(connection_pool=switches._client.connection_pool), "test", KEY)
    await one_way.turn_off("echo", OFF)
    assert await switches.switches() == {"echo": OFF}
    assert await one_way.turn_on("echo")


def test_a_reason_without_end_is_refused_before_it_is_kept() -> None:
    with pytest.raises(ToolFailure) as refused:
        build_switch("ada", "x" * 2000)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


class Board:
    """Switches in a dict."""

    def __init__(self, **off: Switch) -> None:
        self.off = off

    def find(self, name: str, tenant: str) -> Switch | None:
        return find_switch(self.off, name, tenant)

    async def switches(self) -> dict[str, Switch]:
        return self.off


class Harness:
    """An executor whose one tool counts its runs."""

    def __init__(self, board: Board | None = None, **spec: Any) -> None:
        self.runs = 0
        self.ledger = MemoryLedger()
        self.registry = ToolRegistry([WorkerTool(build_spec(**spec), self._run)])
        self.executor = build_executor(
            self.registry,
            FakeSandboxClient(),
            self.ledger,
            MemoryBlobs(),
            {"host": "h", "queue": "q"},
            policy=CallPolicy(self.registry, board),
        )

    def _run(self, *_: Any) -> Outcome:
        self.runs += 1
        return Outcome("ran")


def test_a_worker_does_not_run_what_is_off_and_runs_the_next_call_when_it_is_on_again() -> None:
    board = Board(echo=OFF)
    harness = Harness(board)
    refused = harness.executor.execute(build_call(), build_context())
    assert (refused.error_code, refused.error, harness.runs) == (ErrorCode.TOOL_DISABLED, OFF.refusal("echo"), 0)
    board.off.clear()
    assert harness.executor.execute(build_call(call_id="call-2"), build_context()).success


def test_a_worker_does_not_run_what_its_own_registry_has_off() -> None:
    harness = Harness()
    harness.registry.disable("echo")
    assert harness.executor.execute(build_call(), build_context()).error_code is ErrorCode.TOOL_DISABLED
    harness.registry.enable("echo")
    assert harness.executor.execute(build_call(call_id="call-2"), build_context()).success


def test_switches_do_not_stop_session_verbs() -> None:
    verb = "session.close"
    harness = Harness(Board(**{verb: OFF}), name=verb, audience="session")
    assert harness.executor.execute(build_call(verb), build_context()).success


def fine(call: ToolCall, _: ToolContext) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, success=True, output="ran")


async def dispatch(name: str, board: Any, audience: Any = "model") -> tuple[ToolResult, int]:
    transport, catalog = (
        AnsweringTransport(fine),
        StaticCatalog(build_spec("echo"), build_spec("session.close", audience="session")),
    )
    dispatcher = Dispatcher(transport, TenantCatalog(catalog), KEY, queue_wait_s=60, rules=CallRules(switches=board))
    result = await dispatcher.dispatch(Request(build_call(name), "acme", "s1", "q", audience=audience))
    return result, len(transport.deliveries)


async def test_the_dispatcher_does_not_send_what_is_off() -> None:
    result, sent = await dispatch("echo", Board(echo=OFF))
    assert (result.error_code, result.error, sent) == (ErrorCode.TOOL_DISABLED, OFF.refusal("echo"), 0)


async def test_the_dispatcher_reports_an_unknown_tool_from_one_that_is_off() -> None:
    result, _ = await dispatch("nothing", Board(nothing=OFF))
    assert result.error_code is ErrorCode.TOOL_NOT_FOUND


async def test_the_dispatcher_sends_nothing_when_the_switches_are_not_known() -> None:
    class Away:
        async def switches(self) -> dict[str, Switch]:
            raise BrokerUnavailable("Redis is away")

    result, sent = await dispatch("echo", Away())
    assert (result.error_code, sent) == (ErrorCode.BROKER_UNAVAILABLE, 0)


@pytest.fixture
def fresh_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of the switches."""
    monkeypatch.setattr("store.tools.SWITCHES_FRESH_S", 0.0)


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


async def test_a_tool_is_off_only_for_its_tenant(client: ToolClient) -> None:
    state = await client.disable("echo", reason="no", tenant="acme")
    assert state is not None
    assert (state.state, state.scope) == ("disabled", "tenant")
    assert await call(client) is ErrorCode.TOOL_DISABLED
    assert await call(client, "other") is None
    assert [spec.name for spec in await client.tools()] == ["other"]
    assert (await client.tool_state("echo", "neighbour")).state == "enabled"
    assert [state.scope for state in await client.tool_states("neighbour")] == [None, None]
    state = await client.enable("echo", tenant="acme")
    assert state is not None
    assert state.state == "enabled"
    assert await call(client) is None


async def test_lists_mark_tools_that_a_policy_forbids(redis_server: RedisProcess, client: ToolClient) -> None:
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


async def test_a_worker_refuses_a_tool_that_is_off(pool: SwitchedPool, client: ToolClient) -> None:
    await client.disable("echo", tenant="acme")
    client._dispatcher._rules = replace(client._dispatcher._rules, switches=None)
    assert await call(client) is ErrorCode.TOOL_DISABLED
    board = WorkerSwitches(pool.redis, "default", KEY)
    assert board.find("echo", build_context().tenant) is not None
    assert board.find("echo", "neighbour") is None


async def test_the_two_kinds_of_switch_are_turned_apart(client: ToolClient) -> None:
    await client.disable("echo", reason="own", tenant="acme")
    await client.disable("echo", reason="all")
    assert (await client.tool_state("echo")).scope == "everywhere"
    state = await client.enable("echo")
    assert state is not None
    assert (state.state, state.scope, state.switch and state.switch.reason) == ("disabled", "tenant", "own")
    assert (await client.tool_state("echo", "neighbour")).state == "enabled"
    await client.disable("echo")
    state = await client.enable("echo", tenant="acme")
    assert state is not None
    assert state.scope == "everywhere"


async def test_an_operator_sees_for_which_tenants_a_tool_is_off(client: ToolClient) -> None:
    await client.disable("echo", tenant="acme")
    await client.disable("echo", tenant="beta")
    await client.disable("other", tenant="beta")
    await client.disable("echo")
    assert list(await client.switched_tenants("echo")) == ["acme", "beta"]


@pytest.mark.parametrize("data", [b"junk", b"", b'{"by": 3}', b'{"at": 1e300}', b"[]", b'{"unknown": 1}', b"\xff"])
def test_a_switch_that_cannot_be_read_still_turns_its_tool_off(data: bytes) -> None:
    for name in (b"acme/echo", b"echo"):
        assert find_switch(parse_switches(KEY, {name: data}), "echo", "acme") is not None


async def test_there_is_no_switch_for_a_tenant_that_there_is_not(pool: SwitchedPool, client: ToolClient) -> None:
    async with redis.asyncio.Redis.from_url(pool.broker.redis_url.get_secret_value()) as opened:
        await RedisTenants(opened, "default", KEY).add("acme", TenantPolicy())
    for work in (client.disable("echo", tenant="unknown"), client.enable("echo", tenant="unknown")):
        with pytest.raises(ToolFailure) as refused:
            await work
        assert refused.value.code is ErrorCode.UNKNOWN_TENANT
    assert pool.redis.hgetall(switches_key("default")) == {}


async def test_the_switches_of_a_tenant_go_with_it(pool: SwitchedPool) -> None:
    async with redis.asyncio.Redis.from_url(pool.broker.redis_url.get_secret_value()) as opened:
        tenants, switches = RedisTenants(opened, "default", KEY), RedisSwitches(opened, "default", KEY)
        for name in ("acme", "acme2"):
            await tenants.add(name, TenantPolicy())
            await switches.turn_off("echo", OFF, name)
        await switches.turn_off("echo", OFF)
        await tenants.remove("acme")
        assert sorted(await opened.hkeys(switches_key("default"))) == [b"acme2/echo", b"echo"]


async def test_a_tenants_key_sees_its_own_states_and_changes_none(pool: SwitchedPool, client: ToolClient) -> None:
    async with redis.asyncio.Redis.from_url(pool.broker.redis_url.get_secret_value()) as opened:
        await RedisTenants(opened, "default", KEY).add("acme", TenantPolicy())
        keys = ApiKeys(opened, "default", KEY)
        made = await keys.add("acme", "tenant", name="ann")
        await client.disable("echo", tenant="acme")
        client._credential = Credential(keys, made.text)
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
