"""The spans of one run, made of its events: the run, its requests to the model, its calls, and what approvals wait."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from contract.calls import ToolCall
from contract.traceparent import SpanRef, call_span_id, run_span_id, trace_id_of
from orchestrator.call_spans import call_attributes, end_call
from orchestrator.loop import events
from orchestrator.loop.events import OnEvent, RunEvent
from orchestrator.models.base import Model
from telemetry import names
from telemetry.logs import get_logger
from telemetry.spans import Attributes, Span, Tracer

log = get_logger(__name__)

INTERRUPTED = "interrupted"
NO_REPLY = "no_reply"
USUAL_PORTS = {"https": 443, "http": 80}


class RunSpans:
    """Spans of a run while it lasts. Their ids are made of the run's and its calls' names: a process that goes on with
    it makes the same.

    `is_told`: whether a call, or with "" the model's next reply, has been told of by a process that had the run before.
    `is_agent` False: of a batch's item that is one call. `earlier`: the run of the attempt before this one.
    """

    def __init__(
        self,
        tracer: Tracer,
        tenant: str,
        run: str,
        *,
        session: str | None = None,
        batch: str | None = None,
        attempt: int = 1,
        earlier: str | None = None,
        began_at: float | None = None,
        is_agent: bool = True,
        is_told: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._tracer, self._run, self._is_told = tracer, run, is_told
        self._who: Attributes = {names.CONVERSATION: session or run, names.TENANT: tenant, names.RUN: run}
        # A run of a program that is traced itself is a part of what that does; one that may be gone on with elsewhere
        # is a trace of its own.
        ambient = tracer.ambient() if batch is None else None
        ref = tracer.root(trace_id_of(tenant, run), run_span_id(tenant, run))
        if ambient is not None:
            ref = SpanRef(ambient.trace_id, ref.span_id, ambient.is_sampled)
        links = [SpanRef(trace_id_of(tenant, earlier), run_span_id(tenant, earlier))] if earlier is not None else []
        told: Attributes = {**self._who, names.BATCH: batch, names.ATTEMPT: attempt if batch is not None else None}
        if is_agent:
            told = {
                **told,
                names.OPERATION: "invoke_agent",
                names.PROVIDER: names.PROVIDER_NAME,
                names.AGENT: names.AGENT_NAME,
            }
        name = f"invoke_agent {names.AGENT_NAME}" if is_agent else "batch_item"
        self.span = tracer.start(name, told, parent=ambient, ref=ref, links=links, at=began_at)
        self._server: Attributes = {}
        self._model = ""
        self._chat: Span | None = None
        self._is_replayed = False
        self._calls: dict[str, Span] = {}
        self._approvals: dict[str, Span] = {}
        self._error: str | None = None
        self._left: list[Span] = []
        self.leave = self._left.append if batch is not None else None
        """Takes spans of a call that is given up in the middle: of a run that may be gone on with, it is not known yet
        whether they are to be told of.
        """

    def before(self, tell: OnEvent) -> OnEvent:
        """What a run tells its events to: these spans, and then `tell`."""
        if not self.span.ref.is_sampled:
            return tell

        def on_event(event: RunEvent) -> None:
            self.on_event(event)
            tell(event)

        return on_event

    def on_event(self, event: RunEvent) -> None:
        """Take one event. Never raises."""
        try:
            self._take(event)
        except Exception:  # the edge: spans must never end the run that they tell of
            log.exception("span_lost", run=self._run, kind=type(event).__name__)

    def know_model(self, model: Model) -> None:
        """Which server is asked, where there is one."""
        address = urlsplit(str(getattr(model, "address", "")))
        if address.hostname:
            self._server = {
                names.SERVER_ADDRESS: address.hostname,
                names.SERVER_PORT: address.port or USUAL_PORTS.get(address.scheme),
            }

    def call(self, call: str) -> Span | None:
        """The span of a call that runs."""
        return self._calls.get(call)

    def finish(self, error: str | None = None) -> None:
        """The run has ended, its session closed; what is open ends as `error` says."""
        self._end_chat(error or INTERRUPTED)
        for span in (*self._left, *self._approvals.values(), *self._calls.values()):
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
                self._end_chat(NO_REPLY)
                self._is_replayed = self._is_told("")
                if not self._is_replayed:
                    self._chat = self._begin_chat(event)
            case events.ModelAnswered():
                self._answered(event)
            case events.CallStarted():
                if not self._is_told(event.call.id):
                    self._calls[event.call.id] = self._begin_call(event.call, event.at)
            case events.CallFinished():
                self._finished(event)
            case events.ApprovalAsked() if (call := self._calls.get(event.call.id)) is not None:
                self._approvals[event.call.id] = self._tracer.start("approval", self._who, parent=call.ref, at=event.at)
            case events.ApprovalDecided() if (asked := self._approvals.pop(event.call_id, None)) is not None:
                asked.set({names.IS_ALLOWED: event.is_allowed, names.IS_CHANGED: event.is_changed})
                asked.end(at=event.at)
            case events.RunFinished():
                self._ended(event)
            case events.RunAborted():
                self._error = "aborted"

    def _begin_chat(self, event: events.ModelAsked) -> Span:
        told: Attributes = {
            names.OPERATION: "chat",
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: self._model,
            names.STEP: event.step,
            **self._server,
            **self._who,
        }
        return self._tracer.start(f"chat {self._model}", told, kind="client", parent=self.span.ref, at=event.at)

    def _answered(self, event: events.ModelAnswered) -> None:
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

    def _end_chat(self, error: str) -> None:
        if self._chat is not None:
            self._chat.end(error=error)
            self._chat = None

    def _begin_call(self, call: ToolCall, at: float) -> Span:
        parent = self.span.ref
        ref = SpanRef(parent.trace_id, call_span_id(call.id), parent.is_sampled)
        told: Attributes = {**call_attributes(self._tracer, call), **self._who}
        return self._tracer.start(f"execute_tool {call.name}", told, parent=parent, ref=ref, at=at)

    def _finished(self, event: events.CallFinished) -> None:
        result = event.result
        approval = self._approvals.pop(result.call_id, None)
        if approval is not None:
            approval.end(error=INTERRUPTED)
        span = self._calls.pop(result.call_id, None)
        if span is None:
            if self._is_replayed:
                return
            # Of a call that could not even be read.
            span = self._begin_call(ToolCall(id=result.call_id, name=result.name), event.at)
        end_call(self._tracer, span, result)

    def _ended(self, event: events.RunFinished) -> None:
        told: dict[str, Any] = {
            names.STOP_REASON: event.stop_reason,
            names.INPUT_TOKENS: event.usage.prompt_tokens,
            names.OUTPUT_TOKENS: event.usage.completion_tokens,
        }
        self.span.set(
            {**told, **self._tracer.content(names.OUTPUT_MESSAGES, lambda: _message("assistant", event.answer))}
        )
        self._error = None if event.stop_reason == "answered" else event.stop_reason


def _message(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)
