"""The tags dialect: the order of calls, and the format of results."""

from typing import Any

from contract.calls import ToolResult
from orchestrator.dialects.base import Event, MalformedCall, ReplyEnd
from orchestrator.dialects.profiles import STANDARD, ModelProfile
from orchestrator.dialects.tags import TagsDialect

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
