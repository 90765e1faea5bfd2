"""Keeps requests within the model's context window. Shortens the results of calls in the messages, oldest first, and
puts a note into each.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from toolcrew.orchestrator.dialects.model import Message, TokenUsage
from toolcrew.orchestrator.dialects.reply_fields import ORIGIN

BYTES_PER_TOKEN = 3.5
"""Estimate of the bytes per token, until the server reports the tokens of a request."""
SHORTENED_CHARS = 400
"""Number of characters that remain of a shortened result, half from each end. A result that the model has not seen yet
keeps at least this number.
"""
NOTE_CHARS = 160
"""Characters that are reserved for the note in the middle of a shortened result."""
MAX_RESERVE_TOKENS = 4096
_UNSIZED = frozenset({"role", "content", "name", "tool_call_id", ORIGIN})


class ContextWindow:
    """A context window of `limit_tokens`. None: the limit is unknown and nothing is shortened.

    A quarter, at most MAX_RESERVE_TOKENS, is reserved for the reply. `tools`: the tools that every request contains in
    addition to its messages.
    """

    def __init__(self, limit_tokens: int | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.limit_tokens = limit_tokens
        self._bytes_per_token = BYTES_PER_TOKEN
        # Counted separately: as a share of the messages, the tools would make the first steps look far larger than
        # they are.
        self._tools_bytes = len(json.dumps(tools)) if tools else 0

    def learn(self, messages: Sequence[Message], usage: TokenUsage) -> None:
        """Adjust the estimate to the tokens that the server counted for a request with these messages and the tools."""
        if usage.prompt_tokens > 0:
            self._bytes_per_token = min(8.0, max(0.5, self._total(messages) / usage.prompt_tokens))

    def estimate(self, messages: Sequence[Message], reply: Message) -> TokenUsage:
        """Return the estimated usage of a request with these messages and of its reply."""
        return TokenUsage(
            round(self._total(messages) / self._bytes_per_token), round(_size(reply) / self._bytes_per_token)
        )

    def shrink(self, limit_tokens: int | None, messages: Sequence[Message]) -> None:
        """Lower the limit after the server refused a request as too long. `limit_tokens`: the limit that the server
        named.
        """
        total = self._total(messages)
        self.limit_tokens = limit_tokens or self.limit_tokens or max(1, int(total / self._bytes_per_token))
        # The refused request exceeded the limit, even if the estimate was lower. The factor makes each further
        # refusal shorten the request again.
        self._bytes_per_token = min(self._bytes_per_token, total / self.limit_tokens) * 0.9

    def fit(
        self, messages: Sequence[Message], older: Collection[int], newest: Collection[int]
    ) -> tuple[list[Message], int]:
        """Return the messages with results shortened as needed, and the number of shortened results.

        `older` and `newest` are indexes of results that may be shortened. The newest, which the model has not seen, are
        shortened only if shortening all older ones is not enough, and no more than necessary.
        """
        fitted = list(messages)
        if self.limit_tokens is None:
            return fitted, 0
        available_bytes = (self.limit_tokens - min(self.limit_tokens // 4, MAX_RESERVE_TOKENS)) * self._bytes_per_token
        excess = self._total(messages) - available_bytes
        shortened = 0
        for index in (*sorted(older), *sorted(newest)):
            if excess <= 0:
                break
            max_chars = _fitting_chars(fitted[index], excess) if index in newest else SHORTENED_CHARS
            short = _shorten(fitted[index], max_chars)
            saved = _size(fitted[index]) - _size(short)
            if saved > 0:
                fitted[index], excess, shortened = short, excess - saved, shortened + 1
        return fitted, shortened

    def _total(self, messages: Sequence[Message]) -> int:
        return self._tools_bytes + sum(_size(message) for message in messages)


def _fitting_chars(message: Message, excess_bytes: float) -> int:
    """Return how many characters of a result may stay to save `excess_bytes`, assuming characters of average length."""
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return SHORTENED_CHARS
    excess = excess_bytes * len(content) / _text_bytes(content)
    return max(SHORTENED_CHARS, int(len(content) - excess) - NOTE_CHARS)


def _shorten(message: Message, max_chars: int) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or len(content) <= 2 * SHORTENED_CHARS:
        return message
    omitted = len(content) - max_chars
    note = (
        f"[... {omitted} characters of this result are left out to fit the context window; call the tool again, for a "
        "part of it, to see them ...]"
    )
    return {**message, "content": f"{content[: max_chars // 2]}\n{note}\n{content[-(max_chars // 2) :]}"}


def _text_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _size(message: Message) -> int:
    content = message.get("content")
    other_fields = [value for key, value in message.items() if key not in _UNSIZED and value]
    size = _text_bytes(content) if isinstance(content, str) else 0
    return size + 16 + sum(len(json.dumps(value, ensure_ascii=False)) for value in other_fields)
