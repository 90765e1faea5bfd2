"""Every quirk that native_assembler.py lists, and the error forms of argument strings."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.orchestrator.dialects import native_fragments
from toolcrew.orchestrator.dialects.base import Text
from toolcrew.orchestrator.dialects.native import NativeCallAssembler, NativeReply
from toolcrew.orchestrator.dialects.native_fragments import is_object


def delta(*entries: Any, content: str | None = None, finish: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if entries:
        body["tool_calls"] = list(entries)
    if content is not None:
        body["content"] = content
    return {"choices": [{"index": 0, "delta": body, "finish_reason": finish}]}


def entry(index: Any = ..., id: Any = ..., name: Any = ..., arguments: Any = ...) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not ...}
    fields = {key: value for key, value in (("index", index), ("id", id)) if value is not ...}
    return {**fields, "function": function} if function else fields


def assemble(*chunks: dict[str, Any], strict: bool = True) -> NativeReply:
    assembler = NativeCallAssembler("run", 3)
    for chunk in chunks:
        assembler.feed(chunk)
    return assembler.finish(strict)


def calls(*entries: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the calls of a reply with one entry per delta."""
    return [(call.id, call.name, call.arguments) for call in assemble(*(delta(item) for item in entries)).calls]


A = ("a", "one", {"x": 1})
B = ("b", "two", {"y": 2})


ASSEMBLED: dict[str, tuple[list[Any], list[Any]]] = {
    "fragments interleaved by index": (
        [
            entry(0, "a", "one", '{"x"'),
            entry(1, "b", "two", '{"y"'),
            entry(0, arguments=":1}"),
            entry(1, arguments=":2}"),
        ],
        [A, B],
    ),
    "indices with gaps": ([entry(5, "b", "two", '{"y":2}'), entry(1, "a", "one", '{"x":1}'), entry(3)], [A, B]),
    "a new id and name at a used index": (
        [entry(0, "a", "one", '{"x":1}'), entry(0, "b", "two"), entry(0, arguments='{"y":2}')],
        [A, B],
    ),
    "two calls at one index": (
        [
            entry(0, "a", "one", '{"x"'),
            entry(0, "b", "two", '{"y"'),
            entry(0, "a", "one", ":1}"),
            entry(0, "b", arguments=":2}"),
        ],
        [A, B],
    ),
    "repeated ids and names": (
        [entry(0, "a", "one", '{"x"'), entry(0, "a", "one", ":1"), entry(0, "a", "one", "}")],
        [A],
    ),
    "an index that appears later": ([entry(id="a", name="one"), entry(0, arguments='{"x":1}')], [A]),
    "another id without a name": ([entry(0, "a", "one"), entry(0, "zzz", arguments='{"x":1}')], [A]),
    "an empty id and name": ([entry(0, "a", "one"), entry(0, "", "", '{"x":1}')], [A]),
    "no id and name": ([entry(0, "a", "one"), entry(0, None, None, '{"x":1}')], [A]),
    "an index given as text": ([entry("1", "b", "two", '{"y":2}'), entry("0", "a", "one", '{"x":1}')], [A, B]),
    "fragments of a name": ([entry(0, "a", "o"), entry(0, name="ne"), entry(0, arguments='{"x":1}')], [A]),
    **{
        f"a known id with index {index}": (
            [
                entry(index, "a", "one", '{"x"'),
                entry(index, "b", "two", '{"y"'),
                entry(index, "a", arguments=":1}"),
                entry(index, "b", arguments=":2}"),
            ],
            [A, B],
        )
        for index in (..., None)
    },
    "arguments sent as an object": ([entry(0, "a", "one", {"x": 1}), entry(0, "a", "one", {"x": 1})], [A]),
    "all arguments again at the end": ([entry(0, "a", "one", ""), entry(0, arguments='{"x":1}'), entry(0, arguments='{"x": 1}')], [A]),
    "an empty object before the fragments": ([entry(0, "a", "one", "{}"), entry(0, arguments='{"x"'), entry(0, arguments=":1}")], [A]),
    "null before the fragments": ([entry(0, "a", "one", "null"), entry(0, arguments='{"x":1}')], [A]),
    "an empty object at the end": ([entry(0, "a", "one", '{"x":1}'), entry(0, arguments="{}")], [A]),
    "an index that counts fragments": ([entry(0, "a", "one", '{"x"'), entry(1, "a", arguments=":1}")], [A]),
    "an index that counts fragments without an id": ([entry(0, "a", "one"), entry(1, arguments='{"x"'), entry(2, arguments=":1}")], [A]),
    "a call at index 0 whose arguments are at index 1": (
        [entry(0, "a", "one", '{"x"'), entry(0, arguments=":1}"), entry(0, "b", "two"), entry(1, arguments='{"y"'), entry(1, arguments=":2}")],
        [A, B],
    ),
    "arguments before the id and the name": ([entry(0, "a", "one", '{"x":1}'), entry(1, arguments='{"y":2}'), entry(1, "b", "two")], [A, B]),
    "a name and arguments outside of a function": ([{"index": 0, "id": "a", "name": "one", "arguments": '{"x":1}'}], [A]),
    "an object in a JSON string": ([entry(0, "a", "one", json.dumps('{"x":1}'))], [A]),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "expected"), ASSEMBLED.values(), ids=ASSEMBLED)
