"""Output of running calls on a terminal: bounded, escaped, dimmed, and separate from later output."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from contract.run_events import OutputArrived, RunEvent, TextArrived
from orchestrator.terminal.output import MAX_LIVE_LINES, MAX_LIVE_LINES_OF_CALL, LiveLines, LiveOutput, RunPrinter


def run_view(*events: RunEvent, is_terminal: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=300, force_terminal=is_terminal, color_system="standard" if is_terminal else None
    )
    view = RunPrinter(console)
    for event in events:
        view.on_event(event)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def output(text: str, call_id: str = "c1", stream: str = "stdout") -> OutputArrived:
    return OutputArrived(run="r", call_id=call_id, stream=stream, text=text)


def test_live_output_shows_the_last_lines_and_counts_the_rest() -> None:
    screen = run_view(output("".join(f"{number}\n" for number in range(1000)))).splitlines()
    assert len(screen) == MAX_LIVE_LINES + 1
    assert "995 lines" in screen[0]
    assert screen[-1] == "   | 999"


def test_live_output_of_one_call_is_limited() -> None:
    screen = run_view(*(output(f"{number}\n") for number in range(500))).splitlines()
    assert len(screen) == MAX_LIVE_LINES_OF_CALL + 1
    assert "the rest appears" in screen[-1]


def test_concurrent_calls_do_not_mix_their_lines() -> None:
    screen = run_view(output("on", "c1"), output("tw", "c2"), output("e\n", "c1"), output("o\n", "c2"))
    assert screen.splitlines() == ["   | one", "   | two"]


def test_live_output_starts_on_a_new_line() -> None:
    assert run_view(TextArrived(run="r", text="I look"), output("one\n")).splitlines() == ["I look", "   | one"]


def test_live_output_cannot_control_the_terminal() -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202ereversed\x08\n"
    for screen in (run_view(output(hostile)), print_live(hostile), print_live(hostile, is_terminal=False)):
        text = screen.replace("\x1b[?25l", "").replace("\x1b[?25h", "")
        assert "\x1b]0" not in text
        assert "\x1b[2J" not in text
        assert not set(text) & {"\x07", "\x9b", "\u202e", "\x08"}


def print_live(*texts: str, is_terminal: bool = True) -> str:
    file = io.StringIO()
    with LiveOutput(Console(file=file, width=80, force_terminal=is_terminal, color_system=None)) as screen:
        for text in texts:
            screen.show("stdout", text)
    return file.getvalue()


def test_without_a_terminal_every_line_is_printed() -> None:
    assert print_live("a\nb", "c\nd", is_terminal=False) == "a\nbc\nd\n"


@given(st.lists(st.text(alphabet="ab\n", max_size=20), max_size=20))
def test_live_lines_do_not_depend_on_the_chunks(pieces: list[str]) -> None:
    lines, screen = LiveLines(), list[str]()
    for piece in pieces:
        screen += lines.feed("stdout", piece)
    assert [*screen, *lines.rest()] == "".join(pieces).removesuffix("\n").split("\n") if any(pieces) else screen == []
