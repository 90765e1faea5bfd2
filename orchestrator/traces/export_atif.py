"""Export of a trace as an ATIF 1.7 trajectory."""

from collections.abc import Iterator
from typing import Any

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.run_events import ReplyTokens, Warned
from toolcrew.contract.traceparent import trace_id_of
from toolcrew.orchestrator.dialects.thinking import strip_thinking, take_thinking
from toolcrew.orchestrator.traces.reading import Trace, format_instant
from toolcrew.orchestrator.traces.steps import RunCall, RunStep

VERSION = "ATIF-v1.7"
_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}


def build_atif(trace: Trace) -> dict[str, Any]:
    """Return the trace as an ATIF document. `extra` contains facts for which ATIF has no field. The tests check the
    document against the schema of the public specification.
    """
    start = trace.start
    steps = [*_opening(trace), *(_agent_step(trace, step) for step in trace.steps)]
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    run: dict[str, Any] = {"run": trace.run, "faults": trace.faults(), "attempts": trace.attempts}
    run |= {"tenant": trace.tenant, "trace_id": trace_id_of(trace.tenant, trace.run)}
    run["warnings"] = [event.message for event in trace.attempt if isinstance(event, Warned)]
    if trace.finished is not None:
        run |= {"stop_reason": trace.finished.stop_reason, "answer": trace.finished.answer}
    if trace.error is not None:
        run |= {"error": trace.error}
    return {
        "schema_version": VERSION,
        "session_id": trace.session or trace.run,
        "trajectory_id": trace.run,
        "agent": _present(
            name="toolcrew",
            version=(start.release if start else "") or "unknown",
            model_name=start.model if start else None,
            tool_definitions=trace.tools or None,
            extra={"dialect": start.dialect} if start else None,
        ),
        "steps": steps,
        "final_metrics": _final_metrics(trace, len(steps)),
        "extra": {"toolcrew": run},
    }


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def split_thinking(message: dict[str, Any]) -> tuple[str, str | None]:
    """Return the text of a reply and its thinking; the thinking is None if the server did not send any."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    thought = message.get("reasoning_content") or message.get("reasoning")
    if inner := take_thinking(text):
        text, thought = strip_thinking(text), thought or inner
    return text, thought if isinstance(thought, str) and thought else None


def _opening(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the messages of the first request. They exist before the agent acts."""
    first = trace.steps[0] if trace.steps else None
    request_event = first.request if first is not None and first.request is not None else trace.start
    timestamp = format_instant(request_event.at) if request_event is not None else None
    messages = first.messages if first is not None else []
    if not messages and trace.start is not None:
        messages = [{"role": "user", "content": trace.start.instruction}]
    for message in messages:
        source = _SOURCES.get(str(message.get("role")), "user")
        step: dict[str, Any] = {"timestamp": timestamp, "source": source, "message": _text(message.get("content"))}
        if source == "agent":
            # The message belongs to an earlier conversation and not to this run.
            step |= {"is_copied_context": True, "llm_call_count": 0}
        other_fields = {key: value for key, value in message.items() if key not in ("role", "content")}
        yield _present(**step, extra={"message": other_fields} if other_fields else None)


def _agent_step(trace: Trace, step: RunStep) -> dict[str, Any]:
    """Return the ATIF step of one step of the run."""
    reply = step.reply
    message, thought = split_thinking(reply.message if reply else {})
    fields: dict[str, Any] = {"source": "agent", "message": message, "extra": {"step": step.number}}
    if reply is not None:
        tokens = reply.tokens or ReplyTokens()
        metrics = _present(
            prompt_token_ids=list(tokens.prompt_token_ids) or None,
            completion_token_ids=list(tokens.completion_token_ids) or None,
            logprobs=list(tokens.logprobs) or None,
            prompt_tokens=reply.usage.prompt_tokens,
            completion_tokens=reply.usage.completion_tokens,
            cached_tokens=reply.usage.cached_tokens,
            extra={"model_s": reply.model_s},
        )
        fields |= {"reasoning_content": thought, "metrics": metrics, "llm_call_count": 1}
        fields |= {"timestamp": format_instant(reply.at)}
        fields["extra"]["finish_reason"] = reply.finish_reason
    elif step.request is not None:
        fields |= {"timestamp": format_instant(step.request.at)}
        fields["extra"]["has_no_reply"] = True
    if trace.start is not None:
        fields["model_name"] = trace.start.model
    if step.calls:
        fields["tool_calls"] = [_call(call, trace.find_unrun_reason(call)) for call in step.calls.values()]
        fields["observation"] = {
            "results": [_result(call, call.result) for call in step.calls.values() if call.result is not None]
        }
    return _present(**fields)


def _call(call: RunCall, unrun: str) -> dict[str, Any]:
    """Return the ATIF call. `unrun`: reason why the call did not run; "" if the call ran."""
    extra: dict[str, Any] = {"unrun": unrun} if unrun else {}
    if call.started is not None and call.arguments != call.started.call.arguments:
        extra["asked_arguments"] = call.started.call.arguments
    return _present(tool_call_id=call.call_id, function_name=call.tool, arguments=call.arguments, extra=extra or None)


def _result(call: RunCall, result: ToolResult) -> dict[str, Any]:
    """Return the ATIF result of a call."""
    extra = {
        "success": result.success,
        "error_code": result.error_code,
        "error": result.error,
        "output": result.output,
        "metadata": result.metadata,
        "seconds": call.seconds,
        "clocks": result.clocks.model_dump(mode="json"),
        "truncated": result.truncated,
        "was_refused": call.was_refused,
    }
    if result.success:
        # The content already contains the output.
        del extra["output"]
    return {"source_call_id": call.call_id, "content": result.text(), "extra": _present(**extra)}


def _final_metrics(trace: Trace, steps: int) -> dict[str, Any]:
    """Return the totals of the run. ATIF has a field for dollars only, so the cost is in `extra`."""
    # The cost of a run is in the currency of its prices, which may not be dollars.
    extra = {"cost": trace.finished.cost} if trace.finished and trace.finished.cost is not None else None
    return _present(
        total_prompt_tokens=trace.usage.prompt_tokens,
        total_completion_tokens=trace.usage.completion_tokens,
        total_cached_tokens=trace.usage.cached_tokens,
        total_steps=steps,
        extra=extra,
    )


def _text(content: Any) -> str:
    """Return the text of a message, joined from its text parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""
