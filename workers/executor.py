"""Execution of calls on a worker: claim the call (record in Redis that this worker runs it), check it, run its handler,
and build a result in every case.

Invariant of claims: a handler runs only after Redis has granted the claim. If the call has already started, or was sent
again in a newer message, the message runs nothing and sends no result (CallRepeated). If Redis does not answer, the
call does not start. `_not_run` marks a result only if the call cannot have acted.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog
from pydantic import JsonValue

from toolcrew.contract.call_events import HIDDEN
from toolcrew.contract.calls import RunFailure, SessionUsage, ToolCall, ToolContext, ToolResult
from toolcrew.contract.envelope import decode_arguments
from toolcrew.contract.errors import (
    BROKER_CODES,
    OPERATOR_CODES,
    BrokerUnavailable,
    ErrorCode,
    OperatorError,
    RefusalReason,
    ToolFailure,
)
from toolcrew.contract.registry import RELEASING, Switch, check_call, check_switches
from toolcrew.contract.schema import prepare_arguments
from toolcrew.contract.specs import ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL, SandboxPolicy
from toolcrew.store.call_records import CallClaim
from toolcrew.store.calls import WorkerCallStore
from toolcrew.store.tenants import WorkerTenants
from toolcrew.store.tools import WorkerSwitches
from toolcrew.workers.sandbox_client import SandboxdUnreachable
from toolcrew.workers.tools.base import (
    Outcome,
    SandboxRequest,
    ToolEnvironment,
    WorkerRegistry,
    WorkerResources,
    WorkerTool,
)

log = structlog.get_logger(__name__)
T = TypeVar("T")


class CallPolicy:
    """Checks calls against this worker's registry, the deployment's switches and the tenants' policies.

    `switches` or `tenants` is None when the deployment has none. `count_refusal` is called for each call of an unknown
    tenant.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        switches: WorkerSwitches | None = None,
        tenants: WorkerTenants | None = None,
        count_refusal: Callable[[RefusalReason], None] = lambda reason: None,
    ) -> None:
        self._registry = registry
        self._switches = switches
        self._tenants = tenants
        self._count_refusal = count_refusal

    def check_switches(self, spec: ToolSpec, tenant: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Raise ToolFailure if the tool is turned off on this worker, in the deployment, or for the tenant."""

        def find(name: str) -> Switch | None:
            switch = self._registry.switch(name)
            return self._switches.find(name, tenant) if switch is None and self._switches is not None else switch

        check_switches(find, spec, arguments)

    def admit(self, tenant: str, spec: ToolSpec, arguments: Mapping[str, Any]) -> SandboxPolicy | None:
        """Check a call with its prepared arguments. Return the sandbox policy of the tenant; None without tenants.

        Raises ToolFailure: TOOL_DISABLED, UNKNOWN_TENANT, PERMISSION_DENIED, SECURITY_REFUSED; ConfigError,
        BrokerUnavailable.
        """
        if spec.name == SKILL_TOOL:
            # The arguments of this tool may name a second tool, which needs its own check. All other calls have been
            # checked.
            self.check_switches(spec, tenant, arguments)
        if self._tenants is None:
            return None
        if spec.name in RELEASING:
            # Allow this also for a tenant that was removed or has lost its rights: the tenant's sandboxes must still be
            # closed.
            return SandboxPolicy()
        try:
            policy = self._tenants.policy(tenant)
        except ToolFailure:
            self._count_refusal("wrong_tenant")
            raise
        check_call(policy, tenant, spec, arguments)
        return policy.sandbox


class CallRepeated(Exception):
    """Error for a message that gets no answer, because its call has already started, was refused, or was sent again.

    `claim` says which case.
    """

    def __init__(self, claim: CallClaim) -> None:
        super().__init__(claim.value)
        self.claim = claim


class ClaimStore(Protocol):
    """Decides which worker starts a call, or refuses it (WorkerCallStore of store/calls.py)."""

    def claim(
        self, call: ToolCall, context: ToolContext, holder: str, meanwhile: Callable[[], object]
    ) -> CallClaim: ...

    def refuse(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim: ...


class BlobStore(Protocol):
    """Store of bytes outside of calls and results (WorkerBlobs of store/blobs.py)."""

    def take(self, tenant: str, key: str) -> bytes: ...

    def leave(self, tenant: str, data: bytes, ttl_s: int = ...) -> str: ...


class FinishedCall(NamedTuple):
    """A call that has its result. `received_at` is in Unix seconds.

    `requests` lists the requests to sandboxd, in order. `session_usage`: the totals of the session at the end of the
    call, if the call used a sandbox. `folder`: the session's folder after a call of bash_tool; "" for any other call.
    """

    call: ToolCall
    context: ToolContext
    received_at: float
    result: ToolResult
    requests: Sequence[SandboxRequest] = ()
    session_usage: SessionUsage | None = None
    folder: str = ""


class ExecutorMiddleware:
    """Base class of optional features around each call, such as tracing. The methods of this class do nothing extra.

    The executor runs one call at a time.
    """

    def run(self, environment: ToolEnvironment, handler: Callable[[], Outcome]) -> Outcome:
        """Run the handler of a claimed call. An exception from this method becomes the call's failure."""
        return handler()

    def after_call(self, finished: FinishedCall) -> None:
        """Observe a finished call. Runs once for every call with a result, also a refused one. Must not raise."""


@dataclass(frozen=True)
class _PreparedCall:
    """A call that has passed all checks. `call` includes large arguments that were stored outside of the message.

    `aliases` lists the alternative argument names that the caller used. `policy`: the sandbox policy of the tenant.
    """

    call: ToolCall
    tool: WorkerTool
    arguments: dict[str, Any]
    aliases: list[str]
    policy: SandboxPolicy | None


class Executor:
    """Runs calls on this host. A call's failure becomes a result, not an exception.

    `clock` returns the time that all hosts share (Redis's time). The first entry of `middleware` is the innermost.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        claims: ClaimStore,
        blobs: BlobStore,
        resources: WorkerResources,
        policy: CallPolicy,
        middleware: Sequence[ExecutorMiddleware] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._claims = claims
        self.blobs = blobs
        self._resources = resources
        self._policy = policy
        self._middleware = tuple(middleware)
        self._clock = clock

    def execute(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Return the one result of the call. Raises CallRepeated: the message needs no answer."""
        return self.finish(call, context).result

    def finish(self, call: ToolCall, context: ToolContext) -> FinishedCall:
        """Run the call as `execute` does, and return it with its result."""
        # Wall time is for logs. Durations use monotonic time, because a correction of the clock must not change them.
        received_at, received = time.time(), time.monotonic()
        environment: ToolEnvironment | None = None
        prepare = cache(lambda: _before_start(_attempt(call, lambda: self._prepare(call, context))))
        # Prepare the call while Redis decides about the claim. `cache`: when the claim is sent again, the call must not
        # be prepared twice.
        claim = _attempt(call, lambda: self._claims.claim(call, context, self._resources.holder, prepare))
        prepared = prepare()
        if isinstance(prepared, ToolResult) and not prepared.has_not_run:
            # The record must say `forbidden` before the sender gets the refusal. Otherwise a repeated message could
            # start the call later, when the reason for the refusal no longer exists.
            if claim in (CallClaim.GRANTED, CallClaim.MOVED):
                claim = _attempt(call, lambda: self._claims.refuse(call, context, self._resources.holder))
            # If Redis cannot record the refusal, the sender gets the refusal all the same.
            claim = CallClaim.GRANTED if isinstance(claim, ToolResult) else claim
        # Send no result: the caller waits for the result of the other message, and would take this one in its place.
        if claim in (CallClaim.STARTED, CallClaim.SUPERSEDED):
            raise CallRepeated(claim)
        if isinstance(claim, ToolResult):
            result = _before_start(claim)
        else:
            # Read the clock after the claim: the claim's reply updates the shared clock with Redis's time.
            queued_s = max(0.0, self._clock() - (time.monotonic() - received) - context.sent_at)
            if isinstance(prepared, ToolResult):
                result = prepared
            elif claim is CallClaim.GRANTED:
                result, environment = self._run(prepared, context)
            else:
                result = _refusal(call, claim)
            result = result.model_copy(update={"clocks": result.clocks.model_copy(update={"queued_s": queued_s})})
        finished = FinishedCall(call, context, received_at, result)
        if environment is not None:
            finished = finished._replace(
                requests=environment.requests, session_usage=environment.session_usage, folder=environment.folder
            )
        for middleware in self._middleware:
            middleware.after_call(finished)
        return finished

    def _prepare(self, call: ToolCall, context: ToolContext) -> _PreparedCall:
        """Check the call and load its arguments, so that no error of the call is found after its start."""
        tool = self._registry.get(call.name)
        # An unknown tool and a tool of another tenant get the same answer: a tenant cannot learn that another tenant
        # has a tool.
        if tool is None or not tool.spec.is_for(context.tenant):
            raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}")
        # Check before the arguments: a tool that is off reports that even for invalid arguments.
        self._policy.check_switches(tool.spec, context.tenant)
        if context.arguments_blob is not None:
            # The signed context names the blob by its hash, so these arguments are those that the sender has signed.
            arguments_from_blob = decode_arguments(self.blobs.take(context.tenant, context.arguments_blob))
            call = call.model_copy(update={"arguments": arguments_from_blob})
        arguments, aliases = prepare_arguments(
            tool.spec, call.arguments, text=context.text_arguments, checks=tool.validators
        )
        policy = self._policy.admit(context.tenant, tool.spec, arguments)
        return _PreparedCall(call, tool, arguments, aliases, policy)

    def _run(self, prepared: _PreparedCall, context: ToolContext) -> tuple[ToolResult, ToolEnvironment | None]:
        """Run the handler of a claimed call. Return its result and its environment."""
        # Open the environment after the claim: a repeated message must not write to the event stream of the first
        # message.
        environment = _before_start(_attempt(prepared.call, lambda: self._open_environment(prepared, context)))
        if isinstance(environment, ToolResult):
            return environment, None
        try:
            result = _attempt(
                prepared.call, lambda: self._build_result(self._handle(prepared, environment), environment), environment
            )
        finally:
            # The stream of events must end before the result is stored: the caller reads it up to its last entry.
            hidden = environment.events.close() if environment.events.is_watched else 0
        added: dict[str, JsonValue] = {}
        if prepared.aliases:
            added["aliases_used"] = list(prepared.aliases)
        if hidden:
            added[HIDDEN] = hidden
        if added:
            result = result.model_copy(update={"metadata": {**result.metadata, **added}})
        return result, environment

    def _open_environment(self, prepared: _PreparedCall, context: ToolContext) -> ToolEnvironment:
        content = self.blobs.take(context.tenant, context.blob) if context.blob else b""
        return ToolEnvironment(prepared.call, context, self._resources, content, prepared.policy)

    def _handle(self, prepared: _PreparedCall, environment: ToolEnvironment) -> Outcome:
        handler: Callable[[], Outcome] = partial(prepared.tool.handler, prepared.arguments, environment)
        for middleware in self._middleware:
            handler = partial(middleware.run, environment, handler)
        return handler()

    def _build_result(self, outcome: Outcome, environment: ToolEnvironment) -> ToolResult:
        blob = self._store_blob(outcome.blob, environment) if outcome.blob is not None else None
        news = environment.sandbox_news()
        return ToolResult(
            call_id=environment.call.id,
            name=environment.call.name,
            success=outcome.error_code is None,
            output=(outcome.output or "") + news if news else outcome.output,
            error=outcome.error + environment.loss_note(outcome.error) + news if outcome.error is not None else None,
            error_code=outcome.error_code,
            # A tool must not report that its call did not run, because the sender would then send the call again.
            metadata=RunFailure.remove(outcome.metadata),
            truncated=outcome.truncated,
            blob=blob,
            spill=outcome.spill,
            **environment.reports(),
        )

    def _store_blob(self, data: bytes, environment: ToolEnvironment) -> str:
        try:
            return self.blobs.leave(environment.context.tenant, data)
        except (BrokerUnavailable, ToolFailure) as error:
            if error.code not in (*BROKER_CODES, ErrorCode.QUOTA_EXCEEDED):
                raise
            # The call has acted. After an error of Redis or QUOTA_EXCEEDED a caller would send the call again, so use
            # another code.
            raise ToolFailure(
                ErrorCode.OUTCOME_UNKNOWN, f"the call has run, but its result is lost: {error}"
            ) from error


