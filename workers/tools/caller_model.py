"""Lets a tool in a worker use the language model of its caller.

The caller has the model's keys: it receives the question and sends the reply.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from toolcrew.contract.call_events import MODEL
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.functions.completions import Completion
from toolcrew.contract.functions.model_questions import MAX_QUESTIONS, ModelAnswer, ModelQuestion, parse_answer
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.workers.call_event_writer import CallEvents

log = structlog.get_logger(__name__)

READ_S = 2.0
"""Seconds that one read of answers waits."""
MARGIN_S = 5.0
"""Seconds that an answer may spend in transit, in addition to the model's time."""

_NO_MODEL = (
    "no model answers this tool: its caller has no model, or has disconnected; call the tool within an agent's run"
)


class CallerModel:
    """The model of a call's caller. A call may ask at most MAX_QUESTIONS questions, and several at the same time."""

    def __init__(self, name: str, events: CallEvents) -> None:
        self._name = name
        self._events = events
        self._answers = _Answers(events)
        self._question_count = 0

    @property
    def name(self) -> str:
        return self._name

    async def complete(
        self, prompt: str | Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, timeout_s: float = 60.0
    ) -> Completion:
        """Return the reply to a prompt, or to messages in the OpenAI format. `max_tokens` limits the reply.

        Raises ToolFailure: the budget is used up, the question is too large, no caller answers, or no answer arrives
        within `timeout_s`. Also raises the failures of the caller's model.
        """
        if self._question_count >= MAX_QUESTIONS:
            sentence = (
                f"this tool has sent {MAX_QUESTIONS} requests to the model, the limit of one call; send fewer requests"
            )
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, sentence)
        self._question_count += 1
        question = _build_question(self._question_count, prompt, max_tokens, timeout_s)
        waiting = self._answers.expect(question.number)
        try:
            self._send(question)
            async with asyncio.timeout(timeout_s + MARGIN_S) as limit:
                answer = await waiting
        except TimeoutError:
            if not limit.expired():
                raise
            raise ToolFailure(
                ErrorCode.TIMEOUT,
                f"the model did not answer in {timeout_s:g} s: send a shorter prompt, or raise the time limit",
            ) from None
        finally:
            self._answers.forget(question.number)
        return answer.completion()

    def _send(self, question: ModelQuestion) -> None:
        try:
            is_received = self._events.send(MODEL, question.model_dump(mode="json"))
        except ValueError as error:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"the request to the model is invalid: {error}; send a shorter prompt"
            ) from error
        if not is_received:
            raise ToolFailure(ErrorCode.CONFIG_MISSING, _NO_MODEL)


class _Answers:
    """Reads the answers for one call in a thread while a question waits, and gives each answer to the question with its
    id.
    """

    def __init__(self, events: CallEvents) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[ModelAnswer]]] = {}
        self._reader: threading.Thread | None = None

    def expect(self, number: int) -> "asyncio.Future[ModelAnswer]":
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[ModelAnswer] = loop.create_future()
        with self._lock:
            self._waiting[number] = (loop, waiting)
            if self._reader is None or not self._reader.is_alive():
                # Use a daemon thread and no executor, so that the end of the call does not wait for the thread.
                self._reader = threading.Thread(target=self._read, name="model-answers", daemon=True)
                self._reader.start()
        return waiting

    def forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        while self._has_open_questions():
            self._read_answer()

    def _read_answer(self) -> None:
        started = time.monotonic()
        try:
            payload = self._events.await_answer(READ_S)
            if payload is not None:
                self._hand_over(parse_answer(payload))
            elif time.monotonic() - started < READ_S / 2:
                # The read returned before its time limit, so the caller has disconnected.
                self._fail_all()
        except EnvelopeRefused as error:
            log.error("model_reply_refused", reason=str(error))

    def _has_open_questions(self) -> bool:
        with self._lock:
            # Clear the reader while the lock is held: `expect` must not rely on a thread that is about to end.
            if not self._waiting:
                self._reader = None
            return bool(self._waiting)

    def _hand_over(self, answer: ModelAnswer) -> None:
        with self._lock:
            waiting_call = self._waiting.pop(answer.number, None)
        if waiting_call is not None:
            _deliver(*waiting_call, answer)

    def _fail_all(self) -> None:
        with self._lock:
            unanswered, self._waiting = self._waiting, {}
        for number, waiting_call in unanswered.items():
            _deliver(*waiting_call, ModelAnswer.refused(number, ErrorCode.CONFIG_MISSING, _NO_MODEL))


def _build_question(
    number: int, prompt: str | Sequence[Mapping[str, Any]], max_tokens: int | None, timeout_s: float
) -> ModelQuestion:
    messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
    )
    try:
        return ModelQuestion.model_validate(
            {"number": number, "messages": messages, "max_tokens": max_tokens, "timeout_s": timeout_s}
        )
    except ValidationError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the request to the model is invalid ({describe_invalid(error)}): correct it"
        ) from error


def _deliver(loop: asyncio.AbstractEventLoop, waiting: "asyncio.Future[ModelAnswer]", answer: ModelAnswer) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, waiting, answer)
    except RuntimeError:
        # The call and its loop have ended.
        log.info("model_reply_late", number=answer.number)


def _resolve(waiting: "asyncio.Future[ModelAnswer]", answer: ModelAnswer) -> None:
    if not waiting.done():
        waiting.set_result(answer)
