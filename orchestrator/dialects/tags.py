"""The tags dialect: tools described in the system prompt, calls as `<tool_action>` tags in the text, results sent as
user messages.
"""

from collections.abc import Sequence
from typing import Any

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import ReplyReader
from toolcrew.orchestrator.dialects.model import Message, ModelRequest
from toolcrew.orchestrator.dialects.observations import build_tool_messages, build_wire_messages
from toolcrew.orchestrator.dialects.profiles import STANDARD, ModelProfile
from toolcrew.orchestrator.dialects.prompts import (
    EXAMPLES_STOP,
    build_examples,
    build_system_prompt,
    generate_tool_prompt,
)
from toolcrew.orchestrator.dialects.reader import StreamReader
from toolcrew.orchestrator.dialects.tag_events import MalformedTag, TagCall, TagEvent, Text
from toolcrew.orchestrator.dialects.tag_gbnf import build_tag_grammar
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser
from toolcrew.orchestrator.dialects.tag_values import build_tag_call

__all__ = ["MalformedTag", "TagCall", "TagEvent", "TagStreamParser", "TagsDialect", "Text", "build_tag_call"]


class TagsDialect:
    """Calls by tags. `ignore_fenced`: tags inside code fences are text.

    `constrained`: the request contains a GBNF grammar, to which llama.cpp's server constrains the reply. `profile`: how
    the tools and results are shown.
    """

    name = "tags"
    max_repairs = None

    def __init__(
        self,
        *,
        ignore_fenced: bool = False,
        constrained: bool = False,
        profile: ModelProfile = STANDARD,
    ) -> None:
        self._ignore_fenced = ignore_fenced
        self._constrained = constrained
        self._profile = profile

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        return build_system_prompt(
            instruction,
            generate_tool_prompt(self._profile.present(specs), is_brief=self._profile.is_brief),
            self._build_examples(specs),
        )

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        extra: dict[str, Any] = {"grammar": build_tag_grammar(specs)} if self._constrained and specs else {}
        if self._build_examples(specs):
            extra["stop"] = [EXAMPLES_STOP]
        wire = build_wire_messages(messages, self._profile.result_hint)
        return ModelRequest(wire, extra={**self._profile.sampling, **extra})

    def _build_examples(self, specs: Sequence[ToolSpec]) -> str:
        return build_examples(specs) if self._profile.shows_examples else ""

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        tags = TagStreamParser(ignore_fenced=self._ignore_fenced) if reads_tags else None
        return StreamReader(run, step, tags=tags, provisional=False)

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        return build_tool_messages(results)
