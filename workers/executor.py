"""(ToolCall, ToolContext) -> ToolResult: look up, check again, claim, run, classify. Any outcome becomes a result."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from contract.calls import Clocks, KillReport, SandboxInfo, ToolCall, ToolContext, ToolResult
from contract.errors import OPERATOR_CODES, ErrorCode, OperatorError, ToolFailure
from contract.schema import prepare_arguments
from workers.sandbox_client import GuestResponse, SandboxClient, sandbox_id
from workers.tools.base import Outcome, WorkerRegistry, WorkerTool, parse_kill, parse_sandbox

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

    def run(self, request: Mapping[str, Any], body: bytes = b"") -> GuestResponse:
        response = self.client.call(self._name, request, body, call_id=self.call.id)
        done = response.done
        self.kill, self.sandbox = parse_kill(done), parse_sandbox(done)
        self.run_s += float(done.get("run_s", 0.0))
        self.sandbox_s += float(done.get("sandbox_s", 0.0))
        self.sandbox_lost = done.get("sandbox_lost")
        error = done.get("error")
        if isinstance(error, dict):
            raise ToolFailure(_guest_code(str(error.get("code"))), _clean(str(error.get("message"))[:4000]) + self.loss_note())
        return response

    def loss_note(self) -> str:
        """What to tell when the call cost the session its sandbox."""
        if self.sandbox_lost is None:
            return ""
        return f" ({self.sandbox_lost}: the sandbox was removed and its files are lost; the next call gets a fresh, empty one)"

    def open_sandbox(self, image: str | None, ttl_s: float) -> Mapping[str, Any]:
        answer = self.client.describe_open(self._name, image, ttl_s)
        self.sandbox = parse_sandbox(answer)
        return {"image": answer["image"], "start_s": answer["start_s"]}

    def close_sandbox(self) -> bool:
        return self.client.close(self._name)

    def cancel_call(self, call_id: str) -> bool:
        return self.client.cancel(self._name, call_id)

    def host_facts(self) -> Mapping[str, str]:
        return self.facts


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
        except ToolFailure as failure:
            result = ToolResult.failed(call, failure.code, failure.message, metadata=_plain(failure.metadata))
        except OperatorError as error:
            log.error("call_not_served", tool=call.name, call=call.id, code=error.code.value, error=str(error))
            result = ToolResult.failed(call, error.code, str(error))
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
            outcome = tool.handler(arguments, bench)
        except ToolFailure as failure:
            if failure.code in OPERATOR_CODES:
                log.error("call_not_served", tool=call.name, call=call.id, code=failure.code.value, error=failure.message)
            result = ToolResult.failed(call, failure.code, failure.message, metadata=_plain(failure.metadata))
        else:
            result = self._result(call, outcome, bench)
        if aliases:
            result = result.model_copy(update={"metadata": {**result.metadata, "aliases_used": aliases}})
        clocks = Clocks(sandbox_s=max(0.0, bench.sandbox_s - bench.run_s), run_s=bench.run_s)
        return result.model_copy(update={"clocks": clocks, "kill": bench.kill, "sandbox": bench.sandbox})

    def _result(self, call: ToolCall, outcome: Outcome, bench: Bench) -> ToolResult:
        blob = self._blobs.leave(bench.context.tenant, outcome.blob) if outcome.blob is not None else None
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
        )


def _guest_code(text: str) -> ErrorCode:
    """A guest's code is hostile text: what is not in our closed set is INTERNAL."""
    translated = {"NOT_A_REGULAR_FILE": "PATH_NOT_ALLOWED", "SPAWN_FAILED": "FILE_NOT_FOUND"}.get(text, text)
    try:
        return ErrorCode(translated)
    except ValueError:
        return ErrorCode.INTERNAL


def _clean(text: str) -> str:
    """A guest's text without half surrogate pairs, which no UTF-8 of ours can carry."""
    return text.encode("utf-8", "replace").decode()


def _plain(metadata: Mapping[str, object]) -> dict[str, Any]:
    return dict(metadata)
