"""Requests that a tool in a worker sends to the model of its caller, and the replies of the model."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from toolcrew.contract.calls import MAX_TIMEOUT_S, Record
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, ToolFailure
from toolcrew.contract.functions.completions import Completion, TokenUsage
from toolcrew.contract.invalid_input import describe_invalid

MAX_MESSAGES = 1000
MAX_QUESTIONS = 20
"""Limit of model requests of one call, the same as for a tool in the caller's own process."""


class ModelQuestion(Record):
    """Request to the model.

    `number` counts the requests of a call from 1. `messages` have the OpenAI format. `max_tokens` limits the reply.
    """

    number: int = Field(ge=1, le=MAX_QUESTIONS)
    messages: tuple[dict[str, JsonValue], ...] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1)
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)


class ModelAnswer(Record):
    """Reply to a ModelQuestion: a completion, or an error."""

    number: int
    text: str = ""
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    finish_reason: str | None = None
    error: str | None = None
    error_code: ErrorCode | None = None

    @classmethod
    def of(cls, number: int, completion: Completion) -> "ModelAnswer":
        usage = completion.usage
        return cls(
            number=number,
            # UTF-8 cannot encode a lone surrogate.
            text=completion.text.encode("utf-8", "replace").decode(),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=completion.finish_reason,
        )

    @classmethod
    def refused(cls, number: int, code: ErrorCode, error: str) -> "ModelAnswer":
        return cls(number=number, error=error[:4096].encode("utf-8", "replace").decode(), error_code=code)

    def completion(self) -> Completion:
        """Return the completion. Raises ToolFailure if the reply is an error."""
        if self.error_code is not None:
            raise ToolFailure(self.error_code, self.error or "the model did not reply; try again")
        return Completion(self.text, TokenUsage(self.prompt_tokens, self.completion_tokens), self.finish_reason)


def parse_question(payload: Mapping[str, Any]) -> ModelQuestion:
    """Return the question in `payload`. Raises EnvelopeRefused for an invalid payload."""
    try:
        return ModelQuestion.model_validate(payload)
    except ValidationError as error:
        raise EnvelopeRefused(f"not a request to a model: {describe_invalid(error)}") from error


def parse_answer(payload: Mapping[str, Any]) -> ModelAnswer:
    """Return the answer in `payload`. Raises EnvelopeRefused for an invalid payload."""
    try:
        return ModelAnswer.model_validate(payload)
    except ValidationError as error:
        raise EnvelopeRefused(f"not a model's answer: {describe_invalid(error)}") from error
