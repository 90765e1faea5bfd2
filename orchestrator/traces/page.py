"""HTML page of a trace. The page works offline, and has no script and no external resource.

Security: a trace contains untrusted text. Every text is escaped, and the Content-Security-Policy forbids scripts.
"""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from contract.run_events import RunEvent, SandboxReady
from orchestrator.terminal.output import format_clocks
from orchestrator.terminal.text import escape_controls
from orchestrator.traces.export_atif import split_thinking
from orchestrator.traces.reading import Trace, TraceCall, TraceStep, format_instant

OPEN_CHARS = 4000
"""Length above which a text is folded, in characters."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --dim: #61666d; --line: #d9dce1; --card: #f6f7f9;
  --good: #17703c; --bad: #b3261e; --mark: #7a4d00; --bar: #4c7bd9; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --text: #e4e6ea; --dim: #9aa0a8; --line: #33373d;
  --card: #1e2125; --good: #6fcf97; --bad: #ff8a80; --mark: #e5b567; --bar: #7da2ef; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
pre { margin: .4rem 0; padding: .6rem .8rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
.dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); } .mark { color: var(--mark); }
.call { margin: .6rem 0 .6rem .2rem; padding-left: .8rem; border-left: 3px solid var(--line); }
.call.failed { border-color: var(--bad); }
.time { position: relative; height: 6px; margin: .3rem 0; background: var(--card); border-radius: 3px; }
.time i { position: absolute; height: 6px; min-width: 2px; background: var(--bar); border-radius: 3px; }
table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
summary { cursor: pointer; color: var(--dim); }
"""


def build_page(trace: Trace) -> str:
    """Return the page."""
    title = _text(f"Run {trace.run}")
    body = "\n".join([*_head(trace), *(line for step in trace.steps for line in _step(trace, step)), *_tail(trace)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" '
        'content="no-referrer">\n'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _head(trace: Trace) -> Iterator[str]:
    """Yield the title, the table of facts and the instruction."""
    start, finished = trace.start, trace.finished
    yield f"<h1>Run {_text(trace.run)}</h1>"
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
            ("time", f"{trace.seconds:.2f} s, {len(trace.steps)} steps, {len(trace.calls)} calls"),
            ("tokens", f"{trace.usage.prompt_tokens} in, {trace.usage.completion_tokens} out"),
            ("tools", format_clocks(trace.clocks)),
        ]
        rows += [("cost", f"{finished.cost:.4f}")] if finished is not None and finished.cost is not None else []
    if trace.attempts > 1:
        rows.append(("attempts", f"{trace.attempts}; this is the last one"))
    yield (
        "<table>"
        + "".join(f'<tr><td class="dim">{name}</td><td>{_text(str(value))}</td></tr>' for name, value in rows)
        + "</table>"
    )
    for fault in trace.faults():
        yield f'<p class="mark">{_text(fault)}</p>'
    if start is not None:
        yield "<h2>Instruction</h2>" + _pre(start.instruction)


def _step(trace: Trace, step: TraceStep) -> Iterator[str]:
    """Yield one step: its request, its reply and its calls."""
    yield f"<section><h2>Step {step.number}</h2>"
    request, reply = step.request, step.reply
    if request is not None:
        yield _bar(trace, request, reply)
        messages = json.dumps(request.new_messages, ensure_ascii=False, indent=1)
        yield (
            f"<details><summary>{len(request.new_messages)} new of {request.messages} messages "
            f"sent</summary>{_plain(messages)}</details>"
        )
    if reply is None:
        yield '<p class="mark">No reply.</p>'
    else:
        text, thought = split_thinking(reply.message)
        if thought:
            yield f"<details><summary>thinking</summary>{_plain(thought)}</details>"
        if text:
            yield _pre(text)
        yield (
            f'<p class="dim">model {reply.model_s:.2f} s, {reply.usage.prompt_tokens} + '
            f"{reply.usage.completion_tokens} tokens, {_text(str(reply.finish_reason))}</p>"
        )
    for call in step.calls:
        yield from _call(trace, call)
    yield "</section>"


def _call(trace: Trace, call: TraceCall) -> Iterator[str]:
    """Yield one call: its arguments, its approval and its result."""
    result = call.result
    failed = " failed" if result is None or not result.success else ""
    yield f'<div class="call{failed}"><b>{_text(call.tool)}</b> <span class="dim">{_text(call.call_id)}</span>'
    if call.started is not None:
        yield _bar(trace, call.started, call.finished)
    command = call.arguments.get("command")
    is_command = isinstance(command, str) and len(call.arguments) == 1
    yield _pre(str(command) if is_command else json.dumps(call.arguments, ensure_ascii=False, indent=1))
    if (request := call.approval_request) is not None:
        yield f'<p class="mark">approval: {_text(request.reason)} {_text(request.warning)}</p>'
    if (decision := call.approval_decision) is not None:
        style, label = ("good", "allowed") if decision.is_allowed else ("bad", "refused")
        yield f'<p class="{style}">{label} {_text(decision.reason)}</p>'
    if result is None:
        yield '<p class="bad">No result.</p></div>'
        return
    yield _pre(result.text())
    seconds = f"{call.seconds:.3f} s, " if call.seconds is not None else ""
    code = result.metadata.get("exit_code")
    exit_code = "" if code is None else f", exit code {_text(str(code))}"
    yield f'<p class="dim">{seconds}{format_clocks(result.clocks)}{exit_code}</p></div>'


def _tail(trace: Trace) -> Iterator[str]:
    """Yield the answer and the notes."""
    if trace.finished is not None and trace.finished.answer:
        yield "<h2>Answer</h2>" + _pre(trace.finished.answer)
    if notes := trace.notes():
        yield "<h2>Notes</h2>" + "".join(f"<p>{_text(note)}</p>" for note in notes)


def _bar(trace: Trace, begin: RunEvent, end: RunEvent | None) -> str:
    """Return a bar that shows the time between two events. The full width is the time of the run."""
    first = trace.attempt[0].at
    total_s = max(1e-6, trace.attempt[-1].at - first)
    offset = min(100.0, max(0.0, (begin.at - first) / total_s * 100))
    width = min(100.0 - offset, max(0.0, ((end or begin).at - begin.at) / total_s * 100))
    return f'<div class="time"><i style="left:{offset:.2f}%;width:{width:.2f}%"></i></div>'


def _pre(text: str) -> str:
    """Return the text as a block. A long text is folded."""
    if len(text) <= OPEN_CHARS:
        return _plain(text)
    return f"<details><summary>{_text(text[:200])} ... ({len(text)} characters)</summary>{_plain(text)}</details>"


def _plain(text: str) -> str:
    """Return the text as a block."""
    return f"<pre>{_text(text)}</pre>"


def _text(text: str) -> str:
    """Return the text, escaped for HTML, with control characters visible."""
    return escape(escape_controls(text))
