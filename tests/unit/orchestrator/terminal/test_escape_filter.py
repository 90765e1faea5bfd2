"""The filter between a program of a sandbox and the user's own terminal."""

import time
import tracemalloc

import pytest

from toolcrew.orchestrator.terminal.escape_filter import MAX_CHARS, EscapeFilter

QUERIES = {
    "device attributes": "\x1b[c",
    "secondary attributes": "\x1b[>0c",
    "tertiary attributes": "\x1b[=c",
    "old attributes": "\x1bZ",
    "status": "\x1b[5n",
    "cursor position": "\x1b[6n",
    "private status": "\x1b[?6n",
    "request of a setting": '\x1bP$q"p\x1b\\',
    "request of terminfo": "\x1bP+q544e\x1b\\",
    "palette": "\x1b]4;1;?\x07",
    "foreground": "\x1b]10;?\x1b\\",
    "background": "\x1b]11;?\x1b\\",
    "title report": "\x1b[21t",
    "icon report": "\x1b[20t",
    "size report": "\x1b[18t",
    "parameters": "\x1b[x",
    "mode": "\x1b[?2004$p",
    "version": "\x1b[>0q",
    "keyboard": "\x1b[?u",
    "checksum": "\x1b[1;1;1;1;1;1*y",
    "answerback": "\x05",
    "clipboard": "\x1b]52;c;aGk=\x07",
    "clipboard query": "\x1b]52;c;?\x07",
    "iterm": "\x1b]1337;File=:QQ==\x07",
    "notification": "\x1b]9;hello\x07",
    "graphics": "\x1b_Ga=q;AAAA\x1b\\",
    "reports of the size": "\x1b[?2048h",
    "resizing": "\x1b[8;10;10t",
    "printing": "\x1b[5i",
    "vt52": "\x1b[?2l",
    "keyboard lock": "\x1b[2h",
    "latin 1": "\x1b%@",
    "8 bit controls": "\x1b G",
    "c1 in utf-8": "\u009b6n",
    "screen title": "\x1bkname\x1b\\",
}
DRAWING = {
    "color": "\x1b[38;2;1;2;3m",
    "curly underline": "\x1b[4:3m",
    "cursor": "\x1b[10;20H",
    "erase": "\x1b[2J\x1b[K",
    "alternate screen": "\x1b[?1049h",
    "modes": "\x1b[?1000;1006h",
    "paste": "\x1b[?2004h",
    "shape": "\x1b[4 q",
    "margins": "\x1b[2;20r",
    "line drawing": "\x1b(0lqk\x1b(B",
    "save": "\x1b7\x1b8",
    "title": "\x1b]0;make é\x1b\\",
    "link": "\x1b]8;id=1;https://a.example/x?y=1\x1b\\text\x1b]8;;\x1b\\",
    "controls": "a\b\t\r\n\a",
    "unicode": "é漢\U0001f600",
}


@pytest.mark.parametrize("text", QUERIES.values(), ids=QUERIES)
def test_nothing_that_makes_a_terminal_answer_passes(text: str) -> None:
    for size in (1, 2, len(text)):
        data, filter = f"a{text}b".encode(), EscapeFilter()
        passed = b"".join(filter.feed(data[at : at + size]) for at in range(0, len(data), size))
        assert passed.replace(b"6n", b"") == b"ab"


@pytest.mark.parametrize("text", DRAWING.values(), ids=DRAWING)
def test_drawing_passes_unchanged_at_any_cut(text: str) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        filter = EscapeFilter()
        assert filter.feed(data[:cut]) + filter.feed(data[cut:]) == data


def test_the_end_of_a_command_is_written_in_one_form() -> None:
    assert EscapeFilter().feed(b"\x1b]2;t\x07") == b"\x1b]2;t\x1b\\"


@pytest.mark.parametrize("target", ["file:///etc/passwd", "javascript:x", "ssh://a", "https://a\x1b[6n"])
def test_a_link_leads_only_to_the_web(target: str) -> None:
    assert b"\x1b]8" not in EscapeFilter().feed(f"\x1b]8;;{target}\x1b\\x".encode())


def test_known_modes_pass_without_their_neighbours() -> None:
    assert EscapeFilter().feed(b"\x1b[?2048;25;9999l") == b"\x1b[?25l"


@pytest.mark.parametrize("data", [b"\x9b6n", b"\xc0\x9b6n", b"\xe0\x80\x9b6n"])
def test_bytes_that_are_no_utf_8_become_replacement_characters(data: bytes) -> None:
    assert EscapeFilter().feed(data).decode().strip("\ufffd") == "6n"


def test_the_reset_undoes_what_is_still_set() -> None:
    filter = EscapeFilter()
    filter.feed(b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?2004l\x1b[5;6r\x1b[2 q\x1b]8;;https://a\x1b\\")
    undone = filter.reset()
    for part in (b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[r", b"\x1b[0 q", b"\x1b]8;;\x1b\\", b"\x1b[0m"):
        assert part in undone
    assert b"2004" not in undone
    assert b"1049" not in EscapeFilter().reset()


@pytest.mark.parametrize("start", [b"\x1b]0;", b"\x1bP", b"\x1b[", b"\x1b ", b"\x1b[1;", b"\xf0\x9f"])
def test_an_endless_sequence_needs_bounded_memory_and_linear_time(start: bytes) -> None:
    filter, piece = EscapeFilter(), b"1;" * 32 * 1024
    filter.feed(start)
    started = time.process_time()
    tracemalloc.start()
    try:
        for _ in range(3):
            filter.feed(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024
    assert time.process_time() - started < 20
    assert filter.feed(b"m\x07\x1b\\end")[-3:] == b"end"


def test_parameters_of_any_form_are_matched_in_linear_time() -> None:
    started = time.process_time()
    for body in ("1" * MAX_CHARS, "1;" * (MAX_CHARS // 2), ";" * MAX_CHARS, "1" * (MAX_CHARS - 1) + "!"):
        EscapeFilter().feed(f"\x1b[{body}~".encode() * 20)
        EscapeFilter().feed(f"\x1b]8;{body};\x07".encode() * 20)
    assert time.process_time() - started < 10
