"""Middleware of the dispatcher: counts calls for the metrics, and traces calls."""

import asyncio
from collections.abc import Sequence

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.metrics import (
    CALL_SECONDS,
    CALLS,
    CALLS_ENDED,
    OTHER,
    OUTPUT_BYTES,
    OUTPUT_TRUNCATED,
    QUEUE_WAIT_SECONDS,
    REFUSALS,
    REFUSED_CALLS,
    SANDBOX_WAIT_SECONDS,
    TRANSFER_SECONDS,
)
from toolcrew.contract.names import POOL_QUEUES
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dispatch.dispatcher import Work
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.tracing import CURRENT_CALL, call_spans
from toolcrew.store.metrics import Counts
from toolcrew.telemetry.spans import Tracer

HOST_QUEUES = "host"
"""Value of the metrics label `queue` that stands for the queues of all hosts together."""
_ENDS = {ErrorCode.HOST_LOST: "lost", ErrorCode.OUTCOME_UNKNOWN: "unknown"}


class CallMeter:
    """Middleware of the dispatcher that counts calls. Tool names come from the catalog; a name that a model or a
    program invents is counted as OTHER. A tenant's own skill counts as skill_tool, because its name belongs to the
    tenant.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._published: Sequence[ToolSpec] = ()
        self._queues: dict[str, str] = {}

    async def run(self, request: Request, work: Work) -> ToolResult:
        """Run the call and count its result."""
        try:
            result = await work()
        except asyncio.CancelledError:
            if not request.keeps_result:
                self.count_abandoned(request.call.name)
            raise
        self.count(result)
        return result

    def tool_found(self, spec: ToolSpec) -> None:
        """Do nothing: a call is counted under the name in its result."""

    def tools_changed(self, published: Sequence[ToolSpec]) -> None:
        """Store the names of the tools that the workers publish."""
        if published is not self._published:
            self._published = published
            self._queues = {spec.name: POOL_QUEUES.get(spec.pool, HOST_QUEUES) for spec in published}

    def count(self, result: ToolResult) -> None:
        """Count a call that has ended with this result."""
        counts, clocks = self.counts, result.clocks
        queue = self._queues.get(result.name)
        tool = OTHER if queue is None else result.name
        self._count_end(tool, result)
        if clocks.run_s or clocks.sandbox_s:
            counts.observe(CALL_SECONDS, clocks.run_s, tool)
            counts.observe(SANDBOX_WAIT_SECONDS, clocks.sandbox_s)
        if clocks.queued_s and queue is not None:
            counts.observe(QUEUE_WAIT_SECONDS, clocks.queued_s, queue)
        counts.observe(TRANSFER_SECONDS, clocks.transfer_s)
        if result.output is not None:
            counts.observe(OUTPUT_BYTES, _count_bytes(result.output), tool)
        if result.truncated:
            counts.count(OUTPUT_TRUNCATED, tool)

    def count_unsent(self, name: str, code: ErrorCode) -> None:
        """Count a call of a model that never reached a dispatcher: its tool does not exist, its arguments are
        invalid, or it was refused.
        """
        self._count_code(name if name in self._queues else OTHER, code)
        self.counts.count(CALLS_ENDED, "not_run")

    def count_abandoned(self, name: str) -> None:
        """Count a call whose caller no longer waits."""
        self._count_code(name if name in self._queues else OTHER, ErrorCode.CANCELLED)

    def _count_end(self, tool: str, result: ToolResult) -> None:
        self._count_code(tool, result.error_code)
        self.counts.count(CALLS_ENDED, _find_end(result))

    def _count_code(self, tool: str, code: ErrorCode | None) -> None:
        self.counts.count(CALLS, tool, "ok" if code is None else "error", "" if code is None else code.value)
        if code is not None and code.value in REFUSALS:
            self.counts.count(REFUSED_CALLS, code.value)


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


def _find_end(result: ToolResult) -> str:
    """Return the outcome of the call as the metric names it. A call that was not sent is recognized by the missing
    durations (`clocks`) in its result.
    """
    if result.success or result.error_code is None:
        return "done"
    clocks = result.clocks
    was_run = not result.has_not_run and (clocks.queued_s or clocks.sandbox_s or clocks.run_s)
    return _ENDS.get(result.error_code) or ("done" if was_run else "not_run")


def _count_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
