"""Used resources in Redis: totals of sessions count once, however often and late they are reported."""

import pytest
import redis.asyncio

from tests.conftest import RedisProcess
from toolcrew.contract.calls import SessionUsage
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.names import call_key
from toolcrew.store.calls import FinishedCalls
from toolcrew.store.usage import (
    DAY_S,
    MAX_AMOUNT,
    CallEnding,
    ReplySpending,
    StoredChange,
    UsageStore,
    WorkerUsageStore,
    session_usage_key,
    sum_rows,
)


def usage(cpu_s: float, meter: str = "m1", sandbox_s: float = 0.0) -> SessionUsage:
    return SessionUsage(meter=meter, cpu_s=cpu_s, written_bytes=10, sandbox_s=sandbox_s)


def build_ending(
    attempt: int = 1, used: SessionUsage | None = None, call: str = "c1", stored: StoredChange | None = None
) -> CallEnding:
    return CallEnding(
        deployment="d",
        tenant="acme",
        call=call,
        attempt=attempt,
        code="",
        sandbox="box",
        session="s1",
        stored=stored,
        usage=used,
    )


class Harness:
    """The stores of a worker and of an orchestrator on one Redis."""

    def __init__(self, server: RedisProcess) -> None:
        self.client = server.client()
        self.finished = FinishedCalls(self.client)
        self.worker = WorkerUsageStore(self.client, "d")
        self.orchestrator = redis.asyncio.Redis.from_url(server.url)
        self.store = UsageStore(self.orchestrator, "d")

    def finish(self, ending: CallEnding) -> bool:
        return self.finished.store(f"h-{ending.call}", "{}", 60, ending)

    async def sums(self, by: str = "day") -> dict[str, int]:
        now = int(self.client.time()[0])
        rows = await self.store.read("acme", now - DAY_S, now + DAY_S, "hour" if by == "hour" else "day")
        return {name: amount for name, amount in sum_rows(rows).items() if amount}


@pytest.fixture
async def harness(redis_server: RedisProcess) -> Harness:
    return Harness(redis_server)


async def test_usage_counts_once_in_any_order_of_reports(harness: Harness) -> None:
    key = session_usage_key("d", "acme", "s1")
    for used in (usage(2.0), usage(1.0), usage(2.5)):
        harness.worker.count([("acme:s1", used), ("acme:s1", used)])
        # Each report extends the lifetime of the usage of its session.
        assert harness.client.ttl(key) > 60
        harness.client.expire(key, 60)
    assert harness.finish(build_ending(used=usage(3.0)))
    assert harness.finish(build_ending(used=usage(3.0)))
    harness.worker.count([("acme:s1", usage(0.5, "m2", sandbox_s=7.0))])

    expected = {"calls": 1, "cpu_us": 3_500_000, "written_bytes": 20, "sandbox_us": 7_000_000}
    assert await harness.sums() == await harness.sums("hour") == expected
    assert await harness.store.read_session("acme", "s1") == expected
    assert await harness.store.read_session("acme", "other") == {}


async def test_bytes_of_streams_count_and_amounts_without_them_keep_the_earlier_format(harness: Harness) -> None:
    key = session_usage_key("d", "acme", "s1")
    harness.worker.count([("acme:s1", usage(2.0))])
    assert {len(packed) for packed in harness.client.hvals(key)} == {88}
    for stream_bytes in (70, 100, 100):
        used = usage(2.0).model_copy(update={"stream_bytes": stream_bytes})
        harness.worker.count([("acme:s1", used)])
    assert harness.finish(build_ending(used=used))
    assert await harness.sums() == {"calls": 1, "cpu_us": 2_000_000, "written_bytes": 10, "stream_bytes": 100}
    assert (await harness.store.read_session("acme", "s1"))["stream_bytes"] == 100


@pytest.mark.parametrize(("tool", "calls"), [("bash_tool", 1), ("session.open", 0), ("webhook.send", 0)])
async def test_only_calls_of_tools_count_as_calls(harness: Harness, tool: str, calls: int) -> None:
    harness.client.hset(call_key("d", "acme", "c1"), mapping={"state": "running", "attempt": 1, "tool": tool})
    assert harness.finish(build_ending(used=usage(3.0)))
    sums = await harness.sums()
    assert sums.get("calls", 0) == calls
    assert sums["cpu_us"] == 3_000_000


async def test_result_of_a_lost_attempt_is_dropped_but_its_usage_counts(harness: Harness) -> None:
    harness.client.hset(call_key("d", "acme", "c1"), mapping={"state": "queued", "attempt": 2})
    assert not harness.finish(build_ending(1, usage(1.0)))
    assert await harness.sums() == {"cpu_us": 1_000_000, "written_bytes": 10}
    assert harness.finish(build_ending(2, usage(1.5), stored=StoredChange("k1", 5)))
    assert await harness.sums() == {"calls": 1, "cpu_us": 1_500_000, "written_bytes": 10, "stored_bytes": 5}


async def test_call_that_ran_again_after_a_lost_result_counts_once(harness: Harness) -> None:
    assert harness.finish(build_ending(1, usage(1.0), stored=StoredChange("k1", 5)))
    # An orchestrator renews the record for the next attempt.
    harness.client.hset(call_key("d", "acme", "c1"), mapping={"state": "queued", "attempt": 2})
    assert harness.finish(build_ending(2, usage(1.5), stored=StoredChange("k2", 5)))
    assert await harness.sums() == {"calls": 1, "cpu_us": 1_500_000, "written_bytes": 10, "stored_bytes": 10}


def test_amounts_reported_by_a_model_server_are_bounded() -> None:
    amounts = ReplySpending(TokenUsage(MAX_AMOUNT + 1, -1), cost=1e9).amounts()
    assert amounts == [MAX_AMOUNT, 0, 0, MAX_AMOUNT]


async def test_deletions_of_a_checkpoint_subtract_its_bytes_once(harness: Harness) -> None:
    assert harness.finish(build_ending(call="c1", stored=StoredChange("k1", 10)))
    assert harness.finish(build_ending(call="c2", stored=StoredChange("k2", 7)))
    for call in ("c3", "c3", "c4"):
        assert harness.finish(build_ending(call=call, stored=StoredChange("k1", None)))
    assert await harness.sums() == await harness.sums("hour") == {"calls": 4, "stored_bytes": 7}
