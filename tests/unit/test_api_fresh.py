"""Cached replies with a short lifetime."""

import asyncio

import pytest

from orchestrator.api.api_state import ValueCache


class Look:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> int:
        self.count += 1
        await self.may_end.wait()
        return self.count


async def test_what_was_found_a_moment_ago_is_given_again_and_later_it_is_looked_anew() -> None:
    now, look = 100.0, Look()
    fresh = ValueCache[int](1.0, lambda: now)
    assert [await fresh.get(look), await fresh.get(look)] == [1, 1]
    now = 100.999
    assert await fresh.get(look) == 1
    now = 101.0
    assert await fresh.get(look) == 2


async def test_those_who_ask_at_the_same_time_wait_for_one_look() -> None:
    look, fresh = Look(), ValueCache[int](1.0)
    look.may_end.clear()
    asking = [asyncio.create_task(fresh.get(look)) for _ in range(50)]
    while look.count == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    look.may_end.set()
    assert await asyncio.gather(*asking) == [1] * 50


async def test_a_failure_is_not_kept() -> None:
    fresh = ValueCache[int](1.0)

    async def fail() -> int:
        raise ValueError

    with pytest.raises(ValueError):
        await fresh.get(fail)
    assert await fresh.get(Look()) == 1
