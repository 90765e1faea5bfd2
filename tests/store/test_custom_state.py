"""A session's state in Redis: shared by workers, separate for each tenant, and removed when unused."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import RedisProcess
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.call_context import CallContext
from toolcrew.contract.names import account_key, server_sessions_key, session_state_key
from toolcrew.orchestrator.functions.loop_waits import LoopRunner
from toolcrew.orchestrator.functions.session_state import MemoryState
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.tool_state import STATE_TTL_S, RedisState, StateStore
from toolcrew.workers.web_worker import _end_sessions


@pytest.fixture
def store(redis_server: RedisProcess) -> Iterator[StateStore]:
    with redis_server.client() as client:
        yield StateStore(client, "test")


@pytest.fixture
def states(store: StateStore) -> list[RedisState]:
    """Return three views of one session's state, as three workers have them."""
    return [store.open("acme", "s1") for _ in range(3)]


async def test_concurrent_updates_by_workers_are_all_applied(states: list[RedisState]) -> None:
    async def add_ten(state: RedisState) -> None:
        for _ in range(10):
            await state.update("n", lambda n: (n or 0) + 1)

    # Each in a loop of its own, as in a process of its own.
    await asyncio.gather(*(asyncio.to_thread(asyncio.run, add_ten(state)) for state in states))
    assert await states[0].get("n") == 30


async def test_an_update_is_repeated_after_a_concurrent_write(states: list[RedisState]) -> None:
    old_values = []

    async def slow(old: int | None) -> int:
        old_values.append(old)
        if len(old_values) == 1:
            await states[1].set("n", 10)
        return (old or 0) + 1

    assert (await states[0].update("n", slow), old_values) == (11, [None, 10])


async def test_an_update_is_repeated_when_the_value_changed_and_changed_back(states: list[RedisState]) -> None:
    await states[0].set("n", 1)
    old_values = []

    async def slow(old: int) -> int:
        old_values.append(old)
        if len(old_values) == 1:
            await states[1].set("n", 2)
            await states[1].set("n", 1)
        return old + 1

    assert (await states[0].update("n", slow), old_values) == (2, [1, 1])


async def test_state_is_separate_for_each_session_and_tenant(store: StateStore, states: list[RedisState]) -> None:
    await states[0].set("secret", "mine")
    for other in (store.open("acme", "s2"), store.open("other", "s1")):
        assert await other.items() == {}


async def test_every_access_extends_the_time_to_live(redis_server: RedisProcess, states: list[RedisState]) -> None:
    key = session_state_key("test", "acme", "s1")
    await states[0].set("a", 1)
    with redis_server.client() as client:
        for use in (states[0].get("a"), states[0].items(), states[0].update("a", lambda a: a), states[0].set("a", 2)):
            client.expire(key, 10)
            await use
            assert client.ttl(key) == pytest.approx(STATE_TTL_S, abs=5)
        assert set(client.keys("*")) == {key.encode(), b"toolcrew:test:t:acme:memory"}


async def test_state_without_redis_fails_with_an_unknown_outcome() -> None:
    settings = BrokerSettings.model_validate({"redis_url": f"redis://127.0.0.1:{reserve_port()}/0"})
    state = StateStore.of(settings).open("acme", "s1")
    for use in (state.get("a"), state.set("a", 1), state.items(), state.update("a", lambda a: a)):
        with pytest.raises(ToolFailure, match=r"Redis does not answer.*earlier effects remain") as failed:
            await use
        assert failed.value.code is ErrorCode.OUTCOME_UNKNOWN


async def test_concurrent_updates_by_threads_are_all_applied() -> None:
    state = MemoryState()

    def add_ten() -> None:
        async def add() -> None:
            for _ in range(10):
                await state.update("n", lambda n: (n or 0) + 1)

        asyncio.run(add())

    await asyncio.gather(*(asyncio.to_thread(add_ten) for _ in range(8)))
    assert await state.get("n") == 80


async def test_a_sync_function_in_a_thread_can_wait_for_the_loop() -> None:
    context = CallContext("c1", state=MemoryState(), runner=LoopRunner(asyncio.get_running_loop()))

    def count() -> Any:
        return context.wait(context.state.update("n", lambda n: (n or 0) + 1))

    assert await asyncio.to_thread(count) == 1


async def test_wait_in_the_event_loop_fails_instead_of_blocking() -> None:
    context = CallContext("c1", state=MemoryState(), runner=LoopRunner(asyncio.get_running_loop()))
    with pytest.raises(RuntimeError, match="await"):
        context.wait(context.state.get("n"))


async def test_closing_a_session_removes_the_record_of_its_mcp_sessions_and_its_bytes(store: StateStore) -> None:
    record = store.open_server_sessions("acme", "s1")
    other = store.open_server_sessions("acme", "s2")
    await record.set("peer", "a sealed id")
    await other.set("peer", "another sealed id")
    counted = int(store.client.hget(account_key("test", "acme"), "total") or 0)
    assert _end_sessions([], store, "acme", "s1") is False
    assert await other.get("peer") == "another sealed id"
    assert not store.client.exists(server_sessions_key("test", "acme", "s1"))
    assert 0 < int(store.client.hget(account_key("test", "acme"), "total") or 0) < counted
