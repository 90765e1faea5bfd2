"""One tenant uses at most its share of the egress proxy's processor time."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from toolcrew.workers.egress.processor_share import BURST_S, SHARE, ProcessorShare, start_task

STEP_S = 0.01


class FakeProcessor:
    """Clocks that advance by work and by waiting only."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def work(self, seconds: float = STEP_S) -> None:
        self.now += seconds
        self.used += seconds

    def build_share(self) -> ProcessorShare:
        return ProcessorShare(lambda: self.now, lambda: self.used)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> FakeProcessor:
    fake, sleep = FakeProcessor(), asyncio.sleep

    async def skip(seconds: float) -> None:
        fake.now += seconds
        await sleep(0)

    monkeypatch.setattr("toolcrew.workers.egress.processor_share.asyncio.sleep", skip)
    return fake


async def run_steps(work: Callable[[], None], count: int) -> None:
    turn = asyncio.Event()
    for _ in range(count):
        work()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()
        turn.clear()


async def test_a_tenant_with_many_connections_uses_its_share_in_the_long_run(processor: FakeProcessor) -> None:
    share = processor.build_share()
    await asyncio.gather(*(share.run(run_steps(processor.work, 100)) for _ in range(10)))
    assert processor.used == pytest.approx(10.0)
    assert processor.now == pytest.approx(10.0 / SHARE, abs=BURST_S + STEP_S / SHARE)


async def test_work_within_the_burst_does_not_wait(processor: FakeProcessor) -> None:
    await processor.build_share().run(run_steps(processor.work, 10))
    assert processor.now == pytest.approx(10 * STEP_S)


async def test_connections_that_wait_take_their_steps_one_at_a_time(processor: FakeProcessor) -> None:
    share, ends = processor.build_share(), list[float]()

    def work() -> None:
        processor.work()
        ends.append(processor.now)

    processor.work(1.0)
    share.charge(1.0)
    await asyncio.gather(*(share.run(run_steps(work, 1)) for _ in range(20)))
    pauses = [after - before for before, after in itertools.pairwise(ends)]
    assert min(pauses) == pytest.approx(STEP_S / SHARE, rel=0.01), "no two steps follow each other at once"


async def test_tasks_of_a_connection_count_for_its_tenant(processor: FakeProcessor) -> None:
    share = processor.build_share()

    async def connection() -> None:
        await start_task(run_steps(processor.work, 100))

    await share.run(connection())
    assert processor.now > 100 * STEP_S, "the connection has waited"


async def test_a_waiting_connection_can_be_cancelled_and_cleans_up() -> None:
    share, is_closed = ProcessorShare(), asyncio.Event()

    async def connection() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            is_closed.set()

    share.charge(1000.0)
    task = asyncio.ensure_future(share.run(connection()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_results_errors_and_timeouts_pass_through() -> None:
    share = ProcessorShare()

    async def give(value: int) -> int:
        await asyncio.sleep(0)
        return value

    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("expected")

    async def time_out() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timeout"
        return "none"

    assert await share.run(give(7)) == 7
    assert await share.run(time_out()) == "timeout"
    with pytest.raises(OSError, match="expected"):
        await share.run(fail())
