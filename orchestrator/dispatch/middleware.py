"""Middleware of the dispatcher that traces calls. The metrics of calls are another middleware
(orchestrator/metrics/call_meter.py).
"""

from collections.abc import Sequence

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dispatch.dispatcher import Work
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.tracing import CURRENT_CALL, call_spans
from toolcrew.telemetry.spans import Tracer


class TracedCalls:
    """Middleware that starts and ends the spans of every call."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def run(self, request: Request, work: Work) -> ToolResult:
        with call_spans(self._tracer, request.call, request.tenant, request.session, request.run) as spans:
            result = await work()
            spans.finish(result)
        return result

    def tool_found(self, spec: ToolSpec) -> None:
        if (spans := CURRENT_CALL.get()) is not None:
            spans.know(spec)

    def tools_changed(self, published: Sequence[ToolSpec]) -> None:
        """Do nothing: spans do not depend on the published tools."""
