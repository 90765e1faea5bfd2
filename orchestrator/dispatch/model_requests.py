"""Answers what tools in workers ask the model of the run that called them: the model's keys never leave this
process.
"""

from collections.abc import Awaitable

from contract.call_events import MAX_ANSWER_BYTES, CallEvent
from contract.errors import EnvelopeRefused, ErrorCode, ModelUnavailable, ToolFailure
from contract.functions.completions import Usage
from contract.functions.model_questions import ModelAnswer, ModelQuestion, parse_question
from orchestrator.dialects.model import Model
from orchestrator.dispatch.call_events import CallEventReader, Handler
from orchestrator.models.adapter import BudgetedModel
from telemetry.logs import get_logger

log = get_logger(__name__)


class ModelRequests:
    """The questions of one run's tools. Each call has a BudgetedModel, and so a budget, of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._usage = Usage()

    def usage(self) -> Usage:
        """Tokens of all answers so far, as the server counted them."""
        return self._usage

    def open_call(self) -> Handler:
        """What answers the questions of one call: the handler of MODEL events."""
        adapter = BudgetedModel(self._model)

        def handle(event: CallEvent, call: CallEventReader) -> Awaitable[None]:
            return self._handle(adapter, event, call)

        return handle

    async def _handle(self, adapter: BudgetedModel, event: CallEvent, call: CallEventReader) -> None:
        try:
            question = parse_question(event.payload)
        except EnvelopeRefused as error:
            # Nobody waits for an answer to what has no number.
            log.error("model_question_refused", call=call.call_id, reason=str(error))
            return
        answer = await self._answer(adapter, question)
        try:
            await call.answer(answer.model_dump(mode="json"))
        except ValueError:
            sentence = (
                f"the model's reply is larger than {MAX_ANSWER_BYTES} bytes, which is what can be sent: ask for less"
            )
            await call.answer(
                ModelAnswer.refused(question.number, ErrorCode.INVALID_ARGUMENTS, sentence).model_dump(mode="json")
            )

    async def _answer(self, adapter: BudgetedModel, question: ModelQuestion) -> ModelAnswer:
        messages = [dict(message) for message in question.messages]
        try:
            completion = await adapter.complete(messages, max_tokens=question.max_tokens, timeout_s=question.timeout_s)
        except ToolFailure as failure:
            return ModelAnswer.refused(question.number, failure.code, failure.message)
        except ModelUnavailable as error:
            log.error("model_question_not_answered", model=adapter.name, error=str(error))
            return ModelAnswer.refused(question.number, error.code, str(error))
        except (
            Exception
        ) as error:  # the edge: a Model is a program's own code, and the tool would wait for an answer until its limit
            log.exception("model_question_failed", model=adapter.name)
            return ModelAnswer.refused(
                question.number, ErrorCode.INTERNAL, f"the caller's model failed ({type(error).__name__})"
            )
        self._usage += completion.usage
        return ModelAnswer.of(question.number, completion)
