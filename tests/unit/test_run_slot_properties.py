"""Runs that wait for sandboxes, and whose calls ask, work, time out or are cancelled in any order. Slots are neither
exceeded nor left empty, and every run ends.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.runs.run_slots import RunSlot, RunSlots
from tests.slot_harness import given_up

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
Doing = Callable[[], None]


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
        self._slots, self._sandboxes, self._steps = slots, sandboxes, steps
        self.at_work, self.wants = set[str](), set[str]()
        self.working, self.asked = dict[str, Gate](), dict[str, Gate]()
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
            async with gate.limit, given_up(slot, name):
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
        self.slots, self.count, self.plans = RunSlots(), count, plans
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
        self.claiming, some = room, [self.plans.pop() for _ in range(min(room, len(self.plans)))]
        with self.slots.reserve(room):
            self._claimed.clear()
            await self._claimed.wait()
            for steps in some:
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

    def doings(self, *, is_ending: bool) -> list[Doing]:
        """Return the possible next steps. `is_ending`: only the steps that end all runs."""
        actions: list[Doing] = [self._claim] if self.plans and not self.claiming and self.slots.count_free() else []
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
        held = [run for run in self.runs.values() if run.at_work]
        assert len(held) <= self.count, "more are at work than there are slots"
        assert len(held) + self.claiming >= self.count or not any(run.wants for run in self.runs.values()), (
            "a slot is free, and a run waits"
        )
        assert not any(run.wants for run in held), "a run has a slot, and a call of it waits for one"
        waiting = [run for run in self.runs.values() if run.asked and not run.at_work and not run.wants]
        taken = len(self.runs) - len(waiting) - sum(bool(run.wants) for run in self.runs.values())
        assert self.slots.count_free() == max(0, self.count - self.claiming - taken), "who only waits has a slot"


async def settled() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def play(count: int, sandboxes: int, plans: list[list[Calls]], draws: list[tuple[int, bool]]) -> None:
    process = Process(count, sandboxes, list(plans))
    for draw, is_settled in draws:
        if doings := process.doings(is_ending=False):
            doings[draw % len(doings)]()
        if is_settled:
            await settled()
            process.check()
    await settled()
    while doings := process.doings(is_ending=True):
        process.check()
        doings[0]()
        await settled()
    assert (process.runs, process.plans, process.slots.count_free()) == ({}, [], count)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3), st.integers(1, 4), RUNS, st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60))
def test_places_are_never_exceeded_nor_left_empty_and_everybody_ends(
    count: int, sandboxes: int, plans: list[list[Calls]], draws: list[tuple[int, bool]]
) -> None:
    run: Callable[[Awaitable[None]], None] = asyncio.run  # type: ignore[assignment]
    run(play(count, sandboxes, plans, draws))
