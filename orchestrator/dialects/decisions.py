"""JSON decisions: the schema for models that reply in JSON only, and a strict parser that repairs nothing."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from toolcrew.contract.functions.json_schemas import plain_schema
from toolcrew.contract.json_limits import has_more_values_in_text
from toolcrew.contract.schema import MAX_VALUES
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.fences import strip_fence
from toolcrew.orchestrator.dialects.json_objects import parse_json_object
from toolcrew.orchestrator.dialects.thinking import strip_thinking

_REPLY: dict[str, Any] = {
    "type": "object",
    "properties": {"tool": {"type": "null"}, "reply": {"type": "string"}},
    "required": ["tool", "reply"],
    "additionalProperties": False,
}
TOOL_DECISION_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "tool": {"type": "string", "minLength": 1},
                "arguments": {"type": ["object", "null"]},
                "reply": {"type": ["string", "null"]},
            },
            "required": ["tool"],
            "additionalProperties": False,
        },
        {
            **_REPLY,
            "properties": {**_REPLY["properties"], "arguments": {"type": ["object", "null"], "maxProperties": 0}},
        },
    ]
}
"""The two forms of a decision: call a tool, or reply. The parser accepts exactly what this schema accepts."""

CALL_FORM = '{"tool": "NAME", "arguments": {"PARAMETER": "VALUE"}}'
REPLY_FORM = '{"tool": null, "reply": "TEXT"}'
DECISION_HINT = f"Answer with one JSON object and nothing else: {CALL_FORM} to call a tool, or {REPLY_FORM} to reply."

MAX_OPENINGS = 8
"""The limit of positions at which a text is searched for a decision. Each attempt may read to the end of the text."""

_KEYS = frozenset({"tool", "arguments", "reply"})
_ACCEPTED = Draft202012Validator(TOOL_DECISION_SCHEMA)
_OPENING = re.compile(r'\{\s*"(?:tool|arguments|reply)"\s*:')


@dataclass(frozen=True)
class ToolDecisionOutput:
    """A decision of the model.

    If `tool` is None, `reply` is the answer. Otherwise `tool` is the tool to call, and `reply` is accompanying text,
    usually None.
    """

    tool: str | None
    arguments: dict[str, Any]
    reply: str | None = None


def build_decision_schema(specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return TOOL_DECISION_SCHEMA limited to the names and parameters of these tools.

    For servers that constrain a reply to a schema.
    """
    calls = [
        {
            "type": "object",
            "properties": {"tool": {"const": spec.name}, "arguments": _embeddable_schema(spec.parameters)},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for spec in specs
    ]
    return {"anyOf": [*calls, _REPLY]}


def _embeddable_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as a schema that can be part of another one.

    References to the root of the schema would then point to the root of the other schema. So a schema with such
    references becomes `{"type": "object"}`.
    """
    plain = plain_schema(parameters)
    return {"type": "object"} if '"$ref"' in json.dumps(plain) else plain


def parse_tool_decision(text: str) -> ToolDecisionOutput:
    """Parse a text that is one decision and nothing else, except for one code fence around it.

    Raises ValueError with a sentence for the model.
    """
    return _parse_decision(strip_fence(strip_thinking(text).strip()))


def find_tool_decision(text: str) -> tuple[str, ToolDecisionOutput | None, str]:
    """Find the first valid decision in `text`. Return the text before it, the decision and the text after it.

    Without a valid decision, return all of `text`, None and "". A decision inside a think block does not count.
    """
    answer_at = len(text) - len(strip_thinking(text))
    for opening in itertools.islice(_OPENING.finditer(text, answer_at), MAX_OPENINGS):
        start = opening.start()
        if has_more_values_in_text(text[start:], MAX_VALUES):
            continue
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text, start)
            return text[:start], _parse_decision(text[start:end]), text[end:]
        except (ValueError, RecursionError):
            continue
    return text, None, ""


def find_last_object(text: str) -> tuple[int | None, int]:
    """Return where the only decision at the end of a text begins and ends, without the code fence around it. The start
    is None if no object can be a decision.
    """
    opening = _OPENING.search(text, len(text) - len(strip_thinking(text)))
    if opening is None:
        return None, len(text)
    end = len(text.rstrip())
    is_fenced = text.endswith("```", 0, end) and "```" in text[: opening.start()]
    return opening.start(), len(text[: end - 3].rstrip()) if is_fenced else end


def _parse_decision(text: str) -> ToolDecisionOutput:
    if not text.startswith("{"):
        raise ValueError("the reply is not a JSON object")
    value = parse_json_object(text, "the reply")
    if not _ACCEPTED.is_valid(value):
        raise ValueError(_explain(value))
    return ToolDecisionOutput(value["tool"], value.get("arguments") or {}, value.get("reply"))


def _explain(value: Mapping[str, Any]) -> str:
    """Return why the schema rejects the value, as a sentence for the model."""
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        return f"unknown key '{unknown[0][:100]}' in the decision"
    if "tool" not in value:
        return 'the decision has no "tool"'
    tool, arguments, reply = value["tool"], value.get("arguments"), value.get("reply")
    if reply is not None and not isinstance(reply, str):
        return '"reply" must be a string'
    if tool is not None and (not isinstance(tool, str) or not tool):
        return '"tool" must be the name of a tool, or null'
    if arguments is not None and not isinstance(arguments, dict):
        return '"arguments" must be an object'
    return '"arguments" without a tool' if arguments else '"tool" is null but there is no "reply"'
