"""(ToolCall, ToolContext) -> ToolResult: look up, check again, claim, run, classify. Any outcome becomes a result."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from contract.call_events import HIDDEN
from contract.calls import Clocks, ToolCall, ToolContext, ToolResult
from contract.errors import OPERATOR_CODES, BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from contract.registry import Switch
from contract.schema import prepare_arguments
from workers.bench import Bench, SandboxBench
from workers.call_events import CallEvents, Unwatched
from workers.interrupts import CallInterrupted
from workers.sandbox_client import SandboxClient
from workers.tools.base import Outcome, WorkerRegistry, WorkerTool

log = structlog.get_logger(__name__)


class CallLedger(Protocol):
    """Who may start a call."""

    def claim(self, tenant: str, call_id: str, host: str) -> bool: ...


class BlobStore(Protocol):
    """Bytes beside the envelope."""

    def take(self, tenant: str, key: str) -> bytes: ...

    def leave(self, tenant: str, data: bytes) -> str: ...


class SwitchBoard(Protocol):
    """Which tools an administrator has turned off."""

    def find(self, name: str) -> Switch | None: ...


class CallGuard(Protocol):
    """Stops a call from outside, while its handler runs: at its limit, or because it was cancelled."""

    def run(self, call: ToolCall, context: ToolContext, work: Callable[[], Outcome]) -> Outcome:
        """What `work` gives. Raises CallInterrupted, from whatever it is doing."""
        ...


class Executor:
    """Runs calls on this host. Never raises for a call's failure.

    `client` None: a worker without sandboxes; its calls need no session. `guard` ends the calls that no sandbox would end.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        client: SandboxClient | None,
        ledger: CallLedger,
        blobs: BlobStore,
        facts: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        guard: CallGuard | None = None,
        switches: SwitchBoard | None = None,
        open_events: Callable[[ToolCall, ToolContext], CallEvents] | None = None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._ledger = ledger
        self._blobs = blobs
        self._facts = facts
        self._clock = clock
        self._guard = guard
        self._switches = switches
        self._open_events = open_events

    def execute(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """The one result of the call, whatever happens."""
        taken_at = self._clock()
        queued_s = max(0.0, taken_at - context.sent_at)
        try:
            result = self._execute(call, context, taken_at)
        except (ToolFailure, OperatorError) as error:
            result = _failed(call, error)
        except Exception as error:  # the edge: a bug in a tool must cost this call only, and be loud
            log.exception("tool_bug", tool=call.name, call=call.id)
            result = ToolResult.failed(
                call,
                ErrorCode.INTERNAL,
                f"{call.name} failed by a bug of ours ({type(error).__name__}); the log has it under call {call.id}",
            )
        return result.model_copy(update={"clocks": result.clocks.model_copy(update={"queued_s": queued_s})})

    def _execute(self, call: ToolCall, context: ToolContext, taken_at: float) -> ToolResult:
        tool = self._registry.get(call.name)
        if tool is None:
            raise ToolFailure(ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}")
        self._check_switch(tool)
        if taken_at > context.deadline_at:
            raise ToolFailure(ErrorCode.TIMEOUT, "the call waited in the queue past its deadline and was not run")
        arguments, aliases = prepare_arguments(tool.spec, call.arguments, text=context.text_arguments, checks=tool.validators)
        if not self._ledger.claim(context.tenant, call.id, self._facts["host"]):
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, "this call has been started before and was not run again")
        content = self._blobs.take(context.tenant, context.blob) if context.blob else b""
        # Only now: the caller of a repetition hears the first one's events.
        events = self._open_events(call, context) if self._open_events is not None else Unwatched()
        try:
            result = self._run(tool, arguments, aliases, self._open_bench(call, context, content, events))
        finally:
            hidden = events.close()
        return result.model_copy(update={"metadata": {**result.metadata, HIDDEN: hidden}}) if hidden else result

    def _check_switch(self, tool: WorkerTool) -> None:
        """Raises ToolFailure for a tool that is turned off, here or for the whole deployment, whoever asks for it."""
        if tool.spec.audience == "session":
            return
        switch = self._registry.switch(tool.name) or (self._switches.find(tool.name) if self._switches is not None else None)
        if switch is not None:
            raise ToolFailure(ErrorCode.TOOL_DISABLED, switch.refusal(tool.name))

    def _open_bench(self, call: ToolCall, context: ToolContext, content: bytes, events: CallEvents) -> Bench:
        if self._client is None:
            return Bench(call, context, self._facts, content, events=events)
        return SandboxBench(call, context, self._facts, content, events=events, client=self._client)

    def _run(self, tool: WorkerTool, arguments: dict[str, Any], aliases: list[str], bench: Bench) -> ToolResult:
        call = bench.call
        try:
            result = self._result(call, self._handled(tool, arguments, bench), bench)
        except (ToolFailure, OperatorError) as error:
            result = _failed(call, error, bench.news())
        if aliases:
            result = result.model_copy(update={"metadata": {**result.metadata, "aliases_used": aliases}})
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
            metadata=outcome.metadata,
            truncated=outcome.truncated,
            blob=blob,
            spill=outcome.spill,
        )

    def _leave(self, data: bytes, bench: Bench) -> str:
        try:
            return self._blobs.leave(bench.context.tenant, data)
        except BrokerUnavailable as error:
            # The call has acted: whoever reads that Redis was away would send it again.
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, f"the call has run, and its result is lost: {error}") from error


def _failed(call: ToolCall, error: ToolFailure | OperatorError, news: str = "") -> ToolResult:
    """The result of a failure, logged when it is the operator's to know."""
    if error.code in OPERATOR_CODES or isinstance(error, OperatorError):
        log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
    metadata = dict(error.metadata) if isinstance(error, ToolFailure) else {}
    return ToolResult.failed(call, error.code, str(error) + news, metadata=metadata)
