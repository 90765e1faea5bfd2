"""Prints a trace as text: the same view as of a running run, and the parts that are missing in the trace."""

import json
from typing import Any

from rich.console import Console

from toolcrew.contract.clock import with_instants
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import (
    ApprovalAsked,
    ApprovalDecided,
    CallStarted,
    ModelAnswered,
    ModelAsked,
    RunEvent,
    RunFinished,
    RunStarted,
    SandboxReady,
    Warned,
)
from toolcrew.orchestrator.terminal.output import RunPrinter
from toolcrew.orchestrator.traces.export_atif import split_thinking
from toolcrew.orchestrator.traces.reading import Trace, format_instant


class TracePrinter(RunPrinter):
    """Shows a trace. `is_full`: shorten no text, and show the messages of requests."""

    hint = "--full shows them"

    def __init__(self, console: Console, *, is_full: bool = False) -> None:
        super().__init__(console)
        self._is_full = is_full
        if is_full:
            self.max_lines = None

    def show(self, trace: Trace) -> None:
        """Show the last attempt of the run."""
        for event in trace.in_order():
            self.on_event(event)
        if trace.events:
            self._line(f"   {count(len(trace.steps), 'step')} in {trace.seconds:.2f} s", "dim")
        for note in (*trace.notes(), *(f"note: {fault}" for fault in trace.faults())):
            self._line(note, "magenta")

    def on_event(self, event: RunEvent) -> None:
        """Show one event."""
        match event:
            case Warned():
                # `Trace.notes` has the warnings.
                return
            case ModelAsked() if self._is_full:
                for message in event.new_messages:
                    self._block(_message_text(message), "dim", f"{message.get('role')}: ")
            case CallStarted() if self._is_full:
                self._block(json.dumps(event.call.arguments, ensure_ascii=False), "yellow", f"-> {event.call.name} ")
                return
            case ModelAnswered():
                text, thought = split_thinking(event.message)
                self._block(thought, "dim", "thinks: ") if thought else None
                self._block(text, "") if text else None
            case ApprovalAsked():
                warning = f" (dangerous: {event.warning})" if event.warning else ""
                self._line(f"   approval: {event.reason}{warning}", "magenta")
            case ApprovalDecided():
                decision = "allowed" if event.is_allowed else "denied"
                changed = ", with other arguments" if event.is_changed else ""
                self._line(f"   {decision}{changed}{': ' + event.reason if event.reason else ''}", "magenta")
            case SandboxReady():
                self._line(f"   session {event.session}, sandbox {event.sandbox} on {event.host} {event.image}", "dim")
            case RunFinished():
                self._block(event.answer, "bold", "answer: ")
        super().on_event(event)
        if isinstance(event, RunStarted):
            self._line(f"   {format_instant(event.at)}", "dim")
            self._block(event.instruction, "")


def build_json(trace: Trace) -> dict[str, Any]:
    """Return the events of the last attempt, and the faults of the trace file."""
    return {
        "id": trace.run,
        "path": str(trace.path),
        "attempts": trace.attempts,
        "faults": trace.faults(),
        "events": [with_instants(event.to_trace()) for event in trace.attempt],
    }


def _message_text(message: dict[str, Any]) -> str:
    """Return the text of a message, followed by its calls as JSON."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}" if calls else text
