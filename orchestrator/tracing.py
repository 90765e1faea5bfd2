"""Which run and which call this task is at work for, and the spans that are made of that. Used only while tracing is
on.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from contract.calls import ToolCall
from contract.traceparent import SpanRef, call_span_id
from orchestrator.call_spans import CallSpans, call_attributes
from orchestrator.runs.run_spans import RunSpans
from orchestrator.settings import OrchestratorSettings, secrets_of_environment
from orchestrator.traces.masking import Masker, build_masker
from telemetry import names
from telemetry.logs import get_logger
from telemetry.otlp import open_tracer
from telemetry.settings import load_tracing_settings
from telemetry.spans import Attributes, Span, Tracer

log = get_logger(__name__)

SERVICE = "toolcrew-orchestrator"
_RUN: ContextVar[RunSpans | None] = ContextVar("toolcrew-run-spans", default=None)
_CALL: ContextVar[CallSpans | None] = ContextVar("toolcrew-call-spans", default=None)


def open_process_tracer(
    settings: OrchestratorSettings | None = None, secrets: Mapping[str, str] | None = None
) -> Tracer | None:
    """The tracer of this process's clients; None: tracing is off. What settings, environment and `secrets` (kind ->
    value) hold is masked.

    Raises ConfigError with what is missing or wrong.
    """

    def masker() -> Masker:
        known = secrets or {}
        return build_masker(settings, known) if settings is not None else Masker({**secrets_of_environment(), **known})

    return open_tracer(load_tracing_settings(), SERVICE, lambda told: log.warning("spans_lost", message=told), masker)


@contextmanager
def run_spans(spans: RunSpans) -> Iterator[RunSpans]:
    """What is done in the block is done for that run, which ends with it."""
    error: str | None = None
    try:
        with within_run(spans):
            yield spans
    except BaseException as raised:
        error = str(getattr(raised, "code", "")) or type(raised).__name__
        raise
    finally:
        spans.finish(error)


@contextmanager
def within_run(spans: RunSpans) -> Iterator[None]:
    """What is done in the block is done for that run."""
    token = _RUN.set(spans)
    try:
        yield
    finally:
        _RUN.reset(token)


def current_run() -> RunSpans | None:
    """The run that this task is at work for."""
    return _RUN.get()


@contextmanager
def call_spans(
    tracer: Tracer, call: ToolCall, tenant: str, session: str | None, run: str | None
) -> Iterator[CallSpans]:
    """What is done in the block is done for that call: a run's has its span already, any other gets one."""
    of_run = _RUN.get()
    span = of_run.call(call.id) if of_run is not None else None
    leave = of_run.leave if of_run is not None else None
    spans = CallSpans(
        tracer, span or _begin(tracer, call, tenant, session, run, of_run), is_own=span is None, leave=leave
    )
    token = _CALL.set(spans)
    try:
        yield spans
    finally:
        _CALL.reset(token)
        spans.finish(None)


def current_call() -> CallSpans | None:
    """The call that this task is at work for."""
    return _CALL.get()


def _begin(
    tracer: Tracer, call: ToolCall, tenant: str, session: str | None, run: str | None, of_run: RunSpans | None
) -> Span:
    who: Attributes = {names.TENANT: tenant, names.SESSION: session, names.RUN: run, names.CONVERSATION: session or run}
    parent = of_run.span.ref if of_run is not None else tracer.ambient()
    root = tracer.root() if parent is None else parent
    ref = SpanRef(root.trace_id, call_span_id(call.id), root.is_sampled)
    if call.name.startswith("session."):
        # Verbs of sessions are no tools that a model could be told of.
        return tracer.start(call.name, {names.CALL: call.id, **who}, parent=parent, ref=ref)
    told: Attributes = {**call_attributes(tracer, call), **who}
    return tracer.start(f"execute_tool {call.name}", told, parent=parent, ref=ref)
