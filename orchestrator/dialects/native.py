"""The native dialect: tools in the request's `tools`, calls in the reply's `tool_calls` deltas, results as tool messages."""

from collections.abc import Sequence
from typing import Any

from contract.calls import ToolResult
from contract.specs import ToolSpec
from orchestrator.dialects.base import ReplyReader
from orchestrator.dialects.native_assembler import MalformedNativeCall, NativeCall, NativeCallAssembler, Reply
from orchestrator.dialects.observations import build_messages
from orchestrator.dialects.reader import StreamReader
from orchestrator.dialects.tag_parser import TagStreamParser
from orchestrator.models.base import Message
from orchestrator.prompts import build_system_prompt, convert_to_openai_tool

__all__ = ["MalformedNativeCall", "NativeCall", "NativeCallAssembler", "NativeDialect", "Reply"]


class NativeDialect:
    """Native tool calls. Tags in the text are read as well, unless `enable_tool_action_parsing` is off, but run only in a reply without
    native calls, at its end. `short_ids`: ids of nine alphanumerics in the messages, which Mistral's templates insist on.
    """

    name = "native"
    text_arguments = False

    def __init__(self, *, enable_tool_action_parsing: bool = True, short_ids: bool = False) -> None:
        self._reads_tags = enable_tool_action_parsing
        self._short_ids = short_ids

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        """The instruction alone: the tools travel in the request's own field."""
        return build_system_prompt(instruction)

    def build_tools(self, specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        return [convert_to_openai_tool(spec) for spec in specs]

    def open_reader(self, run: str, step: int) -> ReplyReader:
        tags = TagStreamParser() if self._reads_tags else None
        return StreamReader(run, step, tags=tags, provisional=True, short_ids=self._short_ids)

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        return build_messages(results)
