"""Bytes of a program as text: rendered as by a terminal, cut at lines and characters, with every cut counted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.records.builders import build_context, build_exec_response, build_reply
from toolcrew.contract.guest_protocol import A, ExecRequest, GuestReply, GuestRequest, StreamCounts
from toolcrew.workers.tools.base import OnData
from toolcrew.workers.tools.shell import BASH_TOOL
from toolcrew.workers.tools.shown_output import LIVE_BYTES
from toolcrew.workers.tools.text import MAX_LINES, fold, show_output

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


FRAMES = "".join(f"\x1b[2K#{n} pull\n\x1b[2K {n * 10} %\n\x1b[2A" for n in range(10)) + "\x1b[2B"


@pytest.mark.parametrize(
    ("raw", "visible"),
    [
        pytest.param(
            "start\n1/3\n\x1b[1A\x1b[2K2/3\n\x1b[1A\x1b[2K3/3\ndone\n", "start\n3/3\ndone\n", id="up and clear"
        ),
        pytest.param(f"build\n{FRAMES}ok\n", "build\n#9 pull\n 90 %\nok\n", id="frame of two lines"),
        pytest.param("a 1%\x1b[1Ga 50%\x1b[1G\x1b[Kdone\n", "done\n", id="column"),
        pytest.param("long line\x1b[0G\x1b[Kshort", "short", id="clear to the end"),
        pytest.param("x\ny\nz\n\x1b[3F\x1b[Jnew\n", "new\n", id="previous line and clear below"),
        pytest.param("log\n\x1b[2J\x1b[H1st frame\nmore\n\x1b[H\x1b[2J2nd\n", "log\n2nd\n", id="whole screen"),
        pytest.param("\x1b[?25l\x1b[H\x1b[Jtop 1\n\x1b[Htop 2\x1b[K\n\x1b[J\x1b[?25h", "top 2\n", id="home"),
        pytest.param("a\n\x1b[s12\x1b[u34", "a\n34", id="saved cursor"),
        pytest.param("\x1b7ab\x1b8c\x1b[G", "cb", id="saved cursor of DEC"),
        pytest.param("ab\x1b[1Dc", "ac", id="left"),
        pytest.param("ab\x1b[3Cc", "ab   c", id="right"),
        pytest.param("10%\r20%\r\x1b[1A30%\r\n", "30%\n", id="carriage return"),
        pytest.param("\x1b[31mred\x1b[0m\n\x1b[1A\x1b[32mgreen\x1b[0m\n", "green\n", id="colors"),
        pytest.param("a\x1b[99A\x1b[99999999B\x1b[99Db", "b", id="beyond the edges"),
    ],
)
def test_frames_that_a_program_draws_over_each_other_fold_to_the_last_one(raw: str, visible: str) -> None:
    assert fold(raw) == visible


@given(text=st.text(alphabet="ab\n\r\b\x1b[;019?ABCDEFGHJKMdfsu78", max_size=80))
def test_drawing_never_grows_text_and_leaves_no_control_characters(text: str) -> None:
    folded = fold(text)
    assert len(folded) <= len(text)
    assert not set(folded) & set("\r\b")


@given(text=st.text(alphabet="ab\n\r\b\x1b[]m;0", max_size=60))
def test_fold_never_grows_text_and_keeps_newlines(text: str) -> None:
    folded = fold(text)
    assert len(folded) <= len(text)
    assert "\r" not in folded
    assert folded.count("\n") == text.count("\n")


def test_fold_takes_linear_time() -> None:
    for piece in ("a\r", "\x1b", "\x1b[", "a\b", "\x1b]", "x", "a\x1b[C", "a\n\x1b[A", "\x1b[99H", "\x1b[2J\n"):
        fold(piece * 200_000)
        fold(piece * (60_000 // len(piece)))


def test_long_output_is_cut_in_the_middle() -> None:
    raw = b"".join(b"%d\n" % n for n in range(MAX_LINES * 2))
    text, cut, _ = show_output(raw, None, "see line {offset}")
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
    text, cut, _ = show_output(visible, StreamCounts(total=len(raw), head=head, tail=tail))
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
        self.request: GuestRequest[Any] | None = None
        self._pieces = pieces

    def run(self, request: GuestRequest[A], body: bytes = b"", on_data: OnData | None = None) -> GuestReply[A]:
        self.request = request
        assert on_data is not None
        for stream, data in self._pieces:
            on_data(stream, data)
        return build_reply(request, build_exec_response())

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
    assert isinstance(bench.request, ExecRequest)
    assert (bench.request.live, bench.request.max_bytes) == (True, LIVE_BYTES)
