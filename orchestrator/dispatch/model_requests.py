"""Answer the model questions of tools in workers with the model of the run. The model's keys never leave this
process.
"""

from collections.abc import Awaitable

from toolcrew.contract.call_events import MAX_ANSWER_BYTES, CallEvent
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ModelUnavailable, ToolFailure
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.functions.model_questions import ModelAnswer, ModelQuestion, parse_question
from toolcrew.orchestrator.dialects.model import Model
from toolcrew.orchestrator.dispatch.call_event_listener import CallEventReader, Handler
from toolcrew.orchestrator.models.adapter import BudgetedModel
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


class ModelRequests:
    """Answers the questions of one run's tools. Each call has its own BudgetedModel, and so its own budget."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.model = model.name
        """The name of the model."""
        self._usage = TokenUsage()

    def usage(self) -> TokenUsage:
        """Return the tokens of all answers so far, as the model server counted them."""
        return self._usage

    def open_call(self) -> Handler:
        """Return the handler of MODEL events of one call."""
        adapter = BudgetedModel(self._model)

        def handle(event: CallEvent, call: CallEventReader) -> Awaitable[None]:
            return self._handle(adapter, event, call)

        return handle

    async def _handle(self, adapter: BudgetedModel, event: CallEvent, call: CallEventReader) -> None:
        try:
            question = parse_question(event.payload)
        except EnvelopeRefused as error:
            # Send no answer: a question without a number has no tool that waits for its answer.
            log.error("model_request_refused", call=call.call_id, reason=str(error))
            return
        answer = await self._answer(adapter, question)
        try:
            await call.answer(answer.model_dump(mode="json"))
        except ValueError:
            sentence = (
                f"the model's reply is larger than the limit of {MAX_ANSWER_BYTES} bytes: ask for a shorter reply"
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
            log.error("model_request_not_answered", model=adapter.name, error=str(error))
            return ModelAnswer.refused(question.number, error.code, str(error))
        except Exception as error:  # a Model is a user's code; without an answer the tool would wait until its limit
            log.exception("model_request_failed", model=adapter.name)
            return ModelAnswer.refused(
                question.number,
                ErrorCode.INTERNAL,
                f"the caller's model failed ({type(error).__name__}): see the log of the caller",
            )
        self._usage += completion.usage
        return ModelAnswer.of(question.number, completion)
