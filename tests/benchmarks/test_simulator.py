"""The simulator's measuring instruments: a fair scheduler that is fair, and a clock that jumps only when no reply is
pending.
"""

import asyncio
import time

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator_clock import open_counting_pool, run_jumping
from benchmarks.simulator_shares import share_out
from tests.conftest import RedisProcess

DEMANDS = st.dictionaries(st.integers(0, 50), st.tuples(st.floats(0, 100), st.floats(0.1, 10)), min_size=1)


@given(st.floats(0.1, 500), DEMANDS)
def test_fair_shares_meet_demand_exactly(slots: float, demands: dict[int, tuple[float, float]]) -> None:
    requested, weights = (
        {name: demand for name, (demand, _) in demands.items()},
        {name: weight for name, (_, weight) in demands.items()},
    )
    shares = share_out(slots, requested, weights)
    assert shares.keys() == requested.keys()
    assert all(shares[name] <= requested[name] + 1e-6 for name in requested)
    assert sum(shares.values()) == pytest.approx(min(slots, sum(requested.values())), rel=1e-6, abs=1e-6)
    # A tenant that got less than it wanted has, relative to its weight, as much as any other.
    underserved = [name for name in requested if shares[name] < requested[name] - 1e-6]
    assert all(
        shares[name] / weights[name] >= shares[other] / weights[other] - 1e-6
        for name in underserved
        for other in requested
    )


def test_simulated_sleeps_end_immediately_and_in_order() -> None:
    async def main() -> tuple[list[int], float]:
        woken: list[int] = []

        async def sleep(hours: int) -> None:
            await asyncio.sleep(hours * 3600)
            woken.append(hours)

        await asyncio.gather(*(sleep(hours) for hours in (3, 1, 2)))
        return woken, asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_jumping(main) == ([1, 2, 3], 3 * 3600)
    assert time.monotonic() - began < 60


def test_simulated_clock_stops_during_a_redis_request(redis_server: RedisProcess) -> None:
    async def main() -> float:
        pool = open_counting_pool(redis_server.url, 4)
        async with redis.asyncio.Redis(connection_pool=pool) as client:
            sleeping = asyncio.create_task(asyncio.sleep(0.001))
            for _ in range(20):
                async with client.pipeline(transaction=True) as pipe:
                    for _ in range(5):
                        pipe.incr("n")
                    await pipe.execute()
            before = asyncio.get_running_loop().time()
            await sleeping
        await pool.disconnect()
        return before

    assert run_jumping(main) == 0.0
