"""What tenants and models send is parsed in bounded time and memory: the inputs that once took seconds and gigabytes."""

import collections
import io
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from contract.errors import ErrorCode, ToolFailure
from contract.schema import MAX_VALUES, has_more_values, prepare_arguments
from contract.skills import SkillBroken, parse_skill
from orchestrator.batches.lines import BadBatch, read_lines
from tests.builders import build_spec
from workers.mcp.streams import ReplyReader
from workers.tools.edit import EDIT_TOOL

PROCESSOR_S = 2.0
"""Far above what the inputs take, and below what each of them took before it was bounded."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=3),
    max_leaves=6,
)


@contextmanager
def bounded(mebibytes: float) -> Iterator[None]:
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < PROCESSOR_S
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 1024 * 1024
    finally:
        tracemalloc.stop()


def array_of(values: Any, **schema: Any) -> tuple[Any, dict[str, Any]]:
    return build_spec("t", properties={"a": {"type": "array", **schema}}), {"a": values}


MANY = MAX_VALUES - 10
ARGUMENTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "more values than a call may have": lambda: (EDIT_TOOL.spec, {"file_path": "f", "edits": [0] * 1_000_000}),
    "an error for each item": lambda: (EDIT_TOOL.spec, {"file_path": "f", "edits": [0] * MANY}),
    "an error for each item and form": lambda: array_of([0] * MANY, items={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "forms that each refuse every item": lambda: (
        build_spec("t", properties={"a": {"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "null"}}]}}),
        {"a": [0] * MANY},
    ),
    "a name of a million characters": lambda: (EDIT_TOOL.spec, {"x" * 1_000_000: 1}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments_are_refused_with_a_few_errors(name: str) -> None:
    spec, arguments = ARGUMENTS[name]()
    with bounded(24), pytest.raises(ToolFailure) as refused:
        prepare_arguments(spec, arguments)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert len(refused.value.message) < 4000


def test_items_that_must_differ_are_compared_in_linear_time() -> None:
    spec, arguments = array_of([{"n": number} for number in range(MANY // 2 - 1)], uniqueItems=True)
    with bounded(24):
        prepare_arguments(spec, arguments)
    arguments["a"][-1] = {"n": 0.0}
    with bounded(24), pytest.raises(ToolFailure, match="differ"):
        prepare_arguments(spec, arguments)


@given(st.lists(JSON, max_size=5), st.sampled_from(["uniqueItems", "anyOf", "oneOf"]))
def test_our_checks_decide_as_the_library_does(items: list[Any], keyword: str) -> None:
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
def test_values_are_counted_as_far_as_the_limit(value: Any, limit: int) -> None:
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
def test_wrong_batch_lines_are_refused(name: str) -> None:
    data = LINES[name]()
    with bounded(64), pytest.raises(BadBatch) as refused:
        read_lines(io.BytesIO(data), None, "the body")
    assert 1 <= len(refused.value.complaints) <= 20


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
def test_a_hostile_front_matter_is_refused_or_read_as_plain_lines(name: str) -> None:
    with bounded(24):
        try:
            assert parse_skill(f"---\nname: a\ndescription: b\n{FRONTS[name]}\n---\n", "a").name == "a"
        except SkillBroken:
            return


def test_a_stream_of_events_ends_at_its_limit() -> None:
    reader = ReplyReader("weather", 7, is_stream=True)
    event = b'data: {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}\n\n'
    with bounded(64), pytest.raises(ToolFailure) as refused:
        collections.deque(map(reader.take, [event] * 20_000), maxlen=0)
    assert refused.value.code is ErrorCode.HTTP_ERROR


def test_an_endless_line_of_a_stream_takes_linear_time() -> None:
    reader = ReplyReader("weather", 7, is_stream=True)
    with bounded(64):
        for _ in range(4 * 1024):
            assert not reader.take(b"x" * 1024)
