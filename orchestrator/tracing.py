"""Creates the spans of runs and calls in the orchestrator, and tracks which run and which call the current task
executes. Used only while tracing is on.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from toolcrew.contract import run_events as events
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.masking import Masker
from toolcrew.contract.run_events import RunEvent
from toolcrew.contract.settings import OrchestratorSettings, build_masker, load_tracing_settings, secrets_of_environment
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.traceparent import SpanRef, attempt_span_id, call_span_id, run_span_id, trace_id_of
from toolcrew.telemetry import names
from toolcrew.telemetry.logs import get_logger
from toolcrew.telemetry.spans import Attributes, Span, Tracer

if TYPE_CHECKING:
    from toolcrew.orchestrator.dialects.model import Model

log = get_logger(__name__)

SERVICE = "toolcrew-orchestrator"
CALL_LOST = "CALL_LOST"
"""Value of the attribute `error` in the span of an attempt that had no result and was followed by another attempt."""
CANCELLED = "CANCELLED"
INTERRUPTED = "interrupted"
NO_REPLY = "no_reply"
USUAL_PORTS = {"https": 443, "http": 80}


class CallSpans:
    """Spans of a call in progress. `is_own`: this object ends the span of the call; otherwise RunSpans, which has the
    spans of the call's run, ends it. `leave`: receives each open span when this process no longer waits for the call;
    None: these spans then end at once.
    """

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
        """Add the tool's description to the span of the call."""
        self.span.set({names.TOOL_DESCRIPTION: spec.description} if spec.audience == "model" else {})

    def wait(self, tool: str, context: ToolContext, priority: str) -> Span:
        """Start the span of the call's wait for a slot. The caller ends the returned span."""
        attributes: Attributes = {names.TENANT: context.tenant, names.PRIORITY: priority}
        self._waiting = self._tracer.start(f"admission {tool}", attributes, parent=self.span.ref)
        return self._waiting

    def send(self, call: ToolCall, queue: str, attempt: int) -> Span:
        """Start the span of an attempt, which ends with its result. The span links to an earlier attempt that had no
        result.
        """
        earlier = self._attempt
        if earlier is not None:
            earlier.end(error=CALL_LOST)
        attributes: Attributes = {
            names.MESSAGING_SYSTEM: names.QUEUE_SYSTEM,
            names.MESSAGING_OPERATION: "send",
            names.MESSAGING_OPERATION_TYPE: "send",
            names.MESSAGING_DESTINATION: queue,
            names.CALL: call.id,
            names.ATTEMPT: attempt,
        }
        parent = self.span.ref
        # The id depends only on the call and the attempt. Another process that continues the call uses the same id.
        ref = SpanRef(parent.trace_id, attempt_span_id(call.id, attempt), parent.is_sampled)
        links = [earlier.ref] if earlier is not None else []
        self._attempt = self._tracer.start(
            f"send {call.name}", attributes, kind="producer", parent=parent, ref=ref, links=links
        )
        return self._attempt

    def finish(self, result: ToolResult | None) -> None:
        """End the spans with the result of the call. None: this process no longer waits for the result."""
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
    """Return the attributes of a tool call at its start."""
    return {
        names.OPERATION: "execute_tool",
        names.TOOL: call.name,
        names.TOOL_TYPE: "function",
        names.TOOL_CALL: call.id,
        **tracer.content(names.TOOL_ARGUMENTS, lambda: _json(call.arguments)),
    }


def end_call(tracer: Tracer, span: Span, result: ToolResult | None, at: float | None = None) -> None:
    """End the span of a call, at `at` or now. `result` None: the call was given up."""
    if not span.ref.is_sampled:
        return
    if result is None:
        span.end(error=CANCELLED)
        return
    attributes: dict[str, Any] = {
        names.CLOCKS.format(name): seconds for name, seconds in result.clocks.model_dump().items()
    }
    if result.sandbox is not None:
        attributes |= {names.SANDBOX: result.sandbox.id, names.GENERATION: result.sandbox.generation}
    span.set({**attributes, **tracer.content(names.TOOL_RESULT, result.text)})
    span.end(error=result.error_code.value if result.error_code is not None else None, at=at)


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class TracedRun:
    """Description of a run for its spans. `earlier`: the run of the previous attempt. `is_agent` False: the run is a
    batch item that consists of one call.
    """

    tenant: str
    name: str
    session: str | None = None
    batch: str | None = None
    attempt: int = 1
    earlier: str | None = None
    began_at: float | None = None
    is_agent: bool = True


