"""What a run on a pool is made of: a model in its dialect, the tools that it may have, and how its calls are reviewed
and sent.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, Protocol, TypeVar

from contract.call_events import MODEL
from contract.calls import ToolCall, ToolResult
from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, SandboxUnavailable, ToolFailure
from contract.registry import Switch, filter_specs, switches_for
from contract.run_events import ApprovalAsked, CallSent, OnEvent, OutputArrived, RunEvent, SandboxReady, Warned
from contract.schema import find_aliases
from contract.specs import SkillSummary, ToolSpec
from contract.tenancy import SKILL_TOOL
from orchestrator.admission import WaitNotice, once_per_reason, report_waiting, until_admitted
from orchestrator.approvals import Approver, review
from orchestrator.approvals.asking import choose_people, open_approvals
from orchestrator.approvals.policies import ApprovalPolicy, Rule
from orchestrator.dialects.base import Dialect
from orchestrator.dialects.model import Model
from orchestrator.dialects.plain import PlainDialect
from orchestrator.dispatch.call_events import OnOutput
from orchestrator.dispatch.dispatcher import note_aliases
from orchestrator.dispatch.model_requests import ModelRequests
from orchestrator.dispatch.pool_connection import PoolConnection
from orchestrator.dispatch.request import Request
from orchestrator.dispatch.sessions import Session, SessionInfo
from orchestrator.dispatch.tenant_catalog import Offer, is_offered, refuse_unasked, with_tenant_rules
from orchestrator.large_arguments import check_off_loop
from orchestrator.loop.agent import Agent, RunCall
from orchestrator.loop.limits import ReActOptions, with_window
from orchestrator.models.capabilities import CapabilityCache
from orchestrator.models.choice import ChosenModel, choose_dialect, know_model
from orchestrator.runs.live_text import LiveText
from orchestrator.settings import OrchestratorSettings
from store.skills import SkillUses
from store.slots import Priority
from store.tasks import retry_until_available

MAX_CHARS = 8 * 1024
"""Of the tool's whole description: a model reads it at each step."""
WINDOW_SHARE = 0.02
"""Of a model's context window, where it is known."""
CHARS_A_TOKEN = 4
"""Of English text, about."""
_NONE = "There are no skills now."


def disclose(
    specs: Iterable[ToolSpec],
    skills: Iterable[SkillSummary],
    uses: Mapping[str, int],
    context_tokens: int | None = None,
) -> list[ToolSpec]:
    """The specs, skill_tool's with the skills' names and descriptions. `uses`: how often each was used;
    `context_tokens`: the model's window.
    """
    return [
        spec.model_copy(
            update={"description": f"{spec.description} {_tell(skills, uses, _room(spec, context_tokens))}"}
        )
        if spec.name == SKILL_TOOL
        else spec
        for spec in specs
    ]


def _room(spec: ToolSpec, context_tokens: int | None) -> int:
    most = MAX_CHARS - len(spec.description) - 1
    return most if context_tokens is None else min(most, int(context_tokens * WINDOW_SHARE * CHARS_A_TOKEN))


def _tell(skills: Iterable[SkillSummary], uses: Mapping[str, int], room: int) -> str:
    lines = {skill.name: f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills}
    if not lines:
        return _NONE
    told = _within(lines, uses, room)
    if len(told) == len(lines):
        return "\n".join(["Skills:", *told])
    left = len(lines) - len(told)
    return "\n".join(["Skills, those that are used most:", *told, f"[{left} more: action list names them]"])


def _within(lines: Mapping[str, str], uses: Mapping[str, int], room: int) -> list[str]:
    """Those that fit, in the order of their names; who is used least is left out first. One that is too long keeps no
    shorter one out.
    """
    fitting: set[str] = set()
    for name in sorted(lines, key=lambda name: (-uses.get(name, 0), name)):
        if len(lines[name]) + 1 <= room:
            room -= len(lines[name]) + 1
            fitting.add(name)
    return [lines[name] for name in lines if name in fitting]


