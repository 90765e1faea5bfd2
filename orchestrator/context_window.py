"""Keeps a request below the model's context window: older results are shortened, oldest first, and say so."""

import json
from collections.abc import Collection, Sequence

from orchestrator.models.base import Message, Usage

BYTES_PER_TOKEN = 3.5
"""Until a server has told what a request really took."""
KEPT_CHARS = 400
"""Of a shortened result, half from either end."""
MAX_RESERVE_TOKENS = 4096


class ContextWindow:
    """Of `limit_tokens`, a part is left for the reply: a quarter, at most MAX_RESERVE_TOKENS. None: nothing is known, nothing is shortened."""

    def __init__(self, limit_tokens: int | None = None) -> None:
        self.limit_tokens = limit_tokens
        self._bytes_per_token = BYTES_PER_TOKEN

    def learn(self, messages: Sequence[Message], usage: Usage) -> None:
        """Take in what a request of those messages took, as the server counted it. The tools of the request count as the messages'."""
        if usage.prompt_tokens > 0:
            self._bytes_per_token = min(8.0, max(0.5, _total(messages) / usage.prompt_tokens))

    def shrink(self, limit_tokens: int | None, messages: Sequence[Message]) -> None:
        """The server refused a request of those messages as too long; `limit_tokens` when it says what it takes."""
        total = _total(messages)
        self.limit_tokens = limit_tokens or self.limit_tokens or max(1, int(total / self._bytes_per_token))
        # What was refused took more than the limit, whatever we had counted; a step below it, so that a second refusal shrinks it again.
        self._bytes_per_token = min(self._bytes_per_token, total / self.limit_tokens) * 0.9

    def fit(self, messages: Sequence[Message], older: Collection[int], newest: Collection[int]) -> tuple[list[Message], int]:
        """The messages, with results shortened as far as need be, and how many are. `older` and `newest`: places of the results that may
        be; the newest, which the model has not seen, only when all older ones do not suffice."""
        fitted = list(messages)
        if self.limit_tokens is None:
            return fitted, 0
        room = (self.limit_tokens - min(self.limit_tokens // 4, MAX_RESERVE_TOKENS)) * self._bytes_per_token
        excess = _total(messages) - room
        shortened = 0
        for place in (*sorted(older), *sorted(newest)):
            if excess <= 0:
                break
            short = _shortened(fitted[place], KEPT_CHARS)
            saved = _size(fitted[place]) - _size(short)
            if saved > 0:
                fitted[place], excess, shortened = short, excess - saved, shortened + 1
        return fitted, shortened


def _shortened(message: Message, kept: int) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or len(content) <= 2 * kept:
        return message
    left_out = len(content) - kept
    note = f"[... {left_out} characters of this result are left out to fit the context window; call the tool again to see them ...]"
    return {**message, "content": f"{content[: kept // 2]}\n{note}\n{content[-(kept // 2) :]}"}


def _total(messages: Sequence[Message]) -> int:
    return sum(_size(message) for message in messages)


def _size(message: Message) -> int:
    content = message.get("content")
    size = len(content.encode(errors="surrogatepass")) if isinstance(content, str) else 0
    calls = message.get("tool_calls")
    return size + 16 + (len(json.dumps(calls)) if calls else 0)
