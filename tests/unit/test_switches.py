"""Switching tools off and on: the shared switches, their effect in a worker and in the dispatcher, and a faulty or
silent Redis.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import redis.asyncio

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.registry import SWITCHES_FRESH_S, Switch, ToolRegistry, find_switch, parse_switches
from contract.settings import BrokerSettings
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.tenant_catalog import CallRules, TenantCatalog
from store.connection import open_redis
from store.tools import RedisSwitches, RegistrySwitches, WorkerSwitches, build_switch
from tests.builders import KEY, build_call, build_context, build_spec
from tests.conftest import RedisProcess
from tests.fakes import AnsweringTransport, FakeSandboxClient, MemoryBlobs, MemoryLedger, StaticCatalog, build_executor
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


async def test_a_tool_that_was_turned_off_is_off_until_it_is_turned_on(switches: RedisSwitches) -> None:
    await switches.turn_off("echo", OFF)
    assert await switches.switches() == {"echo": OFF}
    assert await switches.turn_on("echo")
    assert await switches.switches() == {}
    assert not await switches.turn_on("echo")


async def test_a_worker_rereads_old_switches(switches: RedisSwitches, redis_server: RedisProcess) -> None:
    clock = Clock()
    with redis_server.client() as client:
        board = WorkerSwitches(client, "test", KEY, clock)
        assert board.find("echo", "acme") is None
        await switches.turn_off("echo", OFF)
        clock.now += SWITCHES_FRESH_S
        assert board.find("echo", "acme") == OFF
        await switches.turn_on("echo")
        clock.now += SWITCHES_FRESH_S
        assert board.find("echo", "acme") is None


async def test_another_orchestrator_rereads_switches(switches: RedisSwitches, redis_server: RedisProcess) -> None:
    client = open_redis(BrokerSettings.model_validate({"redis_url": redis_server.url}))
    other = RedisSwitches(client, "test", KEY)
    assert await other.switches() == {}
    await switches.turn_off("echo", OFF)
    assert await other.switches() == {}
    other._cache.read_at -= SWITCHES_FRESH_S
    assert await other.switches() == {"echo": OFF}
    await client.aclose()


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
    with pytest.raises(BrokerUnavailable, match="not switched"):
        await away.turn_off("echo", OFF)
    with pytest.raises(BrokerUnavailable, match="not switched"):
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


@pytest.mark.parametrize("data", [b"", b'{"at": 1e300}', b"nonsense", b"[]", b'{"by": 5}', b'{"unknown": 1}', b"\xff"])
def test_a_switch_that_cannot_be_read_still_turns_its_tool_off(data: bytes) -> None:
    assert parse_switches(KEY, {b"echo": data}).keys() == {"echo"}


def test_a_call_of_a_tool_that_is_off_gets_the_reason() -> None:
    sentence = OFF.refusal("echo")
    assert "turned off the tool echo" in sentence
    assert "it is being repaired" in sentence
    assert "another tool" in sentence


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


async def test_a_registry_of_this_process_is_a_source_of_switches() -> None:
    registry = Harness().registry
    registry.disable("echo", OFF)
    result, sent = await dispatch("echo", RegistrySwitches(registry))
    assert (result.error_code, sent) == (ErrorCode.TOOL_DISABLED, 0)
