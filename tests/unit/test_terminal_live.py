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


def test_a_run_shows_a_few_lines_at_a_time_and_says_how_many_more_there_were() -> None:
    shown = run_view(output("".join(f"{number}\n" for number in range(1000)))).splitlines()
    assert len(shown) == MAX_LIVE_LINES + 1
    assert "995 lines" in shown[0]
    assert shown[-1] == "   | 999"


def test_a_run_stops_showing_a_call_that_never_stops_talking() -> None:
    shown = run_view(*(output(f"{number}\n") for number in range(500))).splitlines()
    assert len(shown) == MAX_LIVE_LINES_OF_CALL + 1
    assert "the rest appears" in shown[-1]


def test_calls_that_run_side_by_side_do_not_finish_each_others_lines() -> None:
    shown = run_view(output("on", "c1"), output("tw", "c2"), output("e\n", "c1"), output("o\n", "c2"))
    assert shown.splitlines() == ["   | one", "   | two"]


def test_output_does_not_continue_a_line_of_the_model() -> None:
    assert run_view(TextArrived(run="r", text="I look"), output("one\n")).splitlines() == ["I look", "   | one"]


def test_output_cannot_drive_the_terminal() -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202ereversed\x08\n"
    for shown in (run_view(output(hostile)), live(hostile), live(hostile, is_terminal=False)):
        text = shown.replace("\x1b[?25l", "").replace("\x1b[?25h", "")
        assert "\x1b]0" not in text
        assert "\x1b[2J" not in text
        assert not set(text) & {"\x07", "\x9b", "\u202e", "\x08"}


def live(*texts: str, is_terminal: bool = True) -> str:
    file = io.StringIO()
    with LiveOutput(Console(file=file, width=80, force_terminal=is_terminal, color_system=None)) as shown:
        for text in texts:
            shown.show("stdout", text)
    return file.getvalue()


def test_on_no_terminal_every_line_is_shown_and_the_last_though_it_does_not_end() -> None:
    assert live("a\nb", "c\nd", is_terminal=False) == "a\nbc\nd\n"


@given(st.lists(st.text(alphabet="ab\n", max_size=20), max_size=20))
def test_lines_are_those_of_the_whole_text_however_it_comes(pieces: list[str]) -> None:
    lines, shown = LiveLines(), list[str]()
    for piece in pieces:
        shown += lines.feed("stdout", piece)
    assert [*shown, *lines.rest()] == "".join(pieces).removesuffix("\n").split("\n") if any(pieces) else shown == []
