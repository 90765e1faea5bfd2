"""The dialect of a chat without tools: messages go to the model unchanged, and the reply is text."""

from collections.abc import Sequence

from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import ReplyReader
from toolcrew.orchestrator.dialects.model import Message, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect


class PlainDialect(NativeDialect):
    """Dialect for requests that a program wrote itself. Adds no system prompt and reads no calls from the reply."""

    name = "plain"

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        """Return "": the program supplies its own system messages."""
        return ""

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        """Return a request with the messages, except for the empty system message that the loop added."""
        has_empty_system = bool(messages) and messages[0].get("role") == "system" and messages[0].get("content") == ""
        return super().build_request(messages[1:] if has_empty_system else messages, ())

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        return super().open_reader(run, step, reads_tags=False)
