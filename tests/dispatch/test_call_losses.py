"""Workers that die with a call are detected, once and reliably. Live workers are not affected. Over a real Redis."""

import json
from contextlib import ExitStack
from typing import Any

import pytest
import redis.asyncio

from tests.support.records.builders import build_attempt
from tests.support.sandboxd.fake_hosts import build_report
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.hosts import HOST_LOST_TYPE
from toolcrew.contract.names import call_key, control_queue, host_key, hosts_key, result_key, tombstone_key
from toolcrew.orchestrator.dispatch import call_monitor
from toolcrew.orchestrator.dispatch.call_monitor import LOSSES_EVERY_S, RESULT_LATE_S, CallMonitor
from toolcrew.orchestrator.dispatch.celery_transport import describe_sender
from toolcrew.orchestrator.dispatch.transport import CallLost
from toolcrew.store.call_records import CallState
from toolcrew.store.calls import CallStore
from toolcrew.store.hosts import HostStore

pytestmark = pytest.mark.usefixtures("quiet_logs")

QUEUE = "host.a.b00t"
REPORT = build_report("a")


class MonitorHarness:
    """A monitor with a clock that the test advances. Records the calls that the monitor fails."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.now = 0.0
        self.failed: dict[str, CallLost] = {}
        self.monitor = CallMonitor(
            CallStore(client, "d", describe_sender()), HostStore(client, "d"), self._fail, clock=lambda: self.now
        )

    async def settle(self) -> None:
        """Run rounds until Redis has responded for long enough."""
        for _ in range(7):
            await self.monitor.find_losses()
            self.now += LOSSES_EVERY_S

    async def find_loss(self, record: dict[str, Any], *, sticky: bool = True, attempt: int = 1) -> CallLost | None:
        """Return the monitor's decision about a call with this record, after this time."""
        attempt_sent = build_attempt(
            queue=QUEUE if sticky else "pool.web",
            session="s1" if sticky else None,
            fence=1 if sticky else None,
            number=attempt,
        )
        if record:
            await self.client.hset(call_key("d", "acme", "c1"), mapping={"attempt": 1, **record})
        with self.monitor.over("t1", attempt_sent):
            await self.settle()
            for _ in range(int(RESULT_LATE_S / LOSSES_EVERY_S) + 2):
                await self.monitor.find_losses()
                self.now += LOSSES_EVERY_S
        return self.failed.get("t1")

    def _fail(self, task_id: str, error: Exception) -> None:
        assert isinstance(error, CallLost)
        assert task_id not in self.failed
        self.failed[task_id] = error


async def report(client: "redis.asyncio.Redis", key: str = QUEUE, **fields: Any) -> None:
    await client.set(host_key("d", key), REPORT.model_copy(update=fields).model_dump_json())


RUNNING = {"state": "running", "holder": f"{QUEUE}/w1"}
IN_POOL = {"sticky": False}


@pytest.mark.parametrize(
    ("reports", "record", "options", "outcome"),
    [
        ("w1", RUNNING, {}, None),
        (None, RUNNING, {}, True),
        ("w2", RUNNING, {}, True),
        ("w1", {"state": "queued"}, {}, None),
        (None, {"state": "queued"}, {}, False),
        (None, {"state": "queued"}, IN_POOL, None),
        ("w1", {**RUNNING, "state": "done"}, {}, True),
        # The reply to the note of the loss was lost.
        (None, {"state": "lost", "holder": f"{QUEUE}/w1"}, {}, True),
        (None, {"state": "lost", "holder": ""}, {}, False),
        # Redis lost the record of the second attempt, or a later attempt runs.
        ("w1", RUNNING, {"attempt": 2}, True),
        ("w1", {**RUNNING, "state": "done"}, {"attempt": 2}, True),
        ("w1", {**RUNNING, "state": "queued"}, {"attempt": 2}, None),
        ("w1", {**RUNNING, "state": "lost"}, {"attempt": 2}, None),
        (None, {**RUNNING, "holder": "host.gone.x/w", "attempt": 2}, {}, None),
    ],
)
async def test_a_call_is_lost_only_after_its_worker_is_lost(
    client: "redis.asyncio.Redis",
    reports: str | None,
    record: dict[str, Any],
    options: dict[str, Any],
    outcome: bool | None,
) -> None:
    """`outcome`: whether the lost call has started; None if the call is awaited."""
    if reports:
        await report(client, worker=reports)
    loss = await MonitorHarness(client).find_loss(record, **options)
    assert (None if loss is None else loss.has_started) is outcome


async def test_the_record_of_a_lost_call_has_time_observer_and_reason(client: "redis.asyncio.Redis") -> None:
    assert await MonitorHarness(client).find_loss(RUNNING)
    record = await CallStore(client, "d").find("acme", "c1")
    assert record is not None
    assert (record.state, record.ended_at > 0, record.noticed_by) == (CallState.LOST, True, describe_sender())
    assert QUEUE in record.reason
    assert (
        await CallStore(client, "d").give_up("acme", "c1", 1, CallState.UNKNOWN, ErrorCode.OUTCOME_UNKNOWN)
        is CallState.UNKNOWN
    )
    ended = await CallStore(client, "d").find("acme", "c1")
    assert ended is not None
    assert (ended.code, ended.ended_at) == ("OUTCOME_UNKNOWN", record.ended_at)


