"""A run that only waits for people does not block another run. The run gives up its slot and continues when a slot is
free. In any order of work, questions, time-outs and cancels, slots are neither exceeded nor left empty.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs.run_harness import released_slot
from toolcrew.orchestrator.runs.run_slots import MAX_RUNS_PER_SLOT, RunSlot, RunSlots


class Harness:
    """A process with one slot, and the work of its runs."""

    def __init__(self) -> None:
        self.slots = RunSlots()
        self.runs = dict[str, None]()
        self.slots.configure(1, self.runs)

    def begin(self, *runs: str) -> None:
        self.runs |= dict.fromkeys(runs)

    def end(self, run: str) -> int:
        del self.runs[run]
        return self.slots.count_free()

    @asynccontextmanager
    async def start_waiting_run(self) -> AsyncIterator["Call"]:
        """Start a run with one call, which waits. Yield the call."""
        call = Call("call")

        async def work() -> None:
            async with self.slots.run() as slot:
                await call.make(slot)

        async with call.made_by(work()):
            await call.is_asked.wait()
            yield call


@pytest.fixture
def harness() -> Harness:
    return Harness()


class Call:
    """A call that waits for an answer, works after its run has a slot again, and ends when the test allows it."""

    task: "asyncio.Task[None]"

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_asked = asyncio.Event()
        self.answered = asyncio.Event()
        self.may_end = asyncio.Event()
        self._is_at_work = False
        self.question_s = asyncio.timeout(None)

    async def make(self, slot: RunSlot) -> None:
        async with slot.call(self._name):
            try:
                async with self.question_s, released_slot(slot, self._name):
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
        await settle()
        return self._is_at_work

    async def has_ended(self) -> bool:
        self.may_end.set()
        await settle()
        return self.task.done()


def start_call(slot: RunSlot, name: str) -> AbstractAsyncContextManager[Call]:
    """Return one call of a run that has other calls."""
    call = Call(name)
    return call.made_by(call.make(slot))


async def test_runs_get_slots_back_in_the_order_of_their_answers(harness: Harness) -> None:
    harness.begin("a", "b")
    async with harness.start_waiting_run() as a, harness.start_waiting_run() as b:
        harness.begin("c")
        for waiting in (b, a):
            waiting.answered.set()
            assert not await waiting.is_back()
        harness.end("c")
        assert (await b.is_back(), await a.is_back()) == (True, False)
        harness.end("b")
        assert await a.is_back()


@pytest.mark.parametrize("is_answered", [False, True])
async def test_run_cancelled_while_waiting_occupies_no_slot(harness: Harness, is_answered: bool) -> None:
    harness.begin("a")
    async with harness.start_waiting_run() as a:
        harness.begin("b")
        if is_answered:
            a.answered.set()
            assert not await a.is_back()
        a.task.cancel()
        await asyncio.wait({a.task})
    assert harness.end("a") == 0
    assert harness.end("b") == 1


async def test_run_cancelled_as_it_gets_a_slot_frees_the_slot(harness: Harness) -> None:
    harness.begin("a")
    async with harness.start_waiting_run() as a:
        harness.begin("b")
        a.answered.set()
        assert not await a.is_back()
        harness.end("b")
        a.task.cancel()
        await asyncio.wait({a.task})
        assert a.task.cancelled()
    assert harness.end("a") == 1


async def test_expired_question_waits_for_a_slot(harness: Harness) -> None:
    harness.begin("a")
    async with harness.slots.run() as slot, start_call(slot, "call") as call:
        await settle()
        harness.begin("b")
        call.question_s.reschedule(0)
        await settle()
        assert not call.task.done()
        harness.end("b")
        await settle()
        assert call.task.done()
        assert harness.slots.count_free() == 0


async def test_run_with_timed_out_calls_waits_for_a_slot(harness: Harness) -> None:
    has_ended = asyncio.Event()
    harness.begin("a")

    async def until_its_time_is_up(limit: asyncio.Timeout) -> None:
        async with harness.slots.run() as slot:
            try:
                async with limit, slot.call("call"), released_slot(slot, "call"):
                    await asyncio.Event().wait()
            except TimeoutError:
                pass
        has_ended.set()

    limit = asyncio.timeout(None)
    run = asyncio.create_task(until_its_time_is_up(limit))
    await settle()
    harness.begin("b")
    limit.reschedule(0)
    await settle()
    assert not has_ended.is_set()
    harness.end("b")
    await settle()
    assert run.done()


async def test_unused_reserved_slot_is_free_again(harness: Harness) -> None:
    harness.begin("a")
    async with harness.start_waiting_run() as a:
        with harness.slots.reserve(1):
            a.answered.set()
            assert not await a.is_back()
        assert await a.is_back()


async def test_number_of_waiting_runs_per_slot_is_limited(harness: Harness) -> None:
    async with AsyncExitStack() as stack:
        for number in range(MAX_RUNS_PER_SLOT):
            assert harness.slots.count_free() == 1
            harness.begin(f"r{number}")
            await stack.enter_async_context(harness.start_waiting_run())
        assert harness.slots.count_free() == 0


async def test_run_without_configured_slots_does_not_wait() -> None:
    async with RunSlots().run() as slot, slot.call("call"), released_slot(slot, "call"):
        pass


async def test_slot_of_a_run_without_sandbox_goes_only_to_a_returning_run(harness: Harness) -> None:
    has_sandbox, has_begun = asyncio.Event(), asyncio.Event()
    harness.begin("a")

    async def wait_for_a_sandbox() -> None:
        async with harness.slots.lend():
            await has_sandbox.wait()
        has_begun.set()

    async with harness.start_waiting_run() as a:
        harness.begin("b")
        b = asyncio.create_task(wait_for_a_sandbox())
        await settle()
        assert harness.slots.count_free() == 0
        a.answered.set()
        assert await a.is_back()
        has_sandbox.set()
        await settle()
        assert not has_begun.is_set(), "a has the slot"
        assert await a.has_ended()
        harness.end("a")
        await settle()
        assert has_begun.is_set()
        await b
    assert harness.end("b") == 1


async def test_run_without_a_sandbox_occupies_no_slot(harness: Harness) -> None:
    harness.begin("a")
    with pytest.raises(OSError, match="no host"):
        async with harness.slots.lend():
            raise OSError("no host")
    assert harness.slots.count_free() == 0
    assert harness.end("a") == 1


TURNS = 30
"""Iterations of the event loop after which every task has made all possible progress. The tasks wait only for the
loop.
"""
Calls = list[list[str]]
"""Phases of each: "work" or "ask"."""
CALLS: st.SearchStrategy[Calls] = st.lists(
    st.lists(st.sampled_from(("work", "ask")), max_size=3), min_size=1, max_size=3
)
RUNS = st.lists(st.lists(CALLS, min_size=1, max_size=2), min_size=1, max_size=5)
Action = Callable[[], None]


class Gate:
    """A point at which a run or a call waits until the schedule lets it continue."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.limit = asyncio.timeout(None)

    def run_out(self) -> None:
        self.limit.reschedule(0)


