"""A run that only waits for people does not block another run. The run gives up its slot and continues when a slot is
free.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from orchestrator.runs.run_slots import MAX_RUNS_PER_SLOT, RunSlot, RunSlots
from tests.slot_harness import given_up


class Harness:
    """A process with two slots, and the work of its runs."""

    def __init__(self, count: int = 2) -> None:
        self.slots, self.runs = RunSlots(), dict[str, None]()
        self.slots.configure(count, self.runs)

    def begin(self, *runs: str) -> None:
        self.runs |= dict.fromkeys(runs)

    def end(self, run: str) -> int:
        del self.runs[run]
        return self.slots.count_free()

    @asynccontextmanager
    async def away(self) -> AsyncIterator["Call"]:
        """Start a run with one call, which waits. Yield the call."""
        call = Call("call")

        async def work() -> None:
            async with self.slots.run() as slot:
                await call.make(slot)

        async with call.made_by(work()):
            await call.is_asked.wait()
            yield call


class Call:
    """A call that waits for an answer, works after its run has a slot again, and ends when the test allows it."""

    task: "asyncio.Task[None]"

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_asked, self.answered, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_at_work = False
        self.question_s = asyncio.timeout(None)

    async def make(self, slot: RunSlot) -> None:
        async with slot.call(self._name):
            try:
                async with self.question_s, given_up(slot, self._name):
                    self.is_asked.set()
                    await self.answered.wait()
            except TimeoutError:
                return
            self._is_at_work = True
            await self.may_end.wait()

    @asynccontextmanager
    async def made_by(self, work: Coroutine[Any, Any, None]) -> AsyncIterator["Call"]:
        self.task = asyncio.create_task(work)
        try:
            yield self
        finally:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def is_back(self) -> bool:
        await settled()
        return self._is_at_work

    async def has_ended(self) -> bool:
        self.may_end.set()
        await settled()
        return self.task.done()


def made(slot: RunSlot, name: str) -> AbstractAsyncContextManager[Call]:
    """Return one call of a run that has other calls."""
    call = Call(name)
    return call.made_by(call.make(slot))


async def settled() -> None:
    """Let everything run that can continue."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_run_that_waits_leaves_its_place_to_another_one() -> None:
    harness = Harness()
    harness.begin("a", "b")
    assert harness.slots.count_free() == 0
    async with harness.away() as a:
        assert harness.slots.count_free() == 1
        a.answered.set()
        assert await a.is_back(), "no other run has taken its slot"
        assert harness.slots.count_free() == 0


async def test_a_run_that_goes_on_waits_for_a_place_before_new_runs_get_it() -> None:
    harness = Harness()
    harness.begin("a", "b")
    async with harness.away() as a:
        harness.begin("c")
        a.answered.set()
        assert not await a.is_back()
        assert harness.end("b") == 0
        assert await a.is_back()


async def test_runs_return_in_the_order_of_their_answers() -> None:
    harness = Harness(1)
    harness.begin("a", "b")
    async with harness.away() as a, harness.away() as b:
        harness.begin("c")
        for waiting in (b, a):
            waiting.answered.set()
            assert not await waiting.is_back()
        harness.end("c")
        assert (await b.is_back(), await a.is_back()) == (True, False)
        harness.end("b")
        assert await a.is_back()


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_run_that_is_cancelled_while_it_waits_takes_no_place_with_it(is_answered: bool) -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.away() as a:
        harness.begin("b")
        if is_answered:
            a.answered.set()
            assert not await a.is_back()
        a.task.cancel()
        await asyncio.wait({a.task})
    assert harness.end("a") == 0
    assert harness.end("b") == 1


async def test_a_run_that_is_cancelled_as_it_gets_its_place_gives_it_on() -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.away() as a:
        harness.begin("b")
        a.answered.set()
        assert not await a.is_back()
        harness.end("b")
        a.task.cancel()
        await asyncio.wait({a.task})
        assert a.task.cancelled()
    assert harness.end("a") == 1


async def test_a_run_gives_up_one_place_when_the_last_of_its_calls_begins_to_wait() -> None:
    harness = Harness()
    harness.begin("a", "b")
    async with (
        harness.slots.run() as slot,
        slot.call("at work"),
        made(slot, "first") as first,
        made(slot, "second") as second,
    ):
        await settled()
        assert first.is_asked.is_set()
        assert second.is_asked.is_set()
        assert harness.slots.count_free() == 0, "one of its calls is at work"
        async with given_up(slot, "at work"):
            assert harness.slots.count_free() == 1
        assert harness.slots.count_free() == 0


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_call_that_is_answered_brings_its_run_back_and_its_end_gives_the_place_up_again(is_first: bool) -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.slots.run() as slot, made(slot, "first") as first, made(slot, "second") as second:
        await settled()
        harness.begin("b")
        answered, other = (first, second) if is_first else (second, first)
        answered.answered.set()
        assert not await answered.is_back(), "b has the slot"
        assert harness.end("b") == 0
        assert await answered.is_back()
        assert harness.slots.count_free() == 0
        assert await answered.has_ended()
        assert harness.slots.count_free() == 1, "the other one only waits"
        other.answered.set()
        assert await other.is_back()
        assert await other.has_ended()
        assert harness.slots.count_free() == 0, "the run itself goes on"


