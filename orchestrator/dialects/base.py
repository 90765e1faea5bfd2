"""What a dialect is to the loop: it shapes the request, reads the reply as events, and makes messages of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contract.calls import ToolCall, ToolResult
from contract.specs import ToolSpec
from orchestrator.models.base import Chunk, Message


@dataclass(frozen=True)
class Text:
    """Text of the reply, to be shown at once."""

    text: str


@dataclass(frozen=True)
class CallRequested:
    """A complete, well-formed request for a tool. The consumer runs it before it handles the next event.

    `model_id`: the id under which the model expects the result, "" when the dialect has none. `call.id` is always ours.
    """

    call: ToolCall
    raw: str = ""
    model_id: str = ""


@dataclass(frozen=True)
class MalformedCall:
    """A request for a tool that cannot be run. `call_id` ties the error observation to it; `reason` tells the model how to write it."""

    call_id: str
    name: str | None
    reason: str
    raw: str
    model_id: str = ""


Event = Text | CallRequested | MalformedCall


@dataclass(frozen=True)
class Usage:
    """Tokens of one reply as the server counted them; 0 when it does not tell."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class ReplyEnd:
    """What is known when the stream has ended. `message` is the assistant message for the transcript."""

    message: Message
    text: str
    finish_reason: str | None
    usage: Usage


class ReplyReader(Protocol):
    """Reads one reply. Text + raw of calls + raw of errors = what the model wrote."""

    def feed(self, chunk: Chunk) -> list[Event]: ...

    def finish(self) -> tuple[list[Event], ReplyEnd]:
        """The last events and the end. In a reply cut by `length` the last call, complete or not, comes as MalformedCall."""
        ...


class Dialect(Protocol):
    """How one way of asking for tools is spoken."""

    @property
    def name(self) -> str: ...

    @property
    def text_arguments(self) -> bool:
        """True when argument values are strings that the schema may coerce."""
        ...

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str: ...

    def build_tools(self, specs: Sequence[ToolSpec]) -> list[dict[str, Any]]: ...

    def open_reader(self, run: str, step: int) -> ReplyReader:
        """A reader for the reply of that step; made-up call ids contain run, step and index, so they are unique and repeatable."""
        ...

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        """Messages for the results of one reply, in order: (call id as the model knows it, result)."""
        ...
