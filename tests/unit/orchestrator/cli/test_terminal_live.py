"""Output of running calls on a terminal: bounded, escaped, dimmed, and separate from later output."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.run_events import CallFinished, OutputArrived, RunEvent, StepStarted, TextArrived, TextWithdrawn
from toolcrew.orchestrator.terminal.output import TAIL_LINES, LiveLines, LiveOutput, LiveTail, RunPrinter


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


def finished(text: str, call_id: str = "c1") -> CallFinished:
    return CallFinished(run="r", result=ToolResult(call_id=call_id, name="bash_tool", success=True, output=text))


def read_screen(text: str) -> list[str]:
    """Return the rows that a terminal shows after this output."""
    rows, at = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", text):
        if part == "\n":
            at += 1
            rows += [""] * (at + 1 - len(rows))
        elif part == "\x1b[1A":
            at -= 1
        elif part == "\x1b[2K":
            rows[at] = ""
        elif part and part != "\r" and not part.startswith("\x1b"):
            rows[at] += part
    return [row for row in rows if row]


def test_output_of_a_running_call_is_shown_until_its_result_replaces_it() -> None:
    running = (output("".join(f"{number}\n" for number in range(1000))), output("half a line"))
    screen = read_screen(run_view(*running, is_terminal=True))
    assert screen == [*(f"   | {number}" for number in range(1001 - TAIL_LINES, 1000)), "   | half a line"]

    screen = read_screen(run_view(output("one\n"), finished("one\n"), is_terminal=True))
    assert [row.strip() for row in screen if "one" in row] == ["one"]
    assert [row for row in screen if "|" in row] == []


@pytest.mark.parametrize("line", ["x" * 150, "x " * 75, "\u6f22" * 150])
def test_a_line_of_running_output_takes_one_row_however_long_it_is(line: str) -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    tail = LiveTail(console)
    tail.show([line, line], [])
    assert console.file.getvalue().count("\n") == 2  # type: ignore[attr-defined]
    tail.clear()
    assert read_screen(console.file.getvalue()) == []  # type: ignore[attr-defined]


def test_without_a_terminal_output_appears_once_with_its_result() -> None:
    screen = run_view(output("one\n"), finished("one\n")).splitlines()
    assert [row.strip() for row in screen if "one" in row] == ["one"]


def test_concurrent_calls_do_not_mix_their_lines() -> None:
    pieces = (output("on", "c1"), output("tw", "c2"), output("e\n", "c1"), output("o\n", "c2"))
    assert read_screen(run_view(*pieces, is_terminal=True)) == ["   | one", "   | two"]


def test_a_reply_that_arrives_meanwhile_erases_running_output() -> None:
    events = (output("one\n"), TextArrived(run="r", text="I "), output("two\n"), TextArrived(run="r", text="look"))
    assert read_screen(run_view(*events, is_terminal=True)) == ["I look"]


@pytest.mark.parametrize(
    ("events", "is_terminal", "is_shown"),
    [
        ([TextArrived(run="r", text="the ans"), TextArrived(run="r", text="wer\n")], True, True),
        ([TextArrived(run="r", text="the answer")], False, False),
        ([TextArrived(run="r", text="{the answer}")], True, False),
        (
            [
                TextArrived(run="r", text="the old"),
                TextWithdrawn(run="r", characters=3),
                TextArrived(run="r", text="answer"),
            ],
            True,
            True,
        ),
        ([TextArrived(run="r", text="the answer"), StepStarted(run="r", step=2)], True, False),
    ],
)
def test_a_terminal_knows_whether_it_shows_the_answer(
    events: list[RunEvent], is_terminal: bool, is_shown: bool
) -> None:
    view = RunPrinter(Console(file=io.StringIO(), force_terminal=is_terminal))
    for event in events:
        view.on_event(event)
    assert view.has_shown("the answer") is is_shown


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
