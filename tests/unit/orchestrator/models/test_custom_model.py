"""A tool in a worker queries its caller's model. Every failure gives an error message."""

import asyncio
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from toolcrew.contract.call_events import MAX_ANSWER_BYTES, MODEL, CallEvent, decode_answer, encode_answer, encode_event
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ModelUnavailable, ToolFailure
from toolcrew.contract.functions.completions import Completion, TokenUsage
from toolcrew.contract.functions.model_questions import MAX_QUESTIONS, ModelAnswer, parse_answer, parse_question
from toolcrew.contract.model_endpoints import Prices
from toolcrew.orchestrator.dispatch.model_requests import ModelRequests
from toolcrew.orchestrator.loop.limits import ReActOptions, Spending, StopReason
from toolcrew.orchestrator.models.adapter import MAX_CALLS
from toolcrew.orchestrator.models.scripted import ScriptedModel
from toolcrew.workers.tools import caller_model as custom_model
from toolcrew.workers.tools.caller_model import CallerModel


class FakeEvents:
    """The worker's end of a call's events, in memory. `is_disconnected`: no client listens."""

    is_watched = True

    def __init__(self) -> None:
        self.sent: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: queue.Queue[bytes] = queue.Queue()
        self.is_disconnected = False

    def show(self, stream: str, text: str) -> None:
        """Ignore the output."""

    def send(self, kind: str, payload: Mapping[str, Any]) -> bool:
        assert kind == MODEL
        encode_event(kind, payload)
        if not self.is_disconnected:
            self.sent.put(dict(payload))
        return not self.is_disconnected

    def await_answer(self, timeout_s: float) -> dict[str, Any] | None:
        until = time.monotonic() + timeout_s
        while not self.is_disconnected and time.monotonic() < until:
            try:
                return decode_answer(self.answers.get(timeout=0.01))
            except queue.Empty:
                continue
        return None

    def close(self) -> int:
        return 0

    def answer(self, payload: Mapping[str, Any]) -> None:
        self.answers.put(encode_answer(payload))


class FakeReader:
    """The caller's end of the events."""

    call_id = "call-1"

    def __init__(self, events: FakeEvents) -> None:
        self._events = events

    async def answer(self, payload: Mapping[str, Any]) -> None:
        self._events.answer(payload)


class Bridge:
    """Both ends in one process: `serve` answers `count` questions by the run's model."""

    def __init__(self, script: Any) -> None:
        self.events = FakeEvents()
        self.script = ScriptedModel(script)
        self.requests = ModelRequests(self.script)
        self.model = CallerModel("scripted", self.events)

    async def serve(self, count: int = 1) -> None:
        handle = self.requests.open_call()
        for _ in range(count):
            payload = await asyncio.to_thread(self.events.sent.get, True, 5)
            answer_task = handle(CallEvent(kind=MODEL, payload=payload), FakeReader(self.events))  # type: ignore[arg-type]
            assert answer_task is not None
            await answer_task

    async def ask(self, prompt: Any = "What now?", **options: Any) -> Completion:
        serving = asyncio.create_task(self.serve())
        try:
            return await self.model.complete(prompt, **options)
        finally:
            await serving


async def refusal(completion_task: Any) -> ToolFailure:
    with pytest.raises(ToolFailure) as failed:
        await completion_task
    return failed.value


async def test_concurrent_questions_get_their_own_answers() -> None:
    bridge = Bridge(lambda messages: str(messages[-1]["content"]))
    serving = asyncio.create_task(bridge.serve(5))
    completions = await asyncio.gather(*(bridge.model.complete(f"q{n}") for n in range(5)))
    await serving
    assert [completion.text for completion in completions] == [f"q{n}" for n in range(5)]


async def test_a_late_answer_is_not_used_for_the_next_question() -> None:
    events = FakeEvents()
    model = CallerModel("slow", events)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await model.complete("first")
    events.answer(ModelAnswer(number=1, text="late").model_dump(mode="json"))
    events.answer(ModelAnswer(number=2, text="in time").model_dump(mode="json"))
    assert (await model.complete("second")).text == "in time"


async def test_a_slow_model_is_reported_as_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_model, "MARGIN_S", 0.0)
    failure = await refusal(CallerModel("slow", FakeEvents()).complete("?", timeout_s=0.05))
    assert (failure.code, "did not answer in 0.05 s" in failure.message) == (ErrorCode.TIMEOUT, True)


async def test_a_question_without_a_listener_is_refused_at_once() -> None:
    events = FakeEvents()
    events.is_disconnected = True
    failure = await refusal(CallerModel("none", events).complete("?"))
    assert (failure.code, "no model" in failure.message) == (ErrorCode.CONFIG_MISSING, True)


async def test_a_disconnected_caller_ends_the_wait_for_an_answer() -> None:
    events = FakeEvents()
    completion_task = asyncio.create_task(CallerModel("gone", events).complete("?"))
    await asyncio.to_thread(events.sent.get, True, 5)
    events.is_disconnected = True
    assert "disconnected" in (await refusal(completion_task)).message


