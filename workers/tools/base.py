"""The interface of tools: a handler gets its arguments and a ToolEnvironment, and returns an Outcome."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any, NamedTuple, TypeVar

import structlog
from pydantic import JsonValue

from toolcrew.contract.calls import (
    CallUsage,
    Clocks,
    KillReport,
    SandboxInfo,
    SessionUsage,
    Spill,
    ToolCall,
    ToolContext,
)
from toolcrew.contract.errors import ConfigError, ErrorCode, OperatorError, SandboxUnavailable, ToolFailure
from toolcrew.contract.functions.call_context import CallContext, CoroutineRunner
from toolcrew.contract.functions.session_state import NoState, SessionStates
from toolcrew.contract.guest_protocol import (
    A,
    FailedAnswer,
    GuestReply,
    GuestRequest,
    InvalidGuestAnswer,
    parse_error,
    parse_guest_answer,
)
from toolcrew.contract.registry import Tool, ToolRegistry
from toolcrew.contract.secrets import check_session_values
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.store.secrets import TenantSecrets
from toolcrew.workers.call_event_writer import CallEvents
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient, SandboxdUnreachable, sandbox_id
from toolcrew.workers.tools.caller_model import CallerModel

log = structlog.get_logger(__name__)

T = TypeVar("T")
OnData = Callable[[str, bytes], None]

MAX_REQUESTS = 64
"""Limit of the recorded requests to sandboxd of one call. A call has only a few."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a handler. `blob` contains bytes for the caller that are not part of the text output."""

    output: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    truncated: bool = False
    error: str | None = None
    error_code: ErrorCode | None = None
    blob: bytes | None = None
    spill: Spill | None = None


class SandboxRequest(NamedTuple):
    """Record of a request to sandboxd that has ended.

    `sandbox_s` is the time that sandboxd needed after the sandbox was ready, in seconds. `run_s` is the guest's part of
    this time.
    """

    op: str
    began_at: float
    ended_at: float
    sandbox_s: float = 0.0
    run_s: float = 0.0
    kill: KillReport | None = None
    error: str | None = None


@dataclass(frozen=True)
class WorkerResources:
    """The resources that all calls of one executor share.

    - `facts`: `host` and `queue` of this worker.
    - `holder`: this worker's name in the records of calls.
    - `client`: the client of sandboxd; None in a worker without sandboxes.
    - `states`: the states of sessions; None when sessions have no state here.
    - `open_events`: opens the event stream of a call whose caller wants events.
    - `find_secrets`: returns the secrets of a tenant by name; None in a worker without sandboxes.
    """

    facts: Mapping[str, str]
    holder: str = ""
    client: SandboxClient | None = None
    states: SessionStates | None = None
    open_events: Callable[[ToolCall, ToolContext], CallEvents] | None = None
    find_secrets: Callable[[str], TenantSecrets] | None = None