async def test_bounded_rounds_check_all_calls_in_turn(
    client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_monitor, "MAX_CHECKED_CALLS", 1)
    harness = MonitorHarness(client)
    await report(client)
    for call, queue in (("c1", QUEUE), ("c2", "host.gone.x")):
        record = {"attempt": 1, "state": "running", "holder": f"{queue}/w1"}
        await client.hset(call_key("d", "acme", call), mapping=record)
    with ExitStack() as stack:
        for call in ("c1", "c2"):
            stack.enter_context(harness.monitor.over(call, build_attempt(queue="pool.web", call_id=call)))
        await harness.settle()
    assert set(harness.failed) == {"c2"}


async def test_sending_a_call_again_clears_its_lost_state(client: "redis.asyncio.Redis") -> None:
    assert await MonitorHarness(client).find_loss(RUNNING)
    assert await CallStore(client, "d").renew("acme", "c1", 1)
    record = await CallStore(client, "d").find("acme", "c1")
    assert record is not None
    assert (record.state, record.ended_at, record.noticed_by, record.reason) == (CallState.QUEUED, 0.0, "", "")


async def test_a_pool_call_is_lost_with_the_worker_that_runs_it(client: "redis.asyncio.Redis") -> None:
    harness = MonitorHarness(client)
    await report(client, "pool.w.1", kind="web")
    assert await harness.find_loss({"state": "running", "holder": "pool.w.1/77"}, sticky=False) is None
    await client.delete(host_key("d", "pool.w.1"))
    loss = await harness.find_loss({"state": "running", "holder": "pool.w.1/77"}, sticky=False)
    assert loss is not None
    assert loss.has_started


async def test_a_new_call_is_not_checked_for_loss(client: "redis.asyncio.Redis") -> None:
    harness = MonitorHarness(client)
    attempt = build_attempt(queue=QUEUE, session="s1", fence=1)
    await client.hset(
        call_key("d", "acme", "c1"), mapping={"attempt": 1, "state": "running", "holder": "host.gone.x/w"}
    )
    await harness.settle()
    with harness.monitor.over("t1", attempt):
        await harness.monitor.find_losses()
    assert harness.failed == {}


@pytest.mark.parametrize("pause_s", [5.0, 60.0])
async def test_no_call_is_lost_right_after_an_outage(client: "redis.asyncio.Redis", pause_s: float) -> None:
    """After a stop of this program or of Redis, all reports have expired. Every host will report again within
    moments.
    """
    harness = MonitorHarness(client)
    attempt = build_attempt(queue=QUEUE, session="s1", fence=1)
    await client.hset(call_key("d", "acme", "c1"), mapping={"attempt": 1, **RUNNING})
    await report(client)
    await client.zadd(hosts_key("d"), {QUEUE: 1})
    with harness.monitor.over("t1", attempt):
        await harness.settle()
        await client.delete(host_key("d", QUEUE))
        harness.now += pause_s
        await harness.monitor.find_losses()
        assert (harness.failed, await client.exists(tombstone_key("d", QUEUE))) == ({}, 0)
        await harness.settle()
        assert (set(harness.failed), await client.exists(tombstone_key("d", QUEUE))) == ({"t1"}, 1)


async def test_no_call_is_lost_when_redis_pauses_during_a_round(client: "redis.asyncio.Redis") -> None:
    harness = MonitorHarness(client)
    await client.hset(call_key("d", "acme", "c1"), mapping={"attempt": 1, **RUNNING})
    await report(client)
    read = harness.monitor._store.find_all

    async def read_after_reports_expired(deliveries: Any) -> Any:
        harness.now += 20
        await client.delete(host_key("d", QUEUE))
        return await read(deliveries)

    with harness.monitor.over("t1", build_attempt(queue=QUEUE, session="s1", fence=1)):
        await harness.settle()
        harness.monitor._store.find_all = read_after_reports_expired  # type: ignore[method-assign]
        await harness.monitor.find_losses()
    assert harness.failed == {}


async def test_a_slow_round_is_not_treated_as_an_outage(client: "redis.asyncio.Redis") -> None:
    """Otherwise the monitor would fail only the first few calls of a dead host in each ten seconds."""
    harness = MonitorHarness(client)
    lose = harness.monitor._store.lose

    async def lose_slowly(*args: Any) -> bool:
        harness.now += LOSSES_EVERY_S
        return await lose(*args)

    harness.monitor._store.lose = lose_slowly  # type: ignore[method-assign]
    await harness.settle()
    with ExitStack() as stack:
        for number in range(6):
            await client.hset(call_key("d", "acme", f"c{number}"), mapping={"attempt": 1, **RUNNING})
            stack.enter_context(
                harness.monitor.over(f"t{number}", build_attempt(queue="pool.web", call_id=f"c{number}"))
            )
        for name, sent_attempt in harness.monitor._sent.items():
            sent_attempt.since = 1e9 if name == "t5" else 0
        harness.now += LOSSES_EVERY_S
        await harness.monitor.find_losses()
        assert len(harness.failed) == 5
        harness.now += LOSSES_EVERY_S
        harness.monitor._sent["t5"].since = 0
        await harness.monitor.find_losses()
        assert len(harness.failed) == 6


