"""Counts every call that a dispatcher answers, once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from contract.calls import ToolCall, ToolResult
from contract.errors import ErrorCode
from contract.metrics import (
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
from contract.names import POOL_QUEUES
from contract.specs import ToolSpec
from store.metrics import Counts

HOST_QUEUES = "host"
"""Stands for the queues of all hosts."""
_ENDS = {ErrorCode.HOST_LOST: "lost", ErrorCode.OUTCOME_UNKNOWN: "unknown"}


class MeteredRequest(Protocol):
    """A request, as far as it is counted (orchestrator/dispatch/request.py)."""

    @property
    def call(self) -> ToolCall: ...

    @property
    def keeps_result(self) -> bool: ...


class CallMeter:
    """A middleware of the dispatcher. Names of tools come from the catalog: what a model or a program invents is
    counted under OTHER. A tenant's own skill counts as skill_tool, because its name is the tenant's.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._published: Sequence[ToolSpec] = ()
        self._queues: dict[str, str] = {}

    async def run(self, request: MeteredRequest, work: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Have a call made, and count its result."""
        try:
            result = await work()
        except asyncio.CancelledError:
            if not request.keeps_result:
                self.count_abandoned(request.call.name)
            raise
        self.count(result)
        return result

    def tool_found(self, spec: ToolSpec) -> None:
        """A call is counted under the name in its result."""

    def tools_changed(self, published: Sequence[ToolSpec]) -> None:
        """Learn the names of the tools that the workers publish."""
        if published is not self._published:
            self._published = published
            self._queues = {spec.name: POOL_QUEUES.get(spec.pool, HOST_QUEUES) for spec in published}

    def count(self, result: ToolResult) -> None:
        """A call has been answered."""
        counts, clocks = self._counts, result.clocks
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
        """A call of a model that never came to a dispatcher: its tool is none, its arguments cannot be read, or it was
        refused.
        """
        self._count_code(name if name in self._queues else OTHER, code)
        self._counts.count(CALLS_ENDED, "not_run")

    def count_abandoned(self, name: str) -> None:
        """Whoever waited for the call has gone."""
        self._count_code(name if name in self._queues else OTHER, ErrorCode.CANCELLED)

    def _count_end(self, tool: str, result: ToolResult) -> None:
        self._count_code(tool, result.error_code)
        self._counts.count(CALLS_ENDED, _find_end(result))

    def _count_code(self, tool: str, code: ErrorCode | None) -> None:
        self._counts.count(CALLS, tool, "ok" if code is None else "error", "" if code is None else code.value)
        if code is not None and code.value in REFUSALS:
            self._counts.count(REFUSED_CALLS, code.value)


def _find_end(result: ToolResult) -> str:
    """What the ledger has of the call. Whoever answers without having sent it has no clocks."""
    if result.success or result.error_code is None:
        return "done"
    clocks = result.clocks
    was_run = not result.has_not_run and (clocks.queued_s or clocks.sandbox_s or clocks.run_s)
    return _ENDS.get(result.error_code) or ("done" if was_run else "not_run")


def _count_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
