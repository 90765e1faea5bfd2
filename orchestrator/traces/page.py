"""HTML page of a trace (templates/trace.html)."""

from typing import Any

from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import RunEvent, SandboxReady
from toolcrew.orchestrator.offline_pages import render_page
from toolcrew.orchestrator.terminal.output import format_clocks
from toolcrew.orchestrator.traces.export_atif import split_thinking
from toolcrew.orchestrator.traces.reading import Trace, format_instant


def build_page(trace: Trace) -> str:
    """Return the trace as one HTML page."""
    return render_page(
        "trace.html",
        title=f"Run {trace.run}",
        trace=trace,
        facts=_facts(trace),
        place=lambda begin, end: _place(trace, begin, end),
        split_thinking=split_thinking,
        format_clocks=format_clocks,
    )


def _facts(trace: Trace) -> list[tuple[str, Any]]:
    """Return the rows of the table of facts."""
    start, finished = trace.start, trace.finished
    rows: list[tuple[str, Any]] = []
    if start is not None:
        rows += [("started", format_instant(start.at)), ("model", start.model), ("dialect", start.dialect)]
    rows += [
        ("sandbox", f"{event.sandbox} {event.host} {event.image}")
        for event in trace.attempt
        if isinstance(event, SandboxReady)
    ]
    if trace.end is not None:
        rows += [
            ("ended", finished.stop_reason if finished is not None else f"aborted: {trace.error}"),
            ("time", f"{trace.seconds:.2f} s, {count(len(trace.steps), 'step')}, {count(len(trace.calls), 'call')}"),
            ("tokens", f"{trace.usage.prompt_tokens} in, {trace.usage.completion_tokens} out"),
            ("tools", format_clocks(trace.clocks)),
        ]
        rows += [("cost", f"{finished.cost:.4f}")] if finished is not None and finished.cost is not None else []
    if trace.attempts > 1:
        rows.append(("attempts", f"{trace.attempts}; this is the last one"))
    return rows


def _place(trace: Trace, begin: RunEvent, end: RunEvent | None) -> str:
    """Return where a bar for the time between two events begins and ends. The full width of the page is the time of the
    run.
    """
    first = trace.attempt[0].at
    total_s = max(1e-6, trace.attempt[-1].at - first)
    offset = min(100.0, max(0.0, (begin.at - first) / total_s * 100))
    width = min(100.0 - offset, max(0.0, ((end or begin).at - begin.at) / total_s * 100))
    return f"left:{offset:.2f}%;width:{width:.2f}%"
