"""The native dialect: contents of the request, of the transcript and of the results' messages."""

import json
from typing import Any

import pytest

from contract.calls import ToolResult
from contract.specs import ToolSpec
from orchestrator.dialects.base import CallRequested, Event, MalformedCall, ReplyEnd, Text
from orchestrator.dialects.native import NativeDialect

SPEC = ToolSpec(
    name="bash_tool", description="Runs.", parameters={"type": "object", "properties": {"command": {"type": "string"}}}
)
TAG = '<tool_action name="read_tool"><path value="a" /></tool_action>'


def call(index: int, id: str, name: str = "bash_tool", arguments: str = '{"command": "ls"}') -> dict[str, Any]:
    return {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}


def chunk(
    *calls: dict[str, Any], content: str | None = None, finish: str | None = None, **fields: Any
) -> dict[str, Any]:
    body = {"tool_calls": list(calls)} if calls else {}
    return {"choices": [{"index": 0, "delta": {**body, "content": content}, "finish_reason": finish}], **fields}


def read(
    *chunks: dict[str, Any],
    dialect: NativeDialect | None = None,
    run: str = "r1",
    step: int = 2,
    reads_tags: bool = True,
) -> tuple[list[Event], ReplyEnd]:
    reader = (dialect or NativeDialect()).open_reader(run, step, reads_tags=reads_tags)
    events = [event for piece in chunks for event in reader.feed(piece)]
    last, end = reader.finish()
    return events + last, end


def result(name: str = "bash_tool", output: str = "out") -> ToolResult:
    return ToolResult(call_id="r1-2-0", name=name, success=True, output=output)


def test_tools_travel_in_the_request_and_not_in_the_system_prompt() -> None:
    dialect = NativeDialect()
    assert [tool["function"]["name"] for tool in dialect.build_request([], [SPEC]).tools] == ["bash_tool"]
    assert "bash_tool" not in dialect.build_system("Be brief.", [SPEC])


def test_without_tools_the_request_has_none() -> None:
    assert NativeDialect().build_request([], []).tools == []


def test_a_call_has_our_id_and_keeps_the_models_beside_it() -> None:
    [event], _ = read(chunk(call(0, "call:odd id!")))
    assert isinstance(event, CallRequested)
    assert (event.call.id, event.model_id) == ("r1-2-0", "call:odd id!")


def test_equal_ids_of_the_model_in_two_runs_give_different_calls() -> None:
    ids = [read(chunk(call(0, "call_1")), run=run)[0][0].call.id for run in ("r1", "r2")]  # type: ignore[union-attr]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("run", ["x" * 64, "läuft:7", ""])
def test_any_run_gives_an_id_that_fits_the_contract(run: str) -> None:
    [event], _ = read(chunk(call(0, "")), run=run)
    assert isinstance(event, CallRequested)
    assert len(event.model_id) <= 64


def test_the_transcript_message_carries_the_models_ids_and_arguments() -> None:
    _, end = read(chunk(call(0, "c1"), content="Let me look."))
    function = {"name": "bash_tool", "arguments": '{"command": "ls"}'}
    expected = [{"id": "c1", "type": "function", "function": function}]
    assert end.message == {"role": "assistant", "content": "Let me look.", "tool_calls": expected}


def test_a_reply_of_text_alone_has_no_tool_calls_field() -> None:
    _, end = read(chunk(content="Done."), chunk(finish="stop"))
    assert (end.message, end.text) == ({"role": "assistant", "content": "Done."}, "Done.")


def test_a_malformed_call_comes_between_its_valid_neighbours() -> None:
    events, _ = read(chunk(call(0, "a"), call(1, "b", arguments="{broken"), call(2, "c")))
    assert [type(event) for event in events] == [CallRequested, MalformedCall, CallRequested]


@pytest.mark.parametrize("raw", ["{broken", "[1]", "NaN"])
def test_a_malformed_call_stands_in_the_transcript_with_valid_arguments(raw: str) -> None:
    _, end = read(chunk(call(0, "a", arguments=raw)))
    assert json.loads(end.message["tool_calls"][0]["function"]["arguments"]) == {}


def test_a_name_that_no_server_takes_back_is_made_fit_in_the_transcript_only() -> None:
    [event], end = read(chunk(call(0, "a", name="functions.bash tool")))
    assert isinstance(event, CallRequested)
    assert event.call.name == "functions.bash tool"
    assert end.message["tool_calls"][0]["function"]["name"] == "functions_bash_tool"


def test_a_name_too_long_for_the_contract_is_malformed() -> None:
    [event], _ = read(chunk(call(0, "a", name="n" * 200)))
    assert isinstance(event, MalformedCall)


@pytest.mark.parametrize("last", ['{"command": "ls"}', '{"comma'])
def test_the_last_call_of_a_cut_reply_never_runs(last: str) -> None:
    events, end = read(chunk(call(0, "a"), call(1, "b", arguments=last)), chunk(finish="length"))
    assert [type(event) for event in events] == [CallRequested, MalformedCall]
    assert len(end.message["tool_calls"]) == 2


def test_a_cut_call_says_that_it_was_cut() -> None:
    events, _ = read(chunk(call(0, "a")), chunk(finish="length"))
    assert isinstance(events[-1], MalformedCall)
    assert "cut at the token limit" in events[-1].reason


def test_each_result_is_a_tool_message_under_the_models_id() -> None:
    [observation] = NativeDialect().build_observations([("c1", result(output="11"))])
    asking = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}],
    }
    assert NativeDialect().build_request([asking, observation], []).messages == [
        asking,
        {"role": "tool", "tool_call_id": "c1", "content": "11"},
    ]


def test_usage_is_what_the_server_counted() -> None:
    _, end = read(chunk(content="x"), {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (7, 2)


def test_a_tag_in_a_reply_without_native_calls_runs_at_its_end() -> None:
    reader = NativeDialect().open_reader("r", 1)
    assert reader.feed(chunk(content=f"a{TAG}b")) == [Text("a")]
    assert [type(event) for event in reader.finish()[0]] == [CallRequested, Text]


@pytest.mark.parametrize("later", ["", "<tool_action name="])
def test_tags_are_text_in_a_reply_with_native_calls(later: str) -> None:
    events, _ = read(chunk(content=f"a{TAG}b{later}"), chunk(call(0, "c")), chunk(content=TAG))
    assert "".join(event.text for event in events if isinstance(event, Text)) == f"a{TAG}b{later}{TAG}"
    assert [event.model_id for event in events if isinstance(event, CallRequested)] == ["c"]


def test_with_tag_parsing_off_tags_are_text() -> None:
    events, _ = read(chunk(content=TAG), reads_tags=False)
    assert events == [Text(TAG)]


def test_a_tag_result_under_the_native_dialect_is_sent_as_a_user_message() -> None:
    observations = NativeDialect().build_observations([("r1-2-0", result())])
    [message] = NativeDialect().build_request(observations, []).messages
    assert message["role"] == "user"


def test_short_ids_are_nine_alphanumerics_and_a_fitting_one_is_kept() -> None:
    events, end = read(
        chunk(call(0, "abcDEF123"), call(1, "call_much_too_long")), dialect=NativeDialect(short_ids=True)
    )
    ids = [entry["id"] for entry in end.message["tool_calls"]]
    assert ids[0] == "abcDEF123"
    assert len(ids[1]) == 9
    assert [event.model_id for event in events if isinstance(event, CallRequested)] == ids
