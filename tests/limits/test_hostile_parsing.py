"""Input of tenants and models is parsed in bounded time and memory. The examples are inputs that once took seconds
and gigabytes.
"""

import collections
import functools
import io
import itertools
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.support.records.builders import build_spec
from toolcrew.contract.errors import ErrorCode, ModelRefused, ToolFailure
from toolcrew.contract.json_limits import has_more_values, has_more_values_in_text
from toolcrew.contract.schema import MAX_VALUES, prepare_arguments
from toolcrew.contract.skills import SkillBroken, parse_skill
from toolcrew.orchestrator.batches.lines import BadBatch, read_lines
from toolcrew.orchestrator.dialects import native_assembler
from toolcrew.orchestrator.dialects.decisions import find_tool_decision, parse_tool_decision
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler, parse_arguments
from toolcrew.workers.foreign_schemas import SchemaRefused, bound_schema
from toolcrew.workers.mcp.http_transport import find_reply
from toolcrew.workers.mcp.messages import ServerReply
from toolcrew.workers.tools.edit import EDIT_TOOL
from toolcrew.workers.web.exchange import Head, ResponseStream
from toolcrew.workers.web.limits import FetchLimits

MAX_UNITS = 20
"""Processor time of one input, in units of `measure_unit_s`. Far above what the inputs take, and below what each of them
took before it was bounded.
"""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=3),
    max_leaves=6,
)


def measure_unit_s() -> float:
    """Return the processor time of a fixed work, about 0.1 s: processors differ, and a busy neighbour slows them."""
    tracemalloc.start()
    started = time.process_time()
    json.loads(b"[" + b"[]," * 200_000 + b"[]]")
    unit_s = time.process_time() - started
    tracemalloc.stop()
    return unit_s


@contextmanager
def bounded(mebibytes: float) -> Iterator[None]:
    unit_s = measure_unit_s()
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        assert time.process_time() - started < MAX_UNITS * unit_s
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 1024 * 1024
    finally:
        tracemalloc.stop()


def array_of(values: Any, **schema: Any) -> tuple[Any, dict[str, Any]]:
    return build_spec("t", properties={"a": {"type": "array", **schema}}), {"a": values}


