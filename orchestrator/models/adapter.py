"""The model as tools get it: one whole reply to one prompt, within a budget."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ErrorCode, ModelInterrupted, ToolFailure
from contract.functions.completions import Completion
from orchestrator.dialects.model import Message, Model, ModelRequest, Usage
from orchestrator.dialects.native_assembler import NativeCallAssembler
from orchestrator.dialects.reader import read_usage

MAX_CALLS = 20
MAX_TOKENS = 200_000
INTERRUPTIONS = 2
"""How often a reply that broke off is asked for again: nobody has seen a part of it."""
CHARS_PER_TOKEN = 4


@dataclass
class _Spent:
    """What an adapter has used up. `tokens`: estimated where the server does not count."""

    calls: int = 0
    tokens: int = 0
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class BudgetedModel:
    """A model to ask from within a tool: at most `max_calls` times, for about `max_tokens` tokens, prompts and replies
    together.

    What is asked counts before it is answered, and whether it is or not. A reply that has begun is never cut for the
    budget, so the last one may go over it. No tools are offered to the model.
    """

    model: Model
    max_calls: int = MAX_CALLS
    max_tokens: int = MAX_TOKENS
    _spent: _Spent = field(default_factory=_Spent, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def usage(self) -> Usage:
        """Tokens of all replies so far, as the server counted them."""
        return self._spent.usage

    async def complete(
        self, prompt: str | Sequence[Message], *, max_tokens: int | None = None, timeout_s: float = 60.0
    ) -> Completion:
        """The reply to a prompt, or to messages in the OpenAI wire shape. `max_tokens` bounds the reply.

        Raises ToolFailure when the budget is used up or the reply takes longer than `timeout_s`, ModelUnavailable when
        the model cannot be asked.
        """
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        claimed = self._claim_call(messages)
        extra: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        try:
            async with asyncio.timeout(timeout_s) as limit:
                completion = await self._ask(ModelRequest(messages, extra=extra))
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the model did not answer in {timeout_s:g} s: ask for less, or give it more time"
            raise ToolFailure(ErrorCode.TIMEOUT, message) from None
        self._charge(claimed, completion)
        return completion

    async def _ask(self, request: ModelRequest) -> Completion:
        for _ in range(INTERRUPTIONS):
            try:
                return await self._read(request)
            except ModelInterrupted:
                continue
        return await self._read(request)

    async def _read(self, request: ModelRequest) -> Completion:
        assembler, usage = NativeCallAssembler(), Usage()
        async for chunk in self.model.stream(request):
            assembler.feed(chunk)
            usage = read_usage(chunk) or usage
        reply = assembler.finish(strict=False)
        return Completion(reply.text, usage, reply.finish_reason)

    def _claim_call(self, messages: Sequence[Message]) -> int:
        """Count one call with about the tokens of its messages, which it gives, before it is made: calls at the same
        time cannot all be the last.
        """
        if self._spent.calls >= self.max_calls:
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"this tool may ask the model {self.max_calls} times and has done so: its budget is used up",
            )
        if self._spent.tokens >= self.max_tokens:
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                f"this tool may use {self.max_tokens} tokens of the model and has used {self._spent.tokens}: its "
                "budget is used up",
            )
        claimed = sum(len(str(value)) for message in messages for value in message.values()) // CHARS_PER_TOKEN
        self._spent.calls += 1
        self._spent.tokens += claimed
        return claimed

    def _charge(self, claimed: int, completion: Completion) -> None:
        usage = completion.usage
        self._spent.usage = self._spent.usage + usage
        counted = usage.prompt_tokens + usage.completion_tokens
        # A server that does not count must not make the budget endless.
        self._spent.tokens += counted - claimed if counted else len(completion.text) // CHARS_PER_TOKEN + 1