class ActiveSkills:
    """Of one run. `skills`: those that there are for its tenant."""

    def __init__(self, skills: Iterable[SkillSummary]) -> None:
        self._skills: Mapping[str, SkillSummary] = {skill.name: skill for skill in skills}
        self._loaded: set[str] = set()

    def note(self, call: ToolCall, result: ToolResult) -> str | None:
        """The skill that the call has used, if it has used one."""
        name = call.arguments.get("name") if call.name == SKILL_TOOL else call.name
        if not result.success or not isinstance(name, str) or name not in self._skills:
            return None
        # By its content: what else has the name says nothing of what this one may do.
        if call.name == SKILL_TOOL and result.metadata.get("digest") == self._skills[name].digest:
            self._loaded.add(name)
        return name

    def rules(self, trusted: Collection[str], tenant: str) -> tuple[Rule, ...]:
        """What need not be asked about now. `trusted`: digests."""
        active = [self._skills[name] for name in sorted(self._loaded) if self._skills[name].digest in trusted]
        return tuple(
            Rule("allow", allowed.tool, tenant, allowed.argv_prefix)
            for skill in active
            for allowed in skill.allowed_tools
        )


Published = TypeVar("Published")


class RunBook(Protocol):
    """What a run remembers beyond this process (orchestrator/runs/journal.py)."""

    @property
    def is_catching_up(self) -> bool: ...

    def sent_since(self, call: str) -> float | None: ...

    def now(self) -> float: ...

    def review_of(self, call: str) -> ToolCall | ToolResult | None: ...

    def result_of(self, call: str) -> ToolResult | None: ...

    async def note_review(self, call: str, reviewed: ToolCall | ToolResult) -> None: ...

    async def note_result(self, call: str, result: ToolResult) -> None: ...


async def _at_once(_: str) -> None:
    """Nothing is waited for."""


@dataclass(frozen=True)
class RunAs:
    """How one run is made. `tools` None: all that the model can cope with. `book` None: nothing is remembered. `live`:
    shows replies while they come. `logged`: wraps the model, so that its replies are logged.
    """

    run: str
    dialect: str | None = None
    options: ReActOptions = field(default_factory=ReActOptions)
    tools: Iterable[str] | Literal["all"] | None = None
    tell: OnEvent = lambda _: None
    shows_output: bool = False
    priority: Priority = "interactive"
    """Of its calls."""
    approver: Approver | None = None
    """None: the client's."""
    until_ready: Callable[[str], Awaitable[None]] = _at_once
    """Waits, before the call of that id is sent, for what the run may have given away while people were asked about
    it.
    """
    book: RunBook | None = None
    logged: Callable[[Model], Model] = lambda model: model
    live: LiveText | None = None
    is_chat: bool = False
    """The model hears nothing but the run's own messages."""


