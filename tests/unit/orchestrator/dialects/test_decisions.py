"""JSON decisions: valid decisions, invalid ones with the reason, and the position of a decision in a text."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.support.records.builders import build_spec
from toolcrew.orchestrator.dialects.base import CallRequested, MalformedCall
from toolcrew.orchestrator.dialects.decisions import (
    TOOL_DECISION_SCHEMA,
    ToolDecisionOutput,
    build_decision_schema,
    find_tool_decision,
    parse_tool_decision,
)
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect

CALL = '{"tool": "t", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        (CALL, ToolDecisionOutput("t", {"x": 1})),
        ('{"tool": null, "reply": "hi"}', ToolDecisionOutput(None, {}, "hi")),
        ('{"tool": null, "arguments": null, "reply": ""}', ToolDecisionOutput(None, {}, "")),
        ('{"tool": "t"}', ToolDecisionOutput("t", {})),
        ('{"tool": "t", "arguments": {}, "reply": "I look."}', ToolDecisionOutput("t", {}, "I look.")),
        (f" \n{CALL}\n ", ToolDecisionOutput("t", {"x": 1})),
        (f"```json\n{CALL}\n```", ToolDecisionOutput("t", {"x": 1})),
        (f"```\n{CALL}```", ToolDecisionOutput("t", {"x": 1})),
        (f"<think>hm {{</think>\n{CALL}", ToolDecisionOutput("t", {"x": 1})),
        ('{"tool": null, "reply": "\\ud83d\\ude00 \\ud83d"}', ToolDecisionOutput(None, {}, "\U0001f600 \ufffd")),
    ],
)
def test_a_valid_decision_is_parsed(text: str, decision: ToolDecisionOutput) -> None:
    assert parse_tool_decision(text) == decision


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a JSON object"),
        ("It is 4.", "not a JSON object"),
        (f"{CALL} and more", "not valid JSON"),
        (f"{CALL}{CALL}", "not valid JSON"),
        (f"Sure: {CALL}", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"tool": "t"', "not valid JSON"),
        ('{"tool": "t", "tool": "u"}', "the key 'tool' occurs twice"),
        ('{"tool": "t", "arguments": {"a": 1, "a": 2}}', "the key 'a' occurs twice"),
        ('{"tool": "t", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"tool": "t", "arguments": {"a": 1e999}}', "a number that is too large"),
        ('{"tool": "t", "args": {}}', "unknown key 'args'"),
        ('{"reply": "hi"}', 'no "tool"'),
        ('{"tool": null}', 'no "reply"'),
        ('{"tool": null, "reply": 4}', '"reply" must be a string'),
        ('{"tool": null, "reply": "x", "arguments": {"a": 1}}', '"arguments" without a tool'),
        ('{"tool": 5, "arguments": {}}', '"tool" must be the name of a tool, or null'),
        ('{"tool": "", "arguments": {}}', '"tool" must be the name of a tool, or null'),
        ('{"tool": "t", "arguments": "x"}', '"arguments" must be an object'),
        ("{" * 100_000, "nested too deep"),
        ('{"tool": "t", "arguments": {"a": ' + "[" * 100_000, "nested too deep"),
    ],
    ids=range(21),
)
def test_an_invalid_decision_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", "\\(")):
        parse_tool_decision(text)


@pytest.mark.parametrize(
    ("finish_reason", "is_broken", "kind"),
    [("stop", False, CallRequested), ("length", False, MalformedCall), (None, True, MalformedCall)],
)
def test_a_decision_in_a_cut_reply_is_not_run(finish_reason: str | None, is_broken: bool, kind: type[object]) -> None:
    reader = JsonDecisionDialect().open_reader("run", 0)
    reader.feed({"choices": [{"index": 0, "delta": {"content": CALL}, "finish_reason": finish_reason}]})
    events, _ = reader.finish(is_broken=is_broken)
    assert [type(event) for event in events] == [kind]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("no call here", ("no call here", None, "")),
        (f"Sure.\n{CALL}\nThen I answer.", ("Sure.\n", "t", "\nThen I answer.")),
        ('{"tool": 5} or ' + CALL, ('{"tool": 5} or ', "t", "")),
        ('{"tool": "t", "arguments": {"x": ', ('{"tool": "t", "arguments": {"x": ', None, "")),
        ('{"name": "t"}', ('{"name": "t"}', None, "")),
    ],
)
def test_a_decision_is_found_within_text(text: str, parts: tuple[str, str | None, str]) -> None:
    before, decision, behind = find_tool_decision(text)
    assert (before, decision and decision.tool, behind) == parts


def test_many_unclosed_objects_are_rejected_quickly() -> None:
    text = '{"tool":' * 50_000
    assert find_tool_decision(text) == (text, None, "")


_VALUES = st.sampled_from([None, "", "t", 5, {}, {"a": 1}, [], True])


@given(st.dictionaries(st.sampled_from(["tool", "arguments", "reply", "args"]), _VALUES))
@example({"tool": "t"})
@example({"tool": "t", "arguments": {}, "reply": "I look."})
@example({"tool": None, "arguments": {}, "reply": ""})
def test_the_parser_accepts_exactly_what_the_schema_accepts(value: dict[str, Any]) -> None:
    try:
        parse_tool_decision(json.dumps(value))
        is_accepted = True
    except ValueError:
        is_accepted = False
    assert Draft202012Validator(TOOL_DECISION_SCHEMA).is_valid(value) is is_accepted


def test_the_decision_schema_checks_the_tool_parameters() -> None:
    schema = Draft202012Validator(build_decision_schema([build_spec("echo", required=["text"])]))
    assert schema.is_valid({"tool": "echo", "arguments": {"text": "x"}})
    assert not schema.is_valid({"tool": "echo", "arguments": {}})
    assert not schema.is_valid({"tool": "other", "arguments": {}})


def test_parameter_references_are_resolved_except_recursive_ones() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    plain = build_spec("plain", properties={"at": {"$ref": "#/$defs/point"}})
    plain = plain.model_copy(update={"parameters": {**plain.parameters, "$defs": {"point": {"type": "integer"}}}})
    endless = build_spec("endless", properties={"first": {"$ref": "#/$defs/node"}})
    endless = endless.model_copy(update={"parameters": {**endless.parameters, "$defs": {"node": node}}})
    schema = Draft202012Validator(build_decision_schema([plain, endless]))
    assert schema.is_valid({"tool": "plain", "arguments": {"at": 1}})
    assert not schema.is_valid({"tool": "plain", "arguments": {"at": "x"}})
    assert schema.is_valid({"tool": "endless", "arguments": {"first": {"next": {}}}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.text())
def test_any_text_is_parsed_or_raises_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_tool_decision(text)
    before, decision, behind = find_tool_decision(text)
    assert decision is not None or (before, behind) == (text, "")


@given(tool=st.text(min_size=1), arguments=st.dictionaries(st.text(), JSON), reply_text=st.text("ab\n `"))
def test_an_encoded_decision_is_parsed_unchanged(tool: str, arguments: dict[str, Any], reply_text: str) -> None:
    text = json.dumps({"tool": tool, "arguments": arguments})
    expected = ToolDecisionOutput(tool, arguments)
    assert parse_tool_decision(text) == expected
    assert find_tool_decision(reply_text + text + reply_text) == (reply_text, expected, reply_text)
