"""Import of an MCP server's metadata: names, descriptions, schemas and flags, all of them untrusted."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from structlog.testing import capture_logs

from tests.support.guest.guest_exec import LocalSandbox, open_local_sandbox
from tests.support.mcp.mcp_peers import TOOL
from tests.support.records.builders import build_spec
from tests.support.stack.stack import ROOT
from tests.support.web.web_servers import run_tool
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.schema import check_schema, prepare_arguments
from toolcrew.contract.specs import ToolSpec
from toolcrew.workers.foreign_schemas import MAX_PARTS, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, SchemaRefused, bound_schema
from toolcrew.workers.mcp.answers import build_outcome
from toolcrew.workers.mcp.imports import (
    MAX_NAME_CHARS,
    MAX_TOGETHER_BYTES,
    MAX_TOOLS,
    ImportedTool,
    build_tool_name,
    build_tool_names,
    import_tools,
)
from toolcrew.workers.mcp.messages import parse_json, parse_reply
from toolcrew.workers.mcp.sandbox_server import SandboxServer
from toolcrew.workers.mcp.settings import HttpEntry, StdioEntry
from toolcrew.workers.tools.base import WorkerTool

SERVERS = st.from_regex(r"[A-Za-z0-9]{1,8}([_-][A-Za-z0-9]{1,8}){0,2}", fullmatch=True)
NAMES = st.one_of(st.text(max_size=80), st.from_regex(r"[a-z_-]{0,80}", fullmatch=True))
VALID_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _import(*tools: Any, **fields: Any) -> tuple[ImportedTool, ...]:
    return import_tools("docs", HttpEntry(url="https://tools.example/mcp", **fields), tools, "tools")


def _schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# Names


@given(SERVERS, NAMES)
def test_tool_name_is_valid_and_contains_the_server_name(server: str, tool: str) -> None:
    name = build_tool_name(server, tool)
    assert VALID_NAME.fullmatch(name)
    assert name.startswith(f"mcp__{server}__")
    assert build_tool_name(server, tool) == name


@given(SERVERS, SERVERS, NAMES, NAMES)
def test_tool_names_of_two_servers_never_collide(first: str, other: str, tool: str, another: str) -> None:
    if first != other:
        assert build_tool_name(first, tool) != build_tool_name(other, another)


@given(SERVERS, st.lists(NAMES, max_size=20), st.randoms())
def test_tool_names_do_not_depend_on_the_order_of_the_list(server: str, tools: list[str], random: Any) -> None:
    shuffled = list(tools)
    random.shuffle(shuffled)
    names, clashing = build_tool_names(server, tools)
    assert (names, clashing) == build_tool_names(server, shuffled)
    assert set(names.values()) | set(clashing) == set(tools)


def test_tool_with_an_unchanged_name_wins_a_name_clash() -> None:
    changed = build_tool_name("docs", "a!").removeprefix("mcp__docs__")
    names, clashing = build_tool_names("docs", ["a!", changed])
    assert (names, clashing) == ({f"mcp__docs__{changed}": changed}, ["a!"])


@pytest.mark.parametrize("name", [None, 7, "", {}, []])
def test_a_tool_without_a_name_is_skipped_and_logged(name: Any) -> None:
    with capture_logs() as logs:
        assert _import({**TOOL, "name": name}, "none", None) == ()
    assert [entry["event"] for entry in logs] == ["mcp_tool_left_out"] * 3


def test_include_and_exclude_accept_wildcards() -> None:
    tools = [{**TOOL, "name": name} for name in ("read_a", "read_b", "write_a", "[x]")]
    imported = _import(*tools, include=("read_*", "[x]"), exclude=("*_b",))
    assert sorted(tool.name for tool in imported) == ["[x]", "read_a"]


def test_number_of_tools_per_server_is_limited() -> None:
    with capture_logs() as logs:
        imported = _import(*({**TOOL, "name": f"t{n}"} for n in range(MAX_TOOLS + 5)))
    assert (len(imported), logs[-1]["event"]) == (MAX_TOOLS, "mcp_tools_too_many")


def test_total_size_of_the_specs_of_a_server_is_limited() -> None:
    schema = _schema(x={"enum": ["x" * 15_000]})
    with capture_logs() as logs:
        imported = _import(*({**TOOL, "name": f"t{n}", "inputSchema": schema} for n in range(60)))
    assert sum(len(tool.spec.model_dump_json()) for tool in imported) <= MAX_TOGETHER_BYTES
    assert len(imported) + len(logs) == 60


# Descriptions and flags


def test_description_names_its_server_and_is_printable_and_bounded() -> None:
    [imported] = _import({**TOOL, "description": "Read\x1b[2J everything" + "x" * 10_000})
    description = imported.spec.description
    assert description.startswith("[A tool of the MCP server docs")
    assert "] Read\ufffd[2J everything" in description
    assert len(description) < 4200


HINTS = {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False}


@pytest.mark.parametrize(
    ("trust", "hints", "flags"),
    [
        ("untrusted", HINTS, (False, False, True, True)),
        ("trusted", HINTS, (True, True, False, False)),
        ("trusted", None, (False, False, True, True)),
        ("trusted", {}, (False, False, True, True)),
        ("trusted", {"destructiveHint": False}, (False, False, True, False)),
        ("trusted", {"idempotentHint": True}, (False, True, True, True)),
        ("trusted", {"readOnlyHint": "yes"}, (False, False, True, True)),
    ],
)
def test_hints_of_an_untrusted_server_are_ignored(trust: str, hints: Any, flags: tuple[bool, ...]) -> None:
    [tool] = _import({**TOOL, "annotations": hints}, trust=trust)
    spec = tool.spec
    assert (spec.read_only, spec.idempotent, spec.requires_permission, spec.dangerous) == flags


# Schemas


def _bomb() -> dict[str, Any]:
    """Return a few references that expand to 2^16 schemas."""
    defs: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(16)}
    return {"type": "object", "$defs": {**defs, "d16": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/d0"}}}


def _deep() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (7, "not an object"),
        (["x"], "not an object"),
        (False, "not an object"),
        ({"type": "string"}, "not an object"),
        ({"type": ["array", "null"]}, "not an object"),
        (_schema(**{"\x07": {}}), "invisible characters"),
        (_schema(x={"enum": ["\u202etxt"]}), "invisible characters"),
        (_schema(x={"type": "string", "x-mcp-header": "Region"}), "headers"),
        (_schema(x={"description": "x" * 300_000}), "larger than"),
        (_schema(**{f"p{n}": {} for n in range(MAX_PARTS + 1)}), "parts"),
    ],
)
def test_a_tool_whose_schema_cannot_be_offered_is_named_with_the_reason(schema: Any, reason: str) -> None:
    with capture_logs() as logs:
        imported = _import({**TOOL, "inputSchema": schema}, {**TOOL, "name": "good"})
    assert [tool.name for tool in imported] == ["good"], "and no other"
    assert [(entry["event"], entry["name"]) for entry in logs] == [("mcp_tool_left_out", TOOL["name"])]
    assert reason in logs[0]["reason"]


NODE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
ADDRESS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("given_property", "converted"),
    [
        pytest.param({"$ref": "#/$defs/a"}, ADDRESS, id="reference"),
        pytest.param({"$ref": "#/definitions/a"}, ADDRESS, id="reference of draft 7"),
        pytest.param({"$ref": "#addr"}, {"type": "number"}, id="anchor"),
        pytest.param({"$ref": "#/properties/y"}, {"type": "integer"}, id="reference to a property"),
        pytest.param({"$ref": "#/$defs/list/anyOf/1"}, {"type": "boolean"}, id="reference into a list"),
        pytest.param(
            {"$ref": "#/$defs/a", "description": "where"}, {**ADDRESS, "description": "where"}, id="reference and text"
        ),
        pytest.param(
            {"$ref": "#/$defs/a", "minProperties": 2}, {"minProperties": 2, "allOf": [ADDRESS]}, id="reference and rule"
        ),
        pytest.param({"$ref": "https://evil.example/schema"}, {}, id="external reference"),
        pytest.param({"$ref": "#/$defs/none", "title": "T"}, {"title": "T"}, id="reference without target"),
        pytest.param({"type": "any"}, {}, id="any"),
        pytest.param({"type": ["string", "any"]}, {}, id="any in a list"),
        pytest.param({"type": "strange", "minLength": 1}, {"minLength": 1}, id="unknown type"),
        pytest.param({"type": "STRING"}, {"type": "string"}, id="type in capitals"),
        pytest.param({"type": "int"}, {"type": "integer"}, id="type of another language"),
        pytest.param({"type": ["string", "null"]}, {"type": ["string", "null"]}, id="several types"),
        pytest.param(
            {"type": ["string", ADDRESS]}, {"anyOf": [ADDRESS, {"type": "string"}]}, id="draft 3: schema as type"
        ),
        pytest.param(
            {"minimum": 1, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
            {"exclusiveMinimum": 1, "maximum": 9},
            id="draft 4: exclusive bounds",
        ),
        pytest.param({"divisibleBy": 5}, {"multipleOf": 5}, id="draft 3: divisibleBy"),
        pytest.param({"extends": ADDRESS}, {"allOf": [ADDRESS]}, id="draft 3: extends"),
        pytest.param(
            {"type": "object", "properties": {"a": {"type": "string", "required": True}, "b": {"required": False}}},
            {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]},
            id="draft 3: required in the property",
        ),
        pytest.param(
            {"items": [{"type": "string"}, True], "additionalItems": False},
            {"prefixItems": [{"type": "string"}, {}], "items": {"not": {}}},
            id="draft 7: items of a tuple",
        ),
        pytest.param(
            {"dependencies": {"a": ["b"], "c": ADDRESS}},
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": ADDRESS}},
            id="draft 7: dependencies",
        ),
        pytest.param({"id": "urn:x", "$id": "y", "$schema": "z", "$comment": "c"}, {}, id="ids"),
        pytest.param(
            {"type": "string", "nullable": True, "enum": ["a"]},
            {"type": ["string", "null"], "enum": ["a", None]},
            id="nullable",
        ),
        pytest.param(
            {"type": "string", "pattern": "^(a+)+$", "format": "my-format", "x-more": 1},
            {"type": "string", "format": "my-format"},
            id="pattern, unknown format, unknown keyword",
        ),
        pytest.param(
            {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False},
            {"type": "object", "additionalProperties": True},
            id="names by pattern",
        ),
        pytest.param(
            {"$ref": "#/properties/y", "nullable": True}, {"type": ["integer", "null"]}, id="nullable reference"
        ),
        pytest.param(
            {"const": "x", "nullable": True, "title": "T"},
            {"title": "T", "anyOf": [{"const": "x"}, {"type": "null"}]},
            id="nullable constant",
        ),
        pytest.param({"type": "string", "enum": [1, 2]}, {"enum": [1, 2]}, id="values of another type"),
        pytest.param(
            {"type": "integer", "enum": [1, "a", 1]}, {"type": "integer", "enum": [1, "a"]}, id="mixed values"
        ),
        pytest.param(True, {}, id="true"),
        pytest.param(False, {"not": {}}, id="false"),
        pytest.param("string", {}, id="no schema"),
        pytest.param({"properties": [], "required": [], "enum": []}, {}, id="empty lists of PHP"),
        pytest.param({"minLength": "3", "maximum": None, "uniqueItems": "yes", "minItems": -1}, {}, id="wrong values"),
        pytest.param({"minLength": 3.0, "title": 7, "required": "a"}, {"minLength": 3, "required": ["a"]}, id="loose"),
        pytest.param({"description": "a\x1b[2J\u202eb"}, {"description": "a\ufffd[2J\ufffdb"}, id="hidden characters"),
        pytest.param(
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}, {"anyOf": [{"type": "null"}, ADDRESS]}, id="or"
        ),
    ],
)
def test_a_schema_of_any_draft_is_converted(given_property: Any, converted: Any) -> None:
    more = {"a": ADDRESS, "list": {"anyOf": [{}, {"type": "boolean"}]}, "z": {"$anchor": "addr", "type": "number"}}
    schema = {**_schema(x=given_property, y={"type": "integer"}), "$defs": more, "definitions": more}
    with capture_logs() as logs:
        [imported] = _import({**TOOL, "inputSchema": schema})
    assert imported.spec.parameters == _schema(x=converted, y={"type": "integer"})
    assert logs == []


@pytest.mark.parametrize(
    ("schema", "converted"),
    [
        (None, _schema()),
        ({}, _schema()),
        ([], _schema()),
        (True, _schema()),
        ({"type": "object"}, _schema()),
        ({"type": "object", "properties": 7}, _schema()),
        ({"type": ["object", "null"], "properties": {"a": {}}}, _schema(a={})),
        ({"properties": {"a": {"type": "string"}}}, _schema(a={"type": "string"})),
        ({"$ref": "#/definitions/t", "definitions": {"t": ADDRESS}}, ADDRESS),
        ({"type": "object", "required": ["q"]}, {**_schema(q={}), "required": ["q"]}),
        ({"type": "object", "additionalProperties": True}, {**_schema(), "additionalProperties": True}),
        (
            {"anyOf": [_schema(a={"type": "string"}), {**_schema(b={}, a={"type": "integer"}), "required": ["a"]}]},
            _schema(a={"anyOf": [{"type": "string"}, {"type": "integer"}]}, b={}),
        ),
        ({"oneOf": [ADDRESS, {**ADDRESS, "properties": {}}]}, ADDRESS),
        ({"allOf": [ADDRESS, _schema(b={})]}, {**_schema(city={"type": "string"}, b={}), "required": ["city"]}),
        ({"if": _schema(a={}), "then": _schema(c={}), "properties": {"a": {}}}, _schema(a={}, c={})),
    ],
)
def test_the_parameters_become_a_plain_object(schema: Any, converted: Any) -> None:
    [imported] = _import({**TOOL, "inputSchema": schema})
    assert imported.spec.parameters == converted


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1),
        ({"oneOf": [{"type": "string"}, {"type": "string", "format": "uri"}]}, "x"),
        ({"oneOf": [_schema(id={"type": "integer"}), _schema(name={"type": "string"})]}, {"id": 1}),
        ({"type": "array", "enum": ["a", "b"]}, ["a", "a"]),
        ({"type": "array", "items": {"type": "string"}, "enum": ["a", "b"]}, ["b"]),
        ({"type": "array", "enum": [["a"], ["b"]]}, ["a"]),
    ],
)
def test_a_value_that_the_writer_of_the_schema_meant_is_accepted(schema: Any, arguments: Any) -> None:
    [imported] = _import({**TOOL, "inputSchema": _schema(x=schema)})
    assert prepare_arguments(imported.spec, {"x": arguments})[0] == {"x": arguments}


@pytest.mark.parametrize("value", ["a", ["c"], [["a"]]])
def test_values_of_items_are_checked_where_they_are_written_next_to_them(value: Any) -> None:
    [imported] = _import({**TOOL, "inputSchema": _schema(x={"type": "array", "enum": ["a", "b"]})})
    with pytest.raises(ToolFailure):
        prepare_arguments(imported.spec, {"x": value})


def _measure_depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_measure_depth, parts), default=0)


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({**_schema(root={"$ref": "#/$defs/n"}), "$defs": {"n": NODE}}, id="recursive"),
        pytest.param(_schema(x={"$ref": "#"}), id="refers to the root"),
        pytest.param({"type": "object", "allOf": [{"$ref": "#"}], "properties": {"x": {}}}, id="is its own part"),
        pytest.param(
            {**_schema(x={"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/a"}}}, id="refers to itself"
        ),
        pytest.param({**_schema(x={}), "default": {"pattern": "^(a+)+$"}, "$ref": "#/default"}, id="refers to a value"),
        pytest.param(
            {"type": "object", "more": {"x": {"items": {"pattern": "a"}}}, "properties": {"x": {"$ref": "#/more/x"}}},
            id="refers to an unknown keyword",
        ),
        pytest.param(_bomb(), id="expands to 2^16 schemas"),
        pytest.param(_deep(), id="deep"),
        pytest.param(_schema(x={"enum": ["x" * 20_000]}), id="large values"),
        pytest.param(
            _schema(**{f"p{n}": {"description": "x" * 900} for n in range(100)}, x={}), id="long descriptions"
        ),
        pytest.param(
            _schema(x={"anyOf": [_schema(**{f"p{n}": {"enum": ["a"] * 30}}) for n in range(300)]}), id="many forms"
        ),
    ],
)
def test_a_large_or_recursive_schema_is_cut_and_offered(schema: dict[str, Any]) -> None:
    with capture_logs() as logs:
        [imported] = _import({**TOOL, "inputSchema": schema})
    parameters = imported.spec.parameters
    text = json.dumps(parameters)
    assert parameters["properties"].keys() == schema["properties"].keys()
    assert [word for word in ("$ref", "$defs", "pattern") if f'"{word}"' in text] == []
    assert len(text) <= MAX_SCHEMA_BYTES
    assert _measure_depth(parameters) <= MAX_SCHEMA_DEPTH + 2
    prepare_arguments(imported.spec, {name: None for name in parameters["properties"]})
    assert logs == []


def test_a_recursive_schema_is_checked_down_to_the_cut() -> None:
    [imported] = _import({**TOOL, "inputSchema": {**_schema(root={"$ref": "#/$defs/n"}), "$defs": {"n": NODE}}})
    prepare_arguments(imported.spec, {"root": {"kids": [{"kids": []}]}})
    with pytest.raises(ToolFailure):
        prepare_arguments(imported.spec, {"root": {"kids": [{"kids": 7}]}})


def test_descriptions_are_shortened_before_parameters_lose_their_types() -> None:
    many = {f"p{n}": {"type": "string", "description": "x" * 2000, "enum": ["a", "b"]} for n in range(50)}
    [imported] = _import({**TOOL, "inputSchema": _schema(**many)})
    properties = imported.spec.parameters["properties"]
    assert {(part["type"], len(part["enum"])) for part in properties.values()} == {("string", 2)}
    assert {len(part["description"]) for part in properties.values()} <= set(range(50, 310))


def test_foreign_regex_patterns_are_dropped_but_a_parameter_named_pattern_is_kept() -> None:
    slow = {"type": "string", "pattern": "^(a+)+$", "$id": "https://evil.example/"}
    schema = bound_schema(_schema(pattern=slow, many={"type": "array", "items": slow}, one={"anyOf": [slow]}))
    assert schema["properties"]["pattern"] == {"type": "string"}
    assert "(a+)+" not in json.dumps(schema)
    spec = ToolSpec(name="t", description="t", parameters=schema)
    assert prepare_arguments(spec, {"pattern": "a" * 40 + "!"})[0]["pattern"].endswith("!")


WORDS = [
    *("type", "properties", "$ref", "items", "allOf", "anyOf", "$defs", "enum", "pattern", "x", "required", "minimum"),
    *("exclusiveMinimum", "nullable", "dependencies", "extends", "additionalProperties", "if", "then", "default"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["#", "#/x", "#/properties/x", "string", "any", "a"]),
    lambda part: st.lists(part) | st.dictionaries(st.sampled_from(WORDS), part),
    max_leaves=20,
)


@given(JSON)
def test_any_json_schema_value_is_bounded_or_refused(value: Any) -> None:
    given_schema = {**value, "type": "object"} if isinstance(value, dict) else value
    try:
        schema = bound_schema(given_schema)
    except SchemaRefused:
        return
    assert schema["type"] == "object"
    check_schema(schema)


# Hostile servers: their data cannot break a worker, hide text from people, or stop the next call


PEER = str(ROOT / "tests" / "support" / "mcp" / "mcp_stdio_peer.py")


def _specs(*tools: dict[str, Any]) -> list[ToolSpec]:
    return [tool.spec for tool in _import(*tools)]


@pytest.fixture
def box() -> Iterator[LocalSandbox]:
    with open_local_sandbox() as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": None}, "gave no text"),
        ({"content": "plain"}, "plain"),
        ({"content": ["plain"]}, "plain"),
        ({"content": {"type": "text", "text": "plain"}}, "plain"),
        ({"toolResult": {"a": "plain"}}, '"a": "plain"'),
    ],
)
@pytest.mark.parametrize("error", [None, False, "false", True, "true"])
def test_a_result_may_have_another_form(result: dict[str, Any], text: str, error: Any) -> None:
    outcome = build_outcome("docs", "t", result if error is None else {**result, "isError": error})
    assert text in outcome.output
    assert (outcome.error is not None) == (error in (True, "true"))


def _call_with_structured(structured: str) -> ToolResult:
    """Return the result of a call whose reply has this structured content."""
    [spec] = _specs(TOOL)
    answer = f'{{"content": [], "structuredContent": {structured}}}'
    return run_tool(
        WorkerTool(spec, lambda arguments, bench: build_outcome("docs", spec.name, parse_json(answer, "docs")))
    )


# Results


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999"])
def test_result_with_a_non_finite_number_is_an_http_error(number: str) -> None:
    assert _call_with_structured(f'{{"x": {number}}}').error_code is ErrorCode.HTTP_ERROR


@pytest.mark.parametrize("structured", ['{"x": "\\ud800"}', '{"\\udfff": 1}', '["\\ud83d"]'])
def test_result_with_a_lone_surrogate_can_be_sent(structured: str) -> None:
    result = _call_with_structured(structured)
    assert result.success
    assert ToolResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize(
    "code", [2**31, -(10**4000), True, 1.5, "x", None], ids=["32 bits", "4000 digits", "bool", "float", "text", "null"]
)
def test_invalid_error_code_of_a_reply_becomes_zero(code: Any) -> None:
    reply = parse_reply({"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "no"}}, 1)
    assert (reply.code, reply.error) == (0, "no")


# What it says of its tools


def test_tool_with_an_oversized_name_is_left_out() -> None:
    assert _specs({**TOOL, "name": "x" * (MAX_NAME_CHARS + 1)}) == []
    assert len(_specs({**TOOL, "name": "x" * MAX_NAME_CHARS})) == 1


@pytest.mark.parametrize("hidden", ["\U000e0069\U000e0067", "\u202etxet", "\u2066x\u2069"])
def test_invisible_characters_in_a_description_are_removed(hidden: str) -> None:
    [spec] = _specs({**TOOL, "description": f"Adds.{hidden}"})
    assert not set(hidden) & set("\U000e0069\U000e0067\u202e\u2066\u2069") & set(spec.description)
    [spec] = _specs({**TOOL, "inputSchema": {"type": "object", "properties": {"a": {"description": hidden}}}})
    assert (
        not set(hidden)
        & set("\U000e0069\U000e0067\u202e\u2066\u2069")
        & set(json.dumps(spec.parameters, ensure_ascii=False))
    )


def test_description_keeps_text_of_any_script_and_joiners() -> None:
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u200f\u05d0"
    [spec] = _specs({**TOOL, "description": text})
    assert spec.description.endswith(text)


@pytest.mark.parametrize("divisor", [0.7, 3e-300])
def test_huge_number_with_multiple_of_is_refused_without_a_crash(divisor: float) -> None:
    [imported] = _specs({**TOOL, "inputSchema": {"type": "object", "properties": {"a": {"multipleOf": divisor}}}})
    for spec in (imported, build_spec("ours", properties={"a": {"multipleOf": divisor}})):
        with pytest.raises(ToolFailure) as caught:
            prepare_arguments(spec, {"a": 10**400 + 1})
        assert caught.value.code is ErrorCode.INVALID_ARGUMENTS


# Lines of a server over stdio


def _server(tmp_path: Path, reply: bytes) -> SandboxServer:
    """Return a server that answers calls of `echo` with this reply, unchanged."""
    env = {"OF": SecretStr(str(tmp_path)), "SAYS": SecretStr(reply.hex())}
    return SandboxServer(
        "peer", StdioEntry(command=sys.executable, args=(PEER, "says"), network="none", env=env), is_sessionless=True
    )


_HEAD = b'{"jsonrpc":"2.0","id":ID,'


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (_HEAD + b'"result":{"x":NaN}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":{"x":1e999}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":' + b'{"a":' * 500 + b"1" + b"}" * 501 + b"\n", ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":7}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":{},"error":{}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"res', ErrorCode.HTTP_ERROR),
        (b'{"jsonrpc":"1.0","id":ID,"result":{}}\n', ErrorCode.HTTP_ERROR),
        (_HEAD + b'"result":{"content":[{"type":"text","text":"\xff"}]}}\n', ErrorCode.TIMEOUT),
        (b'{"jsonrpc":"2.0","id":ID.0,"result":{}}\n{"jsonrpc":"2.0","id":"ID","result":{}}\n', ErrorCode.TIMEOUT),
        (b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"result":{}}\n', ErrorCode.TIMEOUT),
        (b'{"jsonrpc":"2.0","id":NEXT,"result":{"content":[{"type":"text","text":"forged"}]}}\n', ErrorCode.TIMEOUT),
    ],
)  # fmt: skip
def test_invalid_mcp_reply_fails_only_its_own_call(
    box: LocalSandbox, tmp_path: Path, reply: bytes, code: ErrorCode
) -> None:
    server = _server(tmp_path, reply)
    with pytest.raises(ToolFailure) as caught:
        server.call_tool(box.run, "echo", {"text": "x"}, "/workspace", 1.5)
    assert caught.value.code is code
    text = server.call_tool(box.run, "count", {}, "/workspace", 30)["content"][0]["text"]
    assert int(text.split()[0]) in (1, 2)
