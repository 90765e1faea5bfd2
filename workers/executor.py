"""(ToolCall, ToolContext) -> ToolResult: look up, check again, claim, run, classify. Any outcome becomes a result."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from contract.call_events import HIDDEN
from contract.calls import Clocks, RunFailure, ToolCall, ToolContext, ToolResult
from contract.envelope import decode_arguments
from contract.errors import OPERATOR_CODES, BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from contract.functions.session_state import SessionStates
from contract.ledger import Claim
from contract.policy_checks import check_switches
from contract.registry import Switch
from contract.schema import prepare_arguments
from contract.specs import ToolSpec
from contract.tenancy import SandboxTerms
from telemetry.spans import Tracer
from workers.bench import Bench, SandboxBench
from workers.call_events import CallEvents, NoCallEvents
from workers.held_calls import HeldCalls
from workers.interrupts import CallInterrupted
from workers.sandbox_client import SandboxClient, SandboxdAway
from workers.tools.base import Outcome, WorkerRegistry, WorkerTool
from workers.tracing import CallTrace, open_trace

log = structlog.get_logger(__name__)

T = TypeVar("T")


class CallRepeated(Exception):
    """Nobody waits for an answer to this message: the call has been started or refused before, or was sent again. `claim` says which."""

    def __init__(self, claim: Claim) -> None:
        super().__init__(claim.value)
        self.claim = claim


class ClaimStore(Protocol):
    """Decides who may start a call, or refuse it (WorkerCallStore of store/calls.py)."""

    def claim(self, call: ToolCall, context: ToolContext, holder: str) -> Claim: ...

    def confirm(self, call: ToolCall, context: ToolContext, holder: str) -> Claim: ...

    def refuse(self, call: ToolCall, context: ToolContext) -> Claim: ...


class BlobStore(Protocol):
    """Bytes beside the envelope."""

    def take(self, tenant: str, key: str) -> bytes: ...

    def leave(self, tenant: str, data: bytes, ttl_s: int = ...) -> str: ...


class SwitchBoard(Protocol):
    """Which tools an administrator has turned off."""

    def find(self, name: str, tenant: str) -> Switch | None: ...


class TenantDoor(Protocol):
    """Which calls of which tenants are served."""

    def admit(self, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> SandboxTerms: ...


class CallGuard(Protocol):
    """Stops a call from outside, while its handler runs: at its limit, or because it was cancelled."""

    def run(self, call: ToolCall, context: ToolContext, work: Callable[[], Outcome]) -> Outcome:
        """What `work` gives. Raises CallInterrupted, from whatever it is doing."""
        ...


@dataclass(frozen=True)
class _Prepared:
    """A call that may be started. `call`: with all of its arguments. `aliases`: by which other names its parameters were given. `terms`: what its tenant's sandboxes may have."""

    call: ToolCall
    tool: WorkerTool
    arguments: dict[str, Any]
    aliases: list[str]
    terms: SandboxTerms | None


