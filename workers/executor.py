"""(ToolCall, ToolContext) -> ToolResult: look up, check again, claim, run, classify. Any outcome becomes a result."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from contract.calls import Clocks, KillReport, SandboxInfo, ToolCall, ToolContext, ToolResult
from contract.errors import OPERATOR_CODES, BrokerUnavailable, ErrorCode, OperatorError, SandboxUnavailable, ToolFailure
from contract.schema import prepare_arguments
from workers.guest_answers import GuestNonsense, Told, parse_error, parse_told
from workers.sandbox_client import GuestResponse, SandboxClient, sandbox_id
from workers.tools.base import OnData, Outcome, WorkerRegistry, WorkerTool

log = structlog.get_logger(__name__)


class CallLedger(Protocol):
    """Who may start a call."""

    def claim(self, tenant: str, call_id: str, host: str) -> bool: ...


class BlobStore(Protocol):
    """Bytes beside the envelope."""

    def take(self, tenant: str, key: str) -> bytes: ...

    def leave(self, tenant: str, data: bytes) -> str: ...


@dataclass
class Bench:
    """The Workbench of one call: binds its session's sandbox, and remembers what the sandbox told."""

    client: SandboxClient
    call: ToolCall
    context: ToolContext
    facts: Mapping[str, str]
    content: bytes = b""
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    sandbox_s: float = 0.0
    run_s: float = 0.0
    sandbox_lost: str | None = None
    _name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.context.session is None:
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, f"{self.call.name} needs a session: open one first")
        self._name = sandbox_id(self.context.tenant, self.context.session)

    def run(self, request: Mapping[str, Any], body: bytes = b"", on_data: OnData | None = None) -> GuestResponse:
        response = self.client.call(self._name, request, body, call_id=self.call.id, on_data=on_data)
        try:
            told = parse_told(request, response.done)
        except GuestNonsense as nonsense:
            self._give_up_sandbox()
            raise SandboxUnavailable(f"the sandbox gave an answer that is none ({nonsense}), and was removed: open a new session") from None
        self._note(told)
        if told.error is not None:
            code, words = parse_error(told)
            raise ToolFailure(code, words + self.loss_note())
        return response

    def _note(self, told: Told) -> None:
        """Remember what the end of a request tells. The guest's clock is believed as far as sandboxd's own reaches."""
        self.kill, self.sandbox, self.sandbox_lost = told.kill, told.sandbox, told.sandbox_lost
        self.run_s += min(max(0.0, told.run_s), told.sandbox_s)
        self.sandbox_s += told.sandbox_s

    def _give_up_sandbox(self) -> None:
        """Who has taken the guest's place is not asked again."""
        try:
            self.client.close(self._name)
        except (ToolFailure, OperatorError) as error:
            log.error("sandbox_not_closed", call=self.call.id, error=str(error))

    def loss_note(self) -> str:
        """What to tell when the call cost the session its sandbox."""
        if self.sandbox_lost is None:
            return ""
        return f" ({self.sandbox_lost}: the sandbox and its files are lost; the next call gets a fresh, empty one)"

    def open_sandbox(self, image: str | None, ttl_s: float) -> Mapping[str, Any]:
        answer = self.client.describe_open(self._name, image, ttl_s)
        self.sandbox = SandboxInfo.model_validate(answer["sandbox"])
        return {"image": answer["image"], "start_s": answer["start_s"]}

    def close_sandbox(self) -> bool:
        return self.client.close(self._name)

    def host_facts(self) -> Mapping[str, str]:
        return self.facts

    @property
    def is_watched(self) -> bool:
        return False

    def show(self, stream: str, text: str) -> None:
        """Nobody watches yet."""


class Executor:
    """Runs calls on this host. Never raises for a call's failure."""

    def __init__(
        self,
        registry: WorkerRegistry,
        client: SandboxClient,
        ledger: CallLedger,
        blobs: BlobStore,
        facts: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._client = client
        self._ledger = ledger
        self._blobs = blobs
        self._facts = facts
        self._clock = clock

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
        if taken_at > context.deadline_at:
            raise ToolFailure(ErrorCode.TIMEOUT, "the call waited in the queue past its deadline and was not run")
        arguments, aliases = prepare_arguments(tool.spec, call.arguments, text=context.text_arguments, checks=tool.validators)
        if not self._ledger.claim(context.tenant, call.id, self._facts["host"]):
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, "this call has been started before and was not run again")
        content = self._blobs.take(context.tenant, context.blob) if context.blob else b""
        bench = Bench(self._client, call, context, self._facts, content)
        return self._run(tool, arguments, aliases, bench)

    def _run(self, tool: WorkerTool, arguments: dict[str, Any], aliases: list[str], bench: Bench) -> ToolResult:
        call = bench.call
        try:
            result = self._result(call, tool.handler(arguments, bench), bench)
        except (ToolFailure, OperatorError) as error:
            result = _failed(call, error)
        if aliases:
            result = result.model_copy(update={"metadata": {**result.metadata, "aliases_used": aliases}})
        clocks = Clocks(sandbox_s=max(0.0, bench.sandbox_s - bench.run_s), run_s=bench.run_s)
        return result.model_copy(update={"clocks": clocks, "kill": bench.kill, "sandbox": bench.sandbox})

    def _result(self, call: ToolCall, outcome: Outcome, bench: Bench) -> ToolResult:
        blob = self._leave(outcome.blob, bench) if outcome.blob is not None else None
        error = outcome.error + bench.loss_note() if outcome.error is not None else None
        return ToolResult(
            call_id=call.id,
            name=call.name,
            success=outcome.error_code is None,
            output=outcome.output,
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


def _failed(call: ToolCall, error: ToolFailure | OperatorError) -> ToolResult:
    """The result of a failure, logged when it is the operator's to know."""
    if error.code in OPERATOR_CODES or isinstance(error, OperatorError):
        log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
    metadata = dict(error.metadata) if isinstance(error, ToolFailure) else {}
    return ToolResult.failed(call, error.code, str(error), metadata=metadata)
