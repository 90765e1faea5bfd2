"""OpenTelemetry spans of a call in the worker: the worker's processing, and the times in sandboxd and the guest."""

from collections.abc import Mapping

import structlog

from toolcrew.contract.calls import KillReport
from toolcrew.contract.settings import load_tracing_settings
from toolcrew.contract.traceparent import SpanRef, parse_traceparent
from toolcrew.telemetry import names
from toolcrew.telemetry.otlp import open_tracer
from toolcrew.telemetry.spans import Attributes, Tracer
from toolcrew.workers.executor import ExecutorMiddleware, FinishedCall
from toolcrew.workers.tools.base import SandboxRequest

log = structlog.get_logger(__name__)

LEAST_SHOWN_S = 0.001
"""Shortest sandbox start that gets its own span, in seconds."""


def open_process_tracer(kind: str) -> Tracer | None:
    """Return the tracer of a worker of that kind, or None when tracing is off. The pool's processes inherit the
    tracer.

    Raises ConfigError: the tracing settings are invalid.
    """
    return open_tracer(
        load_tracing_settings(), f"toolcrew-{kind}-worker", lambda message: log.warning("spans_lost", message=message)
    )


class CallTracing(ExecutorMiddleware):
    """Sends the spans of calls whose trace is sampled. `facts` holds `host` and `queue` of this worker."""

    def __init__(self, tracer: Tracer, facts: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._facts = facts

    def after_call(self, finished: FinishedCall) -> None:
        call, context, result = finished.call, finished.context, finished.result
        parent = parse_traceparent(context.trace) if context.trace is not None else None
        if parent is None or not parent.is_sampled:
            return
        attributes: Attributes = {
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
        span = self._tracer.start(
            f"process {call.name}", attributes, kind="consumer", parent=parent, at=finished.received_at
        )
        for request in finished.requests:
            self._send_request(request, span.ref)
        span.end(error=result.error_code.value if result.error_code is not None else None)

    def _send_request(self, request: SandboxRequest, parent: SpanRef) -> None:
        span = self._tracer.start(f"sandboxd {request.op}", {}, kind="client", parent=parent, at=request.began_at)
        # sandboxd reports durations, not times. The spans are placed backwards from the end of the request.
        ready_at = max(request.began_at, request.ended_at - request.sandbox_s)
        if ready_at - request.began_at >= LEAST_SHOWN_S:
            self._tracer.start("sandbox start", {}, parent=span.ref, at=request.began_at).end(at=ready_at)
        if request.run_s > 0.0:
            ran_until = min(request.ended_at, ready_at + request.run_s)
            guest = self._tracer.start(f"guest {request.op}", {}, parent=span.ref, at=ready_at)
            if request.kill is not None:
                self._send_kill(request.kill, guest.ref, ready_at, ran_until)
            guest.end(at=ran_until)
        elif request.kill is not None:
            self._send_kill(request.kill, span.ref, ready_at, request.ended_at)
        span.end(error=request.error, at=request.ended_at)

    def _send_kill(self, kill: KillReport, parent: SpanRef, earliest: float, ended_at: float) -> None:
        attributes: Attributes = {
            names.KILL_METHOD: kill.method,
            names.KILL_SIGNALLED: kill.signalled,
            names.KILL_SURVIVORS: kill.survivors,
        }
        self._tracer.start("kill", attributes, parent=parent, at=max(earliest, ended_at - kill.ms / 1000)).end(
            at=ended_at
        )
