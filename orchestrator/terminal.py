"""A run on a terminal: text as it comes, calls with their results and clocks. Hostile output is shown escaped."""

import json
from typing import Any

from rich.console import Console
from rich.text import Text as RichText

from contract.calls import Clocks, ToolResult
from orchestrator.events import (
    CallFinished,
    CallStarted,
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

MAX_SHOWN_LINES = 20
_ALLOWED_CONTROLS = {"\n", "\t"}
_DIRECTION_MARKS = frozenset({0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)})


class RunView:
    """Shows the events of one run at a time. `on_event` is what an Agent wants."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._mid_line = False

    def on_event(self, event: RunEvent) -> None:
        """Show one event."""
        match event:
            case RunStarted():
                self._line(f"run {event.run}  model {event.model}  dialect {event.dialect}", "dim")
            case StepStarted():
                self._line(f"step {event.step}", "bold cyan")
            case TextArrived():
                self._piece(event.text)
            case TextWithdrawn():
                self._line(f"   the last {event.characters} characters are void: the reply broke off and came again", "magenta")
            case CallStarted():
                self._line(f"-> {event.call.name} {_shorten(json.dumps(event.call.arguments, ensure_ascii=False))}", "yellow")
            case CallFinished():
                self._result(event.result)
            case StepFinished():
                self._line(f"   model {event.model_s:.2f} s, {event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens", "dim")
            case Warned():
                self._line(f"warning: {event.message}", "magenta")
            case RunAborted():
                self._line(f"aborted: {event.reason}", "red")
            case RunFinished():
                self._line(f"stopped: {event.stop_reason}   tools: {format_clocks(event.clocks)}", "dim")

    def _result(self, result: ToolResult) -> None:
        lines = result.text().rstrip("\n").split("\n")
        for line in lines[:MAX_SHOWN_LINES]:
            self._line(f"   {line}", "green" if result.success else "red")
        if len(lines) > MAX_SHOWN_LINES:
            self._line(f"   ... {len(lines) - MAX_SHOWN_LINES} lines more (not shown here)", "dim")
        self._line(f"   {format_clocks(result.clocks)}", "dim")

    def _piece(self, text: str) -> None:
        self._console.print(RichText(escape_controls(text)), end="", soft_wrap=True)
        self._mid_line = not text.endswith("\n") if text else self._mid_line

    def _line(self, text: str, style: str) -> None:
        if self._mid_line:
            self._console.print()
            self._mid_line = False
        self._console.print(RichText(escape_controls(text), style=style), soft_wrap=True)


def format_clocks(clocks: Clocks) -> str:
    """The four clocks in milliseconds."""
    parts = ("queued", clocks.queued_s), ("sandbox", clocks.sandbox_s), ("run", clocks.run_s), ("transfer", clocks.transfer_s)
    return "  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in parts)


def escape_controls(text: str) -> str:
    """Control and bidirectional characters as visible escapes: output of a sandbox must not drive a terminal."""
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    code = ord(character)
    if character in _ALLOWED_CONTROLS:
        return character
    if code < 32 or 127 <= code < 160 or code in _DIRECTION_MARKS or 0xD800 <= code <= 0xDFFF:
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character


def _shorten(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def table_rows(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[str]:
    """Rows as aligned text lines, a header first."""
    cells = [list(columns)] + [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