def _attempt(call: ToolCall, work: Callable[[], T], environment: ToolEnvironment | None = None) -> T | ToolResult:
    """Return the result of `work`, or a failed ToolResult. `environment` is the environment of the running handler."""
    try:
        return work()
    except SandboxdUnreachable as error:
        return _sandboxd_away(call, error)
    except (ToolFailure, OperatorError) as error:
        news, reports = (environment.sandbox_news(), environment.reports()) if environment is not None else ("", {})
        if error.code in OPERATOR_CODES or isinstance(error, OperatorError):
            log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
        metadata = RunFailure.remove(error.metadata) if isinstance(error, ToolFailure) else {}
        return ToolResult.failed(call, error.code, str(error) + news, metadata=metadata, **reports)
    # The outermost handler: a bug in a tool must fail only this call, and the log must show it.
    except Exception as error:
        log.exception("tool_bug", tool=call.name, call=call.id)
        message = (
            f"{call.name} failed because of a bug ({type(error).__name__}); see the worker's log for call {call.id}"
        )
        return ToolResult.failed(call, ErrorCode.INTERNAL, message)


def _sandboxd_away(call: ToolCall, error: SandboxdUnreachable) -> ToolResult:
    """Return the result of a call after sandboxd became unreachable.

    The result says whether the call has acted. The dispatcher sends a call again if it has not acted, or if its tool
    may run twice.
    """
    log.error("sandboxd_not_answering", tool=call.name, call=call.id, was_sent=error.was_sent, error=str(error))
    if not error.was_sent:
        return _not_run(ToolResult.failed(call, ErrorCode.SANDBOX_UNAVAILABLE, str(error)), RunFailure.SANDBOXD)
    message = f"{error}; the call may or may not have acted: check its effects before you repeat it"
    return ToolResult.failed(call, ErrorCode.OUTCOME_UNKNOWN, message, metadata=RunFailure.LOST.metadata)


