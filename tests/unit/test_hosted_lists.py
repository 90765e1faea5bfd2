"""Lists of programs' runs: page by page while runs start and end, by state, and fast for many runs."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import ErrorCode, ToolFailure
from contract.run_events import FailureKind
from orchestrator.runs.hosted import HostedRuns
from store.batches import RunBody
from store.run_records import HostedState
from tests.builders import KEY
from tests.conftest import RedisProcess
from tests.hosted_harness import ECHO, HostedHarness, MadeHosted, open_hosted
from tests.item_harness import echo_then
from tests.run_harness import build_outcome


@pytest.fixture
def harness(make_hosted: MadeHosted) -> HostedHarness:
    return make_hosted(echo_then("done", "one"))


async def test_ten_thousand_runs_are_listed_a_page_at_a_time_and_quickly(harness: HostedHarness) -> None:
    for _ in range(20):
        await asyncio.gather(*(harness.runs.start("acme", ECHO) for _ in range(10)))
    pipe = harness.client.pipeline(transaction=False)
    one: Any = await harness.client.hgetall(
        f"toolcrew:d:t:acme:run.{(await harness.runs.list('acme', limit=1)).runs[0].id}"
    )
    for number in range(9800):
        pipe.hset(f"toolcrew:d:t:acme:run.old{number}", mapping={**one, b"state": b"ended"})
        for part in ("index", "succeeded"):
            pipe.zadd(f"toolcrew:d:t:acme:batch.@runs:{part}", {f"old{number}": -number})
    await pipe.execute()
    for state in (None, HostedState.QUEUED, HostedState.SUCCEEDED, HostedState.FAILED):
        took = []
        for _ in range(5):
            began = time.perf_counter()
            page = await harness.runs.list("acme", limit=50, state=state)
            took.append(time.perf_counter() - began)
        # 20 ms on a quiet machine; what goes through all records would take seconds.
        assert min(took) < 0.2, state
        assert len(page.runs) == (0 if state is HostedState.FAILED else 50)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_have_each_run_once_while_runs_are_started_and_forgotten(
    redis_server: RedisProcess, data: st.DataObject
) -> None:
    async def check() -> None:
        async with open_hosted(redis_server) as make:
            harness = make()
            await harness.client.flushdb()
            harness.runs = HostedRuns(
                harness.client, "d", KEY, harness.pool.tenants, max_kept=data.draw(st.integers(5, 30))
            )
            run_ids = [await harness.start() for _ in range(data.draw(st.integers(0, 20)))]
            listed, cursor, is_first = list[str](), None, True
            while cursor is not None or is_first:
                is_first = False
                page = await harness.runs.list("acme", cursor=cursor, limit=data.draw(st.integers(1, 7)))
                listed += [run.id for run in page.runs]
                cursor = page.next_cursor
                for _ in range(data.draw(st.integers(0, 3))):
                    await harness.start()
                if data.draw(st.booleans()) and run_ids:
                    await harness.client.delete(f"toolcrew:d:t:acme:run.{run_ids.pop(0)}")
            assert len(set(listed)) == len(listed)
            assert [run for run in listed if run in run_ids] == [run for run in reversed(run_ids) if run in listed]
            assert set(run_ids) <= set(listed)

    asyncio.run(check())


async def test_the_oldest_that_have_ended_are_forgotten_with_all_they_left(make_hosted: MadeHosted) -> None:
    harness = make_hosted(["done", "done"])
    harness.runs = HostedRuns(harness.client, "d", KEY, harness.pool.tenants, max_kept=3)
    started = [await harness.start() for _ in range(2)]
    async with harness.working():
        await harness.ended(started[1])
        await harness.ended(started[0])
    cursor = (await harness.runs.list("acme", limit=1)).next_cursor
    started += [await harness.start() for _ in range(3)]
    assert [run.id for run in (await harness.runs.list("acme")).runs] == started[:1:-1]
    assert (await harness.runs.list("acme", cursor=cursor)).runs == ()
    assert await harness.client.keys(f"toolcrew:d:t:acme:run.{started[0]}*") == []


async def test_runs_that_do_not_end_keep_no_others_from_being_forgotten(make_hosted: MadeHosted) -> None:
    harness = make_hosted(["done"])
    harness.runs = HostedRuns(harness.client, "d", KEY, harness.pool.tenants, max_kept=15)
    waiting = [await harness.start(priority=-1) for _ in range(12)]
    ended = []
    for _ in range(6):
        ended.append(await harness.start(priority=1))
        claim = await harness.claimed()
        await harness.queue.finish(claim, build_outcome(claim))
    assert [run.id for run in (await harness.runs.list("acme")).runs] == [*ended[:2:-1], *waiting[::-1]]
    assert await harness.client.keys(f"toolcrew:d:t:acme:run.{ended[2]}*") == []


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1" * 16, "²"])
async def test_a_cursor_that_is_none_is_refused(harness: HostedHarness, cursor: str) -> None:
    with pytest.raises(ToolFailure) as failure:
        await harness.runs.list("acme", cursor=cursor)
    assert failure.value.code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize("state", list(HostedState))
async def test_runs_are_found_by_their_state(make_hosted: MadeHosted, state: HostedState) -> None:
    harness = make_hosted(["done"])
    won = await harness.start()
    async with harness.working():
        await harness.ended(won)
    cancelled = await harness.start()
    await harness.runs.cancel("acme", cancelled)
    lost = await harness.start(RunBody(instruction="x", tools=("echo",), dialect="native", model="nosuch"))
    claim = await harness.claimed()
    async with harness.publisher.open("acme", lost, claim.token, 1):
        pass
    asking, running, queued = [await harness.start() for _ in range(3)]
    for _ in range(2):
        await harness.claimed()
    await harness.client.hset(f"toolcrew:d:t:acme:run.{asking}", "asking", "1")
    await harness.queue.finish(claim, build_outcome(claim, FailureKind.MODEL))
    expected = {
        HostedState.SUCCEEDED: won,
        HostedState.CANCELLED: cancelled,
        HostedState.FAILED: lost,
        HostedState.WAITING_FOR_APPROVAL: asking,
        HostedState.RUNNING: running,
        HostedState.QUEUED: queued,
    }
    assert [run.id for run in (await harness.runs.list("acme", state=state)).runs] == [expected[state]]
