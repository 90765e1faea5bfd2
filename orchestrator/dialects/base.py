"""What a dialect is to the loop: it shapes the request, reads the reply as events, and makes messages of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.calls import ToolCall, ToolResult
from contract.specs import ToolSpec
from orchestrator.dialects.model import Chunk, Message, ModelRequest, Usage
from orchestrator.dialects.tag_events import Text

__all__ = ["CallRequested", "Dialect", "Event", "MalformedCall", "ReplyEnd", "ReplyReader", "Text", "Usage"]


@dataclass(frozen=True)
class CallRequested:
    """A complete, well-formed request for a tool. The consumer runs it before it handles the next event.

    `model_id`: the id under which the model expects the result, "" when the dialect has none. `call.id` is always ours.
    `is_text`: the argument values are strings that the schema may coerce. `is_parallel`: the model asked for several
    calls at once.
    """

    call: ToolCall
    raw: str = ""
    model_id: str = ""
    is_text: bool = False
    is_parallel: bool = False


@dataclass(frozen=True)
class MalformedCall:
    """A request for a tool that cannot be run. `call_id` ties the error observation to it; `reason` tells the model how
    to write it.
    """

    call_id: str
    name: str | None
    reason: str
    raw: str
    model_id: str = ""


Event = Text | CallRequested | MalformedCall


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

    def finish(self, *, is_broken: bool = False) -> tuple[list[Event], ReplyEnd]:
        """The last events and the end. In a reply cut by `length` the last call, complete or not, comes as
        MalformedCall; in one whose stream broke off (`is_broken`) every call that has not come out yet does."""
        ...


class Dialect(Protocol):
    """How one way of asking for tools is spoken."""

    @property
    def name(self) -> str: ...

    @property
    def max_repairs(self) -> int | None:
        """How many replies in a row may be nothing but malformed calls before the run stops; None: as the run's options
        say.
        """
        ...

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str: ...

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        """The request for the transcript's messages, in the form that servers take."""
        ...

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        """A reader for the reply of that step; made-up call ids contain run, step and index, so they are unique and
        repeatable.

        `reads_tags` off: tags in the text are text, in every dialect.
        """
        ...

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        """One message for each result of one reply, in order: (call id as the model knows it, else ours; result)."""
        ...
