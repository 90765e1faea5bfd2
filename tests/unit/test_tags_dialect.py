"""The tags dialect: calls, results, and a grammar whose calls the parser reads as exactly those calls."""

import re
from random import Random
from typing import Any

import pytest

from contract.calls import ToolResult
from contract.schema import prepare_arguments
from contract.specs import ToolSpec
from orchestrator.dialects.base import CallRequested, Event, MalformedCall, ReplyEnd, Text
from orchestrator.dialects.profiles import STANDARD, ModelProfile
from orchestrator.dialects.tag_events import TagCall, TagEvent
from orchestrator.dialects.tag_gbnf import build_tag_grammar, is_spellable
from orchestrator.dialects.tag_parser import TagStreamParser
from orchestrator.dialects.tag_values import decode_attribute, strip_body
from orchestrator.dialects.tags import TagsDialect
from tests.builders import build_spec
from tests.gbnf_sampler import Grammar

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


RICH = build_spec(
    "rich_tool",
    properties={
        "query": {"type": "string", "minLength": 1},
        "note": {"type": "string"},
        "mode": {"enum": ["a b", 'say "hi"', "<tool_action>", "1 & 2\n3", 7, None]},
        "kind": {"const": "fixed"},
        "count": {"type": "integer"},
        "from": {"type": "integer", "minimum": 1},
        "share": {"type": ["number", "null"]},
        "is_deep": {"type": "boolean"},
        "names": {"type": "array"},
        "extra": {"type": "object"},
        "anything": {},
        "not spellable": {"type": "string"},
    },
    required=["query", "mode", "is_deep"],
)
PLAIN = build_spec(
    "plain_tool", properties={"first": {"type": "string"}, "second": {"type": "string"}}, required=["second"]
)
BARE = build_spec("bare_tool", properties={})
ODD = build_spec("odd \"<&>' name\n\\", properties={"值": {"type": "string"}}, required=["值"])
ALL = [RICH, PLAIN, BARE, ODD]
SAMPLES = 400

_CHILD = re.compile(r'<([^\s/>=<"\'!?&]+) value="([^"]*)" />|<([^\s/>=<"\'!?&]+)>((?:(?!</).)*)</\3>', re.DOTALL)


def read_text(text: str) -> list[TagEvent]:
    parser = TagStreamParser()
    return [*parser.feed(text), *parser.finish()]


def read_by_hand(call: str) -> dict[str, str]:
    """Return the parameters of a call in the grammar's two forms of a child, without use of the parser."""
    body = call[call.index(">") + 1 : call.rindex("</tool_action>")]
    matches = list(_CHILD.finditer(body))
    assert "".join(child[0] for child in matches) == body
    return {
        child[1] or child[3]: decode_attribute(child[2], '"') if child[1] else strip_body(child[4]) for child in matches
    }


@pytest.mark.parametrize(("index", "spec"), list(enumerate(ALL)), ids=["rich", "plain", "bare", "odd"])
def test_every_call_of_the_grammar_is_read_as_that_call(index: int, spec: ToolSpec) -> None:
    grammar, random = Grammar(build_tag_grammar(ALL)), Random(index)
    for _ in range(SAMPLES):
        written = grammar.sample(random, f"call-{index}")
        arguments = read_by_hand(written)
        assert read_text(written) == [TagCall(spec.name, arguments, written)]
        assert set(spec.parameters["required"]) <= set(arguments)  # type: ignore[arg-type]


def test_values_fit_their_type() -> None:
    grammar, random = Grammar(build_tag_grammar([RICH])), Random(7)
    for _ in range(SAMPLES):
        (call,) = read_text(grammar.sample(random, "call-0"))
        assert isinstance(call, TagCall)
        # Between two tags text may be all line breaks, which are dropped; and enums of other types than text are not
        # read as text.
        prepare_arguments(RICH, {**call.arguments, "query": "x", "mode": "a b"}, text=True)


def test_without_tools_only_a_reply_can_be_written() -> None:
    assert build_tag_grammar([]) == "root ::= reply\nreply ::= [^<\\n] [^<]*\n"


def test_a_tool_with_a_required_parameter_that_no_tag_can_name_is_left_out() -> None:
    unfit = build_spec("unfit_tool", properties={"two words": {"type": "string"}}, required=["two words"])
    assert "unfit_tool" not in build_tag_grammar([unfit, PLAIN])


@pytest.mark.parametrize("name", ["", "two words", "a=b", "a/b", "<a", "a>", 'a"', "a&b", "tool_action", "a\nb"])
def test_these_names_cannot_be_written_in_a_tag(name: str) -> None:
    assert not is_spellable(name)


def test_an_enum_allows_its_values_and_no_others() -> None:
    spec = build_spec("pick", properties={"mode": {"enum": ["on", "off"]}}, required=["mode"])
    assert '("on" | "off")' in build_tag_grammar([spec])


def test_native_calls_win_from_there_on_and_what_ran_is_not_undone() -> None:
    native = {"index": 0, "id": "c", "function": {"name": "bash_tool", "arguments": "{}"}}
    events, _ = read(chunk(TAG), chunk("<tool_action na", tool_calls=[native]), chunk(TAG))
    assert [event.call.name for event in events if isinstance(event, CallRequested)] == ["read_tool", "bash_tool"]
    assert "".join(event.text for event in events if isinstance(event, Text)) == f"<tool_action na{TAG}"
