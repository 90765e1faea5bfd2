"""Shows runs and calls on a terminal, while they run and after their end. Untrusted text is escaped."""

import json
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text as RichText

from toolcrew.contract.calls import Clocks, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import (
    ApprovalAsked,
    CallFinished,
    CallStarted,
    OutputArrived,
    RunAborted,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextArrived,
    TextWithdrawn,
    Warned,
)
from toolcrew.orchestrator.terminal.text import escape_controls

__all__ = ["LiveOutput", "RunPrinter", "escape_controls", "format_clocks", "format_times", "table_rows"]

MAX_SHOWN_LINES = 20
MAX_LINE_CHARS = 200
TAIL_LINES = 8
"""Limit of the lines of running output that a terminal shows."""


class LiveLines:
    """Joins pieces of a running call's output to lines."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}

    def feed(self, stream: str, text: str) -> list[str]:
        """Return the lines that end in this piece."""
        *lines, rest = (self._open.get(stream, "") + text).split("\n")
        # A line may never end, so only the part that can be shown is stored.
        self._open[stream] = _last_overwrite(rest)[: MAX_LINE_CHARS + 1] + ("\r" if rest.endswith("\r") else "")
        return [_fit(line) for line in lines]

    def rest(self) -> list[str]:
        """Return the last, incomplete line of each output stream."""
        return [_fit(line) for line in self._open.values() if line]


class LiveTail:
    """The last lines of running output on a terminal. Erase them with `clear` before anything else is printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []
        self._height = 0

    def show(self, lines: list[str], rest: list[str]) -> None:
        """Add complete lines, and show the last ones. `rest`: incomplete lines, which the next call replaces."""
        self._lines = [*self._lines, *lines][-TAIL_LINES:]
        shown = [*self._lines, *rest][-TAIL_LINES:]
        # One write, so that the lines do not flicker.
        with self._console:
            self.clear()
            if shown:
                # No line is wrapped, so the number of rows is known.
                text = RichText("\n".join(shown), style="dim")
                self._console.print(text, no_wrap=True, overflow="ellipsis")
        self._height = len(shown)

    def clear(self) -> None:
        """Erase the lines from the terminal. Repeatable."""
        if self._height:
            self._console.control(Control(*[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * self._height))
        self._height = 0

    def forget(self) -> None:
        """Erase the lines and start again without them."""
        self.clear()
        self._lines = []


class LiveOutput:
    """Shows the output of one call while the call runs.

    A terminal shows the last lines until the call ends and its result is shown. Any other output receives every line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = LiveLines()
        self._tail = LiveTail(console) if console.is_terminal else None

    def __enter__(self) -> "LiveOutput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tail is not None:
            self._tail.clear()
        else:
            self._print(self._lines.rest())

    def show(self, stream: str, text: str) -> None:
        """Show the next piece of the call's output. `stream`: stdout or stderr."""
        lines = self._lines.feed(stream, text)
        if self._tail is None:
            self._print(lines)
        else:
            self._tail.show(lines, self._lines.rest())

    def _print(self, lines: list[str]) -> None:
        """Print the lines."""
        for line in lines:
            self._console.print(RichText(line, style="dim"), soft_wrap=True)


class RunPrinter:
    """Shows the events of runs, one run at a time. Pass `on_event` to an Agent.

    A terminal shows the last lines of running calls until their results are shown. Any other output receives only the
    results, so that no output appears twice.

    `asks_elsewhere`: people decide about approvals on the pages or with another command, and not at this terminal.
    """

    max_lines: int | None = MAX_SHOWN_LINES
    """Limit of the lines that are shown of one text; None: no limit."""
    hint = "not shown"

    def __init__(self, console: Console, *, asks_elsewhere: bool = False) -> None:
        self._console = console
        self.asks_elsewhere = asks_elsewhere
        self._mid_line = False
        self._live: dict[str, LiveLines] = {}
        self._tail = LiveTail(console)
        self._reply = ""

    def on_event(self, event: RunEvent) -> None:
        """Show one event."""
        match event:
            case RunStarted():
                self._line(f"run {event.run}  model {event.model}  dialect {event.dialect}", "dim")
            case StepStarted():
                self._reply = ""
                self._line(f"step {event.step}", "bold cyan")
            case TextArrived() | TextWithdrawn():
                self._text(event)
            case CallStarted():
                self._line(
                    f"-> {event.call.name} {_shorten(json.dumps(event.call.arguments, ensure_ascii=False))}", "yellow"
                )
            case ApprovalAsked() if self.asks_elsewhere:
                self._line("   waits for an answer: `toolcrew approvals list` shows the question", "magenta")
            case OutputArrived():
                self._output(event)
            case CallFinished():
                self._live.pop(event.result.call_id, None)
                self._tail.forget()
                self._result(event.result)
            case StepFinished():
                self._line(
                    f"   model {event.model_s:.2f} s, {event.usage.prompt_tokens} + {event.usage.completion_tokens} "
                    "tokens",
                    "dim",
                )
            case Warned():
                self._line(f"warning: {event.message}", "magenta")
            case RunAborted():
                self._line(f"aborted: {event.reason}", "red")
            case RunFinished():
                self._line(f"stopped: {event.stop_reason}   tools: {format_clocks(event.clocks)}", "dim")

    def has_shown(self, answer: str) -> bool:
        """Return whether a terminal shows this answer as the text of the last reply."""
        return self._console.is_terminal and self._reply.strip() == answer.strip()

    def _text(self, event: TextArrived | TextWithdrawn) -> None:
        """Show a piece of a reply, or a note about withdrawn text."""
        if isinstance(event, TextArrived):
            self._reply += event.text
            self._piece(event.text)
        else:
            self._reply = self._reply[: -event.characters or None]
            self._line(
                f"   discard the last {count(event.characters, 'character')}: the reply was interrupted and "
                "started again",
                "magenta",
            )

    def _output(self, event: OutputArrived) -> None:
        """Show the last lines of running output. The result of the call replaces them."""
        if not self._console.is_terminal:
            return
        live = self._live.setdefault(event.call_id, LiveLines())
        lines = live.feed(event.stream, event.text)
        # The end of a line of the reply has not arrived yet, and nothing may come between.
        if not self._mid_line:
            self._tail.show([f"   | {line}" for line in lines], [f"   | {line}" for line in live.rest()])

    def _result(self, result: ToolResult) -> None:
        """Show the result of a call."""
        self._block(result.text(), "green" if result.success else "red")
        code = result.metadata.get("exit_code")
        self._line(f"   {format_times(result)}{f'   exit code {code}' if code else ''}", "dim")

    def _block(self, text: str, style: str, head: str = "") -> None:
        """Show the first lines of a text. `head`: before the first line."""
        lines = text.rstrip("\n").split("\n")
        for number, line in enumerate(lines[: self.max_lines]):
            self._line(f"   {'' if number else head}{line}", style)
        if self.max_lines is not None and len(lines) > self.max_lines:
            self._line(f"   ... {count(len(lines) - self.max_lines, 'more line')} ({self.hint})", "dim")

    def _piece(self, text: str) -> None:
        """Show a piece of text without a newline."""
        self._tail.clear()
        self._console.print(RichText(escape_controls(text)), end="", soft_wrap=True)
        self._mid_line = not text.endswith("\n") if text else self._mid_line

    def _line(self, text: str, style: str) -> None:
        """Show a line. An unfinished line before it ends first."""
        self._tail.clear()
        if self._mid_line:
            self._console.print()
            self._mid_line = False
        self._console.print(RichText(escape_controls(text), style=style), soft_wrap=True)


def format_clocks(clocks: Clocks) -> str:
    """Return a text with the duration of each phase in milliseconds."""
    return "  ".join(f"{name.removesuffix('_s')} {seconds * 1000:.1f} ms" for name, seconds in clocks)


def format_times(result: ToolResult) -> str:
    """Return a text with the durations of a call. For a lost call, only the time until the detection of the loss is
    known.
    """
    if result.error_code in (ErrorCode.HOST_LOST, ErrorCode.OUTCOME_UNKNOWN):
        return f"lost, noticed {result.clocks.total_s:.1f} s after the call was sent"
    return format_clocks(result.clocks)


def _last_overwrite(line: str) -> str:
    """Return the part of a line after its last carriage return. Programs overwrite a line to show their progress."""
    return line.rstrip("\r").rpartition("\r")[2]


def _fit(line: str) -> str:
    """Return the line for the terminal: cut, escaped and without tabs."""
    line = _last_overwrite(line)
    cut = line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}..."
    return escape_controls(cut).replace("\t", "    ")


def _shorten(text: str, limit: int = 400) -> str:
    """Return the text, cut to `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def table_rows(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[str]:
    """Return the rows as aligned lines of text, with a header line first. None is shown as "-"."""
    cells = [list(columns)] + [
        ["-" if (value := row.get(column, "")) is None else str(value) for column in columns] for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