async def test_questions_above_the_limit_of_a_call_are_refused() -> None:
    assert MAX_QUESTIONS == MAX_CALLS
    bridge = Bridge(lambda _: "ok")
    for _ in range(MAX_QUESTIONS):
        await bridge.ask()
    failure = await refusal(bridge.model.complete("?"))
    assert (failure.code, "20 requests" in failure.message) == (ErrorCode.PERMISSION_DENIED, True)
    assert bridge.events.sent.empty()


async def test_the_caller_enforces_the_question_limit() -> None:
    requests, events = ModelRequests(ScriptedModel(lambda _: "ok")), FakeEvents()
    handle = requests.open_call()
    question = {"number": 1, "messages": [{"role": "user", "content": "?"}], "timeout_s": 5}
    for _ in range(MAX_CALLS + 1):
        answer_task = handle(CallEvent(kind=MODEL, payload=question), FakeReader(events))  # type: ignore[arg-type]
        assert answer_task is not None
        await answer_task
    answers = [parse_answer(decode_answer(events.answers.get())) for _ in range(MAX_CALLS + 1)]
    assert [answer.error_code for answer in answers] == [None] * MAX_CALLS + [ErrorCode.PERMISSION_DENIED]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([{"content": object()}], {}),
        ("?", {"timeout_s": 0}),
        ("?", {"max_tokens": 0}),
        ("?", {"timeout_s": 10_000}),
        ("x" * 300_000, {}),
    ],
    ids=["no message", "not JSON", "zero timeout", "zero tokens", "timeout too long", "prompt too large"],
)
async def test_an_invalid_question_is_refused_before_it_is_sent(prompt: Any, options: dict[str, Any]) -> None:
    events = FakeEvents()
    failure = await refusal(CallerModel("m", events).complete(prompt, **options))
    assert (failure.code, "to the model is invalid" in failure.message) == (ErrorCode.INVALID_ARGUMENTS, True)
    assert events.sent.empty()


async def test_a_model_reply_above_the_limit_is_reported_as_an_error() -> None:
    failure = await refusal(Bridge(lambda _: "x" * (MAX_ANSWER_BYTES + 1)).ask())
    assert (failure.code, "limit" in failure.message) == (ErrorCode.INVALID_ARGUMENTS, True)


async def test_an_unavailable_model_fails_the_question_with_its_error() -> None:
    def fail(_: Any) -> str:
        raise ModelUnavailable("the endpoint refuses the key")

    failure = await refusal(Bridge(fail).ask())
    assert (failure.code, failure.message) == (ErrorCode.NETWORK_ERROR, "the endpoint refuses the key")


async def test_an_unexpected_model_exception_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    failure = await refusal(Bridge(lambda _: 1 / 0).ask())
    assert (failure.code, failure.message) == (
        ErrorCode.INTERNAL,
        "the caller's model failed (ZeroDivisionError): see the log of the caller",
    )
    assert "model_request_failed" in caplog.text


async def test_an_invalid_answer_is_logged_and_skipped() -> None:
    events = FakeEvents()
    events.answers.put(b"[]")
    events.answer({"number": "x"})
    events.answer(ModelAnswer(number=7, text="of no call").model_dump(mode="json"))
    events.answer(ModelAnswer(number=1, text="mine").model_dump(mode="json"))
    with capture_logs() as logs:
        assert (await CallerModel("m", events).complete("?")).text == "mine"
    assert [entry["event"] for entry in logs] == ["model_reply_refused"] * 2


async def test_an_invalid_question_is_logged_and_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    requests, events = ModelRequests(ScriptedModel(lambda _: "ok")), FakeEvents()
    for payload in (
        {},
        {"number": 1},
        {"number": 10**6, "messages": [{}], "timeout_s": 1},
        {"number": 1, "messages": "x", "timeout_s": 1},
    ):
        with pytest.raises(EnvelopeRefused):
            parse_question(payload)
        answer_task = requests.open_call()(CallEvent(kind=MODEL, payload=payload), FakeReader(events))  # type: ignore[arg-type]
        assert answer_task is not None
        await answer_task
        assert "model_request_refused" in caplog.text
        caplog.clear()
    assert events.answers.empty()


async def test_the_answer_reader_thread_ends_when_no_question_waits() -> None:
    before = set(threading.enumerate())
    bridge = Bridge(lambda _: "ok")
    completion_task = asyncio.create_task(bridge.model.complete("?"))
    await asyncio.sleep(0)
    (reader,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "model-answers"]
    await bridge.serve()
    await completion_task
    await asyncio.to_thread(reader.join, 2)
    assert not reader.is_alive()


def test_model_usage_of_tools_counts_toward_the_run_budget() -> None:
    options = ReActOptions(max_tokens=100, prices=Prices(1e6, 2e6))
    spending = Spending(options, by_tools=lambda: TokenUsage(60, 30))
    assert (spending.find_exhausted(), spending.cost) == (None, 120)
    spending.charge(TokenUsage(5, 5), TokenUsage())
    assert (spending.find_exhausted(), spending.counted) == (StopReason.MAX_TOKENS, TokenUsage(65, 35))
