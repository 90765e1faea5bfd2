"""Events of running calls: a worker's thread writes them, and one listener per process receives them, over a real
Redis.
"""

import asyncio
import threading
import time

import pytest
import redis
import redis.asyncio

from contract.call_events import (
    HIDDEN,
    MAX_PIECE_BYTES,
    MAX_WAITING_BYTES,
    MAX_WAITING_EVENTS,
    MODEL,
    OUTPUT,
    encode_event,
    entry_fields,
)
from contract.calls import ToolResult
from contract.settings import BrokerSettings
from orchestrator.dispatch.call_events import CallEventListener, output_handler
from store.call_events import WorkerCallEventStore, call_event_keys, wakes_key
from store.connection import connect_once
from tests.builders import KEY
from tests.event_harness import DEPLOYMENT, EventHarness, Screen, run_call
from workers import call_events as writing
from workers.call_events import CallEvents, CallEventWriter


async def test_output_comes_in_order_and_whole_before_listening_ends(harness: EventHarness) -> None:
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        for number in range(500):
            writer.show("stdout", f"line {number}\n")

    await harness.hear(work, screen.show)
    assert screen.text() == "".join(f"line {number}\n" for number in range(500))


async def test_output_arrives_while_the_call_runs(harness: EventHarness) -> None:
    shown, answered = asyncio.Event(), threading.Event()

    async def on_output(_: str, text: str) -> None:
        shown.set()

    def work(writer: CallEventWriter) -> None:
        writer.show("stdout", "first")
        assert answered.wait(5)

    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(on_output)}, 30):
        running = asyncio.create_task(asyncio.to_thread(run_call, work, harness.writer()))
        async with asyncio.timeout(5):
            await shown.wait()
        assert not running.done()
        answered.set()
        await running


async def test_a_piece_that_nothing_follows_is_sent_by_itself(harness: EventHarness) -> None:
    """Fast pieces are collected, but the last piece must not wait until the call ends."""
    screen, has_shown, may_end = Screen(), asyncio.Event(), threading.Event()

    def on_output(stream: str, text: str) -> None:
        screen.show(stream, text)
        if "b" in screen.text():
            has_shown.set()

    def work(writer: CallEventWriter) -> None:
        writer.show("stdout", "a")
        writer.show("stdout", "b")
        assert may_end.wait(5)

    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(on_output)}, 30):
        running = asyncio.create_task(asyncio.to_thread(run_call, work, harness.writer()))
        async with asyncio.timeout(5):
            await has_shown.wait()
        may_end.set()
        await running


async def test_streams_keep_their_names_and_their_order(harness: EventHarness) -> None:
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        for stream, text in (("stdout", "1"), ("stderr", "2"), ("stderr", "3"), ("stdout", "4")):
            writer.show(stream, text)

    await harness.hear(work, screen.show)
    assert "".join(text for _, text in screen.pieces) == "1234"
    assert (screen.text("stdout"), screen.text("stderr")) == ("14", "23")


async def test_one_listener_hears_many_calls_and_mixes_nothing_up(harness: EventHarness) -> None:
    screens = {f"call-{number}": Screen() for number in range(20)}

    async def one(call_id: str) -> None:
        await harness.hear(
            lambda writer: [writer.show("stdout", f"{call_id} {n};") for n in range(20)], screens[call_id].show, call_id
        )

    await asyncio.gather(*(one(call_id) for call_id in screens))
    for call_id, screen in screens.items():
        assert screen.text() == "".join(f"{call_id} {n};" for n in range(20))


