"""The json dialect: tools described in the system prompt, one JSON decision per reply, results as user messages."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import Event, MalformedCall, ReplyEnd, ReplyReader, Text
from toolcrew.orchestrator.dialects.call_ids import build_call_id
from toolcrew.orchestrator.dialects.decisions import (
    CALL_FORM,
    DECISION_HINT,
    REPLY_FORM,
    ToolDecisionOutput,
    build_decision_schema,
    find_last_object,
    parse_tool_decision,
)
from toolcrew.orchestrator.dialects.model import Chunk, Message, ModelRequest
from toolcrew.orchestrator.dialects.observations import UNKNOWN_TOOL, build_wire_messages, is_failure
from toolcrew.orchestrator.dialects.profiles import STANDARD, ModelProfile
from toolcrew.orchestrator.dialects.prompts import NO_TOOLS, build_examples, build_system_prompt, describe_tools
from toolcrew.orchestrator.dialects.reader import BROKEN, StreamReader, build_call_event, explain_unrun

__all__ = ["JsonDecisionDialect", "build_tool_system_prompt"]

RESULT_HEAD = "[Tool result for "
RESULT_HINT = 'Now reply to the user in one plain sentence, with "tool": null.'
"""Hint after the results of calls, in place of the profile's hint. With the profile's wording, small models repeat
their last call.
"""

_HOW_TO_DECIDE = f"""\
Every reply of yours is one JSON object and nothing else.
To call a tool: {CALL_FORM}
To answer the user: {REPLY_FORM}
Call one tool at a time. Its result comes in the next message. When you know the answer, reply."""


Parse = Callable[[str], tuple[str, ToolDecisionOutput | None, str]]
"""Returns the text before a decision, the decision (None: the reply is plain text) and the text after it. Raises
ValueError for a reply that the model must write again."""


class JsonDecisionDialect:
    """One JSON decision per reply.

    After a reply that is no decision, the model gets an explanation of the format. The next such reply ends the run.

    `has_schema`: the server supports `response_format` json_schema and constrains the reply to it; otherwise only the
    prompt requests the format. `parse`: function that parses a whole reply. `profile`: how the tools and results are
    shown.
    """

    name = "json"
    max_repairs = 1

    def __init__(
        self,
        *,
        has_schema: bool = False,
        parse: Callable[[str], ToolDecisionOutput] = parse_tool_decision,
        profile: ModelProfile = STANDARD,
    ) -> None:
        self._has_schema = has_schema
        self._parse = parse
        self._profile = profile

    def build_system(self, instruction: str, specs: Sequence[ToolSpec]) -> str:
        examples = build_examples(specs, in_json=True) if self._profile.shows_examples else ""
        return build_system_prompt(instruction, build_tool_system_prompt(self._profile.present(specs)), examples)

    def build_request(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> ModelRequest:
        messages = [self._with_hint(message) for message in build_wire_messages(messages)]
        if not self._has_schema:
            return ModelRequest(messages, extra={**self._profile.sampling})
        schema = {"name": "tool_decision", "schema": build_decision_schema(specs)}
        response_format = {"type": "json_schema", "json_schema": schema}
        return ModelRequest(messages, extra={**self._profile.sampling, "response_format": response_format})

    def _with_hint(self, message: Message) -> Message:
        # Every result has the hint, also an earlier one: then the beginning of a conversation never changes, and
        # servers can cache it.
        text = str(message.get("content"))
        if not self._profile.result_hint or not text.startswith(RESULT_HEAD) or is_failure(text.partition("\n")[2]):
            return message
        return {**message, "content": f"{text}\n\n{RESULT_HINT}"}

    def open_reader(self, run: str, step: int, *, reads_tags: bool = True) -> ReplyReader:
        return DecisionReader(run, step, self._parse_reply)

    def _parse_reply(self, raw: str) -> tuple[str, ToolDecisionOutput, str]:
        """Return the text before a decision, the decision, and "". Many models write a sentence before their object;
        nothing may follow it.
        """
        try:
            return "", self._parse(raw), ""
        except ValueError:
            start, end = find_last_object(raw)
            if start is None:
                raise
            decision = self._parse(raw[start:end])
            return raw[:start], decision, raw[end:]

    def build_observations(self, results: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        return [_build_observation(call_id, result) for call_id, result in results]


def build_tool_system_prompt(specs: Sequence[ToolSpec]) -> str:
    """Return the tool prompt for models that decide in JSON: the tools, and the two forms of a decision."""
    return f"{describe_tools(specs) if specs else NO_TOOLS}\n\n{_HOW_TO_DECIDE}"


class DecisionReader:
    """A ReplyReader for JSON decisions. It buffers the whole reply, because only the end shows whether it is a
    decision.
    """

    def __init__(self, run: str, step: int, parse: Parse) -> None:
        self._parse = parse
        self._call_id = build_call_id(run, step, 0)
        self._stream = StreamReader(run, step, tags=None, provisional=False)
        self._raw: list[str] = []

    def feed(self, chunk: Chunk) -> list[Event]:
        self._raw += [event.text for event in self._stream.feed(chunk) if isinstance(event, Text)]
        return []

    def finish(self, *, is_broken: bool = False) -> tuple[list[Event], ReplyEnd]:
        events, end = self._stream.finish(is_broken=is_broken)
        self._raw += [event.text for event in events if isinstance(event, Text)]
        native = [event for event in events if not isinstance(event, Text)]
        raw = "".join(self._raw)
        if native:
            # Some servers convert the JSON decision into native calls.
            return [*([Text(raw)] if raw else []), *native], end
        if not raw.strip():
            return [], end
        events = self._decide(raw, BROKEN if is_broken else explain_unrun(end.ending, end.finish_reason))
        visible_text = "".join(event.text for event in events if isinstance(event, Text))
        malformed = any(isinstance(event, MalformedCall) for event in events)
        return events, replace(end, text=raw if malformed else visible_text)

    def _decide(self, raw: str, cut: str | None) -> list[Event]:
        try:
            before, decision, behind = self._parse(raw)
        except ValueError as error:
            return [MalformedCall(self._call_id, None, f"Malformed decision: {cut or error}. {DECISION_HINT}", raw)]
        if decision is None:
            return [Text(raw)]
        if decision.tool is None:
            return [Text(decision.reply)] if decision.reply else []
        decision_text = raw[len(before) : len(raw) - len(behind)]
        call: Event = (
            build_call_event(self._call_id, decision.tool, decision.arguments, decision_text)
            if cut is None
            else MalformedCall(self._call_id, decision.tool, cut, decision_text)
        )
        texts = [Text(text) if text else None for text in (before + (decision.reply or ""), behind)]
        return [event for event in (texts[0], call, texts[1]) if event is not None]


def _build_observation(call_id: str, result: ToolResult) -> Message:
    if call_id != result.call_id:
        # The id belongs to a native call. Servers require the result under the same id.
        return {"role": "tool", "tool_call_id": call_id, "name": result.name, "content": result.text()}
    if result.name == UNKNOWN_TOOL:
        # The reply was no decision, so no tool can be named as the source.
        return {"role": "user", "content": result.text()}
    return {"role": "user", "content": f"{RESULT_HEAD}{result.name}]\n{result.text()}"}
