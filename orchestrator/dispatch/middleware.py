"""The optional features around calls: metrics and traces."""

import asyncio
from collections.abc import Sequence

from contract.calls import ToolResult
from contract.specs import ToolSpec
from orchestrator.dispatch.dispatcher import CallMiddleware, Work
from orchestrator.dispatch.request import Request
from orchestrator.metrics.call_meter import CallMeter
from orchestrator.tracing import CURRENT_CALL, call_spans
from telemetry.spans import Tracer


class MeteredCalls(CallMiddleware):
    """Counts every call once. A tenant's own skill counts as skill_tool: its name is the tenant's."""

    def __init__(self, meter: CallMeter) -> None:
        self._meter = meter

    async def run(self, request: Request, work: Work) -> ToolResult:
        try:
            result = await work()
        except asyncio.CancelledError:
            if not request.keeps_result:
                self._meter.count_abandoned(request.call.name)
            raise
        self._meter.count(result)
        return result

    def tools_changed(self, published: Sequence[ToolSpec]) -> None:
        self._meter.know(published)


class TracedCalls(CallMiddleware):
    """Makes the spans of every call."""

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