MANY = MAX_VALUES - 10
ARGUMENTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "more values than a call may have": lambda: (EDIT_TOOL.spec, {"file_path": "f", "edits": [0] * 1_000_000}),
    "an error for each item": lambda: (EDIT_TOOL.spec, {"file_path": "f", "edits": [0] * MANY}),
    "an error for each item and form": lambda: array_of(
        [0] * MANY, items={"anyOf": [{"type": "string"}, {"type": "null"}]}
    ),
    "forms that each refuse every item": lambda: (
        build_spec("t", properties={"a": {"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "null"}}]}}),
        {"a": [0] * MANY},
    ),
    "a name of a million characters": lambda: (EDIT_TOOL.spec, {"x" * 1_000_000: 1}),
    "a text that is a list of a million values": lambda: (
        EDIT_TOOL.spec,
        {"file_path": "f", "edits": f"[{'0,' * 1_000_000}0]"},
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_invalid_arguments_are_refused_with_a_bounded_message(name: str) -> None:
    spec, arguments = ARGUMENTS[name]()
    with bounded(24), pytest.raises(ToolFailure) as refused:
        prepare_arguments(spec, arguments, text=True)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert len(refused.value.message) < 4000


def test_unique_items_are_compared_in_linear_time() -> None:
    spec, arguments = array_of([{"n": number} for number in range(MANY // 2 - 1)], uniqueItems=True)
    with bounded(24):
        prepare_arguments(spec, arguments)
    arguments["a"][-1] = {"n": 0.0}
    with bounded(24), pytest.raises(ToolFailure, match="differ"):
        prepare_arguments(spec, arguments)


def nested_forms(depth: int) -> dict[str, Any]:
    """Return alternatives in alternatives, whose last one fits after a change."""
    inner = nested_forms(depth - 1) if depth else {"type": "integer"}
    form = {"type": "object", "required": ["y"], "properties": {"x": {"type": "string"}, "y": inner}}
    return {"anyOf": [{"type": "null"}, {"type": "boolean"}, form]}


def nested_value(depth: int) -> Any:
    return {"x": None, "y": nested_value(depth - 1)} if depth else 1.0


SCHEMA_FORMS = [*[{"type": "null"}] * 300, {"type": "integer"}]
FOREIGN_SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "many forms for many items": ({"items": {"anyOf": SCHEMA_FORMS}}, [0] * MANY),
    "one of many forms for many items": ({"items": {"oneOf": SCHEMA_FORMS}}, [0] * MANY),
    "many conditions for many items": ({"items": {"allOf": [{"type": "integer"}] * 300}}, [0] * MANY),
    "many forms for a long text": ({"anyOf": SCHEMA_FORMS}, "x" * 16_000_000),
    "a long enum for many items": ({"items": {"enum": list(range(1500))}}, [1499] * MANY),
    "a large default for many items": ({"items": {"properties": {"b": {"default": [0] * 1000}}}}, [{}] * MANY),
    "forms in forms with nulls": ({"items": nested_forms(4)}, [{"x": None, "y": nested_value(4)}] * (MANY // 16)),
    "a null in every item": ({"items": {"properties": {"b": {"type": "string"}}}}, [{"b": None}] * (MANY // 2)),
    "defaults that do not fit": (
        {"items": {"properties": {"b": {"type": "string", "default": 1}}}},
        [{}] * (MANY // 2),
    ),
    "defaults in defaults": (
        {
            "default": [{}] * 400,
            "items": {
                "properties": {"b": {"default": [{}] * 400, "items": {"properties": {"c": {"default": [0] * 400}}}}}
            },
        },
        None,
    ),
    "nested unevaluated items": (
        functools.reduce(
            lambda inner, _: {"allOf": [inner], "unevaluatedItems": {"type": "string"}},
            range(9),
            {"contains": {"type": "integer"}},
        ),
        [1] * MANY,
    ),
}


@pytest.mark.parametrize("name", FOREIGN_SCHEMAS)
def test_a_foreign_schema_is_checked_in_bounded_time(name: str) -> None:
    schema, value = FOREIGN_SCHEMAS[name]
    with bounded(24):
        parameters = bound_schema({"type": "object", "properties": {"a": schema}})
        spec = build_spec("t").model_copy(update={"parameters": parameters})
        with suppress(ToolFailure):
            prepare_arguments(spec, {} if value is None else {"a": value})


def test_forms_that_refer_to_themselves_are_compared_in_bounded_time() -> None:
    """A tool may describe a tree. Each level of a value multiplies the forms that the check compares."""
    forms = [
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/node"}, "kind": {"const": kind}}, "required": ["kind"]}
        for kind in ("add", "multiply", "negate")
    ]
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/node"}},
        "$defs": {"node": {"anyOf": [{"type": "integer"}, *forms]}},
    }
    spec, value = build_spec("t").model_copy(update={"parameters": parameters}), 1
    for _ in range(5):
        value = {"x": value, "kind": "negate"}  # type: ignore[assignment]
    assert prepare_arguments(spec, {"a": value})[0]["a"] == value
    for _ in range(60):
        value = {"x": value, "kind": "negate"}  # type: ignore[assignment]
    # Without a limit, the check follows 3^65 references. The time is that of the references, so it is not measured.
    with pytest.raises(ToolFailure, match="flatter") as refused:
        prepare_arguments(spec, {"a": value})
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


BIG_SCHEMAS: dict[str, dict[str, Any]] = {
    "a long list that is referred to often": {"required": [f"n{n}" for n in range(20_000)]},
    "a long description that is referred to often": {"description": "x" * 200_000},
    "long values that are referred to often": {"enum": ["x" * 20_000] * 10},
    "many properties that are referred to often": {"properties": {f"n{n}": {} for n in range(15_000)}},
    "references that double": {"allOf": [{"$ref": "#/$defs/big"}, {"$ref": "#/$defs/big"}]},
    "many anchors": {"allOf": [{"$anchor": f"a{n}", "$ref": f"#b{n}"} for n in range(5000)]},
}


@pytest.mark.parametrize("name", BIG_SCHEMAS)
def test_a_foreign_schema_is_converted_in_bounded_time(name: str) -> None:
    references = {f"p{n}": {"$ref": "#/$defs/big"} for n in range(1000)}
    with bounded(24), suppress(SchemaRefused):
        bound_schema({"type": "object", "properties": references, "$defs": {"big": BIG_SCHEMAS[name]}})


REPLIES = {
    "unclosed code fence": "```json\n" + " " * 200_000 + "x",
    "millions of lists": '{"tool": "t", "arguments": {"a": [' + "[]," * 2_000_000 + "[]]}}",
    "deep": '{"tool": "t", "arguments": {"a": ' + "[" * 2_000_000,
    "lone surrogates": '{"tool": "t", "arguments": {"a": "' + "\\ud800" * 200_000 + '"}, "x": 1}',
    "a number of a million digits": '{"tool": "t", "arguments": {"a": ' + "1" * 1_000_000 + "}}",
    "millions of keys": '{"tool": "t", "arguments": {' + '"a": 1, ' * 1_000_000 + '"b": 1}}',
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_hostile_reply_is_refused_in_bounded_time(name: str) -> None:
    with bounded(64), pytest.raises(ValueError):
        parse_tool_decision(REPLIES[name])
    arguments = REPLIES[name].partition('"arguments": ')[2].removesuffix("}")
    with bounded(64), suppress(ValueError):
        parse_arguments(arguments)
    with bounded(64):
        find_tool_decision(REPLIES[name] * 2)


@pytest.mark.parametrize(
    "delta",
    [{"content": "x" * 65536}, {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 65536}}]}],
    ids=["text", "arguments"],
)
def test_an_endless_reply_is_refused(delta: dict[str, Any]) -> None:
    reader = NativeCallAssembler()
    with pytest.raises(ModelRefused):
        collections.deque(map(reader.feed, itertools.repeat({"choices": [{"index": 0, "delta": delta}]})), maxlen=0)


def test_empty_tool_call_fragments_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_assembler, "MAX_REPLY_CHARS", 10 * native_assembler.FRAGMENT_CHARS)
    reader = NativeCallAssembler()
    chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {}}]}}]}
    for _ in range(10):
        reader.feed(chunk)
    with pytest.raises(ModelRefused):
        reader.feed(chunk)


@given(JSON, st.integers(1, 12))
def test_values_of_json_text_are_counted_up_to_the_limit(value: Any, limit: int) -> None:
    text = json.dumps(value)
    if has_more_values(value, 2 * limit + 1):
        assert has_more_values_in_text(text, limit)
    if not has_more_values(value, limit):
        assert not has_more_values_in_text(text, limit)


@given(st.lists(JSON, max_size=5), st.sampled_from(["uniqueItems", "anyOf", "oneOf"]))
def test_schema_checks_agree_with_jsonschema(items: list[Any], keyword: str) -> None:
    forms = [{"items": {"type": "integer"}}, {"maxItems": 2}]
    schema: dict[str, Any] = {"uniqueItems": True} if keyword == "uniqueItems" else {keyword: forms}
    spec, arguments = array_of(items, **schema)
    # The library takes 1.0 for an integer, and ours does not.
    is_valid = Draft202012Validator({**schema, "type": "array"}).is_valid(items)
    if any(isinstance(item, float) for item in items) and keyword != "uniqueItems":
        return
    try:
        prepare_arguments(spec, arguments)
        assert is_valid
    except ToolFailure:
        assert not is_valid


@given(JSON, st.integers(1, 12))
def test_values_are_counted_up_to_the_limit(value: Any, limit: int) -> None:
    def count(part: Any) -> int:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return 1 + sum(map(count, inner))

    assert has_more_values(value, limit) is (count(value) > limit)


def line(**fields: Any) -> bytes:
    return json.dumps({"id": "a", "instruction": "x", **fields}).encode()


LINES = {
    "many unknown keys": lambda: line(**{f"k{number}": 1 for number in range(14_000)}),
    "a list of wrong names": lambda: line(tools=[0] * 15_000),
    "too many values": lambda: line(tools=[0] * 1_000_000),
    "millions of wrong lines": lambda: b"{\n" * 2_000_000,
    "deep": lambda: b'{"id": "a", "x": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("name", LINES)
def test_hostile_batch_lines_are_refused_in_bounded_time(name: str) -> None:
    data = LINES[name]()
    with bounded(64), pytest.raises(BadBatch) as refused:
        read_lines(io.BytesIO(data), None, "the body")
    assert 1 <= len(refused.value.errors) <= 20


def bomb(levels: int, key: str) -> str:
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines += [f"a{level}: &a{level}", *([f"  {key}"] if key else []), *(f"    - *a{level - 1}" for _ in range(10))]
    return "\n".join(lines)


FRONTS = {
    "merge keys": bomb(12, "<<:"),
    "aliases": bomb(12, ""),
    "nested lists": "x: " + "- " * 8000,
    "nested brackets": "x: " + "[" * 8000,
    "a number of base 60": "x: " + ":".join(["1"] * 8000),
    "many keys": "\n".join(f"k{number}: 1" for number in range(2500)),
}


@pytest.mark.parametrize("name", FRONTS)
def test_a_hostile_front_matter_is_parsed_or_refused_in_bounded_time(name: str) -> None:
    with bounded(24):
        try:
            assert parse_skill(f"---\nname: a\ndescription: b\n{FRONTS[name]}\n---\n", "a").name == "a"
        except SkillBroken:
            return


async def find_in(*pieces: bytes) -> ServerReply | None:
    """Return the reply to request 7 in a stream of events that arrives in these pieces."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return await find_reply("weather", 7, ResponseStream(Head(200, {}), stream(), FetchLimits()))


async def test_an_endless_event_stream_is_refused() -> None:
    event = b'data: {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}\n\n'
    with bounded(64), pytest.raises(ToolFailure) as refused:
        await find_in(*[event] * 20_000)
    assert refused.value.code is ErrorCode.HTTP_ERROR


async def test_an_endless_line_of_a_stream_takes_linear_time() -> None:
    with bounded(64):
        assert await find_in(*[b"x" * 1024] * 4 * 1024) is None


async def test_an_event_with_too_many_values_is_not_parsed() -> None:
    with bounded(64), pytest.raises(ToolFailure, match="values"):
        await find_in(b"data: [" + b"[]," * 1_000_000 + b"[]]\n\n")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_the_reply_is_found_among_other_events(end: bytes) -> None:
    lines = [b": here", b"id: 1", b'data: {"jsonrpc": "2.0", "id": 8, "result": {}}', b"", b"event: message"]
    lines += [b'data: {"jsonrpc": "2.0",', b'data: "id": 7, "result": {"a": 1}}', b"", b""]
    stream = end.join(lines)
    assert await find_in(*[stream[at : at + 5] for at in range(0, len(stream), 5)]) == ServerReply(result={"a": 1})
