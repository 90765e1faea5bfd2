"""Questions from a running call to its caller: answered while the output continues, and valid only while the call
runs.
"""

import asyncio
import time
from typing import Any

import pytest

from contract.call_events import MODEL, OUTPUT, CallEvent
from contract.errors import EnvelopeRefused
from orchestrator.dispatch.call_events import MAX_QUESTIONS, CallEventReader, output_handler
from store import call_events as stored_events
from store.call_events import call_event_keys
from tests.event_harness import DEPLOYMENT, EventHarness, Screen, run_call
from workers.call_events import CallEventWriter


async def test_a_question_is_answered_while_output_goes_on(harness: EventHarness) -> None:
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


async def test_a_question_that_is_still_worked_on_ends_with_the_call(harness: EventHarness) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def on_question(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with harness.events.listen("acme", "call-1", {MODEL: on_question}, 30):
        writer = harness.writer()
        assert await asyncio.to_thread(writer.send, MODEL, {})
        async with asyncio.timeout(5):
            await begun.wait()
        assert await asyncio.to_thread(writer.await_answer, 0.1) is None
        writer.close()
    async with asyncio.timeout(5):
        await ended.wait()


async def test_questions_of_a_call_that_has_ended_are_not_begun_with_and_hold_nothing_up(harness: EventHarness) -> None:
    screen, begun = Screen(), list[CallEvent]()

    async def on_question(event: CallEvent, _: CallEventReader) -> None:
        begun.append(event)
        await asyncio.Event().wait()

    def ask_and_leave(writer: CallEventWriter) -> None:
        for _ in range(2 * MAX_QUESTIONS):
            writer.send(MODEL, {})
        writer.show("stdout", "done")

    async with harness.events.listen("acme", "call-1", {OUTPUT: output_handler(screen.show), MODEL: on_question}, 30):
        await asyncio.to_thread(run_call, ask_and_leave, harness.writer())
        left_at = time.monotonic()
    assert time.monotonic() - left_at < 1
    assert screen.text() == "done"
    assert len(begun) <= MAX_QUESTIONS


async def test_who_waits_for_an_answer_of_a_caller_that_has_gone_is_reported_soon(
    harness: EventHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_events, "WAIT_SLICE_S", 0.1)
    started = time.monotonic()
    assert await asyncio.to_thread(harness.writer().await_answer, 30) is None
    assert time.monotonic() - started < 2


async def test_an_answer_that_is_nonsense_is_refused(harness: EventHarness) -> None:
    harness.plain.rpush(call_event_keys(DEPLOYMENT, "acme", "call-1").answers, b"[1]")
    with pytest.raises(EnvelopeRefused):
        await asyncio.to_thread(harness.writer().await_answer, 1)
