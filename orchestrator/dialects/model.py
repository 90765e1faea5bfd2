"""What a model is to the loop: a name and a stream of chunks."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from contract.functions.completions import Usage

__all__ = ["Chunk", "Message", "Model", "ModelRequest", "Usage"]

Message = dict[str, Any]
"""A chat message in the OpenAI wire shape."""
Chunk = dict[str, Any]
"""A `chat.completion.chunk` in the OpenAI wire shape, as a plain dict. Only nominally OpenAI's: see
dialects/native.py.
"""


@dataclass(frozen=True)
class ModelRequest:
    """One request. `tools` in the OpenAI wire shape; empty: the field is not sent at all. `extra` goes into the body as
    it is.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


class Model(Protocol):
    """A chat model. `stream` raises contract.errors.ModelUnavailable with a sentence for the operator."""

    @property
    def name(self) -> str: ...

    def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]: ...

    async def aclose(self) -> None: ...
