"""A reply in transit: read ahead within bounds. Repeated text is not shown twice, and text that becomes invalid is
withdrawn.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from tests.support.stack.waiting import SOON_S
from toolcrew.orchestrator.dialects.model import Chunk
from toolcrew.orchestrator.loop.reply_stream import MAX_CHUNKS, DisplayedText, ReadAhead


class Display:
    """The text that a user who follows the events sees."""

    def __init__(self) -> None:
        self.text = ""
        self.shown: list[str] = []

    def take(self, void: int, text: str) -> None:
        self.text = self.text[: len(self.text) - void] + text
        self.shown += [text] if text else []


def show(replies: list[list[str]]) -> Display:
    text_stream, display = DisplayedText(), Display()
    for at, pieces in enumerate(replies):
        if at:
            text_stream.restart()
        for piece in pieces:
            display.take(*text_stream.show(piece))
    display.take(text_stream.end(), "")
    return display


def test_restarted_reply_replaces_the_displayed_text() -> None:
    display = show([["It is five"], ["It is", " four."]])
    assert (display.text, display.shown) == ("It is four.", ["It is five", "our."])


@given(st.lists(st.lists(st.text("ab", max_size=4), max_size=4), min_size=1, max_size=4))
def test_displayed_text_ends_as_the_last_reply(replies: list[list[str]]) -> None:
    assert show(replies).text == "".join(replies[-1])


def test_repeating_a_displayed_text_takes_linear_time() -> None:
    pieces = ["abcd"] * 100_000
    text_stream = DisplayedText()
    for piece in pieces:
        text_stream.show(piece)
    text_stream.restart()
    started = time.process_time()
    for piece in pieces:
        text_stream.show(piece)
    assert time.process_time() - started < 1


class EndlessStream:
    """A stream that never ends and never waits. `closed` is true after the reader has closed the stream."""

    def __init__(self) -> None:
        self.sent = 0
        self.closed = False

    async def stream(self) -> AsyncIterator[Chunk]:
        try:
            while True:
                self.sent += 1
                yield {"choices": []}
        finally:
            self.closed = True


async def test_read_ahead_is_bounded_and_closes_the_stream() -> None:
    endless = EndlessStream()
    async with asyncio.timeout(SOON_S), ReadAhead(endless.stream()) as chunks:
        assert await anext(chunks) == {"choices": []}
        await asyncio.sleep(0)
        assert endless.sent <= MAX_CHUNKS + 2
    assert endless.closed
