"""Tools that are switched off for one tenant: on both sides and in the prompts of that tenant's models, without
effect on other tenants.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis.asyncio

from contract.errors import ErrorCode, ToolFailure
from contract.names import switches_key
from contract.registry import Switch, find_switch, parse_switches
from contract.tenancy import TenantPolicy
from orchestrator.sdk.client import ToolClient
from store.api_keys import ApiKeys, Credential
from store.tenants import RedisTenants
from store.tools import RedisSwitches, WorkerSwitches
from tests.builders import KEY, build_context, build_spec
from tests.conftest import RedisProcess
from tests.switched_pool import SwitchedPool
from workers.tools.base import Outcome, WorkerTool

OFF = Switch(by="ada", at=1_700_000_000, reason="it is not for them")


@pytest.fixture(autouse=True)
def fresh_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the cache of the switches."""
    monkeypatch.setattr("store.tools.SWITCHES_FRESH_S", 0.0)


@pytest.fixture
def pool(redis_server: RedisProcess) -> SwitchedPool:
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


@pytest.mark.parametrize("data", [b"junk", b"", b'{"by": 3}'])
def test_a_tenants_switch_that_cannot_be_read_still_turns_its_tool_off(data: bytes) -> None:
    assert find_switch(parse_switches(KEY, {b"acme/echo": data}), "echo", "acme") is not None


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