def _refusal(call: ToolCall, claim: CallClaim) -> ToolResult:
    """Return the result of a call whose claim was refused."""
    if claim is CallClaim.EXPIRED:
        message = f"{call.name} waited in the queue past its deadline and was not run: send it again"
        return _not_run(ToolResult.failed(call, ErrorCode.TIMEOUT, message), RunFailure.EXPIRED)
    message = f"{call.name} was not run: its session has moved to another host, or was closed"
    return _not_run(ToolResult.failed(call, ErrorCode.HOST_LOST, message), RunFailure.MOVED)


def _before_start(step: T | ToolResult) -> T | ToolResult:
    """Return what a step before the start of the tool gave. If Redis did not answer, the sender sends the call again.
    Any other failure is final: a repetition would meet it again.
    """
    if isinstance(step, ToolResult) and step.error_code in BROKER_CODES:
        return _not_run(step, RunFailure.BROKER)
    return step


def _not_run(result: ToolResult, failure: RunFailure) -> ToolResult:
    """Mark in the result that the call cannot have acted, so that the dispatcher may send it again."""
    return result.model_copy(update={"metadata": {**result.metadata, **failure.metadata}})


DURABLE_AFTER_S = 2.5
"""Seconds after which Redis has certainly written a claim to disk (`appendfsync everysec`)."""
CHECK_INTERVAL_S = 0.5