async def test_calls_that_end_together_are_read_together(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    screens, round_trips, ended = [Screen() for _ in range(100)], list[int](), asyncio.Barrier(100)
    open_pipeline = harness.redis.pipeline

    async def one(number: int) -> None:
        handlers = {OUTPUT: output_handler(screens[number].show)}
        async with harness.events.listen("acme", f"call-{number}", handlers, 30) as reader:
            assert reader is not None
            # No wake-up: what is still unread when the result comes.
            harness.plain.xadd(
                reader.keys.events, entry_fields(encode_event(OUTPUT, {"stream": "stdout", "text": str(number)}))
            )  # type: ignore[arg-type]
            if await ended.wait() == 0:
                monkeypatch.setattr(
                    harness.redis, "pipeline", lambda **options: round_trips.append(1) or open_pipeline(**options)
                )

    await asyncio.gather(*map(one, range(100)))
    assert [screen.text() for screen in screens] == [str(number) for number in range(100)]
    assert len(round_trips) < 50


async def test_a_call_of_one_id_is_another_call_for_another_tenant(harness: EventHarness) -> None:
    mine, theirs = Screen(), Screen()
    async with (
        harness.events.listen("acme", "call-1", {OUTPUT: output_handler(mine.show)}, 30),
        harness.events.listen("evil", "call-1", {OUTPUT: output_handler(theirs.show)}, 30),
    ):
        await asyncio.to_thread(run_call, lambda writer: writer.show("stdout", "secret"), harness.writer(tenant="acme"))
    assert (mine.text(), theirs.text()) == ("secret", "")


async def test_nothing_is_left_in_redis_when_the_call_is_over(harness: EventHarness) -> None:
    await harness.hear(lambda writer: writer.show("stdout", "x" * 100_000), Screen().show)
    await harness.events.close()
    assert harness.names() == []


async def test_a_cancelled_caller_leaves_nothing_and_its_worker_writes_nothing_more(harness: EventHarness) -> None:
    async def caller() -> None:
        async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30):
            listening.set()
            await asyncio.Event().wait()

    listening, writer = asyncio.Event(), harness.writer()
    task = asyncio.create_task(caller())
    await listening.wait()
    task.cancel()
    await asyncio.wait({task})
    await harness.events.close()

    hidden = await asyncio.to_thread(run_call, lambda w: w.show("stdout", "late"), writer)
    assert hidden == 4
    assert [key for key in harness.names() if b":call:" in key] == []


async def test_every_key_expires_by_itself_when_the_caller_dies(harness: EventHarness) -> None:
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30):
        await asyncio.to_thread(harness.writer().show, "stdout", "x")
        lives = [harness.plain.ttl(key) for key in harness.names()]
    assert lives
    assert all(0 < int(str(ttl)) <= 100 for ttl in lives)


async def test_a_slow_consumer_holds_the_writer_up_and_loses_nothing(harness: EventHarness) -> None:
    screen, longest = Screen(), 0

    async def on_output(stream: str, text: str) -> None:
        nonlocal longest
        await asyncio.sleep(0.001)
        longest = max(longest, int(str(harness.plain.xlen(call_event_keys(DEPLOYMENT, "acme", "call-1").events))))
        screen.show(stream, text)

    text = "".join(f"{number:06}\n" for number in range(150_000))
    reader = await harness.hear(lambda writer: writer.show("stdout", text), on_output)
    assert screen.text() == text
    # Pieces are at least half as large as they may be.
    assert longest <= 2 * MAX_WAITING_BYTES / MAX_PIECE_BYTES + 1
    assert reader.note(build_result()).metadata == {}


async def test_a_consumer_that_stops_taking_costs_the_call_a_bounded_time_and_is_reported(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "STALL_S", 0.2)
    stuck = asyncio.Event()

    async def on_output(_: str, text: str) -> None:
        await stuck.wait()

    writer, text = harness.writer(), "x" * 1_000_000
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(on_output)}, 30):
        started = time.monotonic()
        hidden = await asyncio.to_thread(run_call, lambda w: w.show("stdout", text), writer)
        took = time.monotonic() - started
        waiting = int(str(harness.plain.xlen(call_event_keys(DEPLOYMENT, "acme", "call-1").events)))
        stuck.set()
    assert took < 1.5
    assert 1_000_000 - MAX_WAITING_BYTES <= hidden < 1_000_000
    assert waiting <= MAX_WAITING_EVENTS + 1


async def test_many_small_pauses_do_not_add_up_for_ever(harness: EventHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_PAUSE_S", 0.3)

    async def on_output(_: str, text: str) -> None:
        await asyncio.sleep(0.02)

    started = time.monotonic()
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(on_output)}, 30):
        hidden = await asyncio.to_thread(run_call, lambda w: w.show("stdout", "x" * 2_000_000), harness.writer())
    assert hidden > 0
    assert time.monotonic() - started < 3


async def test_a_handler_that_raises_costs_neither_the_call_nor_the_others(harness: EventHarness) -> None:
    screen = Screen()

    def broken(_: str, text: str) -> None:
        raise RuntimeError("a bug of the caller's")

    await asyncio.gather(
        harness.hear(lambda w: w.show("stdout", "a"), broken, "call-1"),
        harness.hear(lambda w: w.show("stdout", "b"), screen.show, "call-2"),
    )
    assert screen.text() == "b"


