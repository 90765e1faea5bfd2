"""The tag grammar, row by row, and the invariants of the parser for any input."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcrew.orchestrator.dialects.tags import MalformedTag, TagCall, TagEvent, TagStreamParser, Text, build_tag_call


def parse(text: str, **options: object) -> list[TagEvent]:
    parser = TagStreamParser(**options)  # type: ignore[arg-type]
    return merge_text([*parser.feed(text), *parser.finish()])


def merge_text(events: list[TagEvent]) -> list[TagEvent]:
    result: list[TagEvent] = []
    for event in events:
        if isinstance(event, Text) and result and isinstance(result[-1], Text):
            result[-1] = Text(result[-1].text + event.text)
        else:
            result.append(event)
    return result


def only_error(text: str) -> MalformedTag:
    [event] = [event for event in parse(text) if isinstance(event, MalformedTag)]
    return event


def tag(body: str) -> str:
    return f'<tool_action name="t">{body}</tool_action>'


SEARCH = '<tool_action name="vector-search">\n<query value="读取文件" />\n<limit value="5" />\n</tool_action>'


@pytest.mark.parametrize("length", range(1, 13))
def test_only_a_possible_marker_is_held_back(length: int) -> None:
    parser = TagStreamParser()
    parser.feed("x")
    assert parser.feed("text" + "<tool_action"[:length]) == [Text("text")]


@pytest.mark.parametrize(
    "text",
    [
        "use <tool_action tag to call", "<tool_actions>", "<tool_action> is the marker", "<tool_action/>",
        "<tool_action />", "<tool_action name=bash>", '<tool_action name="a\nb">', '<tool_action name="a"x="b">',
        '<tool_action name="a">hello', '<tool_action name="a"> < b', '<TOOL_ACTION name="a"/>',
    ],
)  # fmt: skip
def test_mention_of_a_tag_is_text(text: str) -> None:
    assert parse(text) == [Text(text)]


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ('<v value="a" />', "a"),
        ("<v value='a' />", "a"),
        ('<v value = "a"/>', "a"),
        ('<v\nvalue="a"\n/>', "a"),
        ('<v value="" />', ""),
        ("<v/>", ""),
        ("<v />", ""),
        ('<v value="{"a": 1}" />', '{"a": 1}'),
        ('<v value="say "hi"" />', 'say "hi"'),
        ('<v value="test"" />', "test"),
        ('<v value="a\r\n b" />', "a\r\n b"),
        ('<v value="</tool_action> /> <x" />', "</tool_action> /> <x"),
        ('<v value="a"/b" />', 'a"/b'),
        ('<v value="&lt;&gt;&amp;&quot;&apos;&#65;&#x4e2d;" />', "<>&\"'A中"),
        ('<v value="&amp;lt; &nbsp; && &#0; &#xD800;" />', "&lt; &nbsp; && &#0; &#xD800;"),
        (r'<v value="a\n\"b" />', r"a\n\"b"),
        ('<v value="a"></v>', "a"),
        ('<v value="a" > </v >', "a"),
        ("<v>a</v>", "a"),
        ("<v> \n a \n </v>", " a "),
        ("<v>\r\na\n\n</v>", "a\n"),
        ("<v></v>", ""),
        ("<v>\n</v>", ""),
        ('<v>&lt; "x" <b>y</b> </v> z</v>', '&lt; "x" <b>y</b> </v> z'),
        ("<v></v></v>", "</v>"),
        ("<v><![CDATA[</v></tool_action>]]]]></v>", "</v></tool_action>]]"),
        ("<v> <![CDATA[a]]> <![CDATA[b]]>\n</v>", "ab"),
        ("<v><![CDATA[a]]>b</v>", "<![CDATA[a]]>b"),
        ("<v>a</v><!-- </tool_action> -->", "a"),
    ],
)
def test_parameter_value_is_read_as_written(body: str, value: str) -> None:
    [event] = parse(tag(body))
    assert isinstance(event, TagCall)
    assert event.arguments == {"v": value}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('<v value="1" /><v value="2" />', "duplicate parameter 'v'"),
        ('<v value="1" /><v>2</v>', "duplicate parameter 'v'"),
        ('<v value="1" />junk', "unexpected text between parameters"),
        ("<!DOCTYPE>", "unexpected text between parameters"),
        ('<v value="1" other="2" />', "unexpected attribute 'other'"),
        ('<param name="x" value="y" />', "unexpected attribute 'name'"),
        ("<v value=1 />", "unquoted parameter value"),
        ("<v value />", "unquoted parameter value"),
        ('<v value="1">', "parameter tag is not self-closed"),
        ('<v value="1"></w>', "parameter tag is not self-closed"),
        ('<v value="1"><w value="2" />', "parameter tag is not self-closed"),
        ("</v>", "unexpected closing tag"),
    ],
)
def test_malformed_tag_body_is_one_error_with_its_reason(body: str, reason: str) -> None:
    error = only_error(f"before {tag(body)} after")
    assert (error.reason, error.name, error.raw) == (reason, "t", tag(body))


def test_json_body_is_refused_with_the_canonical_form() -> None:
    assert '<PARAMETER value="..." />' in only_error(tag('{"command": "ls"}')).reason


@pytest.mark.parametrize(
    "text",
    ['<tool_action><v value="1"/></tool_action>', '<tool_action id="1"/>', '<tool_action name=""></tool_action>'],
)
def test_call_without_a_tool_name_is_an_error(text: str) -> None:
    error = only_error(text)
    assert (error.reason, error.name) == ("missing tool name", None)


@pytest.mark.parametrize(
    "text",
    ['<tool_action name="t"', '<tool_action name="t"><v value="rm -rf', '<tool_action name="t"><v>a</v></tool_action'],
)
def test_unclosed_tag_is_an_error_and_not_text(text: str) -> None:
    assert [type(event) for event in parse("a " + text)] == [Text, MalformedTag]
    assert only_error(text).reason == "unclosed"


def test_new_tag_in_a_tag_ends_the_first_as_unclosed() -> None:
    first, second = parse('<tool_action name="a"><v value="1" />\n<tool_action name="b"/>')
    assert isinstance(first, MalformedTag)
    assert (first.reason, first.name) == ("unclosed", "a")
    assert isinstance(second, TagCall)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('<tool_action name="a">{"x"<tool_action name="b"/>', [MalformedTag, TagCall]),
        (tag('<v value="1" /><v value="<tool_action name="x"/>" />'), [MalformedTag]),
    ],
    ids=["new tag after an error", "tag inside a duplicate value"],
)
def test_tag_after_or_inside_a_malformed_tag(text: str, kinds: list[type[TagEvent]]) -> None:
    assert [type(event) for event in parse(text)] == kinds


def test_leading_think_block_is_not_searched() -> None:
    text = f"<think>{SEARCH}</think>{SEARCH}<think>{SEARCH}</think>"
    events = parse(text)
    assert parse_chunks(list(text), {}) == events
    assert [type(event) for event in events] == [Text, TagCall, Text, TagCall, Text]


def test_code_fences_are_searched_unless_ignored() -> None:
    text = f"```xml\n{SEARCH}\n```\n{SEARCH}"
    assert [type(event) for event in parse(text)] == [Text, TagCall, Text, TagCall]
    assert [type(event) for event in parse(text, ignore_fenced=True)] == [Text, TagCall]


@pytest.mark.parametrize(
    ("before", "is_fenced"),
    [
        ("```\n", True),
        ("~~~ sh\n", True),
        ("   ````\n```\n", True),
        ("```a``` ", False),
        ("    ```\n", False),
        ("```\n```\n", False),
        ("x```\n", False),
    ],
)
def test_code_fences_are_recognised_as_in_markdown(before: str, is_fenced: bool) -> None:
    calls = [event for event in parse(before + SEARCH, ignore_fenced=True) if isinstance(event, TagCall)]
    assert (not calls) is is_fenced


@pytest.mark.parametrize("value", ["\n```\n", "\n~~~ sh\nls\n"])
def test_fences_inside_a_call_do_not_affect_later_text(value: str) -> None:
    text = tag(f"<v>{value}</v>") + "\n" + tag("{" + value) + "\n" + SEARCH
    assert [type(event) for event in parse(text, ignore_fenced=True)] == [TagCall, Text, MalformedTag, Text, TagCall]


def test_fences_inside_a_think_block_do_not_affect_later_text() -> None:
    assert [type(event) for event in parse(f"<think>\n```\n</think>{SEARCH}", ignore_fenced=True)] == [Text, TagCall]


def test_long_fence_line_is_parsed_alike_for_any_chunks() -> None:
    text = f"```{'a' * 300}`\n{SEARCH}"
    for size in (1, 7, 200, len(text)):
        parser = TagStreamParser(ignore_fenced=True)
        events = [event for start in range(0, len(text), size) for event in parser.feed(text[start : start + size])]
        # A tick in the info text: this is inline code, and no fence.
        assert any(isinstance(event, TagCall) for event in events)


@pytest.mark.parametrize("name", ["-x", "a.b", "中", "@on", "w"])
@pytest.mark.parametrize("place", range(1, 5))
def test_unexpected_attribute_is_found_at_any_split(name: str, place: int) -> None:
    text = f'<tool_action name=\'t\'><v value="a" {name}="1" /></tool_action>'
    split = text.index('a"') + place
    parser = TagStreamParser()
    for chunk in (text[:22], text[22:23], text[23:split], text[split:]):
        events = parser.feed(chunk)
    assert [(type(event), getattr(event, "reason", "")) for event in events] == [
        (MalformedTag, f"unexpected attribute '{name}'")
    ]


def test_release_returns_an_open_tag_as_text_and_stops_parsing() -> None:
    parser = TagStreamParser()
    parser.feed('a<tool_action name="t"><v val')
    assert parser.release() == [Text('<tool_action name="t"><v val')]
    assert parser.feed(SEARCH) == [Text(SEARCH)]


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


def parse_chunks(chunks: list[str], options: dict[str, object]) -> list[TagEvent]:
    parser = TagStreamParser(**options)  # type: ignore[arg-type]
    return merge_text([*(event for chunk in chunks for event in parser.feed(chunk)), *parser.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@settings(max_examples=400)
@given(HOSTILE, OPTIONS)
def test_events_contain_the_whole_input(text: str, options: dict[str, object]) -> None:
    events = parse_chunks([text], options)
    assert "".join(event.text if isinstance(event, Text) else event.raw for event in events) == text


@settings(max_examples=400)
@given(HOSTILE, st.lists(st.integers(0, 10_000), max_size=12), OPTIONS)
def test_events_do_not_depend_on_the_chunks(text: str, places: list[int], options: dict[str, object]) -> None:
    assert parse_chunks(cut(text, places), options) == parse_chunks([text], options)


@given(HOSTILE, OPTIONS)
def test_single_characters_give_the_same_events(text: str, options: dict[str, object]) -> None:
    assert parse_chunks(list(text), options) == parse_chunks([text], options)


@given(st.text(max_size=60))
def test_at_most_twelve_characters_of_text_are_held(text: str) -> None:
    parser = TagStreamParser()
    released_chars = sum(
        len(event.text if isinstance(event, Text) else event.raw)
        for character in text
        for event in parser.feed(character)
    )
    assert "<tool_action" in text or len(text) - released_chars <= 12


@given(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), VALUES)
def test_written_call_is_read_back(name: str, arguments: dict[str, str], around: str) -> None:
    before, after = around.replace("<", "("), around
    calls = [
        event
        for event in parse_chunks([before + build_tag_call(name, arguments) + after], {})
        if isinstance(event, TagCall)
    ]
    assert (calls[0].name, calls[0].arguments) == (name, arguments)


# A carriage return before the line break that ends the body belongs to that break.
@given(NAMES, VALUES.filter(lambda value: "<" not in value and not value.endswith("\r")))
def test_paired_tag_body_is_read_back(name: str, value: str) -> None:
    [call] = parse_chunks([f'<tool_action name="t"><{name}>\n{value}\n</{name}></tool_action>'], {})
    assert isinstance(call, TagCall)
    assert call.arguments == {name: value}


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_truncated_call_is_malformed(arguments: dict[str, str], data: st.DataObject) -> None:
    whole = build_tag_call("t", arguments)
    end = data.draw(st.integers(len('<tool_action name="t">'), len(whole) - 1))
    assert [type(event) for event in parse_chunks([whole[:end]], {})] == [MalformedTag]