class Run:
    """Steps, each with concurrent calls, and the run's own work between steps. `at_work`: the active calls, "" for
    the run itself.
    """

    def __init__(self, slots: RunSlots, sandboxes: asyncio.Semaphore, steps: list[Calls]) -> None:
        self._slots = slots
        self._sandboxes = sandboxes
        self._steps = steps
        self.at_work = set[str]()
        self.wants = set[str]()
        self.working = dict[str, Gate]()
        self.asked = dict[str, Gate]()
        self.wall = Gate()
        self.is_cancelled = False

    async def __call__(self) -> None:
        async with self._sandbox():
            await self._run()

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[None]:
        has_one = False
        try:
            async with self._slots.lend():
                has_one = await self._sandboxes.acquire()
                self.wants.add("")
            self.wants.discard("")
            yield
        finally:
            if has_one:
                self._sandboxes.release()

    async def _run(self) -> None:
        async with self._slots.run() as slot:
            try:
                async with self.wall.limit:
                    for number, calls in enumerate(self._steps):
                        await self._work("")
                        async with asyncio.TaskGroup() as group:
                            for index, phases in enumerate(calls):
                                group.create_task(self._call(slot, f"{number}-{index}", phases))
            except TimeoutError:
                self.wants.add("")
        self.wants.discard("")
        await self._work("")

    async def _call(self, slot: RunSlot, name: str, phases: list[str]) -> None:
        with self._wanting(name):
            async with slot.call(name):
                self.wants.discard(name)
                for phase in phases:
                    if phase == "work":
                        await self._work(name)
                    elif not await self._is_allowed(slot, name):
                        break
                self.wants.add(name)

    async def _is_allowed(self, slot: RunSlot, name: str) -> bool:
        """Return whether the call's question was answered. A call whose question times out does not act."""
        gate = self.asked[name] = Gate()
        try:
            async with gate.limit, released_slot(slot, name):
                try:
                    await gate.is_open.wait()
                finally:
                    del self.asked[name]
                self.wants.add(name)
        except TimeoutError:
            return False
        finally:
            self.wants.discard(name)
        return True

    async def _work(self, name: str) -> None:
        gate = self.working[name] = Gate()
        self.at_work.add(name)
        try:
            await gate.is_open.wait()
        finally:
            self.at_work.discard(name)
            del self.working[name]

    @contextmanager
    def _wanting(self, name: str) -> Iterator[None]:
        self.wants.add(name)
        try:
            yield
        finally:
            self.wants.discard(name)