class Executor:
    """Runs calls on this host. Never raises for a call's failure.

    `client` None: a worker without sandboxes; its calls need no session. `holder`: how the ledger names whoever runs calls here; `clock`: shared by all
    hosts. `guard` ends the calls that no sandbox would end. `held`: shared by all executors of a worker.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        client: SandboxClient | None,
        ledger: ClaimStore,
        blobs: BlobStore,
        facts: Mapping[str, str],
        holder: str = "",
        clock: Callable[[], float] = time.time,
        guard: CallGuard | None = None,
        switches: SwitchBoard | None = None,
        open_events: Callable[[ToolCall, ToolContext], CallEvents] | None = None,
        tenants: TenantDoor | None = None,
        held: HeldCalls | None = None,
        tracer: Tracer | None = None,
        states: SessionStates | None = None,
    ) -> None:
        self._states = states
        self._registry = registry
        self._client = client
        self._ledger = ledger
        self.blobs = blobs
        self._facts = facts
        self._holder = holder
        self._clock = clock
        self._guard = guard
        self._switches = switches
        self._open_events = open_events
        self._tenants = tenants
        self._held = held or HeldCalls()
        self._tracer = tracer

    def execute(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """The one result of the call, whatever happens. Raises CallRepeated when this message is not to be answered."""
        trace = open_trace(self._tracer, call, context, self._facts)
        result = self._executed(call, context, trace)
        if trace is not None:
            trace.finish(result)
        return result

    def _executed(self, call: ToolCall, context: ToolContext, trace: CallTrace | None) -> ToolResult:
        taken = time.monotonic()
        prepared = self._attempt(call, lambda: self._prepare(call, context))
        if isinstance(prepared, ToolResult):
            refused = self._attempt(call, lambda: self._ledger.refuse(call, context))
            return self._answer(prepared, refused if isinstance(refused, Claim) else Claim.GRANTED, context, taken)
        claim = self._attempt(call, lambda: self._ledger.claim(call, context, self._holder))
        if isinstance(claim, ToolResult):
            # Only a Redis that did not answer may answer in a moment; any other failure is a bug, which another attempt repeats.
            return _not_run(claim, RunFailure.BROKER) if claim.error_code is ErrorCode.BROKER_UNAVAILABLE else claim
        if claim is not Claim.GRANTED:
            return self._answer(_refusal(call, claim), claim, context, taken)
        queued_s = self._queued_s(context, taken)
        with self._held.over(lambda: self._ledger.confirm(call, context, self._holder)):
            result = self._attempt(call, lambda: self._serve(prepared, context, trace))
        return _queued(result, queued_s)

    def _answer(self, result: ToolResult, claim: Claim, context: ToolContext, taken: float) -> ToolResult:
        """The result of a call that was not run, when it is this message's to tell."""
        if claim in (Claim.STARTED, Claim.SUPERSEDED):
            raise CallRepeated(claim)
        return _queued(result, self._queued_s(context, taken))

    def _queued_s(self, context: ToolContext, taken: float) -> float:
        """How long the call was on its way. Asked after its claim, which tells the clock what it has to know."""
        return max(0.0, self._clock() - (time.monotonic() - taken) - context.sent_at)

    def _attempt(self, call: ToolCall, work: Callable[[], T]) -> T | ToolResult:
        """What `work` gives, or the result of its failure."""
        try:
            return work()
        except (ToolFailure, OperatorError) as error:
            return _failed(call, error)
        except Exception as error:  # the edge: a bug in a tool must cost this call only, and be loud
            log.exception("tool_bug", tool=call.name, call=call.id)
            return ToolResult.failed(
                call,
                ErrorCode.INTERNAL,
                f"{call.name} failed by a bug of ours ({type(error).__name__}); the log has it under call {call.id}",
            )

    def _prepare(self, call: ToolCall, context: ToolContext) -> _Prepared:
        """Everything that may be wrong with a call before it starts."""
        tool = self._registry.get(call.name)
        # One word for both: nobody learns by calling it that another tenant has a tool.
        if tool is None or not tool.spec.is_for(context.tenant):
            raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}")
        # Checked twice: before the arguments, and after them, because they may name another tool.
        self._check_switch(tool, context.tenant)
        if context.arguments_blob is not None:
            call = call.model_copy(update={"arguments": decode_arguments(self.blobs.take(context.tenant, context.arguments_blob))})
        arguments, aliases = prepare_arguments(tool.spec, call.arguments, text=context.text_arguments, checks=tool.validators)
        self._check_switch(tool, context.tenant, arguments)
        terms = self._tenants.admit(context.tenant, tool.spec, arguments) if self._tenants is not None else None
        return _Prepared(call, tool, arguments, aliases, terms)

    def _serve(self, prepared: _Prepared, context: ToolContext, trace: CallTrace | None) -> ToolResult:
        call = prepared.call
        content = self.blobs.take(context.tenant, context.blob) if context.blob else b""
        # Only now: the caller of a repetition hears the first one's events.
        events = self._open_events(call, context) if self._open_events is not None else NoCallEvents()
        try:
            bench = self._open_bench(call, context, content, events, prepared.terms)
            bench.trace = trace
            result = self._run(prepared, bench)
        finally:
            hidden = events.close()
        return result.model_copy(update={"metadata": {**result.metadata, HIDDEN: hidden}}) if hidden else result

    def _check_switch(self, tool: WorkerTool, tenant: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Raises ToolFailure for a tool that is turned off: here, for the whole deployment, or for that tenant."""
        board = self._switches
        check_switches(
            lambda name: self._registry.switch(name) or (board.find(name, tenant) if board is not None else None), tool.spec, arguments
        )

    def _open_bench(self, call: ToolCall, context: ToolContext, content: bytes, events: CallEvents, terms: SandboxTerms | None) -> Bench:
        if self._client is None:
            return Bench(call, context, self._facts, content, events=events, states=self._states)
        return SandboxBench(call, context, self._facts, content, events=events, states=self._states, client=self._client, terms=terms)

    def _run(self, prepared: _Prepared, bench: Bench) -> ToolResult:
        call = bench.call
        try:
            result = self._result(call, self._handled(prepared.tool, prepared.arguments, bench), bench)
        except SandboxdAway as away:
            return _sandboxd_away(call, away)
        except (ToolFailure, OperatorError) as error:
            result = _failed(call, error, bench.news())
        if prepared.aliases:
            result = result.model_copy(update={"metadata": {**result.metadata, "aliases_used": prepared.aliases}})
        clocks = Clocks(sandbox_s=max(0.0, bench.sandbox_s - bench.run_s), run_s=bench.run_s)
        return result.model_copy(update={"clocks": clocks, "kill": bench.kill, "sandbox": bench.sandbox})

    def _handled(self, tool: WorkerTool, arguments: dict[str, Any], bench: Bench) -> Outcome:
        """What the handler made of the call. Interrupted: a ToolFailure that says so."""
        if self._guard is None:
            return tool.handler(arguments, bench)
        started = time.monotonic()
        try:
            return self._guard.run(bench.call, bench.context, lambda: tool.handler(arguments, bench))
        except CallInterrupted as interrupted:
            raise ToolFailure(interrupted.code, str(interrupted)) from None
        finally:
            bench.run_s = time.monotonic() - started

    def _result(self, call: ToolCall, outcome: Outcome, bench: Bench) -> ToolResult:
        blob = self._leave(outcome.blob, bench) if outcome.blob is not None else None
        error = outcome.error + bench.loss_note(outcome.error) + bench.news() if outcome.error is not None else None
        return ToolResult(
            call_id=call.id,
            name=call.name,
            success=outcome.error_code is None,
            output=(outcome.output or "") + bench.news() if bench.news() else outcome.output,
            error=error,
            error_code=outcome.error_code,
            metadata=RunFailure.remove(outcome.metadata),
            truncated=outcome.truncated,
            blob=blob,
            spill=outcome.spill,
        )

    def _leave(self, data: bytes, bench: Bench) -> str:
        try:
            return self.blobs.leave(bench.context.tenant, data)
        except (BrokerUnavailable, ToolFailure) as error:
            if error.code not in (ErrorCode.BROKER_UNAVAILABLE, ErrorCode.QUOTA_EXCEEDED):
                raise
            # The call has acted: a caller that reads that Redis was away, or that a limit was reached, would send it again.
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, f"the call has run, and its result is lost: {error}") from error


def _failed(call: ToolCall, error: ToolFailure | OperatorError, news: str = "") -> ToolResult:
    """The result of a failure, logged when it is the operator's to know."""
    if error.code in OPERATOR_CODES or isinstance(error, OperatorError):
        log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
    metadata = RunFailure.remove(error.metadata) if isinstance(error, ToolFailure) else {}
    return ToolResult.failed(call, error.code, str(error) + news, metadata=metadata)


def _sandboxd_away(call: ToolCall, away: SandboxdAway) -> ToolResult:
    """The result of a call whose host's sandboxd went away: whoever dispatched it may have it made again, if it has not acted or may act twice."""
    log.error("sandboxd_away", tool=call.name, call=call.id, was_sent=away.was_sent, error=str(away))
    if not away.was_sent:
        return _not_run(ToolResult.failed(call, ErrorCode.SANDBOX_UNAVAILABLE, str(away)), RunFailure.SANDBOXD)
    words = f"{away}; the call may or may not have acted: look before you repeat it"
    return ToolResult.failed(call, ErrorCode.OUTCOME_UNKNOWN, words, metadata=RunFailure.LOST.metadata)


def _refusal(call: ToolCall, claim: Claim) -> ToolResult:
    """What a claim that was not granted tells the caller."""
    if claim is Claim.EXPIRED:
        told = ToolResult.failed(
            call, ErrorCode.TIMEOUT, f"{call.name} waited in the queue past its deadline and was not run: send it again"
        )
        return _not_run(told, RunFailure.EXPIRED)
    told = ToolResult.failed(call, ErrorCode.HOST_LOST, f"{call.name} was not run: its session has moved to another host, or was closed")
    return _not_run(told, RunFailure.MOVED)


def _not_run(result: ToolResult, failure: RunFailure) -> ToolResult:
    """Tell the dispatcher that the call cannot have acted."""
    return result.model_copy(update={"metadata": {**result.metadata, **failure.metadata}})


def _queued(result: ToolResult, queued_s: float) -> ToolResult:
    return result.model_copy(update={"clocks": result.clocks.model_copy(update={"queued_s": queued_s})})