class RunParts:
    """Builds the agents of one client. Raises as the pool does: BrokerUnavailable, ToolFailure, ConfigError."""

    def __init__(
        self, settings: OrchestratorSettings, pool: PoolConnection, approver: Approver, policy: ApprovalPolicy
    ) -> None:
        self._settings = settings
        self._pool = pool
        self.approver = approver
        """The client's."""
        self._policy = policy
        self._capabilities = CapabilityCache(settings.capability_folder)
        self.skill_uses = SkillUses(pool.redis, settings.deployment)

    async def build_agent(self, session: Session | None, chosen: ChosenModel, wanted: RunAs) -> Agent:
        """The agent of one run in a session that is open; None: of one without tools."""
        name = "native" if wanted.is_chat else wanted.dialect or self._settings.dialect
        known = await know_model(chosen, name, self._capabilities)
        options = with_window(wanted.options, self._settings, known)
        specs: list[ToolSpec] = []
        skills: Sequence[SkillSummary] = ()
        switches: Mapping[str, Switch] = {}
        questions = ModelRequests(chosen.model)
        if self._pool.tally is not None:
            wanted = replace(wanted, tell=self._pool.tally.watch_run(wanted.tell, wanted.book))
        run_call: RunCall = _refused
        if session is not None:
            info = await session.info()
            switches = switches_for(await self._pool.switches.switches(), session.tenant)
            names = chosen.tools if wanted.tools is None else wanted.tools
            offer = await _of_workers(self._pool.offers.of(session.tenant))
            specs = await self._specs(
                offer, session.tenant, switches, names, info.describe_network(), options.context_tokens
            )
            skills = offer.skills
            wanted.tell(_ready(wanted.run, info))
            run_call = _Calls(
                self,
                session,
                specs,
                replace(wanted, options=options),
                chosen.model.name,
                questions,
                ActiveSkills(skills),
            ).run_call()
        dialect: Dialect = PlainDialect() if wanted.is_chat else choose_dialect(name, known, is_small=chosen.is_small)
        if wanted.live is not None:
            wanted.live.use(lambda: dialect.open_reader(wanted.run, 0, reads_tags=options.enable_tool_action_parsing))
        return Agent(
            wanted.logged(chosen.model),
            dialect,
            specs,
            run_call,
            instruction=chosen.instruction,
            options=options,
            on_event=wanted.tell,
            run_id=wanted.run,
            spent_by_tools=questions.usage,
            switched_off=switches,
            skills=[skill.name for skill in skills],
        )

    async def specs_in(self, session: Session, names: Iterable[str] | Literal["all"]) -> list[ToolSpec]:
        """What a model may be told of in that session. Raises SandboxUnavailable, BrokerUnavailable, ToolFailure."""
        return await _of_workers(self.specs_for(session.tenant, names, (await session.info()).describe_network()))

    async def specs_for(self, tenant: str, names: Iterable[str] | Literal["all"], reach: str | None) -> list[ToolSpec]:
        """What a model of the tenant may be told of. `reach`: what its session has of the network. Raises ConfigError
        when no worker lives.
        """
        switches = switches_for(await self._pool.switches.switches(), tenant)
        return await self._specs(await self._pool.offers.of(tenant), tenant, switches, names, reach)

    async def _specs(
        self,
        offer: Offer,
        tenant: str,
        switches: Mapping[str, Switch],
        names: Iterable[str] | Literal["all"],
        reach: str | None,
        context_tokens: int | None = None,
    ) -> list[ToolSpec]:
        """skill_tool's with the skills that there are for the tenant, as far as the model has room for them."""
        allowed = await self._pool.tenants.policy(tenant)
        there = sorted(
            (spec for spec in offer.tools if is_offered(switches, allowed, spec)), key=lambda spec: spec.name
        )
        specs = filter_specs([spec.with_network(reach) for spec in there] if reach is not None else there, names)
        if not any(spec.name == SKILL_TOOL for spec in specs):
            return specs
        return disclose(specs, offer.skills, await self.skill_uses.of(tenant), context_tokens)

    @cached_property
    def people(self) -> Approver:
        """Of runs that ask people; one, whose every look is for all that wait."""
        return choose_people(self._settings, open_approvals(self._settings, self._pool.redis, self._pool.keys))

    async def review(
        self,
        call: ToolCall,
        spec: ToolSpec,
        tenant: str,
        session: str | None,
        *,
        tell: OnEvent = lambda _: None,
        run: str = "",
        approver: Approver | None = None,
        active: ActiveSkills | None = None,
    ) -> ToolCall | ToolResult:
        """The call as it may run, or the result that refuses it. `session` None: it is opened for this call. `approver`
        None: the client's. `active`: of the call's run."""
        switches, own = await self._pool.switches.switches(), await self._pool.tenants.policy(tenant)
        try:
            await check_off_loop(
                spec, call.arguments, partial(refuse_unasked, switches, own, tenant, spec, call.arguments)
            )
        except ToolFailure as failure:
            return ToolResult.failed(call, failure.code, failure.message, metadata=dict(failure.metadata))
        policy = with_tenant_rules(self._policy, own, tenant)
        if active is not None:
            policy = replace(policy, rules=policy.rules + active.rules(own.trusted_skills, tenant))
        return await review(
            call,
            spec,
            approver or self.approver,
            policy=policy,
            tenant=tenant,
            session=session,
            ttl_s=self._settings.approval_wait_s,
            on_event=tell,
            run=run,
        )

    async def policy_of(self, tenant: str) -> ApprovalPolicy:
        """What its calls are judged by: the client's rules and the tenant's own."""
        return with_tenant_rules(self._policy, await self._pool.tenants.policy(tenant), tenant)

    def settle(self, session: Session, call: str) -> None:
        """The result of a call is remembered."""
        self._pool.dispatcher.settle(session.tenant, call)


