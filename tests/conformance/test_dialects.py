"""The contract of every dialect: ReplyReader and Dialect."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import CallRequested, Dialect, Event, MalformedCall, ReplyEnd, Text
from toolcrew.orchestrator.dialects.json_decision import JsonDecisionDialect
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.prompt_json import PromptJsonDialect
from toolcrew.orchestrator.dialects.tags import TagsDialect, build_tag_call
from toolcrew.orchestrator.models.scripted import Calls, Reply, ScriptedModel

SPEC = ToolSpec(name="t", description="Does t.", parameters={"type": "object", "properties": {"x": {"type": "string"}}})


@dataclass(frozen=True)
class Speaker:
    """A dialect, and the valid and invalid texts of a model that uses the dialect."""

    dialect: Dialect
    call: Callable[[str, dict[str, str]], Reply]
    broken: Reply
    answer: Callable[[str], str] = str


def decision(tool: str | None, **fields: Any) -> str:
    return json.dumps({"tool": tool, **fields}, ensure_ascii=False)


SPEAKERS = {
    "native": Speaker(
        NativeDialect(), lambda text, arguments: Calls([("t", dict(arguments))], text), Calls([("t", '{"x": ')])
    ),
    "tags": Speaker(
        TagsDialect(),
        lambda text, arguments: text + build_tag_call("t", arguments),
        '<tool_action name="t"><x value=1 /></tool_action>',
    ),
    "tags under native": Speaker(
        NativeDialect(), lambda text, arguments: text + build_tag_call("t", arguments), '<tool_action name="t"><x'
    ),
    "json": Speaker(
        JsonDecisionDialect(),
        lambda text, arguments: decision("t", arguments=arguments, reply=text or None),
        '{"tool": "t", "arguments": {"x": ',
        lambda text: decision(None, reply=text),
    ),
    "prompt_json": Speaker(
        PromptJsonDialect(),
        lambda text, arguments: text + decision("t", arguments=arguments),
        Calls([("t", '{"x": ')]),
    ),
}


@pytest.fixture(params=SPEAKERS)
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return SPEAKERS[request.param]


async def read(dialect: Dialect, reply: Reply, run: str = "run", step: int = 1) -> tuple[list[Event], ReplyEnd]:
    reader, events = dialect.open_reader(run, step), []
    async for chunk in ScriptedModel([reply]).stream(ModelRequest([])):
        events += reader.feed(chunk)
    last, end = reader.finish()
    return [*events, *last], end


async def test_text_precedes_the_call_that_follows_it(speaker: Speaker) -> None:
    events, _ = await read(speaker.dialect, speaker.call("Let me see. ", {"x": "1"}))
    assert "".join(event.text for event in events if isinstance(event, Text)) == "Let me see. "
    assert isinstance(events[-1], CallRequested)


async def test_a_call_has_name_and_arguments(speaker: Speaker) -> None:
    events, _ = await read(speaker.dialect, speaker.call("", {"x": 'a "b" <c>\n'}))
    [call] = [event.call for event in events if isinstance(event, CallRequested)]
    assert (call.name, call.arguments) == ("t", {"x": 'a "b" <c>\n'})


async def test_an_answer_without_calls_is_the_text_and_the_message(speaker: Speaker) -> None:
    written = speaker.answer("It is 11.")
    events, end = await read(speaker.dialect, written)
    assert "".join(event.text for event in events if isinstance(event, Text)) == end.text == "It is 11."
    assert (end.message["content"], end.message["role"]) == (written, "assistant")


async def test_call_ids_are_repeatable_and_differ_by_run_and_step(speaker: Speaker) -> None:
    ids = set()
    for run, step in (("a", 1), ("a", 1), ("a", 2), ("b", 1)):
        events, _ = await read(speaker.dialect, speaker.call("", {}), run, step)
        ids |= {event.call.id for event in events if isinstance(event, CallRequested)}
    assert len(ids) == 3


async def test_an_incomplete_call_is_a_malformed_call(speaker: Speaker) -> None:
    [event], _ = await read(speaker.dialect, speaker.broken)
    assert isinstance(event, MalformedCall)
    assert event.reason


async def test_every_call_and_every_malformed_call_can_be_answered(speaker: Speaker) -> None:
    for reply in (speaker.call("", {"x": "1"}), speaker.broken):
        events, end = await read(speaker.dialect, reply)
        reported_events = speaker.dialect.build_observations(
            [answered(event) for event in events if not isinstance(event, Text)]
        )
        messages = speaker.dialect.build_request([end.message, *reported_events], [SPEC]).messages
        call_ids = [entry["id"] for entry in end.message.get("tool_calls", [])]
        assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == call_ids


def answered(event: Event) -> tuple[str, ToolResult]:
    """Return a call with its result as the loop stores it: under the model's id, or under an id of the loop if the
    model gave none.
    """
    assert not isinstance(event, Text)
    call_id = event.call.id if isinstance(event, CallRequested) else event.call_id
    return event.model_id or call_id, ToolResult(call_id=call_id, name="t", success=True, output="out")


async def test_transcript_messages_are_plain_json(speaker: Speaker) -> None:
    _, end = await read(speaker.dialect, speaker.call("ü", {"x": "1"}))
    assert json.loads(json.dumps(end.message)) == end.message


def test_the_tools_are_either_in_the_system_prompt_or_in_the_request(speaker: Speaker) -> None:
    in_prompt = "Does t." in speaker.dialect.build_system("Be brief.", [SPEC])
    assert in_prompt is (speaker.dialect.build_request([], [SPEC]).tools == [])


def test_the_instruction_starts_the_system_prompt(speaker: Speaker) -> None:
    assert speaker.dialect.build_system("Be brief.", [SPEC]).startswith("Be brief.")


CONTENT = st.lists(
    st.sampled_from(
        ["text ", "<tool_action", ' name="t">', '<x value="1" />', "</tool_action>", "<", '"', "\ud83d", "\ude00", "ü"]
    )
)


@pytest.mark.parametrize(
    ("dialect", "reads_tags"),
    [(NativeDialect(), True), (TagsDialect(), True), (TagsDialect(), False)],
    ids=["native", "tags", "off"],
)
@given(contents=CONTENT)
def test_text_and_raw_events_add_up_to_the_model_output(
    dialect: Dialect, reads_tags: bool, contents: list[str]
) -> None:
    reader = dialect.open_reader("run", 1, reads_tags=reads_tags)
    events = [event for content in contents for event in reader.feed(_content(content))]
    last, end = reader.finish()
    assert (
        "".join(event.text if isinstance(event, Text) else event.raw for event in [*events, *last])
        == end.message["content"]
    )


def _content(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}
