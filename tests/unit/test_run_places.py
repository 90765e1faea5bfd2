"""A run that waits for a person holds up no other one: it gives up its place, and goes on when there is one again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from orchestrator.runs.places import MOST_AWAY, Places


class Ground:
    """A process of two places, and what its runs do."""

    def __init__(self, count: int = 2) -> None:
        self.places, self.runs = Places(), dict[str, None]()
        self.places.serve(count, self.runs)

    def begin(self, *runs: str) -> None:
        self.runs |= dict.fromkeys(runs)

    def end(self, run: str) -> int:
        del self.runs[run]
        return self.places.room()

    @asynccontextmanager
    async def away(self, run: str) -> AsyncIterator["Waiting"]:
        waiting = Waiting(self.places, run)
        try:
            await waiting.is_away.wait()
            yield waiting
        finally:
            waiting.task.cancel()
            await asyncio.wait({waiting.task})


class Waiting:
    """A run that waits until it is answered, and is back when there is a place."""

    def __init__(self, places: Places, run: str) -> None:
        self.is_away, self.answered = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._wait(places, run))

    async def _wait(self, places: Places, run: str) -> None:
        async with places.given_up(run):
            self.is_away.set()
            await self.answered.wait()

    async def is_back(self) -> bool:
        for _ in range(10):
            await asyncio.sleep(0)  # whatever can go on does
        return self.task.done()


async def test_a_run_that_waits_leaves_its_place_to_another_one() -> None:
    ground = Ground()
    ground.begin("a", "b")
    assert ground.places.room() == 0
    async with ground.away("a") as a:
        assert ground.places.room() == 1
        a.answered.set()
        assert await a.is_back(), "nobody has taken its place"
    assert ground.places.room() == 0


async def test_a_run_that_goes_on_waits_for_a_place_before_new_runs_get_it() -> None:
    ground = Ground()
    ground.begin("a", "b")
    async with ground.away("a") as a:
        ground.begin("c")
        a.answered.set()
        assert not await a.is_back()
        assert ground.end("b") == 0
        assert await a.is_back()


async def test_who_was_answered_first_is_back_first() -> None:
    ground = Ground(1)
    ground.begin("a", "b")
    async with ground.away("a") as a, ground.away("b") as b:
        ground.begin("c")
        for waiting in (b, a):
            waiting.answered.set()
            assert not await waiting.is_back()
        ground.end("c")
        assert (await b.is_back(), await a.is_back()) == (True, False)
        ground.end("b")
        assert await a.is_back()


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_run_that_is_cancelled_while_it_waits_takes_no_place_with_it(is_answered: bool) -> None:
    ground = Ground(1)
    ground.begin("a")
    async with ground.away("a") as a:
        ground.begin("b")
        if is_answered:
            a.answered.set()
            assert not await a.is_back()
        a.task.cancel()
        await asyncio.wait({a.task})
    assert ground.end("a") == 0
    assert ground.end("b") == 1


async def test_a_run_that_is_cancelled_as_it_gets_its_place_gives_it_on() -> None:
    ground = Ground(1)
    ground.begin("a")
    async with ground.away("a") as a:
        ground.begin("b")
        a.answered.set()
        assert not await a.is_back()
        ground.end("b")
        a.task.cancel()
        await asyncio.wait({a.task})
        assert a.task.cancelled()
    assert ground.end("a") == 1


async def test_a_run_gives_up_one_place_however_many_of_its_calls_wait() -> None:
    ground = Ground()
    ground.begin("a", "b")
    async with ground.away("a"), ground.away("a") as second:
        assert ground.places.room() == 1
        second.answered.set()
        assert await second.is_back()
        assert ground.places.room() == 1


async def test_a_run_that_is_let_back_may_wait_again_before_it_has_noticed() -> None:
    ground = Ground(1)
    ground.begin("a")
    async with ground.away("a") as first:
        ground.begin("b")
        first.answered.set()
        assert not await first.is_back()
        second = Waiting(ground.places, "a")  # begins when the loop turns, before the first one goes on
        ground.end("b")
        assert await first.is_back()
        assert ground.places.room() == 1
        second.answered.set()
        assert await second.is_back()
    assert ground.end("a") == 1


async def test_so_many_wait_and_no_more() -> None:
    ground = Ground(1)
    async with AsyncExitStack() as stack:
        for number in range(MOST_AWAY):
            assert ground.places.room() == 1
            ground.begin(f"r{number}")
            await stack.enter_async_context(ground.away(f"r{number}"))
        assert ground.places.room() == 0


async def test_nobody_waits_for_a_place_where_runs_are_not_counted() -> None:
    async with Places().given_up("a"):
        pass