def test_tool_call_entries_are_assembled(entries: list[Any], expected: list[Any]) -> None:
    assert calls(*entries) == expected


def test_two_entries_of_one_index_in_one_delta_are_merged() -> None:
    reply = assemble(delta(entry(0, "a", "one", ""), entry(0, arguments='{"x":1}')))
    assert [(call.id, call.name, call.arguments) for call in reply.calls] == [A]


def test_entry_without_index_starts_or_continues_a_call() -> None:
    assembled = calls(entry(id="a", name="one"), entry(arguments='{"x":1}'), entry(name="two", arguments='{"y":2}'))
    assert [call[1:] for call in assembled] == [A[1:], B[1:]]


def test_call_without_a_unique_id_gets_one_from_run_step_and_position() -> None:
    [first, second] = calls(entry(0, name="one"), entry(1, name="two"))
    assert "run-3-0" in first[0]
    assert "run-3-1" in second[0]
    ids = [call[0] for call in calls(entry(0, "same", "one"), entry(1, "same", "two"))]
    assert ids[0] == "same" != ids[1]


@pytest.mark.parametrize("arguments", ["", "  \n", None, ..., "null", "None", "[]", [], '""'])
def test_absent_arguments_are_an_empty_object(arguments: Any) -> None:
    assert calls(entry(0, "a", "one", arguments)) == [("a", "one", {})]


@pytest.mark.parametrize("index", [0, ..., None])
@pytest.mark.parametrize("id", [None, "", ...])
@pytest.mark.parametrize("is_one_delta", [True, False])
def test_whole_calls_of_one_tool_without_ids_are_several_calls(index: Any, id: Any, is_one_delta: bool) -> None:
    entries = [entry(index, id, "one", '{"x":1}'), entry(index, id, "one", '{"x":2}')]
    reply = assemble(delta(*entries)) if is_one_delta else assemble(*map(delta, entries))
    assert [(call.name, call.arguments) for call in reply.calls] == [("one", {"x": 1}), ("one", {"x": 2})]


@pytest.mark.parametrize("field", ["function_call", "tool_calls"])
def test_a_single_call_that_is_no_list_counts(field: str) -> None:
    function = {"name": "one", "arguments": '{"x":1}'}
    call = function if field == "function_call" else {"id": "a", "function": function}
    reply = assemble({"choices": [{"index": 0, "delta": {field: call}}]})
    assert [(call.name, call.arguments) for call in reply.calls] == [A[1:]]


def test_a_call_in_both_fields_counts_once() -> None:
    function = {"name": "one", "arguments": '{"x":1}'}
    both = {"tool_calls": [{"index": 0, "id": "a", "function": function}], "function_call": function}
    assert [call.arguments for call in assemble({"choices": [{"delta": both}]}).calls] == [{"x": 1}]


@pytest.mark.parametrize("raw", ['{"x": "a\n\tb\x00"}', '{\n "x": "a\\n\\tb\\u0000"}'])
def test_control_characters_in_texts_stand_for_themselves(raw: str) -> None:
    [call] = assemble(delta(entry(0, "a", "one", raw))).calls
    assert call.arguments == {"x": "a\n\tb\x00"}
    # The next request contains plain JSON.
    assert json.loads(call.raw) == call.arguments


BROKEN = [
    '{"x":1}' * 20,
    '{"x":1}{"x":1}{"x"',
    "{}[1]",
    '{"x": 1',
    '{"x":1}{"y":2}',
    '{"x": NaN}',
    '{"x": -Infinity}',
    '{"x": 1e999}',
    "[1]",
    '"text"',
    "7",
    "{'x': 1}",
    "[" * 100_000,
]


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: raw[:12])
def test_broken_arguments_raise_or_are_listed_as_malformed(raw: str) -> None:
    both = delta(entry(0, "a", "one", '{"x":1}'), entry(1, "b", "two", raw))
    with pytest.raises(ValueError) as caught:
        assemble(both)
    assert "two" in str(caught.value)
    assert raw in str(caught.value)
    reply = assemble(both, strict=False)
    assert [call.name for call in reply.calls] == ["one"]
    assert [(call.name, call.raw) for call in reply.malformed] == [("two", raw)]


