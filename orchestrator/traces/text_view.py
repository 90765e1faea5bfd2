"""Text view of a trace: steps, calls, approvals, results and clocks. Untrusted text is escaped."""

import json
from collections.abc import Iterator
from typing import Any

from contract.run_events import SandboxReady
from orchestrator.dialects.model import Usage
from orchestrator.terminal.output import escape_controls, format_clocks
from orchestrator.traces.export_atif import split_thinking
from orchestrator.traces.reading import Trace, TraceCall, TraceStep, format_instant

MAX_LINES, MAX_CHARS = 20, 2000
"""Limits of one text in lines and characters, unless the full text is requested."""


def build_lines(trace: Trace, *, is_full: bool = False) -> list[str]:
    """Return the lines of the whole run. `is_full`: shorten no text, and show the messages of requests."""
    lines = [*_head(trace)]
    for step in trace.steps:
        lines += _step(step, is_full)
    lines += trace.notes()
    lines += _tail(trace, is_full)
    return [escape_controls(line) for line in lines]


def build_json(trace: Trace) -> dict[str, Any]:
    """Return the events of the last attempt, and the faults of the file."""
    return {
        "run": trace.run,
        "path": str(trace.path),
        "attempts": trace.attempts,
        "faults": trace.faults(),
        "events": [event.to_trace() for event in trace.attempt],
    }


def _head(trace: Trace) -> Iterator[str]:
    """Yield the run, its sandbox, its model and its instruction."""
    start = trace.start
    yield (
        f"run {trace.run}"
        + (f"  session {trace.session}" if trace.session else "")
        + (f"  attempt {trace.attempts}" if trace.attempts > 1 else "")
    )
    for event in trace.attempt:
        if isinstance(event, SandboxReady):
            yield f"   sandbox {event.sandbox or event.session} on {event.host} {event.image}"
    if start is not None:
        yield f"   {format_instant(start.at)}  model {start.model}  dialect {start.dialect}"
        yield from _block("", start.instruction, is_full=False)


def _step(step: TraceStep, is_full: bool) -> Iterator[str]:
    """Yield one step: its reply and its calls. `is_full`: also the messages of its request."""
    yield f"step {step.number}"
    if is_full and step.request is not None:
        for message in step.request.new_messages:
            yield from _block(f"{message.get('role')}: ", _message_text(message), is_full)
    reply = step.reply
    if reply is None:
        yield "   no reply"
    else:
        text, thought = split_thinking(reply.message)
        if thought:
            yield from _block("thinks: ", thought, is_full)
        if text:
            yield from _block("", text, is_full)
        reason = (
            f", finish reason {reply.finish_reason}" if reply.finish_reason not in ("stop", "tool_calls", None) else ""
        )
        yield f"   model {reply.model_s:.2f} s, {_tokens(reply.usage)}{reason}"
    for call in step.calls:
        yield from _call(call, is_full)


def _call(call: TraceCall, is_full: bool) -> Iterator[str]:
    """Yield one call: its arguments, its approval and its result."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    yield from _block(f"-> {call.tool} ", arguments, is_full)
    if call.approval_request is not None:
        warning = f" (dangerous: {call.approval_request.warning})" if call.approval_request.warning else ""
        yield f"   approval: {call.approval_request.reason}{warning}"
    if call.approval_decision is not None:
        decision = "allowed" if call.approval_decision.is_allowed else "refused"
        changed = ", with other arguments" if call.approval_decision.is_changed else ""
        yield f"   {decision}{changed}{': ' + call.approval_decision.reason if call.approval_decision.reason else ''}"
    result = call.result
    if result is None:
        yield "   no result"
        return
    yield from _block("", result.text(), is_full)
    if result.spill is not None:
        yield f"   the complete output was at {result.spill.path} ({result.spill.bytes} bytes)"
    code = result.metadata.get("exit_code")
    seconds = f"{call.seconds:.3f} s   " if call.seconds is not None else ""
    yield f"   {seconds}{format_clocks(result.clocks)}" + (f"   exit code {code}" if code not in (None, 0) else "")


def _tail(trace: Trace, is_full: bool) -> Iterator[str]:
    """Yield the answer, the totals and the faults."""
    if trace.end is not None:
        finished = trace.finished
        if finished is not None and finished.answer:
            yield from _block("answer: ", finished.answer, is_full)
        reason = f"stopped: {finished.stop_reason}" if finished is not None else f"aborted: {trace.error}"
        cost = f", cost {finished.cost:.4f}" if finished is not None and finished.cost is not None else ""
        yield f"{reason}   {len(trace.steps)} steps in {trace.seconds:.2f} s, {_tokens(trace.usage)}{cost}"
        yield f"   tools: {format_clocks(trace.clocks)}"
    for fault in trace.faults():
        yield f"note: {fault}"


def _tokens(usage: Usage) -> str:
    """Return the token counts."""
    return f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"


def _message_text(message: dict[str, Any]) -> str:
    """Return the text of a message, followed by its calls as JSON."""
    content = message.get("content")
    text = (
        content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content is not None else ""
    )
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}" if calls else text


def _block(head: str, text: str, is_full: bool) -> Iterator[str]:
    """Yield the lines of a text, with `head` before the first line. The text is shortened unless `is_full`."""
    cut = text if is_full or len(text) <= MAX_CHARS else text[:MAX_CHARS]
    lines = cut.rstrip("\n").split("\n")
    visible = lines if is_full else lines[:MAX_LINES]
    for number, line in enumerate(visible):
        yield f"   {head if number == 0 else ''}{line}"
    if len(visible) < len(lines) or len(cut) < len(text):
        yield f"   ... {len(text) - sum(len(line) + 1 for line in visible) + 1} more characters (--full shows them)"
