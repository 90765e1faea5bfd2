"""The tags dialect: tools described in the system prompt, calls as `<tool_action>` tags in the text, results as user messages."""

from collections.abc import Sequence
from typing import Any

from contract.calls import ToolResult
from contract.specs import ToolSpec
from orchestrator.dialects.base import ReplyReader
from orchestrator.dialects.observations import build_messages
from orchestrator.dialects.reader import StreamReader
from orchestrator.dialects.tag_events import Call, Malformed, TagEvent, Text
from orchestrator.dialects.tag_parser import TagStreamParser
from orchestrator.dialects.tag_values import build_tag_call
from orchestrator.models.base import Message
from orchestrator.prompts import build_system_prompt, generate_tool_prompt

__all__ = ["Call", "Malformed", "TagEvent", "TagStreamParser", "TagsDialect", "Text", "build_tag_call"]


class TagsDialect:
    """Calls by tags. `enable_tool_action_parsing` off: every reply is text. `ignore_fenced`: tags inside code fences are text.

    `closing_hint` ends the message with the results; small models need telling that it is now their turn.
    """

    name = "tags"
    text_arguments = True

    def __init__(self, *, enable_tool_action_parsing: bool = True, ignore_fenced: bool = False, closing_hint: str = "") -> None:
        self._reads_tags = enable_tool_action_parsing
        self._ignore_fenced = ignore_fenced
        self._closing_hint = closing_hint

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        return build_system_prompt(instruction, generate_tool_prompt(specs))

    def build_tools(self, specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """None: the system prompt describes them."""
        return []

    def open_reader(self, run: str, step: int) -> ReplyReader:
        tags = TagStreamParser(ignore_fenced=self._ignore_fenced) if self._reads_tags else None
        return StreamReader(run, step, tags=tags, provisional=False)

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        return build_messages(results, self._closing_hint)
