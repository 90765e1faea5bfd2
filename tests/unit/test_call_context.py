"""What a function is told of its call, and the state that outlives it."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from contract.errors import ErrorCode, ToolFailure
from orchestrator.functions.call_context import CallContext, ModelLike
from orchestrator.functions.session_state import MAX_VALUE_BYTES, MemoryState


async def refusal(state: MemoryState, key: Any, value: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as refused:
        await state.set(key, value)
    return refused.value


def test_a_context_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CallContext("c1").cwd = "/"  # type: ignore[misc]


def test_a_model_is_what_has_a_name_and_completes() -> None:
    class Fake:
        name = "fake"

        async def complete(self, prompt: str) -> str:
            return prompt

    assert isinstance(Fake(), ModelLike)
    assert not isinstance(object(), ModelLike)


async def test_what_was_set_is_got_and_an_absent_key_gives_the_default() -> None:
    state = MemoryState()
    await state.set("a", {"n": [1, None, "读"]})
    assert await state.get("a") == {"n": [1, None, "读"]}
    assert (await state.get("b"), await state.get("b", 5)) == (None, 5)
    assert await state.items() == {"a": {"n": [1, None, "读"]}}


async def test_changing_what_was_got_changes_nothing() -> None:
    state = MemoryState()
    await state.set("a", [1])
    (await state.get("a")).append(2)
    assert await state.get("a") == [1]


async def test_updates_by_many_tasks_lose_nothing() -> None:
    state = MemoryState()

    async def add(value: Any) -> int:
        await asyncio.sleep(0)
        return (value or 0) + 1

    await asyncio.gather(*(state.update("n", add) for _ in range(50)))
    assert await state.get("n") == 50


async def test_updates_by_threads_of_other_loops_lose_nothing() -> None:
    state = MemoryState()

    def add_ten() -> None:
        async def add() -> None:
            for _ in range(10):
                await state.update("n", lambda n: (n or 0) + 1)

        asyncio.run(add())

    await asyncio.gather(*(asyncio.to_thread(add_ten) for _ in range(8)))
    assert await state.get("n") == 80


async def test_an_update_gives_the_new_value() -> None:
    assert await MemoryState().update("a", lambda old: [old, 1]) == [None, 1]


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), b"x", "\ud800"], ids=repr)
async def test_what_is_no_json_is_refused_and_the_old_value_stays(value: Any) -> None:
    state = MemoryState()
    await state.set("a", 1)
    failure = await refusal(state, "a", value)
    assert (failure.code, "'a'" in failure.message) == (ErrorCode.INVALID_ARGUMENTS, True)
    assert await state.get("a") == 1


@pytest.mark.parametrize("key", ["", "x" * 257, 5])
async def test_a_key_is_a_short_text(key: Any) -> None:
    assert (await refusal(MemoryState(), key, 1)).code is ErrorCode.INVALID_ARGUMENTS


async def test_a_value_beyond_the_limit_is_refused_with_both_sizes() -> None:
    state = MemoryState()
    await state.set("fits", "x" * (MAX_VALUE_BYTES - 2))
    failure = await refusal(state, "large", "x" * (MAX_VALUE_BYTES - 1))
    assert failure.code is ErrorCode.NO_SPACE
    assert str(MAX_VALUE_BYTES) in failure.message
    assert str(MAX_VALUE_BYTES + 1) in failure.message


async def test_the_whole_state_is_bounded_and_replacing_frees_room() -> None:
    state = MemoryState(max_state_bytes=1000)
    await state.set("a", "x" * 600)
    assert (await refusal(state, "b", "x" * 600)).code is ErrorCode.NO_SPACE
    await state.set("a", "x")
    await state.set("b", "x" * 600)
    assert sum(len(key) + len(json.dumps(value)) for key, value in (await state.items()).items()) < 1000


async def test_a_plain_function_in_a_thread_waits_for_the_loop() -> None:
    context = CallContext("c1", loop=asyncio.get_running_loop())

    def count() -> Any:
        return context.wait(context.state.update("n", lambda n: (n or 0) + 1))

    assert await asyncio.to_thread(count) == 1


async def test_waiting_inside_the_loop_is_an_error_instead_of_a_deadlock() -> None:
    context = CallContext("c1", loop=asyncio.get_running_loop())
    with pytest.raises(RuntimeError, match="await"):
        context.wait(context.state.get("n"))
