"""Bytes of a program as text: rendered as by a terminal, cut at lines and characters, with every cut counted."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import build_context, build_exec_done
from workers.sandbox_client import GuestResponse
from workers.tools.base import OnData
from workers.tools.shell import BASH_TOOL
from workers.tools.shown_output import LIVE_BYTES
from workers.tools.text import MAX_LINES, fold, show_output

DEFAULTS = {"action": "run", "stdin": "", "background": False, "reset_state": False, "close_stdin": False}


@pytest.mark.parametrize(
    ("raw", "visible"),
    [
        ("\x1b[1;31mred\x1b[0m\x1b[K", "red"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1b(Ba\x1b=b\x1b7", "ab"),
        ("10%\r50%\r100%\ndone\r\n", "100%\ndone\n"),
        ("10%\r50%\r", "50%"),
        ("N\bNA\bAME", "NAME"),
        ("\b\ba", "a"),
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b]never ended\nnext", "\nnext"),
    ],
)
def test_fold_applies_terminal_control_sequences(raw: str, visible: str) -> None:
    assert fold(raw) == visible


@given(text=st.text(alphabet="ab\n\r\b\x1b[]m;0", max_size=60))
def test_fold_never_grows_text_and_keeps_newlines(text: str) -> None:
    folded = fold(text)
    assert len(folded) <= len(text)
    assert "\r" not in folded
    assert folded.count("\n") == text.count("\n")


def test_fold_takes_linear_time() -> None:
    for piece in ("a\r", "\x1b", "\x1b[", "a\b", "\x1b]", "x"):
        fold(piece * 200_000)


def test_long_output_is_cut_in_the_middle() -> None:
    raw = b"".join(b"%d\n" % n for n in range(MAX_LINES * 2))
    text, cut = show_output(raw, {}, "see line {offset}")
    lines = text.splitlines()
    assert (cut, lines[499], lines[501], lines[-1], len(lines)) == (True, "499", "2500", "3999", MAX_LINES + 1)
    assert lines[500].endswith(": see line 501 ...]")


@given(st.data())
def test_cut_output_has_whole_characters_and_counts_omitted_bytes(data: st.DataObject) -> None:
    characters = data.draw(st.text(alphabet="aé€😀\n", min_size=60, max_size=200))
    raw = characters.encode()
    head = data.draw(st.integers(0, 20))
    tail = data.draw(st.integers(0, 20))
    visible = raw[:head] + raw[len(raw) - tail :]
    text, cut = show_output(visible, {"total": len(raw), "head": head, "tail": tail})
    before, _, rest = text.partition("[... ")
    omitted = int(rest.partition(" bytes")[0])
    after = rest.partition(" ...]")[2]
    assert cut
    assert "\ufffd" not in text
    assert characters.startswith(before.removesuffix("\n"))
    assert characters.endswith(after.removeprefix("\n"))
    assert len(raw) - head - tail <= omitted <= len(raw)


class WatchedEnvironment:
    """A tool environment whose call has a follower, over a guest that sends these pieces."""

    is_watched = True

    def __init__(self, *pieces: tuple[str, bytes]) -> None:
        self.context = build_context()
        self.shown: list[tuple[str, str]] = []
        self.request: Mapping[str, Any] = {}
        self._pieces = pieces

    def run(self, request: Mapping[str, Any], body: bytes = b"", on_data: OnData | None = None) -> GuestResponse:
        self.request = request
        assert on_data is not None
        for stream, data in self._pieces:
            on_data(stream, data)
        return GuestResponse(build_exec_done())

    def show(self, stream: str, text: str) -> None:
        self.shown.append((stream, text))


def test_live_output_is_shown_immediately_and_not_in_the_result() -> None:
    character = "é".encode()
    bench = WatchedEnvironment(
        ("live", b"a" + character[:1]),
        ("live", character[1:]),
        ("live_stderr", b"\x1b[1mbad\0"),
        ("merged", b"whole\n"),
    )
    outcome = BASH_TOOL.handler({**DEFAULTS, "command": "x"}, bench)  # type: ignore[arg-type]
    assert bench.shown == [("stdout", "a"), ("stdout", "é"), ("stderr", "bad\ufffd")]
    assert outcome.output == "whole\n"
    assert (bench.request["live"], bench.request["max_bytes"]) == (True, LIVE_BYTES)
