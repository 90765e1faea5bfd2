"""Runs that programs start: executed to their end, cancelled in every state, and listed page by page while
runs start and end.
"""

import asyncio
import threading
import time
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.runs.durable_run_harness import ECHO, DurableRunFactory, DurableRunHarness, open_durable, types
from tests.support.runs.item_harness import echo_then, fail_with
from tests.support.runs.run_harness import build_outcome
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.file_ids import new_file_id
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.run_spec import ItemEnvironment, RunBody
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.batches.lines import BatchFile
from toolcrew.orchestrator.runs import durable_runs
from toolcrew.orchestrator.runs.batches import Batches
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store import run_log, run_queue, run_store, stored_runs
from toolcrew.store.audit import Actor, Audit
from toolcrew.store.batches import NO_BATCH, BatchItem
from toolcrew.store.run_log import MAX_TRANSCRIPT_BYTES
from toolcrew.store.run_records import parse_run
from toolcrew.store.stored_runs import BatchCancelled
from toolcrew.store.tenants import RedisTenants


@pytest.fixture
def harness(make_durable: DurableRunFactory) -> DurableRunHarness:
    return make_durable(echo_then("done", "one"))


async def run_to_end(harness: DurableRunHarness) -> str:
    """Start a run and follow its events to its end."""
    run = await harness.start()
    async with harness.working():
        await harness.events(run)
    return run


