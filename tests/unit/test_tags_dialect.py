"""The tags dialect: the order of calls, and the format of results."""

from typing import Any

from contract.calls import ToolResult
from contract.specs import ToolSpec
from orchestrator.dialects.base import CallRequested, Event, MalformedCall, ReplyEnd, Text
from orchestrator.dialects.profiles import STANDARD, ModelProfile
from orchestrator.dialects.tags import TagsDialect

SPEC = ToolSpec(
    name="bash_tool", description="Runs.", parameters={"type": "object", "properties": {"command": {"type": "string"}}}
)
TAG = '<tool_action name="read_tool"><path value="a" /></tool_action>'


def chunk(content: str | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}]}


def read(*chunks: dict[str, Any], reads_tags: bool = True) -> tuple[list[Event], ReplyEnd]:
    reader = TagsDialect().open_reader("r1", 2, reads_tags=reads_tags)
    events = [event for piece in chunks for event in reader.feed(piece)]
    last, end = reader.finish()
    return events + last, end


def result(output: str = "out", call_id: str = "r1-2-0") -> ToolResult:
    return ToolResult(call_id=call_id, name="read_tool", success=True, output=output)


def test_the_system_prompt_describes_the_tools_and_the_request_has_none() -> None:
    dialect = TagsDialect()
    assert "bash_tool: Runs." in dialect.build_system("Be brief.", [SPEC])
    assert dialect.build_request([], [SPEC]).tools == []


def test_a_call_comes_as_soon_as_its_tag_is_complete() -> None:
    [event] = TagsDialect().open_reader("r1", 2).feed(chunk(TAG))
    assert isinstance(event, CallRequested)
    assert (event.call.id, event.call.arguments, event.raw) == ("r1-2-0", {"path": "a"}, TAG)


def test_the_transcript_keeps_the_tags_and_the_answer_text_does_not() -> None:
    _, end = read(chunk(f"a{TAG}b"))
    assert end.message == {"role": "assistant", "content": f"a{TAG}b"}
    assert end.text == "ab"


def test_an_unclosed_tag_is_malformed_and_reports_how_to_write_it() -> None:
    [event], _ = read(chunk('<tool_action name="write_tool"><content value="x'), chunk(finish="length"))
    assert isinstance(event, MalformedCall)
    assert event.reason.startswith(
        "Malformed tool_action (write_tool): unclosed, since the reply was cut at the token limit. Use <name value="
    )


def test_the_reasoning_field_is_never_searched() -> None:
    assert read(chunk(reasoning_content=TAG))[0] == []


def test_native_calls_win_from_there_on_and_what_ran_is_not_undone() -> None:
    native = {"index": 0, "id": "c", "function": {"name": "bash_tool", "arguments": "{}"}}
    events, _ = read(chunk(TAG), chunk("<tool_action na", tool_calls=[native]), chunk(TAG))
    assert [event.call.name for event in events if isinstance(event, CallRequested)] == ["read_tool", "bash_tool"]
    assert "".join(event.text for event in events if isinstance(event, Text)) == f"<tool_action na{TAG}"


def sent(*results: ToolResult, profile: ModelProfile = STANDARD) -> Any:
    """Return the message that the model gets for these results."""
    dialect = TagsDialect(profile=profile)
    observations = dialect.build_observations([(finished.call_id, finished) for finished in results])
    assert [message["role"] for message in observations] == ["tool"] * len(results)
    [message] = dialect.build_request(observations, []).messages
    return message


def test_a_closing_hint_ends_the_message() -> None:
    profile = ModelProfile("small", result_hint="Answer now.")
    assert sent(result("1"), profile=profile)["content"].endswith("1\n\nAnswer now.")
