"""The native dialect: contents of the request, of the transcript and of the results' messages."""

import json
from typing import Any

import pytest

from toolcrew.orchestrator.dialects.base import CallRequested, Event, MalformedCall, ReplyEnd, Text
from toolcrew.orchestrator.dialects.native import NativeDialect

TAG = '<tool_action name="read_tool"><path value="a" /></tool_action>'


def call(index: int, id: str, name: str = "bash_tool", arguments: str = '{"command": "ls"}') -> dict[str, Any]:
    return {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}


def chunk(
    *calls: dict[str, Any], content: str | None = None, finish: str | None = None, **fields: Any
) -> dict[str, Any]:
    body = {"tool_calls": list(calls)} if calls else {}
    return {"choices": [{"index": 0, "delta": {**body, "content": content}, "finish_reason": finish}], **fields}


def read(
    *chunks: dict[str, Any], dialect: NativeDialect | None = None, run: str = "r1"
) -> tuple[list[Event], ReplyEnd]:
    reader = (dialect or NativeDialect()).open_reader(run, 2)
    events = [event for piece in chunks for event in reader.feed(piece)]
    last, end = reader.finish()
    return events + last, end


@pytest.mark.parametrize("run", ["x" * 64, "läuft:7", ""])
def test_generated_model_id_has_at_most_64_characters(run: str) -> None:
    [event], _ = read(chunk(call(0, "")), run=run)
    assert isinstance(event, CallRequested)
    assert len(event.model_id) <= 64


def test_call_gets_its_own_id_and_the_transcript_keeps_the_models_id() -> None:
    [_, event], end = read(chunk(call(0, "call:odd id!"), content="Let me look."))
    assert isinstance(event, CallRequested)
    assert (event.call.id, event.model_id) == ("r1-2-0", "call:odd id!")
    function = {"name": "bash_tool", "arguments": '{"command": "ls"}'}
    expected = [{"id": "call:odd id!", "type": "function", "function": function}]
    assert end.message == {"role": "assistant", "content": "Let me look.", "tool_calls": expected}


@pytest.mark.parametrize("raw", ["{broken", "[1]", "NaN"])
def test_malformed_call_has_empty_arguments_in_the_transcript(raw: str) -> None:
    events, end = read(chunk(call(0, "a"), call(1, "b", arguments=raw), call(2, "c")))
    assert [type(event) for event in events] == [CallRequested, MalformedCall, CallRequested]
    assert json.loads(end.message["tool_calls"][1]["function"]["arguments"]) == {}


def test_invalid_tool_name_is_replaced_only_in_the_transcript() -> None:
    [event, too_long], end = read(chunk(call(0, "a", name="functions.bash tool"), call(1, "b", name="n" * 200)))
    assert isinstance(event, CallRequested)
    assert event.call.name == "functions.bash tool"
    assert end.message["tool_calls"][0]["function"]["name"] == "functions_bash_tool"
    assert isinstance(too_long, CallRequested)
    assert len(too_long.call.name) < 200
    assert end.message["tool_calls"][1]["function"]["name"] == "n" * 64


@pytest.mark.parametrize("last", ['{"command": "ls"}', '{"comma'])
def test_last_call_of_a_cut_reply_is_malformed(last: str) -> None:
    (first, cut), end = read(chunk(call(0, "a"), call(1, "b", arguments=last)), chunk(finish="length"))
    assert isinstance(first, CallRequested)
    assert isinstance(cut, MalformedCall)
    assert "cut at the token limit" in cut.reason
    assert len(end.message["tool_calls"]) == 2


def test_text_reply_has_no_calls_and_reports_usage() -> None:
    counted = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    _, end = read(chunk(content="Done."), chunk(finish="stop"), counted)
    assert end.message == {"role": "assistant", "content": "Done."}
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (7, 2)


def test_tag_in_a_reply_without_native_calls_is_a_call_at_the_end() -> None:
    reader = NativeDialect().open_reader("r", 1)
    assert reader.feed(chunk(content=f"a{TAG}b")) == [Text("a")]
    assert [type(event) for event in reader.finish()[0]] == [CallRequested, Text]


@pytest.mark.parametrize("later", ["", "<tool_action name="])
def test_tags_are_text_in_a_reply_with_native_calls(later: str) -> None:
    events, _ = read(chunk(content=f"a{TAG}b{later}"), chunk(call(0, "c")), chunk(content=TAG))
    assert "".join(event.text for event in events if isinstance(event, Text)) == f"a{TAG}b{later}{TAG}"
    assert [event.model_id for event in events if isinstance(event, CallRequested)] == ["c"]


def test_short_ids_are_nine_alphanumerics() -> None:
    events, end = read(
        chunk(call(0, "abcDEF123"), call(1, "call_much_too_long")), dialect=NativeDialect(short_ids=True)
    )
    ids = [entry["id"] for entry in end.message["tool_calls"]]
    assert ids[0] == "abcDEF123"
    assert len(ids[1]) == 9
    assert [event.model_id for event in events if isinstance(event, CallRequested)] == ids