async def failure_of(awaited: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as failure:
        await awaited
    return failure.value


async def test_a_run_reports_each_step_and_its_answer(harness: DurableRunHarness) -> None:
    run = await harness.start(metadata={"for": "me"}, priority=3)
    assert (await harness.runs.get("acme", run)).state is DurableRunState.QUEUED
    async with harness.working():
        events = await harness.events(run)
    record = await harness.runs.get("acme", run)
    assert record.state is DurableRunState.SUCCEEDED
    assert record.end is not None
    assert record.started_at is not None
    assert (record.end.answer, record.end.stop_reason, record.end.steps) == ("done", "answered", 2)
    assert (record.metadata, record.priority, record.instruction) == ({"for": "me"}, 3, "say it")
    reported_events = [name for name in types(events) if name not in ("ModelAsked", "ModelAnswered")]
    step = ["StepStarted", "CallStarted", "CallSent", "CallFinished", "StepFinished"]
    assert reported_events == [
        "SandboxReady",
        "RunStarted",
        *step,
        "StepStarted",
        "TextArrived",
        "StepFinished",
        "RunFinished",
        "RunEnded",
    ]
    assert all(event["run"] == run for event in events)
    assert (events[-1]["state"], events[-1]["answer"], events[-1]["calls"]) == ("succeeded", "done", 1)
    assert events[-1]["seconds"] > 0


async def test_the_transcript_is_available_during_and_after_the_run(make_durable: DurableRunFactory) -> None:
    reached, may_continue = asyncio.Event(), asyncio.Event()

    async def wait(call: Any, _: Any) -> Any:
        reached.set()
        await may_continue.wait()
        return fail_with(ErrorCode.TIMEOUT)(call, _)

    harness = make_durable(echo_then("done", "one", "two"), answers={"echo": wait})
    run = await harness.start()
    async with harness.working():
        await reached.wait()
        before = await harness.runs.transcript("acme", run)
        may_continue.set()
        await harness.events(run)
    after = await harness.runs.transcript("acme", run)
    assert [message["role"] for message in before] == ["user", "assistant"]
    assert [message["role"] for message in after] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert after[1:3] == before


async def test_logs_and_transcripts_are_parsed_outside_the_event_loop(
    harness: DurableRunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = dict[str, int]()

    def record_thread(module: Any, name: str) -> None:
        function = getattr(module, name)

        def call_and_record(*arguments: Any) -> Any:
            threads[name] = threading.get_ident()
            return function(*arguments)

        monkeypatch.setattr(module, name, call_and_record)

    names = {
        "parse_run": stored_runs,
        "parse_entry": run_log,
        "build_transcript": durable_runs,
        "unpack_transcript": run_store,
    }
    names["pack_end"] = run_queue
    for name, module in names.items():
        record_thread(module, name)
    run = await run_to_end(harness)
    assert await harness.runs.transcript("acme", run)
    await harness.client.delete(f"toolcrew:d:t:acme:run.{run}:transcript")
    assert await harness.runs.transcript("acme", run)
    assert threads.keys() == names.keys()
    assert threading.get_ident() not in threads.values()


async def test_a_transcript_above_the_limit_is_read_from_the_log(
    harness: DurableRunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MAX_TRANSCRIPT_BYTES", 100)
    run = await run_to_end(harness)
    messages = await harness.runs.transcript("acme", run)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert not await harness.client.exists(f"toolcrew:d:t:acme:run.{run}:transcript")


async def test_a_run_returns_its_signed_end_and_not_a_forged_one(harness: DurableRunHarness) -> None:
    run = await run_to_end(harness)
    key = f"toolcrew:d:t:acme:run.{run}"
    await harness.client.hset(key, "end", (await harness.client.hget(key, "end")).replace(b"done", b"forged"))
    record = await harness.runs.get("acme", run)
    assert record.end is not None
    assert record.end.answer == "done"


async def test_a_hostile_transcript_is_refused_in_bounded_memory(harness: DurableRunHarness) -> None:
    run = await run_to_end(harness)
    bomb, values = b" " * (MAX_TRANSCRIPT_BYTES + 1), b"[" + b"{}," * 500_000 + b"{}]"
    stored = [zlib.compress(text) for text in (bomb, values, b"[" * 100_000, b'["one"]')]
    for transcript in (*stored, zlib.compress(b"[{}]")[:-1], b"x"):
        await harness.client.set(f"toolcrew:d:t:acme:run.{run}:transcript", transcript)
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match=f"transcript of run {run}"):
                await harness.runs.transcript("acme", run)
            assert tracemalloc.get_traced_memory()[1] < 3 * MAX_TRANSCRIPT_BYTES
        finally:
            tracemalloc.stop()


async def test_a_run_of_a_removed_tenant_fails_with_unknown_tenant(make_durable: DurableRunFactory) -> None:
    run = await make_durable().start()
    await RedisTenants(make_durable().client, "d", KEY).add("other", TenantPolicy())
    resumed_harness = make_durable()
    async with resumed_harness.working():
        record = await resumed_harness.ended(run)
    assert record.state is DurableRunState.FAILED
    assert record.end is not None
    assert record.end.failure is not None
    assert record.end.failure.code == "UNKNOWN_TENANT"


def nest(depth: int) -> Any:
    """Return lists nested to the given depth."""
    inner: Any = []
    for _ in range(depth):
        inner = [inner]
    return inner


async def test_an_idempotency_key_starts_one_run(harness: DurableRunHarness) -> None:
    first, repeated = await harness.start(idempotency_key="once"), await harness.start(idempotency_key="once")
    assert first == repeated
    assert len((await harness.runs.list("acme")).runs) == 1
    failure = await failure_of(harness.start(ECHO.model_copy(update={"instruction": "else"}), idempotency_key="once"))
    assert failure.code is ErrorCode.INVALID_ARGUMENTS
    assert "idempotency key" in failure.message
    assert (await harness.runs.start("zeta", ECHO, idempotency_key="once")).id != first


@pytest.mark.parametrize(
    ("body", "environment", "options", "facts"),
    [
        (ECHO.model_copy(update={"instruction": "x" * 2**20}), ItemEnvironment(), {}, "1048576"),
        (ECHO, ItemEnvironment(workspace="/etc"), {}, "upload the workspace"),
        (ECHO, ItemEnvironment(workspace=new_file_id("file")), {}, "TOOLCREW_WORKSPACE_STORE"),
        (ECHO, ItemEnvironment(artifacts=("out/**",)), {}, "TOOLCREW_WORKSPACE_STORE"),
        (ECHO, ItemEnvironment(workspace=new_file_id("file"), restore="c"), {}, "`restore`"),
        (ECHO.model_copy(update={"model": "local"}), ItemEnvironment(), {}, "local model"),
        (ECHO, ItemEnvironment(), {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        (ECHO, ItemEnvironment(), {"metadata": {"a": "x" * 513}}, "metadata"),
        (ECHO, ItemEnvironment(), {"idempotency_key": ""}, "1 to 256"),
        (ECHO, ItemEnvironment(), {"metadata": {"a": "\ud83d"}}, "Unicode"),
        (
            ECHO.model_copy(update={"history": ({"role": "user", "content": nest(1000)},)}),
            ItemEnvironment(),
            {},
            "nest",
        ),
        (ECHO, ItemEnvironment(session="s", image="i"), {}, "`session`"),
        (ECHO, ItemEnvironment(), {"priority": 101}, "priority"),
    ],
)
async def test_an_invalid_run_is_refused_at_the_start(
    harness: DurableRunHarness, body: RunBody, environment: ItemEnvironment, options: Any, facts: str
) -> None:
    failure = await failure_of(harness.start(body, environment=environment, **options))
    assert failure.code is ErrorCode.INVALID_ARGUMENTS
    assert any(part in failure.message for part in facts.split("|"))
    assert (await harness.runs.list("acme")).runs == ()


async def test_waiting_runs_above_the_tenant_limit_are_refused(harness: DurableRunHarness) -> None:
    harness.runs = DurableRuns(harness.client, "d", KEY, harness.pool.tenants, max_pending=2)
    first, _ = await harness.start(), await harness.start()
    assert (await failure_of(harness.start())).code is ErrorCode.QUOTA_EXCEEDED
    assert (await harness.runs.start("zeta", ECHO)).state is DurableRunState.QUEUED
    await harness.runs.cancel("acme", first)
    assert await harness.start()


async def test_a_run_in_an_open_session_is_exclusive_and_leaves_it_open(harness: DurableRunHarness) -> None:
    session = await Session.open(harness.pool.dispatcher, harness.pool.blobs, tenant="acme", spec=SessionSpec())
    location = {"state": "open", "queue": "host.h1.b00t", "fence": "1"}
    await harness.client.hset(f"toolcrew:d:t:acme:session.{session.id}:place", mapping=location)
    run = await harness.start(environment=ItemEnvironment(session=session.id))
    failure = await failure_of(harness.start(environment=ItemEnvironment(session=session.id)))
    assert run in failure.message
    async with harness.working():
        assert (await harness.ended(run)).state is DurableRunState.SUCCEEDED
    assert "close" not in harness.sent()
    assert harness.sent().count("open") <= 2
    assert await harness.start(environment=ItemEnvironment(session=session.id)) != run


async def test_a_session_of_another_tenant_is_not_found(harness: DurableRunHarness) -> None:
    location = {"state": "open", "queue": "host.h1.b00t", "fence": "1"}
    await harness.client.hset("toolcrew:d:t:zeta:session.theirs:place", mapping=location)
    for name in ("theirs", "unknown", "../zeta", "theirs:place"):
        assert (
            await failure_of(harness.start(environment=ItemEnvironment(session=name)))
        ).code is ErrorCode.SESSION_NOT_FOUND


async def test_a_waiting_run_is_cancelled_at_once(harness: DurableRunHarness) -> None:
    run = await harness.start()
    assert (await harness.runs.cancel("acme", run)).state is DurableRunState.CANCELLED
    assert types(await harness.events(run)) == ["RunEnded"]
    assert await harness.queue.claim(9) == []


async def test_a_running_run_is_cancelled_by_its_holder(make_durable: DurableRunFactory) -> None:
    reached, never = asyncio.Event(), asyncio.Event()

    async def hang(call: Any, _: Any) -> Any:
        reached.set()
        await never.wait()

    harness = make_durable(echo_then("done", "one"), answers={"echo": hang})
    run = await harness.start()
    async with harness.working():
        await reached.wait()
        assert (await harness.runs.cancel("acme", run)).state is DurableRunState.RUNNING
        record = await harness.ended(run)
    assert record.state is DurableRunState.CANCELLED
    assert types(await harness.stored_events(run)).count("RunEnded") == 1
    assert await harness.client.zcard("toolcrew:d:runs:cancels") == 0


async def test_a_run_of_a_dead_holder_is_cancelled_at_once(harness: DurableRunHarness) -> None:
    run = await harness.start()
    await harness.die(await harness.claim_next())
    assert (await harness.runs.cancel("acme", run)).state is DurableRunState.CANCELLED


async def test_a_cancelled_run_is_not_resumed_after_the_death_of_its_holder(harness: DurableRunHarness) -> None:
    run = await harness.start()
    claim = await harness.claim_next()
    await harness.runs.cancel("acme", run)
    await harness.die(claim)
    assert await harness.other.claim(9) == []
    assert (await harness.runs.get("acme", run)).state is DurableRunState.CANCELLED
    assert types(await harness.events(run)) == ["RunEnded"]


async def test_a_cancelled_run_cannot_be_returned_to_the_queue(harness: DurableRunHarness) -> None:
    run = await harness.start()
    claim = await harness.claim_next()
    await harness.runs.cancel("acme", run)
    with pytest.raises(BatchCancelled):
        await harness.queue.give_back(claim)


async def test_a_cancel_by_an_operator_is_audited_and_one_by_the_tenant_is_not(harness: DurableRunHarness) -> None:
    operator, owner = Actor(key="k1", role="operator", name="eve"), Actor(key="k2", role="tenant", tenant="acme")
    first, second = await harness.start(), await harness.start()
    await harness.runs.cancel("acme", first, actor=operator)
    await harness.runs.cancel("acme", first, actor=operator)
    await harness.runs.cancel("acme", second, actor=owner)
    assert (await failure_of(harness.runs.cancel("zeta", second, actor=operator))).code is ErrorCode.FILE_NOT_FOUND
    (result,) = (await Audit(harness.client, "d").read()).entries
    assert (result.action, result.tenant, result.target, result.actor) == ("run.cancel", "acme", first, operator)


async def test_unknown_and_foreign_runs_are_reported_alike_as_not_found(harness: DurableRunHarness) -> None:
    await harness.start()
    other_run = (await harness.runs.start("zeta", ECHO)).id
    await harness.submit(1)
    for name in ("0" * 24, "@runs", "x:events", "*", "", "a" * 65, "é", other_run, "b-1"):
        for method in (harness.runs.get, harness.runs.cancel, harness.runs.transcript):
            assert (await failure_of(method("acme", name))).code is ErrorCode.FILE_NOT_FOUND
        assert (await failure_of(harness.events(name))).code is ErrorCode.FILE_NOT_FOUND
    assert (await harness.runs.get("zeta", other_run)).state is DurableRunState.QUEUED


async def test_durable_runs_cannot_be_changed_as_a_batch(harness: DurableRunHarness) -> None:
    await harness.start()
    batches = Batches(harness.queue, RunEventPublisher(harness.client, "d"), "acme")
    for method in (batches.cancel, batches.resume, batches.status, batches.custom_ids, batches.delete):
        assert (await failure_of(method(NO_BATCH))).code is ErrorCode.INVALID_ARGUMENTS
    assert (await harness.queue.batches.list_batches("acme")).batches == {}
    file = BatchFile((), "0" * 64, 0, "/v1/agent/runs")
    assert await batches.submit(file, batch=NO_BATCH) != NO_BATCH


async def test_an_item_without_a_session_is_stored_as_in_the_previous_release(harness: DurableRunHarness) -> None:
    assert "session" not in BatchItem(custom_id="a", line=1, url="/v1/agent/runs", work=ECHO).model_dump_json()
    run = await harness.start()
    fields: Any = await harness.client.hgetall(f"toolcrew:d:t:acme:run.{run}")
    assert parse_run(KEY, "acme", run, fields).item.environment == ItemEnvironment()


async def test_a_page_of_ten_thousand_runs_is_listed_quickly(harness: DurableRunHarness) -> None:
    for _ in range(20):
        await asyncio.gather(*(harness.runs.start("acme", ECHO) for _ in range(10)))
    pipe = harness.client.pipeline(transaction=False)
    fields: Any = await harness.client.hgetall(
        f"toolcrew:d:t:acme:run.{(await harness.runs.list('acme', limit=1)).runs[0].id}"
    )
    for number in range(9800):
        pipe.hset(f"toolcrew:d:t:acme:run.old{number}", mapping={**fields, b"state": b"ended"})
        for part in ("index", "succeeded"):
            pipe.zadd(f"toolcrew:d:t:acme:runs:{part}", {f"old{number}": -number})
    await pipe.execute()
    for state in (None, DurableRunState.QUEUED, DurableRunState.SUCCEEDED, DurableRunState.FAILED):
        durations = []
        for _ in range(5):
            started_at = time.perf_counter()
            page = await harness.runs.list("acme", limit=50, state=state)
            durations.append(time.perf_counter() - started_at)
        # 20 ms on a quiet machine; what goes through all records would take seconds.
        assert min(durations) < 0.2, state
        assert len(page.runs) == (0 if state is DurableRunState.FAILED else 50)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_list_each_run_once_while_runs_are_added_and_removed(
    redis_server: RedisProcess, data: st.DataObject
) -> None:
    async def check() -> None:
        async with open_durable(redis_server) as make:
            harness = make()
            await harness.client.flushdb()
            harness.runs = DurableRuns(
                harness.client, "d", KEY, harness.pool.tenants, max_listed=data.draw(st.integers(5, 30))
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


async def test_the_oldest_ended_runs_are_removed_with_all_their_keys(make_durable: DurableRunFactory) -> None:
    harness = make_durable(["done", "done"])
    harness.runs = DurableRuns(harness.client, "d", KEY, harness.pool.tenants, max_listed=3)
    started = [await harness.start() for _ in range(2)]
    async with harness.working():
        await harness.ended(started[1])
        await harness.ended(started[0])
    cursor = (await harness.runs.list("acme", limit=1)).next_cursor
    started += [await harness.start() for _ in range(3)]
    assert [run.id for run in (await harness.runs.list("acme")).runs] == started[:1:-1]
    assert (await harness.runs.list("acme", cursor=cursor)).runs == ()
    assert await harness.client.keys(f"toolcrew:d:t:acme:run.{started[0]}*") == []
    # The bytes of the removed runs no longer count. A record that has expired is not subtracted a second time.
    await harness.client.delete(f"toolcrew:d:t:acme:run.{started[2]}")
    await harness.start()
    used = int(await harness.client.hget("toolcrew:d:t:acme:memory", "total") or 0)
    sizes = [await harness.client.hget(key, "run_bytes") async for key in harness.client.scan_iter("*:run.*")]
    texts = [int(size.split()[0]) for size in sizes if size]
    assert len(texts) == 3
    # The record that this test has deleted counts until it would have expired.
    assert used == sum(texts) + texts[0]


async def test_waiting_runs_do_not_block_the_removal_of_ended_runs(make_durable: DurableRunFactory) -> None:
    harness = make_durable(["done"])
    harness.runs = DurableRuns(harness.client, "d", KEY, harness.pool.tenants, max_listed=15)
    waiting = [await harness.start(priority=-1) for _ in range(12)]
    ended = []
    for kind in (FailureKind.MODEL, None) * 3:
        ended.append(await harness.start(priority=1))
        claim = await harness.claim_next()
        await harness.queue.finish(claim, build_outcome(claim, kind))
    assert [run.id for run in (await harness.runs.list("acme")).runs] == [*ended[:2:-1], *waiting[::-1]]
    assert await harness.client.keys(f"toolcrew:d:t:acme:run.{ended[2]}*") == []


async def test_an_invalid_list_cursor_is_refused(harness: DurableRunHarness) -> None:
    for cursor in ("", "x", "-1", "1" * 16, "²"):
        with pytest.raises(ToolFailure) as failure:
            await harness.runs.list("acme", cursor=cursor)
        assert failure.value.code is ErrorCode.INVALID_ARGUMENTS


async def test_runs_are_listed_by_state(make_durable: DurableRunFactory) -> None:
    harness = make_durable(["done"])
    succeeded = await harness.start()
    async with harness.working():
        await harness.ended(succeeded)
    cancelled = await harness.start()
    await harness.runs.cancel("acme", cancelled)
    failed_run = await harness.start(RunBody(instruction="x", tools=("echo",), dialect="native", model="nosuch"))
    claim = await harness.claim_next()
    async with harness.publisher.open("acme", failed_run, claim.token, 1):
        pass
    waiting, running, queued = [await harness.start() for _ in range(3)]
    for _ in range(2):
        await harness.claim_next()
    await harness.client.hset(f"toolcrew:d:t:acme:run.{waiting}", "asking", "1")
    await harness.queue.finish(claim, build_outcome(claim, FailureKind.MODEL))
    expected = {
        DurableRunState.SUCCEEDED: succeeded,
        DurableRunState.CANCELLED: cancelled,
        DurableRunState.FAILED: failed_run,
        DurableRunState.WAITING_FOR_APPROVAL: waiting,
        DurableRunState.RUNNING: running,
        DurableRunState.QUEUED: queued,
    }
    assert set(expected) == set(DurableRunState)
    for state, run in expected.items():
        assert [record.id for record in (await harness.runs.list("acme", state=state)).runs] == [run]
    newer = await harness.start()
    page = await harness.runs.list("acme", state=DurableRunState.QUEUED, limit=1)
    next_page = await harness.runs.list("acme", state=DurableRunState.QUEUED, limit=1, cursor=page.next_cursor)
    assert [record.id for record in (*page.runs, *next_page.runs)] == [newer, queued]
