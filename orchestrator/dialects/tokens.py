"""Collects token ids and log-probabilities from the chunks of a reply.

Endpoints give them if the request asks: `logprobs` (OpenAI; llama.cpp adds the ids), `return_token_ids` (vLLM).
"""

import math
from typing import Any

from toolcrew.contract.run_events import ReplyTokens
from toolcrew.orchestrator.dialects.model import Chunk

MAX_TOKENS = 2_000_000
_MAX_ID = 2**31


class TokenCollector:
    """Tokens of one reply. A list with an invalid value is omitted completely: without that value, the remaining values
    would not match their tokens.
    """

    def __init__(self) -> None:
        self._prompt: list[Any] = []
        self._ids: list[Any] = []
        self._entry_ids: list[Any] = []
        self._logprobs: list[Any] = []

    def feed(self, chunk: Chunk) -> None:
        """Add the token ids and log-probabilities of a chunk."""
        if not self._prompt:
            self._prompt = _as_list(chunk.get("prompt_token_ids"))
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        self._ids += _as_list(choice.get("token_ids"))
        logprobs = choice.get("logprobs")
        for entry in _as_list(logprobs.get("content")) if isinstance(logprobs, dict) else ():
            self._logprobs.append(entry.get("logprob") if isinstance(entry, dict) else None)
            self._entry_ids.append(entry.get("id") if isinstance(entry, dict) else None)

    def build(self) -> ReplyTokens | None:
        """Return the tokens; None if there are none."""
        tokens = ReplyTokens(
            prompt_token_ids=_checked_ids(self._prompt),
            completion_token_ids=_checked_ids(self._ids) or _checked_ids(self._entry_ids),
            logprobs=_checked_logprobs(self._logprobs),
        )
        return tokens if tokens != ReplyTokens() else None


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _checked_ids(values: list[Any]) -> tuple[int, ...]:
    is_valid = len(values) <= MAX_TOKENS and all(type(value) is int and 0 <= value < _MAX_ID for value in values)
    return tuple(values) if is_valid else ()


def _checked_logprobs(values: list[Any]) -> tuple[float, ...]:
    is_valid = len(values) <= MAX_TOKENS and all(
        type(value) in (int, float) and math.isfinite(value) and value <= 0 for value in values
    )
    return tuple(map(float, values)) if is_valid else ()
