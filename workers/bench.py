"""The Workbenches of calls: what every call has, and what a call beside a sandbox has besides."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any, NoReturn, TypeVar

import structlog

from contract.calls import KillReport, SandboxInfo, ToolCall, ToolContext
from contract.errors import ErrorCode, OperatorError, SandboxUnavailable, ToolFailure
from contract.functions.call_context import CallContext, CoroutineRunner
from contract.functions.session_state import NoState, SessionStates
from contract.tenancy import SandboxTerms
from workers.call_events import CallEvents, NoCallEvents
from workers.custom.model import CallerModel
from workers.guest_answers import GuestNonsense, Told, parse_error, parse_told
from workers.sandbox_client import GuestResponse, SandboxClient, SandboxdAway, sandbox_id
from workers.tools.base import OnData
from workers.tracing import CallTrace, Lap

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass
class Bench:
    """What every call has. Without a sandbox: whoever asks it for one is told that this pool has none."""

    call: ToolCall
    context: ToolContext
    facts: Mapping[str, str]
    content: bytes = b""
    kill: KillReport | None = None
    sandbox: SandboxInfo | None = None
    sandbox_s: float = 0.0
    run_s: float = 0.0
    events: CallEvents = field(default_factory=NoCallEvents)
    states: SessionStates | None = None
    """None: sessions have no state here."""
    trace: CallTrace | None = None
    """None: nobody traces the call."""

    def call_context(self, runner: CoroutineRunner | None = None) -> CallContext:
        context = self.context
        return CallContext(
            call_id=self.call.id,
            tenant=context.tenant,
            run=context.run,
            session=context.session,
            cwd=context.cwd,
            config=MappingProxyType(copy.deepcopy(context.config)),
            model=CallerModel(context.model, self.events) if context.model is not None else None,
            state=NoState() if self.states is None or context.session is None else self.states.open(context.tenant, context.session),
            runner=runner,
        )

    @property
    def is_watched(self) -> bool:
        return self.events.is_watched

    def show(self, stream: str, text: str) -> None:
        self.events.show(stream, text)

    def loss_note(self, words: str) -> str:
        """What to tell after `words` when the call cost the session its sandbox."""
        return ""

    def news(self) -> str:
        """What happened to the sandbox before the call: a line for the end of its output, or nothing."""
        return f"\n[{self.sandbox.news}]" if self.sandbox is not None and self.sandbox.news else ""

    def host_facts(self) -> Mapping[str, str]:
        return self.facts

    def run(self, request: Mapping[str, Any], body: bytes = b"", on_data: OnData | None = None) -> GuestResponse:
        self._refuse()

    def place_skill(self, digest: str, pack: Callable[[], IO[bytes]], *, is_shared: bool) -> str:
        self._refuse()

    def open_sandbox(
        self,
        image: str | None,
        ttl_s: float,
        *,
        restore: str | None = None,
        network: str | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        self._refuse()

    def checkpoint(self) -> Mapping[str, Any]:
        self._refuse()

    def delete_checkpoint(self, checkpoint: str) -> bool:
        self._refuse()

    def close_sandbox(self) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ToolFailure(ErrorCode.SANDBOX_UNAVAILABLE, f"{self.call.name} runs in a pool without sandboxes, and asked for one")


@dataclass
class SandboxBench(Bench):
    """Binds the sandbox of the call's session, and remembers what the sandbox told. Raises ToolFailure when the call has no session.

    `terms`: what the tenant's policy says of its sandboxes now; None: sessions have what the class `default` has.
    """

    client: SandboxClient = field(kw_only=True)
    terms: SandboxTerms | None = None
    sandbox_lost: str | None = None
    workspace_kept: bool = False
    _name: str = field(init=False, default="")
    _has_asked: bool = field(init=False, default=False)
    """Whether a request of this call has been carried out: then a later one that was not sent leaves a call that has acted in part."""

    def __post_init__(self) -> None:
        if self.context.session is None:
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, f"{self.call.name} needs a session: open one first")
        self._name = sandbox_id(self.context.tenant, self.context.session)

    def run(self, request: Mapping[str, Any], body: bytes = b"", on_data: OnData | None = None) -> GuestResponse:
        if self.trace is None:
            return self._ran(request, body, on_data)
        sandbox_s, run_s, self.kill = self.sandbox_s, self.run_s, None
        return self._timed(
            str(request.get("op")),
            lambda: self._ran(request, body, on_data),
            lambda: (self.sandbox_s - sandbox_s, self.run_s - run_s, self.kill),
        )

    def _timed(self, op: str, work: Callable[[], T], told: Callable[[], tuple[float, float, KillReport | None]]) -> T:
        """What it gives; the trace, where there is one, hears what it took. `told`: what sandboxd said of that."""
        if self.trace is None:
            return work()
        began, began_at, error = time.monotonic(), time.time(), None
        try:
            return work()
        except (ToolFailure, OperatorError) as failure:
            error = failure.code.value
            raise
        finally:
            sandbox_s, run_s, kill = told()
            self.trace.note(Lap(op, began_at, began_at + time.monotonic() - began, sandbox_s, run_s, kill, error))

    def _ran(self, request: Mapping[str, Any], body: bytes, on_data: OnData | None) -> GuestResponse:
        try:
            response = self.client.call(self._name, request, body, call_id=self.call.id, on_data=on_data, terms=self.terms)
        except SandboxdAway as away:
            raise SandboxdAway(str(away), was_sent=away.was_sent or self._has_asked) from away
        self._has_asked = True
        try:
            told = parse_told(request, response.done)
        except GuestNonsense as nonsense:
            self._give_up_sandbox()
            raise SandboxUnavailable(f"the sandbox gave an answer that is none ({nonsense}), and was removed: open a new session") from None
        self._note(told)
        if told.error is not None:
            code, words, figures = parse_error(told)
            raise ToolFailure(code, words + self.loss_note(words), **figures)
        return response

    def place_skill(self, digest: str, pack: Callable[[], IO[bytes]], *, is_shared: bool) -> str:
        try:
            place = self.client.find_skill(self._name, digest, shared=is_shared)
            if place is not None:
                return place
            with pack() as archive:
                return self._timed(
                    "place_skill", lambda: self.client.place_skill(self._name, digest, archive, shared=is_shared), _nothing_told
                )
        except SandboxdAway as away:
            # Nothing of the call itself was asked for.
            raise SandboxdAway(str(away), was_sent=self._has_asked) from away

    def _note(self, told: Told) -> None:
        """Remember what the end of a request tells. The guest's clock is believed as far as sandboxd's own reaches."""
        # News come with the first answer of a call that asks several times.
        news = self.sandbox.news if self.sandbox is not None else None
        self.kill, self.sandbox_lost, self.workspace_kept = told.kill, told.sandbox_lost, told.workspace_kept
        self.sandbox = told.sandbox.model_copy(update={"news": told.sandbox.news or news}) if told.sandbox is not None else None
        self.run_s += min(max(0.0, told.run_s), told.sandbox_s)
        self.sandbox_s += told.sandbox_s

    def _give_up_sandbox(self) -> None:
        """Who has taken the guest's place is not asked again."""
        try:
            self.client.close(self._name)
        except (ToolFailure, OperatorError) as error:
            log.error("sandbox_not_closed", call=self.call.id, error=str(error))

    def loss_note(self, words: str) -> str:
        if self.sandbox_lost is None:
            return ""
        reason = "" if self.sandbox_lost in words else f"{self.sandbox_lost}: "
        if self.workspace_kept:
            left = (
                "the files in /workspace are kept, and the next call gets a new sandbox around them; background jobs, /tmp and the shell's"
            )
            return f" ({reason}the sandbox is gone; {left} folder and variables are lost)"
        return f" ({reason}the sandbox and its files are lost; the next call gets a fresh, empty one)"

    def open_sandbox(
        self,
        image: str | None,
        ttl_s: float,
        *,
        restore: str | None = None,
        network: str | None = None,
        moved: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        told: list[float] = [0.0]

        def opened() -> dict[str, Any]:
            answer = self.client.describe_open(self._name, image, ttl_s, restore=restore, network=network, terms=self.terms, moved=moved)
            told[0] = float(answer["start_s"])
            return answer

        answer = self._timed("open" if restore is None else "restore", opened, lambda: (told[0], 0.0, None))
        # A session that was open already may have no container now.
        self.sandbox = SandboxInfo.model_validate(answer["sandbox"]) if answer["sandbox"] is not None else None
        return {name: answer[name] for name in ("image", "network", "hosts", "workspace", "start_s")}

    def checkpoint(self) -> Mapping[str, Any]:
        answer = self._timed("checkpoint", lambda: self.client.checkpoint(self._name), _nothing_told)
        return {name: answer[name] for name in ("checkpoint", "bytes", "sha256", "skipped", "torn")}

    def delete_checkpoint(self, checkpoint: str) -> bool:
        return self.client.delete_checkpoint(self._name, checkpoint)

    def close_sandbox(self) -> bool:
        return self._timed("close", lambda: self.client.close(self._name), _nothing_told)


def _nothing_told() -> tuple[float, float, KillReport | None]:
    return 0.0, 0.0, None
