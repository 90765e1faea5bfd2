"""A trace as OpenTelemetry spans in OTLP's JSON, with the attributes of the conventions for generative AI (status:
development).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from orchestrator.traces import records
from orchestrator.traces.reading import Trace, TraceCall, seconds_of
from telemetry import names

INTERNAL, CLIENT = 1, 3
STATUS_ERROR = 2


def build_otel(trace: Trace, *, with_content: bool = False) -> dict[str, Any]:
    """An ExportTraceServiceRequest. `with_content`: instruction, answer, arguments and results, too; without it no text
    of the run is in it.
    """
    spans = _spans(trace, with_content) if trace.records else []
    resource = {"service.name": "toolcrew", "service.version": trace.start.release if trace.start else ""}
    if trace.records:
        resource[names.TENANT] = trace.records[0].tenant
    scope = {"name": "toolcrew", "version": resource["service.version"]}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


def _spans(trace: Trace, with_content: bool) -> list[dict[str, Any]]:
    first = trace.attempt[0]
    # Each attempt has spans of its own: two with one id would be one to whoever reads them.
    salt = str(trace.attempts) if trace.attempts > 1 else ""
    root = _span_id(trace.start.span_id if trace.start else first.parent or first.span_id, salt)
    end = trace.end
    told: dict[str, Any] = {
        names.OPERATION: "invoke_agent",
        names.PROVIDER: names.PROVIDER_NAME,
        names.AGENT: names.AGENT_NAME,
        names.CONVERSATION: trace.run,
        names.REQUEST_MODEL: trace.start.model if trace.start else None,
        names.STOP_REASON: end.stop_reason if end else None,
        names.INPUT_TOKENS: end.prompt_tokens if end else None,
        names.OUTPUT_TOKENS: end.completion_tokens if end else None,
        names.ERROR: _run_error(end),
    }
    if with_content:
        told |= {names.INPUT_MESSAGES: _message("user", trace.start.instruction) if trace.start else None}
        told |= {names.OUTPUT_MESSAGES: _message("assistant", end.answer) if end else None}
    times = (first.ts, trace.attempt[-1].ts)
    ids = {"traceId": first.trace_id, "spanId": root}
    spans = [_span(ids, f"invoke_agent {names.AGENT_NAME}", INTERNAL, times, told, (end.error if end else None) or "")]
    for child in (*_chats(trace, salt), *_tools(trace, salt, with_content)):
        child |= {"traceId": first.trace_id, "parentSpanId": root}
        spans.append(child)
    return spans


def _chats(trace: Trace, salt: str) -> list[dict[str, Any]]:
    """One span for each request, those that brought no reply among them."""
    model = trace.start.model if trace.start else ""
    spans = []
    answers = {record.span_id: record for record in trace.attempt if isinstance(record, records.LlmResponse)}
    for record in trace.attempt:
        if not isinstance(record, records.LlmRequest):
            continue
        answer = answers.get(record.span_id)
        told: dict[str, Any] = {
            names.OPERATION: "chat",
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: model,
            names.CONVERSATION: trace.run,
            names.STEP: record.step,
        }
        if answer is None:
            told[names.ERROR] = "no_reply"
        else:
            told |= {names.INPUT_TOKENS: answer.prompt_tokens, names.OUTPUT_TOKENS: answer.completion_tokens}
            told[names.FINISH_REASONS] = [answer.finish_reason] if answer.finish_reason else None
        times = (record.ts, answer.ts if answer else record.ts)
        spans.append(_span({"spanId": _span_id(record.span_id, salt)}, f"chat {model}".strip(), CLIENT, times, told))
    return spans


def _tools(trace: Trace, salt: str, with_content: bool) -> list[dict[str, Any]]:
    described = {
        tool.get("function", {}).get("name"): tool.get("function", {}).get("description") for tool in trace.tools
    }
    spans = []
    for call in trace.calls:
        begun = call.called or call.result
        if begun is None:
            continue
        told: dict[str, Any] = {
            names.OPERATION: "execute_tool",
            names.TOOL: call.tool,
            names.TOOL_TYPE: "function",
            names.TOOL_CALL: call.call_id,
            names.TOOL_DESCRIPTION: described.get(call.tool),
            names.CONVERSATION: trace.run,
        }
        if call.result is not None:
            told |= {
                names.ERROR: call.result.error_code,
                names.SANDBOX: call.result.sandbox.id if call.result.sandbox else None,
            }
            told |= {names.CLOCKS.format(name): seconds for name, seconds in call.result.clocks.model_dump().items()}
        if with_content:
            told |= _content(call)
        times = (begun.ts, call.result.ts if call.result else begun.ts)
        spans.append(
            _span({"spanId": _span_id(begun.span_id, salt)}, f"execute_tool {call.tool}", INTERNAL, times, told)
        )
    return spans


def _content(call: TraceCall) -> dict[str, Any]:
    told: dict[str, Any] = {names.TOOL_ARGUMENTS: json.dumps(call.arguments, ensure_ascii=False)}
    return {**told, names.TOOL_RESULT: call.result.text()} if call.result is not None else told


def _run_error(end: records.RunEnd | None) -> str | None:
    if end is None:
        return "unfinished"
    return None if end.stop_reason == "answered" else end.stop_reason or "aborted"


def _message(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)


def _span(
    ids: dict[str, str], name: str, kind: int, times: tuple[str, str], attributes: Mapping[str, Any], message: str = ""
) -> dict[str, Any]:
    start, end = (_nanos(ts) for ts in times)
    span: dict[str, Any] = {**ids, "name": name, "kind": kind, "attributes": _attributes(attributes)}
    span |= {"startTimeUnixNano": str(start), "endTimeUnixNano": str(max(start, end))}
    if attributes.get(names.ERROR):
        span["status"] = {"code": STATUS_ERROR} | ({"message": message} if message else {})
    return span


def _nanos(ts: str) -> int:
    return round(seconds_of(ts) * 1_000_000) * 1000


def _span_id(span: str, salt: str) -> str:
    return hashlib.sha256(f"{span} {salt}".encode()).hexdigest()[:16] if salt else span


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}