class RunSpans:
    """Spans of a run in progress. Span ids derive from the names of the run and its calls, so a process that resumes
    the run creates the same ids.

    `is_reported`: returns whether a process that ran the run earlier has already exported the span of a call. For the
    call id "": the span of the next request to the model.
    """

    def __init__(self, tracer: Tracer, run: TracedRun, is_reported: Callable[[str], bool] = lambda _: False) -> None:
        tenant = run.tenant
        name = run.name
        self._tracer = tracer
        self._run = name
        self._is_reported = is_reported
        self._identity: Attributes = {names.CONVERSATION: run.session or name, names.TENANT: tenant, names.RUN: name}
        # A run of a traced program belongs to the trace of the program. A run of a batch may be resumed in another
        # process, so it has a trace of its own.
        ambient = tracer.ambient() if run.batch is None else None
        ref = tracer.root(trace_id_of(tenant, name), run_span_id(tenant, name))
        if ambient is not None:
            ref = SpanRef(ambient.trace_id, ref.span_id, ambient.is_sampled)
        links = []
        if run.earlier is not None:
            links.append(SpanRef(trace_id_of(tenant, run.earlier), run_span_id(tenant, run.earlier)))
        attempt = run.attempt if run.batch is not None else None
        attributes: Attributes = {**self._identity, names.BATCH: run.batch or None, names.ATTEMPT: attempt}
        if run.is_agent:
            attributes = {
                **attributes,
                names.OPERATION: "invoke_agent",
                names.PROVIDER: names.PROVIDER_NAME,
                names.AGENT: names.AGENT_NAME,
            }
        title = f"invoke_agent {names.AGENT_NAME}" if run.is_agent else "batch_item"
        self.span = tracer.start(title, attributes, parent=ambient, ref=ref, links=links, at=run.began_at)
        self._server: Attributes = {}
        self._model = ""
        self._chat: Span | None = None
        self._is_replayed = False
        self._calls: dict[str, Span] = {}
        self._approvals: dict[str, Span] = {}
        self._error: str | None = None
        self._open_spans: list[Span] = []
        self.leave = self._open_spans.append if run.batch is not None else None
        """Receives the spans of a call that is given up. If the run may be resumed, it is not known yet whether these
        spans must be sent.
        """

    def on_event(self, event: RunEvent) -> None:
        """Process one event. Never raises an exception."""
        if not self.span.ref.is_sampled:
            return
        try:
            self._take(event)
        except Exception:  # an error in tracing must not end the run
            log.exception("span_lost", run=self._run, kind=type(event).__name__)

    def know_model(self, model: "Model") -> None:
        """Store the address of the model's server, if there is one."""
        address = urlsplit(str(getattr(model, "address", "")))
        if address.hostname:
            self._server = {
                names.SERVER_ADDRESS: address.hostname,
                names.SERVER_PORT: address.port or USUAL_PORTS.get(address.scheme),
            }

    def call(self, call: str) -> Span | None:
        """Return the span of a running call; None if there is none."""
        return self._calls.get(call)

    def finish(self, error: str | None = None) -> None:
        """End the run, after its session was closed. Open spans end with `error`."""
        self._end_chat(error or INTERRUPTED)
        for span in (*self._open_spans, *self._approvals.values(), *self._calls.values()):
            span.end(error=error or INTERRUPTED)
        self._approvals.clear()
        self._calls.clear()
        self.span.end(error=error or self._error)

    def _take(self, event: RunEvent) -> None:
        match event:
            case events.RunStarted():
                self._model = event.model
                self.span.set(
                    {
                        names.REQUEST_MODEL: event.model,
                        **self._tracer.content(names.INPUT_MESSAGES, lambda: _message("user", event.instruction)),
                    }
                )
            case events.ModelAsked():
                self._end_chat(NO_REPLY, event.at)
                self._is_replayed = self._is_reported("")
                if not self._is_replayed:
                    self._chat = self._begin_chat(event)
            case events.ModelAnswered():
                self._end_answered_chat(event)
            case events.CallStarted():
                if not self._is_reported(event.call.id):
                    self._calls[event.call.id] = self._begin_call(event.call, event.at)
            case events.CallFinished():
                self._end_call(event)
            case events.ApprovalAsked() if (call := self._calls.get(event.call.id)) is not None:
                self._approvals[event.call.id] = self._tracer.start(
                    "approval", self._identity, parent=call.ref, at=event.at
                )
            case events.ApprovalDecided() if (span := self._approvals.pop(event.call_id, None)) is not None:
                span.set({names.IS_ALLOWED: event.is_allowed, names.IS_CHANGED: event.is_changed})
                span.end(at=event.at)
            case events.RunFinished():
                self._end_run(event)
            case events.RunAborted():
                self._error = "aborted"

    def _begin_chat(self, event: events.ModelAsked) -> Span:
        attributes: Attributes = {
            names.OPERATION: "chat",
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: self._model,
            names.STEP: event.step,
            **self._server,
            **self._identity,
        }
        return self._tracer.start(f"chat {self._model}", attributes, kind="client", parent=self.span.ref, at=event.at)

    def _end_answered_chat(self, event: events.ModelAnswered) -> None:
        if self._chat is not None:
            self._chat.set(
                {
                    names.INPUT_TOKENS: event.usage.prompt_tokens,
                    names.OUTPUT_TOKENS: event.usage.completion_tokens,
                    names.FINISH_REASONS: [event.finish_reason] if event.finish_reason else None,
                    **self._tracer.content(
                        names.OUTPUT_MESSAGES, lambda: json.dumps([event.message], ensure_ascii=False, default=str)
                    ),
                }
            )
            self._chat.end(at=event.at)
            self._chat = None

    def _end_chat(self, error: str, at: float | None = None) -> None:
        if self._chat is not None:
            self._chat.end(error=error, at=at)
            self._chat = None

    def _begin_call(self, call: ToolCall, at: float) -> Span:
        parent = self.span.ref
        ref = SpanRef(parent.trace_id, call_span_id(call.id), parent.is_sampled)
        attributes: Attributes = {**call_attributes(self._tracer, call), **self._identity}
        return self._tracer.start(f"execute_tool {call.name}", attributes, parent=parent, ref=ref, at=at)

    def _end_call(self, event: events.CallFinished) -> None:
        result = event.result
        approval = self._approvals.pop(result.call_id, None)
        if approval is not None:
            approval.end(error=INTERRUPTED)
        span = self._calls.pop(result.call_id, None)
        if span is None:
            if self._is_replayed:
                return
            # A call that could not be parsed has no CallStarted event, so its span starts here.
            span = self._begin_call(ToolCall(id=result.call_id, name=result.name), event.at)
        end_call(self._tracer, span, result, event.at)

    def _end_run(self, event: events.RunFinished) -> None:
        attributes: dict[str, Any] = {
            names.STOP_REASON: event.stop_reason,
            names.INPUT_TOKENS: event.usage.prompt_tokens,
            names.OUTPUT_TOKENS: event.usage.completion_tokens,
        }
        self.span.set(
            {**attributes, **self._tracer.content(names.OUTPUT_MESSAGES, lambda: _message("assistant", event.answer))}
        )
        self._error = None if event.stop_reason == "answered" else event.stop_reason