class _Calls:
    """How the calls of one run are made: reviewed, then dispatched, their output told to who listens; remembered where
    there is a book.
    """

    def __init__(
        self,
        parts: RunParts,
        session: Session,
        specs: list[ToolSpec],
        wanted: RunAs,
        model: str,
        questions: ModelRequests,
        active: ActiveSkills,
    ) -> None:
        self._parts, self._session, self._wanted, self._questions, self._active = (
            parts,
            session,
            wanted,
            questions,
            active,
        )
        self._specs = {spec.name: spec for spec in specs}
        self._on_waiting = once_per_reason(self._warn_of_wait)
        self._model = model

    def run_call(self) -> RunCall:
        """What the agent runs a call with."""
        make = self._fresh if self._wanted.book is None else self._remembered

        async def run_call(call: ToolCall) -> ToolResult:
            result = await make(call)
            skill = self._active.note(call, result)
            if skill is not None:
                await self._parts.skill_uses.note(self._session.tenant, skill)
            return result

        return run_call

    async def _remembered(self, call: ToolCall) -> ToolResult:
        book = self._wanted.book
        assert book is not None
        known = book.result_of(call.id)
        if known is not None:
            return known
        try:
            result = await retry_until_available(self._tries(call, book.now))
        except BrokerUnavailable as error:
            result = ToolResult.failed(call, error.code, str(error))
        await book.note_result(call.id, result)
        self._parts.settle(self._session, call.id)
        return result

    def _tries(self, call: ToolCall, clock: Callable[[], float]) -> Callable[[], Awaitable[ToolResult]]:
        """Makes the call each time it is called; raises BrokerUnavailable when nobody knows what came of it. By its
        record the next try then finds out.
        """
        tried_at: float | None = None

        async def send() -> ToolResult:
            nonlocal tried_at
            earlier, tried_at = tried_at, tried_at or clock()
            result = await self._fresh(call, tried_at=earlier)
            if result.error_code is ErrorCode.BROKER_UNAVAILABLE:
                raise BrokerUnavailable(result.error or "Redis does not answer")
            return result

        return send

    async def _fresh(self, call: ToolCall, *, tried_at: float | None = None) -> ToolResult:
        spec = self._specs[call.name]
        reviewed = await self._reviewed(call, spec)
        if isinstance(reviewed, ToolResult):
            return reviewed
        await self._wanted.until_ready(call.id)
        self._wanted.tell(CallSent(run=self._wanted.run, call=reviewed))
        book, wanted = self._wanted.book, self._wanted
        request = Request(
            reviewed,
            self._session.tenant,
            self._session.id,
            default_timeout_s=wanted.options.tool_timeout_s,
            run=wanted.run,
            model=self._model,
            priority=wanted.priority,
            handlers={MODEL: self._questions.open_call()} if spec.pool == "tools" else {},
            keeps_result=book is not None,
            sent_since=(book.sent_since(call.id) or tried_at) if book is not None else None,
        )
        on_output = self._teller(call.id) if self._wanted.shows_output else None

        async def send() -> ToolResult:
            with report_waiting(self._on_waiting):
                return await self._session.send(request, on_output)

        # A run that is remembered has time: its model is not told of a limit that only makes it wait.
        result = await (send() if self._wanted.book is None else until_admitted(send))
        return note_aliases(result, find_aliases(spec, call.arguments))

    async def _reviewed(self, call: ToolCall, spec: ToolSpec) -> ToolCall | ToolResult:
        """As `RunParts.review`; somebody who was asked is not asked again."""
        book, asked = self._wanted.book, list[str]()

        def tell(event: RunEvent) -> None:
            if isinstance(event, ApprovalAsked):
                asked.append(event.digest)
            self._wanted.tell(event)

        known = book.review_of(call.id) if book is not None else None
        if known is not None:
            return known
        session, wanted = self._session, self._wanted
        reviewed = await self._parts.review(
            call,
            spec,
            session.tenant,
            session.id,
            tell=tell,
            run=wanted.run,
            approver=wanted.approver,
            active=self._active,
        )
        if book is not None and asked:
            await book.note_review(call.id, reviewed)
        return reviewed

    def _warn_of_wait(self, notice: WaitNotice) -> None:
        self._wanted.tell(Warned(run=self._wanted.run, message=notice.message))

    def _teller(self, call: str) -> OnOutput:
        return lambda stream, text: self._wanted.tell(
            OutputArrived(run=self._wanted.run, call_id=call, stream=stream, text=text)
        )


async def _of_workers(reading: Awaitable[Published]) -> Published:
    """What the workers publish, for a run that has a session: workers there were, and none left is no setting of
    whoever asks.
    """
    try:
        return await reading
    except ConfigError as error:
        raise SandboxUnavailable(str(error)) from error


async def _refused(call: ToolCall) -> ToolResult:
    """Of a run that has no tools."""
    return ToolResult.failed(call, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}")


def _ready(run: str, info: SessionInfo) -> SandboxReady:
    sandbox, generation = (info.sandbox.id, info.sandbox.generation) if info.sandbox is not None else ("", 1)
    return SandboxReady(
        run=run,
        session=info.session,
        host=info.host,
        image=info.image,
        network=info.network,
        start_s=info.start_s,
        sandbox=sandbox,
        generation=generation,
    )
