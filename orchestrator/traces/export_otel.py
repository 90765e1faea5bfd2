"""Export of a trace as OpenTelemetry spans in OTLP JSON. The spans are those that a traced process sends
(orchestrator/tracing.py), built from the stored events.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from toolcrew.contract.traceparent import derive_id, run_span_id
from toolcrew.orchestrator.traces.reading import Trace
from toolcrew.orchestrator.tracing import RunSpans, TracedRun
from toolcrew.telemetry import names
from toolcrew.telemetry.spans import Span, Tracer

KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
STATUS_ERROR = 2


def build_otel(trace: Trace, *, with_content: bool = False) -> dict[str, Any]:
    """Return an ExportTraceServiceRequest with the spans of the last attempt, the span of the run first.
    `with_content`: include texts of the run: instruction, answer, arguments and results.
    """
    spans = _build_spans(trace, with_content) if trace.events else []
    resource = {"service.name": "toolcrew", "service.version": trace.start.release if trace.start else ""}
    if trace.events:
        resource[names.TENANT] = trace.tenant
    scope = {"name": "toolcrew", "version": resource["service.version"]}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


def _build_spans(trace: Trace, with_content: bool) -> list[dict[str, Any]]:
    ended: list[Span] = []
    tracer = Tracer(ended.append, lambda _: True, has_content=with_content)
    run = RunSpans(tracer, TracedRun(trace.tenant, trace.run, began_at=trace.attempt[0].at))
    for event in trace.attempt:
        run.on_event(event)
    run.finish(None if trace.end is not None else "unfinished")
    # The ids of requests are random, but two exports of a trace must be equal.
    ids = {span.ref.span_id: span.ref.span_id for span in ended}
    for number, span in enumerate(span for span in ended if span.kind == "client"):
        ids[span.ref.span_id] = derive_id("request", run_span_id(trace.tenant, trace.run), str(number))[:16]
    # Each attempt has different span ids. A reader would treat two spans with the same id as one span.
    if trace.attempts > 1:
        ids = {old: hashlib.sha256(f"{new} {trace.attempts}".encode()).hexdigest()[:16] for old, new in ids.items()}
    descriptions = {
        tool.get("function", {}).get("name"): tool.get("function", {}).get("description") for tool in trace.tools
    }
    for span in ended:
        # Spans without an end in the trace end with its last event.
        span.end_at = max(span.start_at, min(span.end_at, trace.attempt[-1].at))
        if names.TOOL in span.attributes:
            span.set({names.TOOL_DESCRIPTION: descriptions.get(span.attributes[names.TOOL])})
    return [_convert(span, ids) for span in sorted(ended, key=lambda span: (span.parent is not None, span.start_at))]


def _convert(span: Span, ids: Mapping[str, str]) -> dict[str, Any]:
    """Return a span in OTLP JSON. `ids`: the exported ids of the spans."""
    exported: dict[str, Any] = {"traceId": span.ref.trace_id, "spanId": ids[span.ref.span_id], "name": span.name}
    if span.parent is not None:
        exported["parentSpanId"] = ids[span.parent.span_id]
    exported |= {"kind": KINDS[span.kind], "attributes": _attributes(span.attributes)}
    start, end = (str(round(at * 1_000_000) * 1000) for at in (span.start_at, span.end_at))
    exported |= {"startTimeUnixNano": start, "endTimeUnixNano": end}
    return exported | ({"status": {"code": STATUS_ERROR}} if span.error else {})


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attributes in OTLP JSON."""
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


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
