"""The dialect of a chat without tools: its messages go to the model as they are, and the reply is text."""

from collections.abc import Sequence

from contract.specs import ToolSpec
from orchestrator.dialects.base import ReplyReader
from orchestrator.dialects.model import Message, ModelRequest
from orchestrator.dialects.native import NativeDialect


class PlainDialect(NativeDialect):
    """For requests that a program has written itself: nothing is said in front of them, and nothing in the reply is
    taken for a call in tags.
    """

    name = "plain"

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        """Nothing: system messages are the program's own."""
        return ""

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        """The messages without the empty one that stands for a system prompt."""
        is_ours = bool(messages) and messages[0].get("role") == "system" and messages[0].get("content") == ""
        return super().build_request(messages[1:] if is_ours else messages, ())

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        return super().open_reader(run, step, reads_tags=False)
