"""The spans of one call on this side of the queue: the call, its waits for a slot, and each attempt at it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from contract.calls import ToolCall, ToolContext, ToolResult
from contract.specs import ToolSpec
from contract.traceparent import SpanRef, attempt_span_id
from telemetry import names
from telemetry.spans import Attributes, Span, Tracer

CALL_LOST = "CALL_LOST"
"""What ended an attempt after which there was another."""
CANCELLED = "CANCELLED"


class CallSpans:
    """Spans of a call while it is made. `is_own`: the span of the call itself is this one's to end; else a run has it.
    `leave`: takes spans of a call that is given up here; None: they end."""

    def __init__(
        self, tracer: Tracer, span: Span, *, is_own: bool, leave: Callable[[Span], None] | None = None
    ) -> None:
        self.span = span
        self._leave = leave
        self._tracer = tracer
        self._is_own = is_own
        self._waiting: Span | None = None
        self._attempt: Span | None = None

    def know(self, spec: ToolSpec) -> None:
        """Tell of the tool what is known by now."""
        self.span.set({names.TOOL_DESCRIPTION: spec.description} if spec.audience == "model" else {})

    def wait(self, tool: str, context: ToolContext, priority: str) -> Span:
        """It waits for a slot, until the span that this gives is ended."""
        told: Attributes = {names.TENANT: context.tenant, names.PRIORITY: priority}
        self._waiting = self._tracer.start(f"admission {tool}", told, parent=self.span.ref)
        return self._waiting

    def send(self, call: ToolCall, queue: str, attempt: int) -> Span:
        """An attempt begins, and ends with its answer; one before it, which had none, is linked."""
        earlier = self._attempt
        if earlier is not None:
            earlier.end(error=CALL_LOST)
        told: Attributes = {
            names.MESSAGING_SYSTEM: names.QUEUE_SYSTEM,
            names.MESSAGING_OPERATION: "send",
            names.MESSAGING_OPERATION_TYPE: "send",
            names.MESSAGING_DESTINATION: queue,
            names.CALL: call.id,
            names.ATTEMPT: attempt,
        }
        parent = self.span.ref
        # Whoever goes on with the call in another process finds the same id.
        ref = SpanRef(parent.trace_id, attempt_span_id(call.id, attempt), parent.is_sampled)
        links = [earlier.ref] if earlier is not None else []
        self._attempt = self._tracer.start(
            f"send {call.name}", told, kind="producer", parent=parent, ref=ref, links=links
        )
        return self._attempt

    def finish(self, result: ToolResult | None) -> None:
        """The call has its result; None: nobody waits for one here any more."""
        error = result.error_code.value if result is not None and result.error_code is not None else None
        parts = [span for span in (self._waiting, self._attempt) if span is not None]
        if result is None and self._leave is not None:
            for span in (*parts, *([self.span] if self._is_own else [])):
                self._leave(span)
            return
        for span in parts:
            span.end(error=CANCELLED if result is None else error)
        if self._is_own:
            end_call(self._tracer, self.span, result)


def call_attributes(tracer: Tracer, call: ToolCall) -> Attributes:
    """What is told of a tool's call when it begins."""
    return {
        names.OPERATION: "execute_tool",
        names.TOOL: call.name,
        names.TOOL_TYPE: "function",
        names.TOOL_CALL: call.id,
        **tracer.content(names.TOOL_ARGUMENTS, lambda: _json(call.arguments)),
    }


def end_call(tracer: Tracer, span: Span, result: ToolResult | None) -> None:
    """The span of a call is over. `result` None: it was given up."""
    if not span.ref.is_sampled:
        return
    if result is None:
        span.end(error=CANCELLED)
        return
    told: dict[str, Any] = {names.CLOCKS.format(name): seconds for name, seconds in result.clocks.model_dump().items()}
    if result.sandbox is not None:
        told |= {names.SANDBOX: result.sandbox.id, names.GENERATION: result.sandbox.generation}
    span.set({**told, **tracer.content(names.TOOL_RESULT, result.text)})
    span.end(error=result.error_code.value if result.error_code is not None else None)


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, default=str)
