"""The model that tools receive: it returns one whole reply per prompt, within a budget."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcrew.contract.errors import ErrorCode, ModelInterrupted, ToolFailure
from toolcrew.contract.functions.completions import Completion
from toolcrew.contract.plurals import count
from toolcrew.orchestrator.dialects.model import Message, Model, ModelRequest, TokenUsage
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler
from toolcrew.orchestrator.dialects.reader import read_usage

MAX_CALLS = 20
MAX_TOKENS = 200_000
INTERRUPTIONS = 2
"""Limit of repeated requests after an interrupted reply. A repetition is safe because no part of the reply was
returned.
"""
CHARS_PER_TOKEN = 4


@dataclass
class _Usage:
    """The calls and tokens that an adapter has used. `tokens` is estimated for servers that do not count."""

    calls: int = 0
    tokens: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True)
class BudgetedModel:
    """A model that a tool may call at most `max_calls` times, for about `max_tokens` tokens of prompts and replies.

    Each call counts before it is sent, even if it fails. A reply is never cut for the budget, so the last one may
    exceed it. The requests contain no tools.
    """

    model: Model
    max_calls: int = MAX_CALLS
    max_tokens: int = MAX_TOKENS
    _used: _Usage = field(default_factory=_Usage, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def usage(self) -> TokenUsage:
        """Return the tokens of all replies so far, as the server counted them."""
        return self._used.usage

    async def complete(
        self, prompt: str | Sequence[Message], *, max_tokens: int | None = None, timeout_s: float = 60.0
    ) -> Completion:
        """Return the reply to a prompt, or to messages in the OpenAI wire shape. `max_tokens` limits the reply.

        Raises ToolFailure when the budget is used up or the reply takes longer than `timeout_s`, and ModelUnavailable
        when the model cannot be called.
        """
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        estimated_tokens = self._reserve_call(messages)
        extra: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        try:
            async with asyncio.timeout(timeout_s) as limit:
                completion = await self._request_reply(ModelRequest(messages, extra=extra))
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the model did not answer in {timeout_s:g} s. Request less, or raise the time limit."
            raise ToolFailure(ErrorCode.TIMEOUT, message) from None
        self._charge(estimated_tokens, completion)
        return completion

    async def _request_reply(self, request: ModelRequest) -> Completion:
        for _ in range(INTERRUPTIONS):
            try:
                return await self._read_reply(request)
            except ModelInterrupted:
                continue
        return await self._read_reply(request)

    async def _read_reply(self, request: ModelRequest) -> Completion:
        assembler, usage = NativeCallAssembler(), TokenUsage()
        async for chunk in self.model.stream(request):
            assembler.feed(chunk)
            usage = read_usage(chunk) or usage
        reply = assembler.finish(strict=False)
        return Completion(reply.text, usage, reply.finish_reason)

    def _reserve_call(self, messages: Sequence[Message]) -> int:
        """Count one call and its estimated tokens before it is sent, and return the estimate.

        Counting first prevents concurrent calls from exceeding the budget together.
        """
        if self._used.calls >= self.max_calls:
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"this tool has used its budget of {count(self.max_calls, 'call')} to the model. Answer without "
                "further calls.",
            )
        if self._used.tokens >= self.max_tokens:
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"this tool has used {self._used.tokens} tokens, and its budget is {self.max_tokens}. Answer without "
                "further calls to the model.",
            )
        estimated_tokens = sum(len(str(value)) for message in messages for value in message.values()) // CHARS_PER_TOKEN
        self._used.calls += 1
        self._used.tokens += estimated_tokens
        return estimated_tokens

    def _charge(self, estimated_tokens: int, completion: Completion) -> None:
        usage = completion.usage
        self._used.usage = self._used.usage + usage
        counted = usage.prompt_tokens + usage.completion_tokens
        # Without an estimate, a server that does not count tokens would make the budget unlimited.
        self._used.tokens += counted - estimated_tokens if counted else len(completion.text) // CHARS_PER_TOKEN + 1
