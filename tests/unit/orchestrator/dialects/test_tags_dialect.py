"""The tags dialect: calls, results, and a grammar whose calls the parser reads as exactly those calls."""

import re
from random import Random
from typing import Any

import pytest

from tests.support.models.gbnf_sampler import Grammar
from tests.support.records.builders import build_spec
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.schema import prepare_arguments
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import CallRequested, Event, MalformedCall, ReplyEnd, Text
from toolcrew.orchestrator.dialects.profiles import ModelProfile
from toolcrew.orchestrator.dialects.tag_events import TagCall, TagEvent
from toolcrew.orchestrator.dialects.tag_gbnf import build_tag_grammar, is_spellable
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser
from toolcrew.orchestrator.dialects.tag_values import decode_attribute, strip_body
from toolcrew.orchestrator.dialects.tags import TagsDialect

TAG = '<tool_action name="read_tool"><path value="a" /></tool_action>'


def chunk(content: str | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}]}


def read(*chunks: dict[str, Any], reads_tags: bool = True) -> tuple[list[Event], ReplyEnd]:
    reader = TagsDialect().open_reader("r1", 2, reads_tags=reads_tags)
    events = [event for piece in chunks for event in reader.feed(piece)]
    last, end = reader.finish()
    return events + last, end


def test_tags_stay_in_the_transcript_but_not_in_the_answer_text() -> None:
    _, end = read(chunk(f"a{TAG}b"))
    assert end.message == {"role": "assistant", "content": f"a{TAG}b"}
    assert end.text == "ab"


def test_unclosed_tag_is_malformed_with_advice() -> None:
    [event], _ = read(chunk('<tool_action name="write_tool"><content value="x'), chunk(finish="length"))
    assert isinstance(event, MalformedCall)
    assert event.reason.startswith(
        "Malformed tool_action (write_tool): unclosed, since the reply was cut at the token limit. Use <name value="
    )


def test_reasoning_field_is_never_searched_for_tags() -> None:
    assert read(chunk(reasoning_content=TAG))[0] == []


def test_result_hint_ends_the_message() -> None:
    dialect = TagsDialect(profile=ModelProfile("small", result_hint="Answer now."))
    result = ToolResult(call_id="r1-2-0", name="read_tool", success=True, output="1")
    observations = dialect.build_observations([("r1-2-0", result)])
    assert [message["role"] for message in observations] == ["tool"]
    [message] = dialect.build_request(observations, []).messages
    assert message["content"].endswith("1\n\nAnswer now.")


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
UNUSUAL = build_spec("odd \"<&>' name\n\\", properties={"值": {"type": "string"}}, required=["值"])
ALL = [RICH, PLAIN, BARE, UNUSUAL]
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
def test_every_call_of_the_grammar_is_parsed_exactly(index: int, spec: ToolSpec) -> None:
    grammar, random = Grammar(build_tag_grammar(ALL)), Random(index)
    for _ in range(SAMPLES):
        written = grammar.sample(random, f"call-{index}")
        arguments = read_by_hand(written)
        assert read_text(written) == [TagCall(spec.name, arguments, written)]
        assert set(spec.parameters["required"]) <= set(arguments)  # type: ignore[arg-type]


def test_values_of_the_grammar_match_their_types() -> None:
    grammar, random = Grammar(build_tag_grammar([RICH])), Random(7)
    for _ in range(SAMPLES):
        (call,) = read_text(grammar.sample(random, "call-0"))
        assert isinstance(call, TagCall)
        # Between two tags text may be all line breaks, which are dropped; and enums of other types than text are not
        # read as text.
        prepare_arguments(RICH, {**call.arguments, "query": "x", "mode": "a b"}, text=True)


def test_grammar_without_tools_allows_only_text() -> None:
    assert build_tag_grammar([]) == "root ::= reply\nreply ::= [^<\\n] [^<]*\n"


def test_tool_with_an_unspellable_required_parameter_is_not_in_the_grammar() -> None:
    unspellable = build_spec("unfit_tool", properties={"two words": {"type": "string"}}, required=["two words"])
    assert "unfit_tool" not in build_tag_grammar([unspellable, PLAIN])


@pytest.mark.parametrize("name", ["", "two words", "a=b", "a/b", "<a", "a>", 'a"', "a&b", "tool_action", "a\nb"])
def test_unspellable_names_are_detected(name: str) -> None:
    assert not is_spellable(name)


def test_enum_allows_only_its_values_in_the_grammar() -> None:
    spec = build_spec("pick", properties={"mode": {"enum": ["on", "off"]}}, required=["mode"])
    assert '("on" | "off")' in build_tag_grammar([spec])


def test_tags_after_a_native_call_are_text() -> None:
    native = {"index": 0, "id": "c", "function": {"name": "bash_tool", "arguments": "{}"}}
    events, _ = read(chunk(TAG), chunk("<tool_action na", tool_calls=[native]), chunk(TAG))
    assert [event.call.name for event in events if isinstance(event, CallRequested)] == ["read_tool", "bash_tool"]
    assert "".join(event.text for event in events if isinstance(event, Text)) == f"<tool_action na{TAG}"