async def test_the_calls_of_a_run_come_back_into_one_place() -> None:
    harness = Harness(1)
    harness.begin("a", "c")
    async with (
        harness.away() as c,
        harness.slots.run() as slot,
        made(slot, "first") as first,
        made(slot, "second") as second,
    ):
        await settled()
        harness.begin("b")
        for call in (first, c, second):
            call.answered.set()
            await settled()
        harness.end("b")
        assert (await first.is_back(), await second.is_back(), await c.is_back()) == (True, True, False)
        assert await first.has_ended()
        assert not await c.is_back(), "the second one is at work"
        del harness.runs["a"]
        assert harness.slots.count_free() == 0
        assert await c.is_back()


async def test_a_call_that_begins_while_the_others_wait_waits_for_a_place() -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.slots.run() as slot, made(slot, "first"):
        await settled()
        harness.begin("b")
        async with made(slot, "second") as second:
            await settled()
            assert not second.is_asked.is_set()
            harness.end("b")
            await settled()
            assert second.is_asked.is_set()


async def test_an_expired_question_ends_in_a_slot() -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.slots.run() as slot, made(slot, "call") as call:
        await settled()
        harness.begin("b")
        call.question_s.reschedule(0)
        await settled()
        assert not call.task.done()
        harness.end("b")
        await settled()
        assert call.task.done()
        assert harness.slots.count_free() == 0


async def test_a_run_whose_calls_are_broken_off_goes_on_in_a_place() -> None:
    harness, has_ended = Harness(1), asyncio.Event()
    harness.begin("a")

    async def until_its_time_is_up(limit: asyncio.Timeout) -> None:
        async with harness.slots.run() as slot:
            try:
                async with limit, slot.call("call"), given_up(slot, "call"):
                    await asyncio.Event().wait()
            except TimeoutError:
                pass
        has_ended.set()

    limit = asyncio.timeout(None)
    run = asyncio.create_task(until_its_time_is_up(limit))
    await settled()
    harness.begin("b")
    limit.reschedule(0)
    await settled()
    assert not has_ended.is_set()
    harness.end("b")
    await settled()
    assert run.done()


async def test_no_run_returns_to_a_slot_that_a_claim_may_fill() -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.away() as a:
        assert harness.slots.count_free() == 1
        with harness.slots.reserve(1):
            a.answered.set()
            assert not await a.is_back()
            assert harness.slots.count_free() == 0
            harness.begin("b")
        assert not await a.is_back()
        assert harness.end("b") == 0
        assert await a.is_back()


async def test_a_place_that_a_claim_did_not_fill_is_there_again() -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.away() as a:
        with harness.slots.reserve(1):
            a.answered.set()
            assert not await a.is_back()
        assert await a.is_back()


async def test_a_run_that_is_let_back_may_wait_again_before_it_has_noticed() -> None:
    harness = Harness(1)
    harness.begin("a")
    async with harness.slots.run() as slot, made(slot, "first") as first:
        await settled()
        harness.begin("b")
        first.answered.set()
        assert not await first.is_back()
        harness.end("b")
        async with made(slot, "second") as second:  # begins when the loop turns, before the first run continues
            assert await first.is_back()
            assert harness.slots.count_free() == 0, "the first one is at work"
            assert await first.has_ended()
            assert harness.slots.count_free() == 1
            second.answered.set()
            assert await second.is_back()


async def test_so_many_wait_and_no_more() -> None:
    harness = Harness(1)
    async with AsyncExitStack() as stack:
        for number in range(MAX_RUNS_PER_SLOT):
            assert harness.slots.count_free() == 1
            harness.begin(f"r{number}")
            await stack.enter_async_context(harness.away())
        assert harness.slots.count_free() == 0


async def test_no_run_waits_for_a_slot_where_runs_are_not_counted() -> None:
    async with RunSlots().run() as slot, slot.call("call"), given_up(slot, "call"):
        pass


async def test_a_run_that_waits_for_its_sandbox_lends_its_place_to_one_that_comes_back_and_to_no_new_one() -> None:
    harness, has_sandbox, has_begun = Harness(1), asyncio.Event(), asyncio.Event()
    harness.begin("a")

    async def wait_for_a_sandbox() -> None:
        async with harness.slots.lend():
            await has_sandbox.wait()
        has_begun.set()

    async with harness.away() as a:
        harness.begin("b")
        b = asyncio.create_task(wait_for_a_sandbox())
        await settled()
        assert harness.slots.count_free() == 0
        a.answered.set()
        assert await a.is_back()
        has_sandbox.set()
        await settled()
        assert not has_begun.is_set(), "a has the slot"
        assert await a.has_ended()
        harness.end("a")
        await settled()
        assert has_begun.is_set()
        await b
    assert harness.end("b") == 1


async def test_a_run_that_gets_no_sandbox_takes_no_place_with_it() -> None:
    harness = Harness(1)
    harness.begin("a")
    with pytest.raises(OSError, match="no host"):
        async with harness.slots.lend():
            raise OSError("no host")
    assert harness.slots.count_free() == 0
    assert harness.end("a") == 1
