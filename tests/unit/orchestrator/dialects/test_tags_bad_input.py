"""Bad input for the tag parser: huge, cut anywhere, half characters, NUL. Time and memory grow only linearly with the
size.
"""

import time
import tracemalloc
from collections.abc import Iterable

import pytest

from toolcrew.orchestrator.dialects.tags import MalformedTag, TagCall, TagEvent, TagStreamParser, Text

MIB = 1024 * 1024
OPEN = '<tool_action name="t"><v value="'
CLOSE = '" /></tool_action>'
SEARCH = '<tool_action name="t"><v value="a > b" /></tool_action>'


def read(chunks: Iterable[str], **options: int) -> list[TagEvent]:
    parser = TagStreamParser(**options)
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


def test_text_passes_through_one_chunk_at_a_time() -> None:
    parser = TagStreamParser()
    parser.feed("x")
    chunk = "text " * 13_107
    assert all(parser.feed(chunk) == [Text(chunk)] for _ in range(100 * MIB // len(chunk)))


@pytest.mark.parametrize(
    "head",
    [OPEN, OPEN[:24], '<tool_action name="t">{', "<tool_action name='"],
    ids=["value", "name", "error", "header"],
)
def test_huge_tag_gives_limit_errors_with_bounded_memory(head: str) -> None:
    parser, chunk, size = TagStreamParser(), "x" * 65_536, len(head)
    tracemalloc.start()
    try:
        lengths = [len(event.raw) for event in parser.feed(head) if isinstance(event, MalformedTag)]
        for _ in range(1600):
            events = parser.feed(chunk)
            assert all(isinstance(event, MalformedTag) and event.reason == "too long" for event in events)
            lengths += [len(event.raw) for event in events if isinstance(event, MalformedTag)]
            size += len(chunk)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    lengths += [len(event.raw) for event in parser.finish() if isinstance(event, MalformedTag)]
    assert (len(lengths), sum(lengths)) == (7, size)
    assert peak < 100 * MIB


def test_many_calls_in_one_chunk_take_linear_time() -> None:
    # Were the rest of the chunk copied at each call, this would take minutes.
    events = read([("x" * 300 + SEARCH) * 20_000])
    assert sum(isinstance(event, TagCall) for event in events) == 20_000


@pytest.mark.parametrize("value", ["a\0b", "\0", "\ud83d", "\ude00\ud83d", "\ufeff", "\u2028", "\x1b[31m"])
def test_unusual_characters_are_kept_in_values_and_text(value: str) -> None:
    events = read(f'{value}x{OPEN}{value}" /></tool_action>')
    assert [event.arguments for event in events if isinstance(event, TagCall)] == [{"v": value}]
    assert "".join(event.text for event in events if isinstance(event, Text)) == value + "x"


def test_tag_limit_below_64_characters_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 64"):
        TagStreamParser(max_tag_chars=63)


def test_tag_at_the_limit_is_a_call_and_one_above_is_too_long() -> None:
    text = OPEN + "x" * (300 - len(OPEN) - len(CLOSE)) + CLOSE
    for chunks in ([text], list(text)):
        assert [type(event) for event in read(chunks, max_tag_chars=300)] == [TagCall]
        assert {event.reason for event in read(chunks, max_tag_chars=299) if isinstance(event, MalformedTag)} == {
            "too long"
        }


def test_call_is_reported_with_the_chunk_that_completes_it() -> None:
    for value in ("x" * 10, "x > y\n" * 1000, "<b>", "->" * 500):
        parser = TagStreamParser()
        text = f'{OPEN}{value}" /></tool_action>'
        before = [
            event
            for start in range(0, len(text) - 1, 5)
            for event in parser.feed(text[start : min(start + 5, len(text) - 1)])
        ]
        assert before == []
        assert [type(event) for event in parser.feed(">")] == [TagCall]


@pytest.mark.parametrize(
    ("head", "unit"),
    [
        (OPEN, "if a->b > 0: "),
        (OPEN[:22] + "<v>", "a -> b, "),
        ("x", "<"),
        ("x", "<tool_actio <tool_action tag "),
        ("", SEARCH),
        (OPEN, '" -x '),
        (OPEN[:22] + "<v>", "</v>"),
        ("<tool_action", " "),
        (OPEN[:22] + "<", "n"),
        (OPEN[:22] + "{", "</tool_actio "),
    ],
    ids=[
        *("code in a value", "code in a body", "lone <", "broken markers", "tiny calls", "quotes"),
        *("closing tags in a body", "blanks in a header", "long name", "skipping"),
    ],
)
def test_parsing_takes_linear_time(head: str, unit: str) -> None:
    small, large = (min(_seconds(head + unit * (size // len(unit))) for _ in range(3)) for size in (20_000, 160_000))
    # Linear is 8, a square 64.
    assert large < 24 * small


def _seconds(text: str) -> float:
    chunks = [text[start : start + 16] for start in range(0, len(text), 16)]
    started = time.process_time()
    read(chunks)
    return time.process_time() - started