class Process:
    """Claims runs one by one, each claim in two halves. The schedule decides the order."""

    def __init__(self, count: int, sandboxes: int, plans: list[list[Calls]]) -> None:
        self._sandboxes = asyncio.Semaphore(sandboxes)
        self.slots = RunSlots()
        self.count = count
        self.plans = plans
        self.runs = dict["asyncio.Task[None]", Run]()
        self.slots.configure(count, self.runs)
        self.claiming = 0
        self._claimed = asyncio.Event()
        self._claims = set["asyncio.Task[None]"]()

    def _claim(self) -> None:
        self._claims.add(asyncio.create_task(self._claimed_runs()))

    async def _claimed_runs(self) -> None:
        room = self.slots.count_free()
        if self.claiming or not room:
            return
        self.claiming, claimed_plans = room, [self.plans.pop() for _ in range(min(room, len(self.plans)))]
        with self.slots.reserve(room):
            self._claimed.clear()
            await self._claimed.wait()
            for steps in claimed_plans:
                run = Run(self.slots, self._sandboxes, steps)
                task = asyncio.create_task(run())
                task.add_done_callback(self._ended)
                self.runs[task] = run
        self.claiming = 0

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self.runs[task]
        self.slots.count_free()

    def _cancel(self, task: "asyncio.Task[None]", run: Run) -> None:
        run.is_cancelled = True
        task.cancel()

    def list_actions(self, *, is_ending: bool) -> list[Action]:
        """Return the possible next steps. `is_ending`: only the steps that end all runs."""
        actions: list[Action] = [self._claim] if self.plans and not self.claiming and self.slots.count_free() else []
        if self.claiming:
            actions.append(self._claimed.set)
        for task, run in self.runs.items():
            actions += [gate.is_open.set for gate in (*run.working.values(), *run.asked.values())]
            if not is_ending:
                actions += [gate.run_out for gate in run.asked.values()]
                actions += [run.wall.run_out] if run.asked and not run.is_cancelled else []
                actions.append(lambda task=task, run=run: self._cancel(task, run))  # type: ignore[misc]
        return actions

    def check(self) -> None:
        working_runs = [run for run in self.runs.values() if run.at_work]
        assert len(working_runs) <= self.count, "more are at work than there are slots"
        assert len(working_runs) + self.claiming >= self.count or not any(run.wants for run in self.runs.values()), (
            "a slot is free, and a run waits"
        )
        assert not any(run.wants for run in working_runs), "a run has a slot, and a call of it waits for one"
        waiting = [run for run in self.runs.values() if run.asked and not run.at_work and not run.wants]
        taken = len(self.runs) - len(waiting) - sum(bool(run.wants) for run in self.runs.values())
        assert self.slots.count_free() == max(0, self.count - self.claiming - taken), "who only waits has a slot"


async def play(count: int, sandboxes: int, plans: list[list[Calls]], draws: list[tuple[int, bool]]) -> None:
    process = Process(count, sandboxes, list(plans))
    for draw, is_settled in draws:
        if actions := process.list_actions(is_ending=False):
            actions[draw % len(actions)]()
        if is_settled:
            await settle()
            process.check()
    await settle()
    while actions := process.list_actions(is_ending=True):
        process.check()
        actions[0]()
        await settle()
    assert (process.runs, process.plans, process.slots.count_free()) == ({}, [], count)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3), st.integers(1, 4), RUNS, st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60))
def test_slots_are_never_exceeded_or_left_empty_and_all_runs_end(
    count: int, sandboxes: int, plans: list[list[Calls]], draws: list[tuple[int, bool]]
) -> None:
    run: Callable[[Awaitable[None]], None] = asyncio.run  # type: ignore[assignment]
    run(play(count, sandboxes, plans, draws))


async def settle() -> None:
    """Let everything run that can continue."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
