"""The interface of a dialect: it builds the request, reads the reply as events, and makes messages of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.finish_reasons import ReplyEnding
from toolcrew.orchestrator.dialects.model import Chunk, Message, ModelRequest, TokenUsage
from toolcrew.orchestrator.dialects.tag_events import Text

__all__ = ["CallRequested", "Dialect", "Event", "MalformedCall", "ReplyEnd", "ReplyReader", "Text", "TokenUsage"]


@dataclass(frozen=True)
class CallRequested:
    """A complete, well-formed request for a tool. The consumer runs it before it handles the next event.

    `call.id` is always an id that the run generated. `model_id` is the id under which the model expects the result, ""
    when the dialect has none. `is_text`: the argument values are strings that the schema may coerce. `is_parallel`: the
    model requested several calls at once.
    """

    call: ToolCall
    raw: str = ""
    model_id: str = ""
    is_text: bool = False
    is_parallel: bool = False


@dataclass(frozen=True)
class MalformedCall:
    """A request for a tool that cannot be run. `call_id` links the error observation to it. `reason` explains to the
    model how to write the call.
    """

    call_id: str
    name: str | None
    reason: str
    raw: str
    model_id: str = ""


Event = Text | CallRequested | MalformedCall


@dataclass(frozen=True)
class ReplyEnd:
    """The end of a reply. `message` is the assistant message for the transcript. `finish_reason`: the server's word."""

    message: Message
    text: str
    finish_reason: str | None
    usage: TokenUsage
    ending: ReplyEnding = ReplyEnding.NORMAL


class ReplyReader(Protocol):
    """Reads one reply. The texts and the raw texts of calls and errors, joined in order, are exactly what the model
    wrote.
    """

    def feed(self, chunk: Chunk) -> list[Event]: ...

    def finish(self, *, is_broken: bool = False) -> tuple[list[Event], ReplyEnd]:
        """Return the last events and the end of the reply. If the reply did not end normally (cut, filtered, failed),
        the last call is returned as a MalformedCall, even if it is complete. If the stream broke off (`is_broken`), so
        is every call that was not yet returned.
        """
        ...


class Dialect(Protocol):
    """Format in which a model writes tool calls and reads their results."""

    @property
    def name(self) -> str: ...

    @property
    def max_repairs(self) -> int | None:
        """Return how many replies in a row may contain only malformed calls before the run stops. None: the run's
        options set the number.
        """
        ...

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str: ...

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        """Return the request for the messages of the transcript, in the form that model servers accept."""
        ...

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        """Return a reader for the reply of step `step`.

        Generated call ids contain run, step and index, so they are unique and repeatable. If `reads_tags` is False,
        every dialect treats tags in the text as text.
        """
        ...

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        """Return one message per result of a reply, in order. Each entry is (call id, result). The call id is the one
        that the model sent, or the run's own id if the model sent none.
        """
        ...
