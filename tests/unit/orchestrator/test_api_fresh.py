"""Cached replies with a short lifetime."""

import asyncio

import pytest

from toolcrew.orchestrator.api.api_state import ValueCache


class Lookup:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> int:
        self.count += 1
        await self.may_end.wait()
        return self.count


async def test_a_cached_value_is_returned_until_it_expires() -> None:
    now, lookup = 100.0, Lookup()
    cache = ValueCache[int](1.0, lambda: now)
    assert [await cache.get(lookup), await cache.get(lookup)] == [1, 1]
    now = 100.999
    assert await cache.get(lookup) == 1
    now = 101.0
    assert await cache.get(lookup) == 2


async def test_concurrent_requests_share_one_lookup() -> None:
    lookup, cache = Lookup(), ValueCache[int](1.0)
    lookup.may_end.clear()
    requests = [asyncio.create_task(cache.get(lookup)) for _ in range(50)]
    while lookup.count == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    lookup.may_end.set()
    assert await asyncio.gather(*requests) == [1] * 50


async def test_a_failed_lookup_is_not_cached() -> None:
    cache = ValueCache[int](1.0)

    async def fail() -> int:
        raise ValueError

    with pytest.raises(ValueError):
        await cache.get(fail)
    assert await cache.get(Lookup()) == 1