class ToolEnvironment:
    """The objects that a tool's handler may use: the call's context and content, the events to the caller, and the
    sandbox of the session.

    The environment also records what sandboxd reports while the call runs. `policy`: the tenant's present sandbox
    policy; None: the policy of the class `default`.
    """

    def __init__(
        self,
        call: ToolCall,
        context: ToolContext,
        resources: WorkerResources,
        content: bytes = b"",
        policy: SandboxPolicy | None = None,
    ) -> None:
        """`content`: bytes that came with the arguments.

        Raises ToolFailure: a worker with sandboxes received a call without a session.
        """
        self.call = call
        self.context = context
        self.content = content
        self.events = CallEvents()
        self.kill: KillReport | None = None
        self.sandbox: SandboxInfo | None = None
        self.sandbox_s = 0.0
        self.run_s = 0.0
        self.usage: CallUsage | None = None
        self.session_usage: SessionUsage | None = None
        """The last totals of the session that sandboxd has reported in this call."""
        self.requests: list[SandboxRequest] = []
        self.folder = ""
        """The session's folder after the call, if the tool reports it; else ""."""
        self._resources = resources
        self._policy = policy
        self._sandbox_lost: str | None = None
        self._is_workspace_kept = False
        self._was_sent = False
        """True after sandboxd has executed a request of this call.

        Then the call may have acted, even if a later request is not sent.
        """
        if resources.client is not None and context.session is None:
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, f"{call.name} needs a session: open one first")
        self._name = sandbox_id(context.tenant, context.session or "")
        # Open the events last: if a later line failed, no code would close them.
        if context.events is not None and resources.open_events is not None:
            self.events = resources.open_events(call, context)

    def reports(self) -> dict[str, Any]:
        """Return the fields of the call's result that come from sandboxd and the guest."""
        clocks = Clocks(sandbox_s=max(0.0, self.sandbox_s - self.run_s), run_s=self.run_s)
        return {"clocks": clocks, "kill": self.kill, "sandbox": self.sandbox, "usage": self.usage}

    def call_context(self, runner: CoroutineRunner | None = None) -> CallContext:
        """Return the context of a function tool: configuration, working directory, caller's model, and session state.

        `runner` runs the coroutines of the model and of the state, for a tool that is not async.
        """
        context, states = self.context, self._resources.states
        return CallContext(
            call_id=self.call.id,
            tenant=context.tenant,
            run=context.run,
            session=context.session,
            cwd=context.cwd,
            config=MappingProxyType(copy.deepcopy(context.config)),
            model=CallerModel(context.model, self.events) if context.model is not None else None,
            state=NoState()
            if states is None or context.session is None
            else states.open(context.tenant, context.session),
            runner=runner,
        )

    @property
    def is_watched(self) -> bool:
        """Return whether the caller wants output before the call ends."""
        return self.events.is_watched

    def show(self, stream: str, text: str) -> None:
        """Send a piece of output to the caller. Does nothing when the caller does not watch.

        May wait for a slow caller, for a limited time.
        """
        self.events.show(stream, text)

    def host_facts(self) -> Mapping[str, str]:
        """Return `host` and `queue` of this worker."""
        return self._resources.facts

    def run(self, request: GuestRequest[A], body: bytes = b"", on_data: OnData | None = None) -> GuestReply[A]:
        """Send one request to the guest of the call's session.

        `on_data` receives (stream, bytes) as they arrive; without it the reply contains them. While `on_data`
        runs, nothing more is read, and the guest waits. Raises ToolFailure and SandboxUnavailable.
        """
        client, before = self._client(), (self.sandbox_s, self.run_s)
        began, began_at, kill, error = time.monotonic(), time.time(), None, None
        try:
            response = client.call(
                self._name,
                request.as_header(),
                body,
                call_id=self.call.id,
                on_data=on_data,
                policy=self._policy,
                run=self.context.run,
            )
            self._was_sent = True
            answer = self._take_answer(request, response)
            kill = answer.kill
            if isinstance(answer, FailedAnswer):
                code, message, figures = parse_error(answer)
                raise ToolFailure(code, message + self.loss_note(message), **figures)
            return GuestReply(answer, response.streams)
        except SandboxdUnreachable as unreachable:
            error = unreachable.code.value
            # Even if this request was never sent, an earlier request of this call may have acted.
            raise SandboxdUnreachable(
                str(unreachable), was_sent=unreachable.was_sent or self._was_sent
            ) from unreachable
        except (ToolFailure, OperatorError) as failure:
            error = failure.code.value
            raise
        finally:
            ended_at = began_at + time.monotonic() - began
            seconds = self.sandbox_s - before[0], self.run_s - before[1]
            self._record(SandboxRequest(request.OP, began_at, ended_at, *seconds, kill, error))

    def place_skill(self, digest: str, pack: Callable[[], IO[bytes]], *, is_shared: bool) -> str:
        """Return the folder of the skill with that digest in the sandbox. The folder is read-only.

        `pack` returns the skill's files as a tar archive, sorted by path. It is called only when the files are not in
        place yet. With `is_shared` the skill is for all tenants; otherwise only for the tenant of this call.
        """
        client = self._client()
        try:
            path = client.find_skill(self._name, digest, shared=is_shared)
            if path is not None:
                return path
            with pack() as archive:
                return self._measure(
                    "place_skill", lambda: client.place_skill(self._name, digest, archive, shared=is_shared)
                )
        except SandboxdUnreachable as unreachable:
            # Placing a skill is no effect of the call, so only earlier requests decide whether the call has acted.
            raise SandboxdUnreachable(str(unreachable), was_sent=self._was_sent) from unreachable

    def open_sandbox(self, spec: SessionSpec, *, moved: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Open the session's sandbox. Return `image`, `network`, `hosts`, `workspace` (its kind), `options`,
        `timeout_s` (the largest limit of a call) and `start_s`. `moved` is set when another host had the session
        (SandboxClient.describe_open).
        """
        client = self._client()
        if moved is None:
            self._check_secrets(spec.secrets)
        fields = self._measure(
            "open" if spec.restore is None and spec.workspace is None else "restore",
            lambda: client.describe_open(self._name, spec, policy=self._policy, moved=moved),
            lambda opened: float(opened["start_s"]),
        )
        # A session that was already open may be without a container now.
        self.sandbox = SandboxInfo.model_validate(fields["sandbox"]) if fields["sandbox"] is not None else None
        return {name: value for name, value in fields.items() if name not in ("ok", "sandbox")}

    def _check_secrets(self, names: Sequence[str]) -> None:
        """Raise ToolFailure when the tenant has no such secret, or the secrets are too long together. Raise ConfigError
        when the record of one is damaged or forged. Do not check a session that moves: a secret that it may use can be
        revoked meanwhile.
        """
        find = self._resources.find_secrets
        secrets = find(self.context.tenant) if names and find is not None else None
        if secrets is None:
            return
        if damaged := [name for name in names if name in secrets.unreadable]:
            raise ConfigError(
                f"the record of secret {damaged[0]} of tenant {self.context.tenant} cannot be verified or read: set it "
                f"again (toolcrew secrets set {damaged[0]}), and tell the operator, whose log has the cause "
                "(secret_unreadable)"
            )
        if missing := [name for name in names if name not in secrets]:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"tenant {self.context.tenant} has no secret {missing[0]}: set it "
                f"(toolcrew secrets set {missing[0]}), or leave it out",
            )
        try:
            check_session_values([secrets[name].value for name in set(names)])
        except ValueError as error:
            raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from None

    def checkpoint(self) -> Mapping[str, Any]:
        """Save a checkpoint. Return `checkpoint` (its id), `bytes`, `sha256`, `skipped` (number of sockets) and `torn`
        (files changed while they were read).
        """
        client = self._client()
        fields = self._measure("checkpoint", lambda: client.checkpoint(self._name))
        return {name: fields[name] for name in ("checkpoint", "bytes", "sha256", "skipped", "torn")}

    def save_files(self, file: str, names: str) -> Mapping[str, Any]:
        """Store files of the workspace (SandboxClient.save_files). Return `bytes` and `sha256`."""
        client = self._client()
        fields = self._measure("save_files", lambda: client.save_files(self._name, file, names))
        return {name: fields[name] for name in ("bytes", "sha256")}

    def fork(self, children: Sequence[str], *, leave_jobs: bool) -> Mapping[str, Any]:
        """Fork the session (SandboxClient.fork). `children`: the ids of the new sessions, which belong to the same
        tenant.
        """
        client, tenant = self._client(), self.context.tenant
        names = [sandbox_id(tenant, child) for child in children]
        fields = self._measure("fork", lambda: client.fork(self._name, names, leave_jobs=leave_jobs))
        return {name: fields[name] for name in ("image", "network", "hosts", "workspace", "options", "start_s")}

    def delete_checkpoint(self, checkpoint: str) -> Mapping[str, Any]:
        """Delete a checkpoint (SandboxClient.delete_checkpoint)."""
        return self._client().delete_checkpoint(self._name, checkpoint)

    def set_ttl(self, ttl_s: float) -> None:
        """Change the time to live of the session (SandboxClient.set_ttl)."""
        self._client().set_ttl(self._name, ttl_s)

    def close_sandbox(self) -> bool:
        """Close the session's sandbox. Return False when there was no sandbox."""
        client = self._client()
        return self._measure("close", lambda: client.close(self._name))

    def sandbox_news(self) -> str:
        """Return a line about the sandbox to append to the output, for example that it was lost before the call. Return
        "" if there is nothing to say.
        """
        return f"\n[{self.sandbox.news}]" if self.sandbox is not None and self.sandbox.news else ""

    def loss_note(self, message: str) -> str:
        """Return the addition to the error `message` when the session lost its sandbox in the call."""
        if self._sandbox_lost is None:
            return ""
        reason = "" if self._sandbox_lost in message else f"{self._sandbox_lost}: "
        if self._is_workspace_kept:
            survivors = (
                "the files in /workspace are kept, and the next call gets a new sandbox around them; background jobs "
                "and the shell's"
            )
            return f" ({reason}the sandbox was lost; {survivors} folder and variables are lost)"
        return f" ({reason}the sandbox and its files are lost; the next call gets a new, empty sandbox)"

    def _client(self) -> SandboxClient:
        if self._resources.client is None:
            raise ToolFailure(
                ErrorCode.SANDBOX_UNAVAILABLE,
                f"{self.call.name} needs a sandbox, but runs in a pool without sandboxes: report it to the operator",
            )
        return self._resources.client

    def _take_answer(self, request: GuestRequest[A], response: GuestResponse) -> A | FailedAnswer:
        """Check the answer to a request, and record its news and its measurements."""
        try:
            answer = parse_guest_answer(request, response.done)
        except InvalidGuestAnswer as nonsense:
            self._give_up_sandbox()
            raise SandboxUnavailable(
                f"the sandbox sent an invalid answer ({nonsense}) and was removed: open a new session"
            ) from None
        # sandboxd sends its news only with the first answer of a call. Keep them when later requests of the call
        # follow.
        news = self.sandbox.news if self.sandbox is not None else None
        self.kill, self._sandbox_lost, self._is_workspace_kept = answer.kill, answer.sandbox_lost, answer.workspace_kept
        self.sandbox = (
            answer.sandbox.model_copy(update={"news": answer.sandbox.news or news})
            if answer.sandbox is not None
            else None
        )
        # Limit the guest's time to what sandboxd measured, because the guest is not trusted.
        self.run_s += min(max(0.0, answer.run_s), answer.sandbox_s)
        self.sandbox_s += answer.sandbox_s
        self.session_usage = answer.session_usage or self.session_usage
        if answer.usage is not None:
            self.usage = answer.usage if self.usage is None else self.usage + answer.usage
        return answer

    def _give_up_sandbox(self) -> None:
        """Close the sandbox, because its guest sent an invalid answer: another program may have replaced the guest."""
        try:
            self._client().close(self._name)
        except (ToolFailure, OperatorError) as error:
            log.error("sandbox_not_closed", call=self.call.id, error=str(error))

    def _measure(self, op: str, work: Callable[[], T], sandbox_s: Callable[[T], float] = lambda _: 0.0) -> T:
        """Run `work`, a request to sandboxd, and record the duration.

        `sandbox_s` returns sandboxd's part of the duration from the result.
        """
        began, began_at = time.monotonic(), time.time()
        seconds, error = 0.0, None
        try:
            result = work()
            seconds = sandbox_s(result)
        except (ToolFailure, OperatorError) as failure:
            error = failure.code.value
            raise
        finally:
            self._record(SandboxRequest(op, began_at, began_at + time.monotonic() - began, seconds, error=error))
        return result

    def _record(self, request: SandboxRequest) -> None:
        if len(self.requests) < MAX_REQUESTS:
            self.requests.append(request)


Handler = Callable[[dict[str, Any], ToolEnvironment], Outcome]
WorkerTool = Tool[Handler]
WorkerRegistry = ToolRegistry[Handler]
