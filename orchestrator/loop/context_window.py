"""Keeps a request below the model's context window: older results are shortened, oldest first, and say so."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.dialects.model import Message, Usage

BYTES_PER_TOKEN = 3.5
"""Until a server has told what a request really took."""
KEPT_CHARS = 400
"""Of a shortened result, half from either end; of one that the model has not seen yet, at least."""
NOTE_CHARS = 160
"""Room for the note in its middle."""
MAX_RESERVE_TOKENS = 4096


class ContextWindow:
    """Of `limit_tokens`, a part is left for the reply: a quarter, at most MAX_RESERVE_TOKENS. None: nothing is known,
    nothing is shortened.

    `tools`: what every request carries beside its messages.
    """

    def __init__(self, limit_tokens: int | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.limit_tokens = limit_tokens
        self._bytes_per_token = BYTES_PER_TOKEN
        # Apart from the messages: as a share of theirs, it would make those of the first steps look far larger than
        # they are.
        self._tools_bytes = len(json.dumps(tools)) if tools else 0

    def learn(self, messages: Sequence[Message], usage: Usage) -> None:
        """Take in what a request of those messages and the tools took, as the server counted it."""
        if usage.prompt_tokens > 0:
            self._bytes_per_token = min(8.0, max(0.5, self._total(messages) / usage.prompt_tokens))

    def estimate(self, messages: Sequence[Message], reply: Message) -> Usage:
        """About what a request of those messages and its reply took."""
        return Usage(round(self._total(messages) / self._bytes_per_token), round(_size(reply) / self._bytes_per_token))

    def shrink(self, limit_tokens: int | None, messages: Sequence[Message]) -> None:
        """The server refused a request of those messages as too long; `limit_tokens` when it says what it takes."""
        total = self._total(messages)
        self.limit_tokens = limit_tokens or self.limit_tokens or max(1, int(total / self._bytes_per_token))
        # What was refused took more than the limit, whatever we had counted; a step below it, so that a second refusal
        # shrinks it again.
        self._bytes_per_token = min(self._bytes_per_token, total / self.limit_tokens) * 0.9

    def fit(
        self, messages: Sequence[Message], older: Collection[int], newest: Collection[int]
    ) -> tuple[list[Message], int]:
        """The messages, with results shortened as far as need be, and how many are. `older` and `newest`: places of the
        results that may be; the newest, which the model has not seen, only when all older ones do not suffice, and no
        further than that takes."""
        fitted = list(messages)
        if self.limit_tokens is None:
            return fitted, 0
        room = (self.limit_tokens - min(self.limit_tokens // 4, MAX_RESERVE_TOKENS)) * self._bytes_per_token
        excess = self._total(messages) - room
        shortened = 0
        for place in (*sorted(older), *sorted(newest)):
            if excess <= 0:
                break
            kept = _fitting_chars(fitted[place], excess) if place in newest else KEPT_CHARS
            short = _shortened(fitted[place], kept)
            saved = _size(fitted[place]) - _size(short)
            if saved > 0:
                fitted[place], excess, shortened = short, excess - saved, shortened + 1
        return fitted, shortened

    def _total(self, messages: Sequence[Message]) -> int:
        return self._tools_bytes + sum(_size(message) for message in messages)


def _fitting_chars(message: Message, excess_bytes: float) -> int:
    """How many characters of a result may stay to save that many bytes, were each of its characters as long as they are
    on average.
    """
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return KEPT_CHARS
    excess = excess_bytes * len(content) / _text_bytes(content)
    return max(KEPT_CHARS, int(len(content) - excess) - NOTE_CHARS)


def _shortened(message: Message, kept: int) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or len(content) <= 2 * KEPT_CHARS:
        return message
    left_out = len(content) - kept
    note = (
        f"[... {left_out} characters of this result are left out to fit the context window; call the tool again, for a "
        "part of it, to see them ...]"
    )
    return {**message, "content": f"{content[: kept // 2]}\n{note}\n{content[-(kept // 2) :]}"}


def _text_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _size(message: Message) -> int:
    content = message.get("content")
    calls = message.get("tool_calls")
    return (_text_bytes(content) if isinstance(content, str) else 0) + 16 + (len(json.dumps(calls)) if calls else 0)
