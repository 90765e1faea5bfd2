"""Invariants of the tag parser, for any input."""

from random import Random
from typing import Any

from tests.fuzz.tag_reference import read_whole
from tests.fuzz.tag_texts import damaged, hostile_text, random_arguments, random_cuts, random_name, written_call
from toolcrew.orchestrator.dialects.tag_events import TagCall, TagEvent, Text
from toolcrew.orchestrator.dialects.tag_parser import TagStreamParser

MARKER = "<tool_action"
MAX_HELD = 12
OPTIONS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"ignore_fenced": True}, {"max_tag_chars": 70})


def parse(chunks: list[str], options: dict[str, Any]) -> list[TagEvent]:
    """Return the events of the chunks, with adjacent texts joined. Checks after every chunk how much text the parser
    holds back.
    """
    parser = TagStreamParser(**options)
    events: list[TagEvent] = []
    text, shown = "".join(chunks), 0
    fed = 0
    for chunk in chunks:
        fed += len(chunk)
        for event in parser.feed(chunk):
            shown += len(raw_of(event))
            _append(events, event)
        is_overlong = bool(events) and getattr(events[-1], "reason", "") == "too long"
        assert fed - shown <= MAX_HELD or text.startswith(MARKER, shown) or is_overlong, f"holds {text[shown:fed]!r}"
    for event in parser.finish():
        _append(events, event)
    return events


def raw_of(event: TagEvent) -> str:
    return event.text if isinstance(event, Text) else event.raw


def _append(events: list[TagEvent], event: TagEvent) -> None:
    assert raw_of(event), f"empty {event!r}"
    if isinstance(event, Text) and events and isinstance(events[-1], Text):
        events[-1] = Text(events[-1].text + event.text)
    else:
        events.append(event)


def check_text(random: Random, text: str, options: dict[str, Any]) -> list[TagEvent]:
    """Check that no text is lost, that chunk boundaries do not matter, and that the reference parser agrees. Return
    the events.
    """
    whole = parse([text], options)
    assert "".join(map(raw_of, whole)) == text, f"lost or changed: {whole!r}"
    chunks = random_cuts(random, text)
    cut = parse(chunks, options)
    assert cut == whole, f"{chunks!r} gives {cut!r}, uncut it is {whole!r}"
    if not options:
        plain = read_whole(text)
        assert whole == plain, f"{text!r} gives {whole!r}, the plain reading is {plain!r}"
    return whole


def check_hostile(random: Random) -> None:
    """Check pieces of the grammar in any order, and a stream that ends anywhere."""
    check_text(random, hostile_text(random), random.choice(OPTIONS))


def check_calls(random: Random) -> None:
    """Check that calls in every form are parsed as intended, with the text around them. Damaged calls lose no text."""
    wanted = [(random_name(random), random_arguments(random)) for _ in range(random.randrange(1, 3))]
    raws = [written_call(random, name, arguments) for name, arguments in wanted]
    around = random.choice(("", "text", " a < b ", "<b>", "\n", "<tool_actions> "))
    text = around + around.join(raws) + around
    calls = [event for event in check_text(random, text, {}) if not isinstance(event, Text)]
    assert [(event.name, event.arguments, event.raw) for event in calls if isinstance(event, TagCall)] == [
        (name, arguments, raw) for (name, arguments), raw in zip(wanted, raws, strict=True)
    ], f"{text!r} gives {calls!r}"
    check_text(random, damaged(random, text), random.choice(OPTIONS))
    end = random.randrange(len(MARKER) + 1, len(raws[0]))
    assert not [event for event in parse([raws[0][:end]], {}) if isinstance(event, TagCall)], (
        f"{raws[0][:end]!r} is a call"
    )
