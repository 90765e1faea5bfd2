"""Untrusted text on pages: it cannot act, hide or imitate, nothing is lost, and large texts are fast."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.orchestrator.api.pages.rendering import address
from toolcrew.orchestrator.api.pages.untrusted_text import count_suspicious, reveal, reveal_exactly, shorten

_TAGS = re.compile(r'<span class="(?:odd|mark)"(?: title="[^"<>]*")?>|</span>|<small>|</small>')


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("<b>&\"'", "&lt;b&gt;&amp;&#34;&#39;"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("a\u200bb", "a\\u200bb"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("\u3164\u2800", "\\u3164\\u2800"),
        ("\r\n", "\\x0d\n"),
        ("tab\there\n", "tab\there\n"),
        ("日本語 café Ω", "日本語 café Ω"),
    ],
)
def test_control_characters_are_escaped(text: str, html: str) -> None:
    assert _TAGS.sub("", reveal(text)) == html


@pytest.mark.parametrize(
    ("text", "invisible", "lookalike"),
    [
        ("ls -la", 0, 0),
        ("rm\u00a0-rf", 0, 1),
        ("cu\u0430l", 0, 1),  # a Cyrillic letter in a Latin word
        ("\u0441\u043e\u0440", 0, 3),  # text that is entirely Cyrillic but looks Latin
        ("ev\u0131l", 0, 0),  # Latin as a whole
        ("\uff52\uff4d", 0, 2),  # of full width
        ("a\u2215b\u2044c", 0, 2),
        ("\u2010\u2013\u2212", 0, 3),
        ("\u2066x\u2069\u200d", 3, 0),
        ("привет", 0, 5),
        ("日本語", 0, 0),
        ("Grüße", 0, 0),
    ],
)
def test_invisible_and_lookalike_characters_are_counted(text: str, invisible: int, lookalike: int) -> None:
    assert count_suspicious(text) == (invisible, lookalike)


def test_reveal_exactly_shows_newlines_tabs_and_trailing_spaces() -> None:
    assert _TAGS.sub("", reveal_exactly("a\tb \t\n \nx")) == "a\u2192\tb\u00b7\u2192\t\u21b5\n\u00b7\u21b5\nx"


@given(st.text(st.characters(codec=None)))
def test_reveal_loses_no_character_and_produces_no_foreign_markup(text: str) -> None:
    for html in (str(reveal(text)), str(reveal_exactly(text))):
        bare = _TAGS.sub("", html)
        assert not re.search("[<>\"']", bare), bare
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", bare)
        # Each character of the text is there: as itself, or as its escape.
        assert len(re.sub("&(?:lt|gt|amp|#34|#39);", "x", bare)) >= len(text)


@pytest.mark.parametrize(
    "text",
    ["x" * 1_000_000, "\x1b" * 500_000, "a\x1b" * 60_000, "x\n" * 200_000, "a\u0430" * 50_000, " " * 300_000],
    ids=len,
)
def test_reveal_of_a_large_text_is_fast(text: str) -> None:
    began = time.monotonic()
    reveal(text)
    reveal_exactly(text)
    count_suspicious(text)
    assert time.monotonic() - began < 20


def test_shorten_counts_omitted_characters() -> None:
    head, tail, hidden = shorten("a" * 60 + "b" * 60, 100)
    assert (head, tail, hidden) == ("a" * 50, "b" * 50, 20)
    assert shorten("a" * 100, 100) == ("a" * 100, "", 0)


def test_parts_of_an_address_are_escaped() -> None:
    assert address("runs", "../../x?y#z", tenant="a&b=c", state=None) == "/runs/..%2F..%2Fx%3Fy%23z?tenant=a%26b%3Dc"