async def now_of(client: "redis.asyncio.Redis") -> int:
    return int((await client.time())[0])


def message(task_id: str, **headers: str | int) -> str:
    return json.dumps({"body": "", "headers": {"id": task_id, **headers}})


async def test_queued_calls_of_a_lost_host_fail_and_its_queue_is_removed(client: "redis.asyncio.Redis") -> None:
    call = call_key("d", "acme", "c1")
    await client.hset(call, mapping={"state": "queued", "attempt": 1})
    await client.lpush(
        QUEUE,
        *(message(f"hub-{number}", call_key=call, call_attempt=1) for number in range(1200)),
        "garbage",
        "[1]",
        '{"headers": 3}',
    )
    await client.lpush(control_queue(QUEUE), "order")
    async with client.pubsub() as subscriber:
        await subscriber.psubscribe("celery-task-meta-*")
        await subscriber.get_message(timeout=1)
        assert await CallStore(client, "d").reap(QUEUE, await now_of(client))
        result = await subscriber.get_message(timeout=1)
    stored = json.loads(await client.get(result_key("hub-7")) or b"")
    assert (stored["status"], stored["task_id"], stored["result"]["exc_type"]) == ("FAILURE", "hub-7", HOST_LOST_TYPE)
    assert json.loads(result["data"])["result"]["exc_type"] == HOST_LOST_TYPE
    assert await client.exists(QUEUE, control_queue(QUEUE)) == 0
    assert await client.exists(tombstone_key("d", QUEUE)) == 1
    assert await client.hget(call, "state") == b"lost"


async def test_a_reap_that_redis_executes_late_changes_nothing(client: "redis.asyncio.Redis") -> None:
    """After a pause of Redis, all reports have expired. Without the check, all hosts would be declared lost at once."""
    await client.lpush(QUEUE, message("t"))
    assert not await CallStore(client, "d").reap(QUEUE, await now_of(client) - 20)
    assert (await client.llen(QUEUE), await client.exists(tombstone_key("d", QUEUE))) == (1, 0)


@pytest.mark.parametrize(
    ("record", "is_answered", "after"),
    [
        ({"state": "queued", "attempt": 1}, True, b"lost"),
        ({}, True, None),
        ({"state": "queued", "attempt": 2}, False, b"queued"),
        ({"state": "running", "attempt": 1}, False, b"running"),
        ({"state": "done", "attempt": 1}, False, b"done"),
        ({"state": "forbidden", "attempt": 1}, True, b"forbidden"),
    ],
    ids=str,
)
async def test_only_unstarted_current_attempts_fail_with_a_lost_host(
    client: "redis.asyncio.Redis", record: dict[str, Any], is_answered: bool, after: bytes | None
) -> None:
    """A renewed call that was marked lost would be refused by its next host."""
    key = call_key("d", "acme", "c1")
    if record:
        await client.hset(key, mapping=record)
    await client.lpush(QUEUE, message("t", call_key=key, call_attempt=1))
    assert await CallStore(client, "d").reap(QUEUE, await now_of(client))
    assert (bool(await client.exists(result_key("t"))), await client.hget(key, "state")) == (is_answered, after)


async def test_a_message_with_a_key_of_wrong_type_does_not_block_others(client: "redis.asyncio.Redis") -> None:
    await client.set("a text", "x")
    await client.lpush(QUEUE, message("t1", call_key="a text", call_attempt=1), message("t2"))
    assert await CallStore(client, "d").reap(QUEUE, await now_of(client))
    assert await client.exists(result_key("t1"), result_key("t2")) == 2


async def test_a_reporting_host_is_not_reaped(client: "redis.asyncio.Redis") -> None:
    await report(client)
    await client.lpush(QUEUE, message("t"))
    assert not await CallStore(client, "d").reap(QUEUE, await now_of(client))
    assert (await client.llen(QUEUE), await client.exists(tombstone_key("d", QUEUE))) == (1, 0)


async def test_silent_hosts_are_found_by_their_last_report(client: "redis.asyncio.Redis") -> None:
    now = (await client.time())[0]
    await report(client)
    await client.zadd(
        hosts_key("d"), {QUEUE: now - 60, "host.dead.x": now - 60, "host.young.x": now, "host.old.x": now - 3600}
    )
    assert sorted(await CallStore(client, "d").reap_all(now)) == ["host.dead.x", "host.old.x"]
    # A host that has been silent for long is forgotten. Others are checked
    # again, because a message may have been on its way to them.
    assert sorted(await client.zrange(hosts_key("d"), 0, -1)) == [QUEUE.encode(), b"host.dead.x", b"host.young.x"]
