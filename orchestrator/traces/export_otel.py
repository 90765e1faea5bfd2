"""Export of a trace as OpenTelemetry spans in OTLP JSON. The attributes follow the semantic conventions for
generative AI (status: development).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from contract.run_events import ModelAnswered, ModelAsked
from contract.traceparent import call_span_id, derive_id, run_span_id, trace_id_of
from orchestrator.traces.reading import Trace, TraceCall
from telemetry import names

INTERNAL, CLIENT = 1, 3
STATUS_ERROR = 2


def build_otel(trace: Trace, *, with_content: bool = False) -> dict[str, Any]:
    """Return an ExportTraceServiceRequest. `with_content`: include texts of the run: instruction, answer, arguments
    and results.
    """
    spans = _spans(trace, with_content) if trace.events else []
    resource = {"service.name": "toolcrew", "service.version": trace.start.release if trace.start else ""}
    if trace.events:
        resource[names.TENANT] = trace.tenant
    scope = {"name": "toolcrew", "version": resource["service.version"]}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


def _spans(trace: Trace, with_content: bool) -> list[dict[str, Any]]:
    """Return all spans of the last attempt: the span of the run first."""
    # Each attempt has different span ids. A reader would treat two spans with the same id as one span.
    salt = str(trace.attempts) if trace.attempts > 1 else ""
    root = _span_id(run_span_id(trace.tenant, trace.run), salt)
    finished = trace.finished
    attributes: dict[str, Any] = {
        names.OPERATION: "invoke_agent",
        names.PROVIDER: names.PROVIDER_NAME,
        names.AGENT: names.AGENT_NAME,
        names.CONVERSATION: trace.run,
        names.REQUEST_MODEL: trace.start.model if trace.start else None,
        names.STOP_REASON: finished.stop_reason if finished else None,
        names.INPUT_TOKENS: trace.usage.prompt_tokens if trace.end else None,
        names.OUTPUT_TOKENS: trace.usage.completion_tokens if trace.end else None,
        names.ERROR: _run_error(trace),
    }
    if with_content:
        attributes |= {names.INPUT_MESSAGES: _message("user", trace.start.instruction) if trace.start else None}
        attributes |= {names.OUTPUT_MESSAGES: _message("assistant", finished.answer) if finished else None}
    times = (trace.attempt[0].at, trace.attempt[-1].at)
    trace_id = trace_id_of(trace.tenant, trace.run)
    ids = {"traceId": trace_id, "spanId": root}
    spans = [_span(ids, f"invoke_agent {names.AGENT_NAME}", INTERNAL, times, attributes, trace.error or "")]
    for child in (*_chats(trace, salt), *_tools(trace, salt, with_content)):
        child |= {"traceId": trace_id, "parentSpanId": root}
        spans.append(child)
    return spans


def _chats(trace: Trace, salt: str) -> list[dict[str, Any]]:
    """Return one span for each request, including requests without a reply."""
    model = trace.start.model if trace.start else ""
    exchanges: list[tuple[ModelAsked, ModelAnswered | None]] = []
    for event in trace.attempt:
        match event:
            case ModelAsked():
                exchanges.append((event, None))
            case ModelAnswered() if exchanges:
                exchanges[-1] = exchanges[-1][0], event
    spans = []
    for number, (request, reply) in enumerate(exchanges):
        attributes: dict[str, Any] = {
            names.OPERATION: "chat",
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: model,
            names.CONVERSATION: trace.run,
            names.STEP: request.step,
        }
        if reply is None:
            attributes[names.ERROR] = "no_reply"
        else:
            attributes[names.INPUT_TOKENS] = reply.usage.prompt_tokens
            attributes[names.OUTPUT_TOKENS] = reply.usage.completion_tokens
            attributes[names.FINISH_REASONS] = [reply.finish_reason] if reply.finish_reason else None
        span = derive_id("request", run_span_id(trace.tenant, trace.run), str(number))[:16]
        times = (request.at, (reply or request).at)
        spans.append(_span({"spanId": _span_id(span, salt)}, f"chat {model}".strip(), CLIENT, times, attributes))
    return spans


def _tools(trace: Trace, salt: str, with_content: bool) -> list[dict[str, Any]]:
    """Return one span for each call."""
    described = {
        tool.get("function", {}).get("name"): tool.get("function", {}).get("description") for tool in trace.tools
    }
    spans = []
    for call in trace.calls:
        begin = call.started or call.finished
        if begin is None:
            continue
        attributes: dict[str, Any] = {
            names.OPERATION: "execute_tool",
            names.TOOL: call.tool,
            names.TOOL_TYPE: "function",
            names.TOOL_CALL: call.call_id,
            names.TOOL_DESCRIPTION: described.get(call.tool),
            names.CONVERSATION: trace.run,
        }
        if call.result is not None:
            attributes |= {
                names.ERROR: call.result.error_code,
                names.SANDBOX: call.result.sandbox.id if call.result.sandbox else None,
            }
            attributes |= {names.CLOCKS.format(name): seconds for name, seconds in call.result.clocks}
        if with_content:
            attributes |= _content(call)
        ids = {"spanId": _span_id(call_span_id(call.call_id), salt)}
        times = (begin.at, (call.finished or begin).at)
        spans.append(_span(ids, f"execute_tool {call.tool}", INTERNAL, times, attributes))
    return spans


def _content(call: TraceCall) -> dict[str, Any]:
    """Return the attributes with the arguments and the result of a call."""
    content: dict[str, Any] = {names.TOOL_ARGUMENTS: json.dumps(call.arguments, ensure_ascii=False)}
    return {**content, names.TOOL_RESULT: call.result.text()} if call.result is not None else content


def _run_error(trace: Trace) -> str | None:
    """Return the error type of the run; None if the run has an answer."""
    if trace.finished is None:
        return "aborted" if trace.end else "unfinished"
    return None if trace.finished.stop_reason == "answered" else trace.finished.stop_reason


def _message(role: str, text: str) -> str:
    """Return a message in the JSON form of the semantic conventions."""
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)


def _span(
    ids: dict[str, str],
    name: str,
    kind: int,
    times: tuple[float, float],
    attributes: Mapping[str, Any],
    message: str = "",
) -> dict[str, Any]:
    """Return one span. `times`: start and end in Unix seconds. `message`: description of the error."""
    start, end = (round(at * 1_000_000) * 1000 for at in times)
    span: dict[str, Any] = {**ids, "name": name, "kind": kind, "attributes": _attributes(attributes)}
    span |= {"startTimeUnixNano": str(start), "endTimeUnixNano": str(max(start, end))}
    if attributes.get(names.ERROR):
        span["status"] = {"code": STATUS_ERROR} | ({"message": message} if message else {})
    return span


def _span_id(span: str, salt: str) -> str:
    """Return the id of a span in an attempt. `salt` "": the first attempt."""
    return hashlib.sha256(f"{span} {salt}".encode()).hexdigest()[:16] if salt else span


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attributes in OTLP JSON, without None values."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    """Return a value in OTLP JSON. An integer is a string there, because JSON numbers have 53 bits."""
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}
