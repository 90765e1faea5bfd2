"""The interface of a model: a name and a stream of chunks."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolcrew.contract.functions.completions import TokenUsage

__all__ = ["Chunk", "Message", "Model", "ModelRequest", "TokenUsage"]

Message = dict[str, Any]
"""A chat message in the OpenAI wire shape."""
Chunk = dict[str, Any]
"""A `chat.completion.chunk` in the OpenAI wire shape, as a plain dict. Servers deviate from it
(native_assembler.py).
"""


@dataclass(frozen=True)
class ModelRequest:
    """One request to a model. `tools` is in the OpenAI wire shape; an empty list is not sent. `extra` is added to the
    body. `before_send`: is awaited by clients of servers each time before they send the request.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    before_send: Callable[[], Awaitable[object]] | None = field(default=None, repr=False, compare=False)


class Model(Protocol):
    """A chat model. `stream` raises toolcrew.contract.errors.ModelUnavailable with a message for the operator."""

    @property
    def name(self) -> str: ...

    def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]: ...

    async def aclose(self) -> None: ...