async def test_entries_that_are_none_of_ours_are_skipped(harness: EventHarness) -> None:
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        key = call_event_keys(DEPLOYMENT, "acme", "call-1").events
        for fields in (
            {"event": "no JSON"},
            {"other": "x"},
            {"event": b"\xff"},
            {"event": "[1]"},
            {"event": '{"kind":"A B"}'},
        ):
            harness.plain.xadd(key, fields)  # type: ignore[arg-type]
        writer.show("stdout", "after")

    await harness.hear(work, screen.show)
    assert screen.text() == "after"


async def test_a_wake_up_for_a_call_without_a_listener_is_ignored(harness: EventHarness) -> None:
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        harness.plain.zadd(wakes_key(DEPLOYMENT, harness.events.id), {b"\xff": 0, "acme:other": 1, "evil:call-1": 2})
        writer.show("stdout", "x")

    await harness.hear(work, screen.show)
    assert screen.text() == "x"


async def test_events_whose_wake_up_was_lost_come_before_the_result_after_however_long_a_silence(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.dispatch.call_events.STALL_S", 0.1)
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        time.sleep(0.2)  # the silence
        writer._store._wakes = "another-process"
        writer.show("stdout", "x")

    await harness.hear(work, screen.show)
    assert screen.text() == "x"


async def test_a_call_is_received_once(harness: EventHarness) -> None:
    handlers = {OUTPUT: output_handler(Screen().show)}
    async with (
        harness.events.listen("acme", "call-1", handlers, 30) as first,
        harness.events.listen("acme", "call-1", handlers, 30) as again,
    ):
        assert first is not None
        assert again is None
    other = CallEventListener(harness.redis, DEPLOYMENT, KEY)
    async with (
        harness.events.listen("acme", "call-2", handlers, 30),
        other.listen("acme", "call-2", handlers, 30) as elsewhere,
    ):
        assert elsewhere is None
    await other.close()


async def test_without_handlers_nothing_is_written_and_nothing_is_read(harness: EventHarness) -> None:
    async with harness.events.listen("acme", "call-1", {}, 30) as reader:
        assert reader is None
        assert harness.names() == []
    events = CallEvents()
    events.show("stdout", "x")
    assert (events.is_watched, events.send(MODEL, {}), events.await_answer(9), events.close()) == (
        False,
        False,
        None,
        0,
    )
    assert harness.names() == []


async def test_a_redis_that_is_away_costs_a_call_nothing_but_its_events() -> None:
    broker = BrokerSettings.model_validate({"redis_url": "redis://:x@127.0.0.1:1/0"})
    client = connect_once(broker)
    writer = CallEventWriter(WorkerCallEventStore(client, DEPLOYMENT, KEY, "acme", "call-1", "l1"), "call-1")
    started = time.monotonic()
    assert run_call(lambda w: [w.show("stdout", "abc") for _ in range(100)], writer) == 300
    assert not writer.send(MODEL, {})
    assert time.monotonic() - started < 2

    plain = redis.asyncio.Redis(host="127.0.0.1", port=1, retry=None)
    events = CallEventListener(plain, DEPLOYMENT, KEY)
    async with events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30) as reader:
        assert reader is None
    await events.close()
    await plain.aclose()


async def test_what_comes_too_late_to_be_shown_is_counted_in_the_result(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.dispatch.call_events.STALL_S", 0.1)

    async def on_output(_: str, text: str) -> None:
        await asyncio.Event().wait()

    reader = await harness.hear(lambda w: [w.show("stdout", "x" * 20_000) for _ in range(3)], on_output)
    hidden = reader.note(build_result()).metadata[HIDDEN]
    assert hidden == 60_000


def build_result() -> ToolResult:
    return ToolResult(call_id="call-1", name="echo", success=True)


async def test_a_function_that_gives_something_back_is_no_coroutine(harness: EventHarness) -> None:
    screen = Screen()

    def write(stream: str, text: str) -> int:
        screen.show(stream, text)
        return len(text)

    await harness.hear(
        lambda writer: [writer.send(OUTPUT, {"stream": "stdout", "text": text}) for text in "abc"], write
    )
    assert screen.text() == "abc"


async def test_a_listener_that_is_closed_in_the_middle_of_a_call_does_not_hold_it(harness: EventHarness) -> None:
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30):
        await harness.events.close()
    async with harness.events.listen("acme", "call-2", {OUTPUT: output_handler(Screen().show)}, 30) as reader:
        assert reader is None
