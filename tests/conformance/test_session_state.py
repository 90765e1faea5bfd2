"""The contract of every session state, in memory and in Redis."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import RedisProcess
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.functions.session_state import MAX_VALUE_BYTES, SessionState
from toolcrew.orchestrator.functions.session_state import MemoryState
from toolcrew.store.tool_state import StateStore

Open = Callable[..., SessionState]


@pytest.fixture(params=["memory", "redis"])
def open_state(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Yield a function that opens states. All states in Redis belong to one session."""
    if request.param == "memory":
        yield MemoryState
        return
    server: RedisProcess = request.getfixturevalue("redis_server")
    with server.client() as client:
        yield lambda **limits: StateStore(client, "test", **limits).open("acme", "s1")


async def refusal(state: SessionState, key: Any, value: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as refused:
        await state.set(key, value)
    return refused.value


async def test_a_set_value_is_returned_and_an_absent_key_gives_the_default(open_state: Open) -> None:
    state = open_state()
    await state.set("a", {"n": [1, None, "读"]})
    assert await state.get("a") == {"n": [1, None, "读"]}
    assert (await state.get("b"), await state.get("b", 5)) == (None, 5)
    assert await state.items() == {"a": {"n": [1, None, "读"]}}


async def test_a_new_state_is_empty_and_accepts_any_text_as_a_key(open_state: Open) -> None:
    state = open_state()
    assert await state.items() == {}
    for key in ("size", "=", "a b", "读", "\n", "x" * 256):
        await state.set(key, key)
    assert await state.items() == {key: key for key in ("size", "=", "a b", "读", "\n", "x" * 256)}


async def test_changing_a_returned_value_does_not_change_the_state(open_state: Open) -> None:
    state = open_state()
    await state.set("a", [1])
    (await state.get("a")).append(2)
    default: list[int] = []
    (await state.get("absent", default)).append(1)
    assert (await state.get("a"), default) == ([1], [])


async def test_update_returns_the_new_value_and_passes_none_for_an_absent_key(open_state: Open) -> None:
    assert await open_state().update("a", lambda old: [old, 1]) == [None, 1]


async def test_concurrent_updates_lose_nothing(open_state: Open) -> None:
    state = open_state()

    async def add(value: Any) -> int:
        await asyncio.sleep(0)
        return (value or 0) + 1

    await asyncio.gather(*(state.update("n", add) for _ in range(20)))
    assert await state.get("n") == 20


async def test_a_failed_update_changes_nothing(open_state: Open) -> None:
    state = open_state()
    await state.set("n", 1)
    with pytest.raises(ZeroDivisionError):
        await state.update("n", lambda n: n // 0)
    assert await state.get("n") == 1


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), b"x", "\ud800"], ids=ascii)
async def test_a_value_that_is_not_json_is_refused_and_the_old_value_stays(open_state: Open, value: Any) -> None:
    state = open_state()
    await state.set("a", 1)
    failure = await refusal(state, "a", value)
    assert (failure.code, "'a'" in failure.message) == (ErrorCode.INVALID_ARGUMENTS, True)
    assert await state.get("a") == 1


@pytest.mark.parametrize("key", ["", "x" * 257, 5, "\ud800"], ids=ascii)
async def test_an_invalid_key_is_refused(open_state: Open, key: Any) -> None:
    state = open_state()
    await state.set("5", "text")
    assert (await refusal(state, key, 1)).code is ErrorCode.INVALID_ARGUMENTS
    assert await state.get(key, "nothing") == "nothing"


async def test_a_value_above_the_limit_is_refused_with_both_sizes(open_state: Open) -> None:
    state = open_state()
    await state.set("fits", "x" * (MAX_VALUE_BYTES - 2))
    failure = await refusal(state, "large", "x" * (MAX_VALUE_BYTES - 1))
    assert failure.code is ErrorCode.NO_SPACE
    assert str(MAX_VALUE_BYTES) in failure.message
    assert str(MAX_VALUE_BYTES + 1) in failure.message


async def test_the_total_size_is_limited_and_replacing_a_value_frees_space(open_state: Open) -> None:
    state = open_state(max_state_bytes=1000)
    await state.set("a", "读" * 200)
    failure = await refusal(state, "b", "x" * 600)
    assert (failure.code, "1206" in failure.message) == (ErrorCode.NO_SPACE, True)
    with pytest.raises(ToolFailure):
        await state.update("b", lambda _: "x" * 600)
    await state.set("a", "x")
    await state.set("b", "x" * 600)
    await state.set("b", "x" * 993)
    assert (await refusal(state, "c", 1)).code is ErrorCode.NO_SPACE


async def test_a_value_that_exactly_fits_is_accepted(open_state: Open) -> None:
    state = open_state(max_state_bytes=10)
    await state.set("a", "x" * 7)
    assert (await refusal(state, "b", 1)).code is ErrorCode.NO_SPACE
    await state.set("a", "y" * 7)
    assert await state.items() == {"a": "y" * 7}