def test_a_call_without_a_name_is_malformed() -> None:
    with pytest.raises(ValueError, match="no tool name"):
        assemble(delta(entry(0, "a", arguments='{"x":1}')))


@pytest.mark.parametrize("reason", ["stop", "end_turn", "tool_calls", "length", None])
def test_calls_count_for_any_finish_reason(reason: str | None) -> None:
    reply = assemble(delta(entry(0, "a", "one", "{}")), delta(finish=reason))
    assert (len(reply.calls), reply.finish_reason) == (1, reason)


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": []},
        {"choices": None, "usage": {}},
        {"choices": [{"index": 0}]},
        {"choices": [{"delta": None}]},
        {"choices": [7]},
    ],
)
def test_chunks_without_a_delta_are_skipped(chunk: dict[str, Any]) -> None:
    assert NativeCallAssembler().feed(chunk) == []


@pytest.mark.parametrize("invalid_entry", [None, 7, "x", [], {"index": True}, {"function": "x"}])
def test_invalid_tool_call_entries_are_skipped(invalid_entry: Any) -> None:
    assert assemble(delta(invalid_entry)).calls == []


def test_surrogate_halves_from_separate_deltas_are_joined() -> None:
    assembler = NativeCallAssembler()
    events = assembler.feed(delta(content="a\ud83d")) + assembler.feed(delta(content="\ude00b"))
    assert events == [Text("a"), Text("\U0001f600b")]


def test_ids_and_finish_reasons_have_no_lone_surrogates() -> None:
    reply = assemble(delta(entry(0, "\ud83d", "o\ude00", "{}")), delta(finish="\ud83d"))
    (reply.calls[0].id + reply.calls[0].name + (reply.finish_reason or "")).encode()


def test_deeply_nested_argument_object_is_malformed() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"x": nested}
    [call] = assemble(delta(entry(0, "a", "one", nested)), strict=False).malformed
    assert call.name == "one"
    while nested:  # Freed level by level: all at once would end the interpreter's stack on some versions.
        nested = nested["x"]


@pytest.mark.parametrize("kind", ["arguments", "calls", "names"])
def test_assembling_takes_linear_time(kind: str) -> None:
    first = {
        "arguments": entry(0, arguments="0123456789abcdef"),
        "calls": entry(name="one"),
        "names": entry(0, name="0123456789abcdef"),
    }[kind]

    def seconds(count: int) -> float:
        assembler, chunk = NativeCallAssembler(), delta(first)
        started = time.process_time()
        for _ in range(count):
            assembler.feed(chunk)
        return time.process_time() - started

    small, large = (min(seconds(count) for _ in range(2)) for count in (2_000, 16_000))
    # Linear is 8, a square 64.
    assert large < 24 * small


def test_lone_surrogate_is_replaced() -> None:
    reply = assemble(
        delta(entry(0, "a", "one", '{"x":"\ud83d'), content="\ud83d"), delta(entry(0, arguments='\ude00\\ud83d"}'))
    )
    assert (reply.text, reply.calls[0].arguments) == ("\ufffd", {"x": "\U0001f600\ufffd"})


def test_the_text_of_a_call_is_parsed_once_however_often_its_id_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_chars = 0

    def count(text: str) -> bool:
        nonlocal parsed_chars
        parsed_chars += len(text)
        return is_object(text)

    monkeypatch.setattr(native_fragments, "is_object", count)
    long = json.dumps({"a": "x" * 100_000})
    texts = [long, *(json.dumps({"a": number}) for number in range(100))]
    assert len(calls(*(entry(0, "c1", "t", text) for text in texts))) == len(texts)
    assert parsed_chars < 2 * sum(map(len, texts))


JSON = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53), 2**53),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    ),
    max_size=4,
)


@given(st.lists(JSON, min_size=1, max_size=4), st.integers(1, 9), st.booleans(), st.randoms())
def test_calls_are_assembled_from_any_split(
    expected: list[dict[str, Any]], size: int, ascii_only: bool, random: Any
) -> None:
    queues = []
    for index, arguments in enumerate(expected):
        raw = json.dumps(arguments, ensure_ascii=ascii_only)
        fragments = [entry(index, arguments=raw[start : start + size]) for start in range(0, len(raw), size)]
        queues.append([entry(index, f"id{index}", f"tool{index}"), *fragments])
    chunks = []
    while queue := random.choice(queues) if (queues := [queue for queue in queues if queue]) else None:
        chunks.append(delta(queue.pop(0)))
    assert [call.arguments for call in assemble(*chunks).calls] == expected
