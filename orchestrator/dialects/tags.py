"""The tags dialect: tools described in the system prompt, calls as `<tool_action>` tags in the text, results sent as
user messages.
"""

from collections.abc import Sequence
from typing import Any

from contract.calls import ToolResult
from contract.specs import ToolSpec
from orchestrator.dialects.base import ReplyReader
from orchestrator.dialects.model import Message, ModelRequest
from orchestrator.dialects.observations import build_tool_messages, build_wire_messages
from orchestrator.dialects.prompts import (
    WORKED_EXAMPLE_STOP,
    build_system_prompt,
    build_worked_example,
    generate_tool_prompt,
)
from orchestrator.dialects.reader import StreamReader
from orchestrator.dialects.tag_events import Call, Malformed, TagEvent, Text
from orchestrator.dialects.tag_gbnf import build_tag_grammar
from orchestrator.dialects.tag_parser import TagStreamParser
from orchestrator.dialects.tag_values import build_tag_call

__all__ = ["Call", "Malformed", "TagEvent", "TagStreamParser", "TagsDialect", "Text", "build_tag_call"]


class TagsDialect:
    """Calls by tags. `ignore_fenced`: tags inside code fences are text.

    `closing_hint` ends the message with the results; small models need it to start their answer. `constrained`: the
    request contains a GBNF grammar, to which llama.cpp's server constrains the reply. `worked_example`: the prompt ends
    with an example, for small models.
    """

    name = "tags"
    max_repairs = None

    def __init__(
        self,
        *,
        ignore_fenced: bool = False,
        closing_hint: str = "",
        constrained: bool = False,
        worked_example: bool = False,
    ) -> None:
        self._ignore_fenced = ignore_fenced
        self._closing_hint = closing_hint
        self._constrained = constrained
        self._shows_example = worked_example

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        return build_system_prompt(instruction, generate_tool_prompt(specs), self._build_example(specs))

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        extra: dict[str, Any] = {"grammar": build_tag_grammar(specs)} if self._constrained and specs else {}
        if self._build_example(specs):
            extra["stop"] = [WORKED_EXAMPLE_STOP]
        return ModelRequest(build_wire_messages(messages, self._closing_hint), extra=extra)

    def _build_example(self, specs: Sequence[ToolSpec]) -> str:
        return build_worked_example(specs) if self._shows_example else ""

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        tags = TagStreamParser(ignore_fenced=self._ignore_fenced) if reads_tags else None
        return StreamReader(run, step, tags=tags, provisional=False)

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        return build_tool_messages(results)
