"""The native dialect: tools in the request's `tools`, calls in the reply's `tool_calls` deltas, results as tool
messages.
"""

from collections.abc import Sequence

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import ReplyReader
from toolcrew.orchestrator.dialects.model import Message, ModelRequest
from toolcrew.orchestrator.dialects.native_assembler import (
    MalformedNativeCall,
    NativeCall,
    NativeCallAssembler,
    NativeReply,
)
from toolcrew.orchestrator.dialects.observations import build_tool_messages, build_wire_messages
from toolcrew.orchestrator.dialects.profiles import STANDARD, ModelProfile
from toolcrew.orchestrator.dialects.prompts import build_example_messages, build_system_prompt
from toolcrew.orchestrator.dialects.reader import StreamReader
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser
from toolcrew.orchestrator.functions.openai_tools import convert_to_openai_tool

__all__ = ["MalformedNativeCall", "NativeCall", "NativeCallAssembler", "NativeDialect", "NativeReply"]


class NativeDialect:
    """Native tool calls. Calls as tags in the text also count, but only if the whole reply has no native call.

    `short_ids`: use ids of nine alphanumeric characters in messages, which Mistral's templates require. `parallel`:
    request several calls at once, for servers that support the field. `profile`: how the tools are shown.
    """

    name = "native"
    max_repairs = None

    def __init__(self, *, short_ids: bool = False, parallel: bool = False, profile: ModelProfile = STANDARD) -> None:
        self._profile = profile
        self._parallel = parallel
        self._short_ids = short_ids

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        """Return the instruction alone. The tools are in a separate field of the request."""
        return build_system_prompt(instruction)

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        extra = {"parallel_tool_calls": True} if self._parallel and specs else {}
        wire = build_wire_messages(messages, self._profile.result_hint)
        if self._profile.shows_examples and wire and wire[0].get("role") == "system":
            wire[1:1] = build_example_messages(specs)
        tools = [convert_to_openai_tool(spec) for spec in self._profile.present(specs)]
        return ModelRequest(wire, tools, {**self._profile.sampling, **extra})

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        tags = TagStreamParser() if reads_tags else None
        return StreamReader(run, step, tags=tags, provisional=True, short_ids=self._short_ids)

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        return build_tool_messages(results)
