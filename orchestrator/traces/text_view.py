"""A trace as lines of text: steps, calls, approvals, results, clocks. Hostile text is shown escaped."""

import json
from collections.abc import Iterator
from typing import Any

from orchestrator.terminal.output import escape_controls, format_clocks
from orchestrator.traces import records
from orchestrator.traces.export_atif import split_thinking
from orchestrator.traces.reading import Trace, TraceCall, TraceStep, seconds_of

MAX_LINES, MAX_CHARS = 20, 2000
"""Of one text, unless all is asked for."""


def build_lines(trace: Trace, *, is_full: bool = False) -> list[str]:
    """The whole run. `is_full`: nothing is shortened, and the messages of requests are shown."""
    lines = [*_head(trace)]
    for step in trace.steps:
        lines += _step(step, is_full)
    lines += _events(trace)
    lines += _tail(trace, is_full)
    return [escape_controls(line) for line in lines]


def build_json(trace: Trace) -> dict[str, Any]:
    """The same as one object, whole: the records of the last attempt, and what of the file is not."""
    return {
        "run": trace.run,
        "path": str(trace.path),
        "attempts": trace.attempts,
        "faults": trace.faults(),
        "records": [record.model_dump(mode="json") for record in trace.attempt],
    }


def _head(trace: Trace) -> Iterator[str]:
    start = trace.start
    session = next((record.session for record in trace.attempt if record.session), None)
    yield (
        f"run {trace.run}"
        + (f"  session {session}" if session else "")
        + (f"  attempt {trace.attempts}" if trace.attempts > 1 else "")
    )
    for record in trace.attempt:
        if isinstance(record, records.SandboxStart) and record.why == "opened":
            yield f"   sandbox {_where(record)}"
    if start is not None:
        yield f"   {start.ts}  model {start.model}  dialect {start.dialect}"
        yield from _block("", start.instruction, is_full=False)


def _step(step: TraceStep, is_full: bool) -> Iterator[str]:
    yield f"step {step.number}"
    if is_full and step.request is not None:
        for message in step.request.messages:
            yield from _block(f"{message.get('role')}: ", _message_text(message), is_full)
    if step.response is None:
        yield "   no reply came"
    else:
        text, thought = split_thinking(step.response.message)
        if thought:
            yield from _block("thinks: ", thought, is_full)
        if text:
            yield from _block("", text, is_full)
        reply = step.response
        reason = (
            f", finish reason {reply.finish_reason}" if reply.finish_reason not in ("stop", "tool_calls", None) else ""
        )
        yield f"   model {reply.model_s:.2f} s, {reply.prompt_tokens} + {reply.completion_tokens} tokens{reason}"
    for call in step.calls:
        yield from _call(call, is_full)


def _call(call: TraceCall, is_full: bool) -> Iterator[str]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    yield from _block(f"-> {call.tool} ", arguments, is_full)
    if call.asked is not None:
        warning = f" (dangerous: {call.asked.warning})" if call.asked.warning else ""
        yield f"   asked: {call.asked.reason}{warning}"
    if call.decided is not None:
        told = "allowed" if call.decided.is_allowed else "refused"
        changed = ", with other arguments" if call.decided.is_changed else ""
        yield f"   {told}{changed}{': ' + call.decided.reason if call.decided.reason else ''}"
    result = call.result
    if result is None:
        yield "   no result"
        return
    yield from _block("", result.text(), is_full)
    if result.spill is not None:
        yield f"   the whole output was at {result.spill.path} ({result.spill.bytes} bytes)"
    code = result.metadata.get("exit_code")
    seconds = f"{result.seconds:.3f} s   " if result.seconds is not None else ""
    yield f"   {seconds}{format_clocks(result.clocks)}" + (f"   exit code {code}" if code not in (None, 0) else "")


def _events(trace: Trace) -> Iterator[str]:
    """What is of the run, not of a step."""
    for record in trace.attempt:
        match record:
            case records.RunWarning():
                yield f"warning: {record.message}"
            case records.SandboxStart() if record.why != "opened":
                yield f"sandbox {record.why}: {_where(record)}"
            case records.SandboxStop():
                yield f"sandbox {record.why}: {record.sandbox} is gone"


def _where(record: records.SandboxStart) -> str:
    return " ".join(part for part in (record.sandbox, f"on {record.host}" if record.host else "", record.image) if part)


def _tail(trace: Trace, is_full: bool) -> Iterator[str]:
    end = trace.end
    if end is not None:
        yield from _block("answer: ", end.answer, is_full) if end.answer else ()
        reason = f"stopped: {end.stop_reason}" if end.error is None else f"aborted: {end.error}"
        cost = f", cost {end.cost:.4f}" if end.cost is not None else ""
        took = max(0.0, seconds_of(end.ts) - seconds_of(trace.attempt[0].ts))
        tokens = f"{end.prompt_tokens} + {end.completion_tokens} tokens"
        yield f"{reason}   {end.steps} steps in {took:.2f} s, {tokens}{cost}"
        yield f"   tools: {format_clocks(end.clocks)}"
    for fault in trace.faults():
        yield f"note: {fault}"


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = (
        content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content is not None else ""
    )
    calls = message.get("tool_calls")
    return f"{text}\n{json.dumps(calls, ensure_ascii=False)}" if calls else text


def _block(head: str, text: str, is_full: bool) -> Iterator[str]:
    """A text below its head, shortened unless all is wanted."""
    shown = text if is_full or len(text) <= MAX_CHARS else text[:MAX_CHARS]
    lines = shown.rstrip("\n").split("\n")
    kept = lines if is_full else lines[:MAX_LINES]
    for at, line in enumerate(kept):
        yield f"   {head if at == 0 else ''}{line}"
    if len(kept) < len(lines) or len(shown) < len(text):
        yield f"   ... {len(text) - sum(len(line) + 1 for line in kept) + 1} characters more (--full shows them)"