def _message(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)


_RUN: ContextVar[RunSpans | None] = ContextVar("toolcrew-run-spans", default=None)
CURRENT_CALL: ContextVar[CallSpans | None] = ContextVar("toolcrew-call-spans", default=None)
"""The spans of the call of the current task. None: the task makes no call, or tracing is off."""


def open_process_tracer(
    settings: OrchestratorSettings | None = None, secrets: Mapping[str, str] | None = None
) -> Tracer | None:
    """Return the tracer for the clients of this process; None if tracing is off. Values from the settings, the
    environment and `secrets` (kind -> value) are masked.

    Raises ConfigError: a setting is missing or wrong. The message says which.
    """

    def masker() -> Masker:
        secret_values = secrets or {}
        return (
            build_masker(settings, secret_values)
            if settings is not None
            else Masker({**secrets_of_environment(), **secret_values})
        )

    tracing = load_tracing_settings()
    if not tracing.is_on:
        return None
    from toolcrew.telemetry.otlp import open_tracer

    return open_tracer(tracing, SERVICE, lambda message: log.warning("spans_lost", message=message), masker)


@contextmanager
def run_spans(spans: RunSpans) -> Iterator[RunSpans]:
    """Make the spans that start in the block children of that run. The spans of the run end with the block."""
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
    """Make the spans that start in the block children of that run. The spans of the run stay open after the block."""
    token = _RUN.set(spans)
    try:
        yield
    finally:
        _RUN.reset(token)


def current_run() -> RunSpans | None:
    """Return the run of the current task."""
    return _RUN.get()


@contextmanager
def call_spans(
    tracer: Tracer, call: ToolCall, tenant: str, session: str | None, run: str | None
) -> Iterator[CallSpans]:
    """Make the spans that start in the block children of that call. A call of a run already has its span; any other
    call gets a new span.
    """
    of_run = _RUN.get()
    span = of_run.call(call.id) if of_run is not None else None
    leave = of_run.leave if of_run is not None else None
    spans = CallSpans(
        tracer, span or _begin(tracer, call, tenant, session, run, of_run), is_own=span is None, leave=leave
    )
    token = CURRENT_CALL.set(spans)
    try:
        yield spans
    finally:
        CURRENT_CALL.reset(token)
        spans.finish(None)


def _begin(
    tracer: Tracer, call: ToolCall, tenant: str, session: str | None, run: str | None, of_run: RunSpans | None
) -> Span:
    identity: Attributes = {
        names.TENANT: tenant,
        names.SESSION: session,
        names.RUN: run,
        names.CONVERSATION: session or run,
    }
    parent = of_run.span.ref if of_run is not None else tracer.ambient()
    root = tracer.root() if parent is None else parent
    ref = SpanRef(root.trace_id, call_span_id(call.id), root.is_sampled)
    if call.name.startswith("session."):
        # Operations on sessions are not tools that a model could use, so they have no tool attributes.
        return tracer.start(call.name, {names.CALL: call.id, **identity}, parent=parent, ref=ref)
    attributes: Attributes = {**call_attributes(tracer, call), **identity}
    return tracer.start(f"execute_tool {call.name}", attributes, parent=parent, ref=ref)