class UnconfirmedCalls:
    """The calls that run in this process. A thread confirms each claim once, after Redis has written it to disk.

    If Redis crashes before that, the claim may be lost, and the record says `queued` again. Without the confirmation,
    the caller would learn at the deadline that the call never ran, and a cancel would not reach the call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unconfirmed: dict[object, tuple[float, Callable[[], object]]] = {}
        self._lock = threading.Lock()
        self._thread_of: int | None = None

    @contextmanager
    def over(self, confirm: Callable[[], object]) -> Iterator[None]:
        """Register a call for the duration of the block. `confirm` records the call's claim again.

        It is called again after BrokerUnavailable.
        """
        mark = object()
        # One lock for both steps. Otherwise the thread could decide to end between them, and no thread would confirm
        # this claim.
        with self._lock:
            self._unconfirmed[mark] = self._clock() + DURABLE_AFTER_S, confirm
            self._start()
        try:
            yield
        finally:
            self._unconfirmed.pop(mark, None)

    def confirm_due(self) -> None:
        """Confirm all claims that are due."""
        # `list` copies the dict in one step of the interpreter: other threads add and remove calls.
        for mark, (due_at, confirm) in list(self._unconfirmed.items()):
            if self._clock() < due_at:
                continue
            # If the call ends during this step, its record says `done`, which a confirmation does not change.
            try:
                confirm()
            except BrokerUnavailable as error:
                # Redis does not answer, so each other claim would also wait for the time limit. The next round confirms
                # them.
                log.warning("claims_not_confirmed", error=str(error))
                return
            self._unconfirmed.pop(mark, None)

    def _start(self) -> None:
        """Start the thread if this process has none. A forked pool process has none of its parent's threads."""
        if self._thread_of != os.getpid():
            self._thread_of = os.getpid()
            threading.Thread(target=self._run, name="held-calls", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(CHECK_INTERVAL_S)
            with self._lock:
                if not self._unconfirmed:
                    self._thread_of = None
                    return
            self.confirm_due()


class ClaimConfirmation(ExecutorMiddleware):
    """Confirms the claims of an executor's calls. `calls`: the calls of all executors of the process."""

    def __init__(self, calls: UnconfirmedCalls, claims: WorkerCallStore, holder: str) -> None:
        self._calls = calls
        self._claims = claims
        self._holder = holder

    def run(self, environment: ToolEnvironment, handler: Callable[[], Outcome]) -> Outcome:
        with self._calls.over(lambda: self._claims.confirm(environment.call, environment.context, self._holder)):
            return handler()
