"""Invariants of the tag parser for every input: no text is lost, chunks do not matter, calls survive the round trip,
and the time is linear.
"""

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.dialects.tags import Malformed, TagCall, TagEvent, TagStreamParser, Text, build_tag_call

PIECES = [
    "<tool_action", ' name="t"', " name='u'", ">", "/>", "<v", ' value="', " value='", '"', "'", "</v>", "</tool_action>", "</tool_action", "<",
    "/", "=", " ", "\n", "\r\n", "<![CDATA[", "]]>", "]", "<!--", "-->", "-", "!", "{", "&quot;", "&#", "x", "<w", "</w>", "<think>", "</think>",
    "```", "~~~", "tool_action", "word=", "中", "\ud800",
]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
OPTIONS = st.sampled_from([{}, {"ignore_fenced": True}, {"max_tag_chars": 70}])
NAMES = st.text(
    st.characters(exclude_characters=" \t\r\n/>=<\"'!?&", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda name: name != "tool_action")
VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def parse(chunks: list[str], options: dict[str, object]) -> list[TagEvent]:
    parser = TagStreamParser(**options)  # type: ignore[arg-type]
    result: list[TagEvent] = []
    for event in [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish():
        if isinstance(event, Text) and result and isinstance(result[-1], Text):
            result[-1] = Text(result[-1].text + event.text)
        else:
            result.append(event)
    return result


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@settings(max_examples=400)
@given(HOSTILE, OPTIONS)
def test_text_and_raws_are_the_input(text: str, options: dict[str, object]) -> None:
    events = parse([text], options)
    assert "".join(event.text if isinstance(event, Text) else event.raw for event in events) == text


@settings(max_examples=400)
@given(HOSTILE, st.lists(st.integers(0, 10_000), max_size=12), OPTIONS)
def test_events_do_not_depend_on_the_chunks(text: str, places: list[int], options: dict[str, object]) -> None:
    assert parse(cut(text, places), options) == parse([text], options)


@given(HOSTILE, OPTIONS)
def test_single_characters_give_the_same_events(text: str, options: dict[str, object]) -> None:
    assert parse(list(text), options) == parse([text], options)


@given(st.text(max_size=60))
def test_at_most_twelve_characters_of_text_are_held(text: str) -> None:
    parser = TagStreamParser()
    shown = sum(
        len(event.text if isinstance(event, Text) else event.raw)
        for character in text
        for event in parser.feed(character)
    )
    assert "<tool_action" in text or len(text) - shown <= 12


@given(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), VALUES)
def test_a_written_call_is_read_back(name: str, arguments: dict[str, str], around: str) -> None:
    before, after = around.replace("<", "("), around
    calls = [
        event for event in parse([before + build_tag_call(name, arguments) + after], {}) if isinstance(event, TagCall)
    ]
    assert (calls[0].name, calls[0].arguments) == (name, arguments)


# A carriage return before the line break that ends the body belongs to that break.
@given(NAMES, VALUES.filter(lambda value: "<" not in value and not value.endswith("\r")))
def test_a_paired_body_is_read_back(name: str, value: str) -> None:
    [call] = parse([f'<tool_action name="t"><{name}>\n{value}\n</{name}></tool_action>'], {})
    assert isinstance(call, TagCall)
    assert call.arguments == {name: value}


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_a_call_that_is_cut_short_never_runs(arguments: dict[str, str], data: st.DataObject) -> None:
    whole = build_tag_call("t", arguments)
    end = data.draw(st.integers(len('<tool_action name="t">'), len(whole) - 1))
    assert [type(event) for event in parse([whole[:end]], {})] == [Malformed]


def test_time_grows_with_the_input_and_not_with_its_square() -> None:
    streams = {
        "open value": ('<tool_action name="t"><v value="', "x"),
        "quotes in a value": ('<tool_action name="t"><v value="', '" '),
        "closing tags in a body": ('<tool_action name="t"><v>', "</v>"),
        "blanks in a header": ("<tool_action", " "),
        "long name": ('<tool_action name="t"><', "n"),
        "mentions": ("", "<tool_action tag "),
        "skipping": ('<tool_action name="t">{', "</tool_actio "),
    }
    for head, unit in streams.values():
        small, large = _seconds(head + unit * 10_000), _seconds(head + unit * 80_000)
        # Linear is 8; a square would be 64. The wide gap is for busy machines.
        assert large < 30 * small


def _seconds(text: str) -> float:
    chunks = [text[start : start + 5] for start in range(0, len(text), 5)]
    times = []
    for _ in range(2):
        parser = TagStreamParser()
        started = time.process_time()
        for chunk in chunks:
            parser.feed(chunk)
        times.append(time.process_time() - started)
    return min(times)
