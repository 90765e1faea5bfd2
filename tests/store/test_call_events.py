"""Events of running calls: a worker's thread writes them, and one listener per process receives them."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest
import redis
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY
from tests.support.redis.event_harness import DEPLOYMENT, EventHarness, Screen, run_call
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.call_events import (
    HIDDEN,
    MAX_EVENT_BYTES,
    MAX_PIECE_BYTES,
    MAX_WAITING_BYTES,
    MAX_WAITING_EVENTS,
    MODEL,
    OUTPUT,
    CallEvent,
    decode_answer,
    decode_event,
    encode_answer,
    encode_event,
    encode_output,
)
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import BrokerUnavailable, EnvelopeRefused
from toolcrew.orchestrator.dispatch.call_event_listener import (
    MAX_QUESTIONS,
    CallEventListener,
    CallEventReader,
    output_handler,
)
from toolcrew.store import call_event_streams as stored_events
from toolcrew.store.call_event_streams import WorkerCallEventStore, call_event_keys, wakes_key
from toolcrew.store.connection import connect_once
from toolcrew.workers import call_event_writer as writing
from toolcrew.workers.call_event_writer import CallEvents, CallEventWriter


async def test_the_last_piece_of_output_is_sent_before_the_call_ends(harness: EventHarness) -> None:
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
        async with asyncio.timeout(SOON_S):
            await has_shown.wait()
        may_end.set()
        await running


async def test_output_keeps_its_stream_names_and_order(harness: EventHarness) -> None:
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        for stream, text in (("stdout", "1"), ("stderr", "2"), ("stderr", "3"), ("stdout", "4")):
            writer.show(stream, text)

    await harness.hear(work, screen.show)
    assert "".join(text for _, text in screen.pieces) == "1234"
    assert (screen.text("stdout"), screen.text("stderr")) == ("14", "23")


async def test_one_listener_keeps_the_events_of_concurrent_calls_apart(harness: EventHarness) -> None:
    screens = {f"call-{number}": Screen() for number in range(20)}

    async def one(call_id: str) -> None:
        await harness.hear(
            lambda writer: [writer.show("stdout", f"{call_id} {n};") for n in range(20)], screens[call_id].show, call_id
        )

    await asyncio.gather(*(one(call_id) for call_id in screens))
    for call_id, screen in screens.items():
        assert screen.text() == "".join(f"{call_id} {n};" for n in range(20))


async def test_events_of_an_equal_call_id_are_not_sent_to_another_tenant(harness: EventHarness) -> None:
    owner_screen, other_screen = Screen(), Screen()
    async with (
        harness.events.listen("acme", "call-1", {OUTPUT: output_handler(owner_screen.show)}, 30),
        harness.events.listen("evil", "call-1", {OUTPUT: output_handler(other_screen.show)}, 30),
    ):
        await asyncio.to_thread(run_call, lambda writer: writer.show("stdout", "secret"), harness.writer(tenant="acme"))
    assert (owner_screen.text(), other_screen.text()) == ("secret", "")


async def test_a_cancelled_caller_leaves_no_keys_and_its_worker_stops_writing(harness: EventHarness) -> None:
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


async def test_every_event_key_has_a_ttl(harness: EventHarness) -> None:
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30):
        await asyncio.to_thread(harness.writer().show, "stdout", "x")
        ttls = [harness.plain.ttl(key) for key in harness.names()]
    assert ttls
    assert all(0 < int(str(ttl)) <= 100 for ttl in ttls)


async def test_a_slow_consumer_slows_the_writer_and_loses_no_output(harness: EventHarness) -> None:
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
    assert reader.with_hidden_count(build_result()).metadata == {}


async def test_a_blocked_consumer_delays_the_writer_for_a_bounded_time(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "STALL_S", 0.2)
    may_continue = asyncio.Event()

    async def on_output(_: str, text: str) -> None:
        await may_continue.wait()

    writer, text = harness.writer(), "x" * 1_000_000
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(on_output)}, 30):
        started = time.monotonic()
        hidden = await asyncio.to_thread(run_call, lambda w: w.show("stdout", text), writer)
        seconds = time.monotonic() - started
        waiting = int(str(harness.plain.xlen(call_event_keys(DEPLOYMENT, "acme", "call-1").events)))
        may_continue.set()
    assert seconds < 15
    assert 1_000_000 - MAX_WAITING_BYTES <= hidden < 1_000_000
    assert waiting <= MAX_WAITING_EVENTS + 1


async def test_the_total_pause_of_the_writer_is_bounded(harness: EventHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_PAUSE_S", 0.3)

    async def on_output(_: str, text: str) -> None:
        await asyncio.sleep(0.02)

    started = time.monotonic()
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(on_output)}, 30):
        hidden = await asyncio.to_thread(run_call, lambda w: w.show("stdout", "x" * 2_000_000), harness.writer())
    assert hidden > 0
    assert time.monotonic() - started < 15


async def test_a_raising_handler_does_not_affect_other_calls(harness: EventHarness) -> None:
    screen = Screen()

    def broken(_: str, text: str) -> None:
        raise RuntimeError("a bug of the caller's")

    await asyncio.gather(
        harness.hear(lambda w: w.show("stdout", "a"), broken, "call-1"),
        harness.hear(lambda w: w.show("stdout", "b"), screen.show, "call-2"),
    )
    assert screen.text() == "b"


async def test_invalid_stream_entries_are_skipped(harness: EventHarness) -> None:
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


async def test_wake_ups_for_unknown_calls_are_ignored(harness: EventHarness) -> None:
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        harness.plain.zadd(wakes_key(DEPLOYMENT, harness.events.id), {b"\xff": 0, "acme:other": 1, "evil:call-1": 2})
        writer.show("stdout", "x")

    await harness.hear(work, screen.show)
    assert screen.text() == "x"


async def test_events_with_a_lost_wake_up_still_arrive(harness: EventHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.dispatch.call_event_listener.STALL_S", 0.1)
    screen = Screen()

    def work(writer: CallEventWriter) -> None:
        time.sleep(0.2)  # the silence
        writer._store._wakes = "another-process"
        writer.show("stdout", "x")

    await harness.hear(work, screen.show)
    assert screen.text() == "x"


async def test_only_the_first_listener_of_a_call_receives_its_events(harness: EventHarness) -> None:
    handlers = {OUTPUT: output_handler(Screen().show)}
    async with (
        harness.events.listen("acme", "call-1", handlers, 30) as first,
        harness.events.listen("acme", "call-1", handlers, 30) as second,
    ):
        assert first is not None
        assert second is None
    other = CallEventListener(harness.redis, DEPLOYMENT, KEY)
    async with (
        harness.events.listen("acme", "call-2", handlers, 30),
        other.listen("acme", "call-2", handlers, 30) as elsewhere,
    ):
        assert elsewhere is None
    await other.close()


async def test_no_events_are_written_or_read_without_handlers(harness: EventHarness) -> None:
    async with harness.events.listen("acme", "call-1", {}, 30) as reader:
        assert reader is None
        assert harness.names() == []
    events = CallEvents()
    events.show("stdout", "x")
    assert (events.is_watched, events.send(MODEL, {}), events.await_answer(9)) == (False, False, None)
    assert events.close() == 0
    assert harness.names() == []


async def test_an_unreachable_redis_drops_events_without_blocking_the_call() -> None:
    broker = BrokerSettings.model_validate({"redis_url": "redis://:x@127.0.0.1:1/0"})
    client = connect_once(broker)
    writer = CallEventWriter(WorkerCallEventStore(client, DEPLOYMENT, KEY, "acme", "call-1", "l1"), "call-1")
    started = time.monotonic()
    assert run_call(lambda w: [w.show("stdout", "abc") for _ in range(100)], writer) == 300
    assert not writer.send(MODEL, {})
    assert time.monotonic() - started < 15

    plain = redis.asyncio.Redis(host="127.0.0.1", port=1, retry=None)
    events = CallEventListener(plain, DEPLOYMENT, KEY)
    async with events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30) as reader:
        assert reader is None
    await events.close()
    await plain.aclose()


async def test_output_that_was_not_shown_is_counted_in_the_result(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolcrew.orchestrator.dispatch.call_event_listener.STALL_S", 0.1)

    async def on_output(_: str, text: str) -> None:
        await asyncio.Event().wait()

    reader = await harness.hear(lambda w: [w.show("stdout", "x" * 20_000) for _ in range(3)], on_output)
    hidden = reader.with_hidden_count(build_result()).metadata[HIDDEN]
    assert hidden == 60_000


def build_result() -> ToolResult:
    return ToolResult(call_id="call-1", name="echo", success=True)


async def test_closing_the_listener_during_a_call_does_not_block_the_call(harness: EventHarness) -> None:
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(Screen().show)}, 30):
        await harness.events.close()
    async with harness.events.listen("acme", "call-2", {OUTPUT: output_handler(Screen().show)}, 30) as reader:
        assert reader is None


async def test_events_are_lost_during_a_redis_outage_and_work_again_afterwards(
    harness: EventHarness, redis_server: RedisProcess
) -> None:
    before, after = Screen(), Screen()
    await harness.hear(lambda writer: writer.show("stdout", "before"), before.show, "call-1")

    writer = harness.writer("call-2")
    async with harness.events.listen("acme", "call-2", {OUTPUT: output_handler(Screen().show)}, 30):
        await asyncio.to_thread(redis_server.stop)
        started = time.monotonic()
        hidden = await asyncio.to_thread(run_call, lambda w: [w.show("stdout", "x" * 1000) for _ in range(100)], writer)
        seconds = time.monotonic() - started
        await asyncio.to_thread(redis_server.start)
    assert (before.text(), hidden) == ("before", 100_000)
    assert seconds < 15

    await harness.hear(lambda w: w.show("stdout", "after"), after.show, "call-3")
    assert after.text() == "after"


async def test_events_are_read_after_redis_recovers(harness: EventHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, failures = asyncio.Event(), [BrokerUnavailable("away") for _ in range(3)]
    read = harness.events._read

    async def read_after_failures(calls: Any) -> None:
        if failures:
            raise failures.pop()
        await read(calls)

    monkeypatch.setattr("toolcrew.orchestrator.dispatch.call_event_listener.RETRY_S", 0.01)
    monkeypatch.setattr(harness.events, "_read", read_after_failures)
    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(lambda *_: arrived.set())}, 30):
        await asyncio.to_thread(harness.writer().show, "stdout", "x")
        async with asyncio.timeout(2):
            await arrived.wait()


async def test_a_question_is_answered_while_output_continues(harness: EventHarness) -> None:
    screen = Screen()

    async def on_question(event: CallEvent, reader: CallEventReader) -> None:
        await reader.answer({"text": f"{event.payload['ask']}!"})

    def work(writer: CallEventWriter) -> None:
        writer.show("stdout", "before ")
        assert writer.send(MODEL, {"ask": "who"})
        answers.append(writer.await_answer(5))
        writer.show("stdout", "after")

    answers: list[Any] = []
    handlers = {OUTPUT: output_handler(screen.show), MODEL: on_question}
    async with harness.events.listen("acme", "call-1", handlers, 30):
        await asyncio.to_thread(run_call, work, harness.writer())
    assert answers == [{"text": "who!"}]
    assert screen.text() == "before after"


async def test_an_unanswered_question_is_cancelled_when_the_call_ends(harness: EventHarness) -> None:
    started_questions, ended = asyncio.Event(), asyncio.Event()

    async def on_question(*_: Any) -> None:
        started_questions.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with harness.events.listen("acme", "call-1", {MODEL: on_question}, 30):
        writer = harness.writer()
        assert await asyncio.to_thread(writer.send, MODEL, {})
        async with asyncio.timeout(SOON_S):
            await started_questions.wait()
        assert await asyncio.to_thread(writer.await_answer, 0.1) is None
        writer.close()
    async with asyncio.timeout(SOON_S):
        await ended.wait()


async def test_open_questions_do_not_delay_the_end_of_the_call(harness: EventHarness) -> None:
    screen, started_questions = Screen(), list[CallEvent]()

    async def on_question(event: CallEvent, _: CallEventReader) -> None:
        started_questions.append(event)
        await asyncio.Event().wait()

    def ask_and_leave(writer: CallEventWriter) -> None:
        for _ in range(2 * MAX_QUESTIONS):
            writer.send(MODEL, {})
        writer.show("stdout", "done")

    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(screen.show), MODEL: on_question}, 30):
        await asyncio.to_thread(run_call, ask_and_leave, harness.writer())
        ended_at = time.monotonic()
    assert time.monotonic() - ended_at < 15
    assert screen.text() == "done"
    assert len(started_questions) <= MAX_QUESTIONS


async def test_a_question_to_a_lost_caller_times_out_early(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_events, "WAIT_SLICE_S", 0.1)
    started = time.monotonic()
    assert await asyncio.to_thread(harness.writer().await_answer, 30) is None
    assert time.monotonic() - started < 15


async def test_an_answer_that_is_not_an_object_is_refused(harness: EventHarness) -> None:
    harness.plain.rpush(call_event_keys(DEPLOYMENT, "acme", "call-1").answers, b"[1]")
    with pytest.raises(EnvelopeRefused):
        await asyncio.to_thread(harness.writer().await_answer, 1)


@given(st.text(max_size=200), st.integers(1, 400))
def test_any_output_is_encoded_in_bounded_pieces_and_decoded_unchanged(text: str, times: int) -> None:
    pieces = encode_output("stdout", text * times)
    assert all(len(data) <= MAX_PIECE_BYTES for _, data in pieces)
    events = [decode_event(data) for _, data in pieces]
    assert "".join(str(event.payload["text"]) for event in events) == text * times
    assert [len(str(event.payload["text"])) for event in events] == [characters for characters, _ in pieces]


@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    for read in (decode_event, decode_answer):
        try:
            read(data)
        except EnvelopeRefused:
            continue


def test_an_event_or_answer_above_the_size_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        encode_event(MODEL, {"text": "x" * MAX_EVENT_BYTES})
    with pytest.raises(ValueError, match="the limit is"):
        encode_answer({"text": "x" * 1024 * 1024})
    with pytest.raises(EnvelopeRefused):
        decode_event(json.dumps({"kind": "output", "payload": {"text": "x" * MAX_EVENT_BYTES}}).encode())
