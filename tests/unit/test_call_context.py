"""The context that a function receives with its call, and the state that outlives the call."""

import asyncio
from typing import Any

import pytest

from contract.functions.call_context import CallContext
from orchestrator.functions.loop_waits import LoopRunner
from orchestrator.functions.session_state import MemoryState


async def test_updates_by_threads_of_other_loops_lose_nothing() -> None:
    state = MemoryState()

    def add_ten() -> None:
        async def add() -> None:
            for _ in range(10):
                await state.update("n", lambda n: (n or 0) + 1)

        asyncio.run(add())

    await asyncio.gather(*(asyncio.to_thread(add_ten) for _ in range(8)))
    assert await state.get("n") == 80


async def test_a_plain_function_in_a_thread_waits_for_the_loop() -> None:
    context = CallContext("c1", state=MemoryState(), runner=LoopRunner(asyncio.get_running_loop()))

    def count() -> Any:
        return context.wait(context.state.update("n", lambda n: (n or 0) + 1))

    assert await asyncio.to_thread(count) == 1


async def test_waiting_inside_the_loop_is_an_error_instead_of_a_deadlock() -> None:
    context = CallContext("c1", state=MemoryState(), runner=LoopRunner(asyncio.get_running_loop()))
    with pytest.raises(RuntimeError, match="await"):
        context.wait(context.state.get("n"))
