"""The spans of one call on this side of the queue: the call as its worker sees it, and what sandboxd and the guest say it took."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from contract.calls import KillReport, ToolCall, ToolContext, ToolResult
from contract.traceparent import SpanRef, parse_traceparent
from telemetry import names
from telemetry.otlp import open_tracer
from telemetry.settings import load_tracing_settings
from telemetry.spans import Attributes, Tracer

log = structlog.get_logger(__name__)

MAX_LAPS = 64
"""Requests to sandboxd of one call that have spans; a call has a few."""
LEAST_SHOWN_S = 0.001
"""A sandbox that is there at once has no span for that."""


def open_process_tracer(kind: str) -> Tracer | None:
    """The tracer of a worker of that kind, which its pool's processes inherit; None: tracing is off. Raises ConfigError."""
    return open_tracer(load_tracing_settings(), f"toolcrew-{kind}-worker", lambda told: log.warning("spans_lost", message=told))


@dataclass(frozen=True)
class Lap:
    """One request to sandboxd. `sandbox_s`: of all of it, as sandboxd counted from where the sandbox was there; `run_s`: of that, the guest's."""

    op: str
    began_at: float
    ended_at: float
    sandbox_s: float
    run_s: float = 0.0
    kill: KillReport | None = None
    error: str | None = None


class CallTrace:
    """What is gathered of a call while it runs; told of when it has ended: no more than its numbers stands in anybody's way."""

    def __init__(self, tracer: Tracer, call: ToolCall, context: ToolContext, parent: SpanRef, facts: Mapping[str, str]) -> None:
        self._tracer, self._call, self._context, self._parent, self._facts = tracer, call, context, parent, facts
        self._taken_at = time.time()
        self._laps: list[Lap] = []

    def note(self, lap: Lap) -> None:
        """A request to sandboxd has been answered."""
        if len(self._laps) < MAX_LAPS:
            self._laps.append(lap)

    def finish(self, result: ToolResult) -> None:
        """The call has its result."""
        call, context = self._call, self._context
        told: Attributes = {
            names.MESSAGING_SYSTEM: names.QUEUE_SYSTEM,
            names.MESSAGING_OPERATION: "process",
            names.MESSAGING_OPERATION_TYPE: "process",
            names.MESSAGING_DESTINATION: self._facts.get("queue"),
            names.HOST: self._facts.get("host"),
            names.TENANT: context.tenant,
            names.RUN: context.run,
            names.SESSION: context.session,
            names.CALL: call.id,
            names.ATTEMPT: context.attempt,
            names.QUEUED: result.clocks.queued_s,
            names.SANDBOX: result.sandbox.id if result.sandbox is not None else None,
            names.GENERATION: result.sandbox.generation if result.sandbox is not None else None,
        }
        span = self._tracer.start(f"process {call.name}", told, kind="consumer", parent=self._parent, at=self._taken_at)
        for lap in self._laps:
            self._tell(lap, span.ref)
        span.end(error=result.error_code.value if result.error_code is not None else None)

    def _tell(self, lap: Lap, parent: SpanRef) -> None:
        span = self._tracer.start(f"sandboxd {lap.op}", {}, kind="client", parent=parent, at=lap.began_at)
        ready_at = max(lap.began_at, lap.ended_at - lap.sandbox_s)
        if ready_at - lap.began_at >= LEAST_SHOWN_S:
            self._tracer.start("sandbox start", {}, parent=span.ref, at=lap.began_at).end(at=ready_at)
        if lap.run_s > 0.0:
            ran_until = min(lap.ended_at, ready_at + lap.run_s)
            guest = self._tracer.start(f"guest {lap.op}", {}, parent=span.ref, at=ready_at)
            if lap.kill is not None:
                self._tell_kill(lap.kill, guest.ref, ready_at, ran_until)
            guest.end(at=ran_until)
        elif lap.kill is not None:
            self._tell_kill(lap.kill, span.ref, ready_at, lap.ended_at)
        span.end(error=lap.error, at=lap.ended_at)

    def _tell_kill(self, kill: KillReport, parent: SpanRef, earliest: float, ended_at: float) -> None:
        told: Attributes = {names.KILL_METHOD: kill.method, names.KILL_SIGNALLED: kill.signalled, names.KILL_SURVIVORS: kill.survivors}
        self._tracer.start("kill", told, parent=parent, at=max(earliest, ended_at - kill.ms / 1000)).end(at=ended_at)


def open_trace(tracer: Tracer | None, call: ToolCall, context: ToolContext, facts: Mapping[str, str]) -> CallTrace | None:
    """The trace of a call whose sender has one that is recorded; None of any other."""
    if tracer is None or context.trace is None:
        return None
    parent = parse_traceparent(context.trace)
    return CallTrace(tracer, call, context, parent, facts) if parent.is_sampled else None
