"""Parts of a run on a pool: a model with its dialect, the tools that the run may use, and the review and dispatch of
its calls.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

from toolcrew.contract.call_events import MODEL
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import (
    BROKER_CODES,
    BrokerUnavailable,
    ConfigError,
    ErrorCode,
    SandboxUnavailable,
    ToolFailure,
)
from toolcrew.contract.registry import Switch, filter_specs, switches_for
from toolcrew.contract.run_events import (
    ApprovalAsked,
    CallSent,
    OnEvent,
    OutputArrived,
    RunEvent,
    SandboxReady,
    Warned,
)
from toolcrew.contract.schema import find_aliases, is_quick
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL
from toolcrew.orchestrator.admission import WaitNotice, once_per_reason, report_waiting, until_admitted
from toolcrew.orchestrator.approvals import Approver, review
from toolcrew.orchestrator.approvals.asking import choose_people_approver, open_approvals
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy, Rule
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.plain import PlainDialect
from toolcrew.orchestrator.dialects.profiles import SHELL_TOOL, STANDARD, ModelProfile
from toolcrew.orchestrator.dispatch.call_events import OnOutput
from toolcrew.orchestrator.dispatch.dispatcher import add_used_aliases
from toolcrew.orchestrator.dispatch.model_requests import ModelRequests
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.sessions import Session, SessionInfo
from toolcrew.orchestrator.dispatch.tenant_catalog import Offer, is_offered, refuse_before_approval, with_tenant_rules
from toolcrew.orchestrator.loop.agent import Agent, RunCall
from toolcrew.orchestrator.loop.limits import ReActOptions, with_window
from toolcrew.orchestrator.models.capabilities import CapabilityCache
from toolcrew.orchestrator.models.choice import ChosenModel, choose_dialect, choose_profile, find_needed_capabilities
from toolcrew.orchestrator.runs.file_list import list_files
from toolcrew.orchestrator.runs.journal import MemoryJournal, RunJournal
from toolcrew.orchestrator.runs.model_account import ModelAccount
from toolcrew.orchestrator.runs.run_gate import GatedRun, UngatedRun
from toolcrew.orchestrator.runs.run_model import RunModel, send_at_once
from toolcrew.store.skills import SkillUses
from toolcrew.store.slots import Priority
from toolcrew.store.tasks import retry_until_available
from toolcrew.store.tenant_threads import in_tenant_thread
from toolcrew.store.usage import UsageStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_CHARS = 8 * 1024
"""Limit of the complete description of skill_tool, in characters. The model reads the description at each step."""
WINDOW_SHARE = 0.02
"""Largest share of the model's context window, 0 to 1, that the description of skill_tool may use if the size of the
window is known.
"""
CHARS_A_TOKEN = 4
"""Approximate number of characters of English text in a token."""
_NONE = "There are no skills now."


def disclose(
    specs: Iterable[ToolSpec],
    skills: Iterable[SkillSummary],
    uses: Mapping[str, int],
    context_tokens: int | None = None,
) -> list[ToolSpec]:
    """Return the specs, with the names and descriptions of skills added to the description of skill_tool.

    `uses`: number of uses of each skill. `context_tokens`: the model's context window.
    """
    return [
        spec.model_copy(
            update={
                "description": f"{spec.description} {_list_skills(skills, uses, _count_chars(spec, context_tokens))}"
            }
        )
        if spec.name == SKILL_TOOL
        else spec
        for spec in specs
    ]


def _count_chars(spec: ToolSpec, context_tokens: int | None) -> int:
    """Return how many characters the list of skills may have."""
    max_chars = MAX_CHARS - len(spec.description) - 1
    return max_chars if context_tokens is None else min(max_chars, int(context_tokens * WINDOW_SHARE * CHARS_A_TOKEN))


def _list_skills(skills: Iterable[SkillSummary], uses: Mapping[str, int], max_chars: int) -> str:
    """Return the list of skills for the description, with a note about skills that do not fit."""
    lines = {skill.name: f"- {skill.name}: {' '.join(skill.description.split())}" for skill in skills}
    if not lines:
        return _NONE
    shown = _choose_lines(lines, uses, max_chars)
    if len(shown) == len(lines):
        return "\n".join(["Skills:", *shown])
    hidden = len(lines) - len(shown)
    return "\n".join(["Skills, those that are used most:", *shown, f"[{hidden} more: use action list to see them]"])


def _choose_lines(lines: Mapping[str, str], uses: Mapping[str, int], remaining_chars: int) -> list[str]:
    """Return the lines that fit, in the order of the input. The most used skills are chosen first. A line that is too
    long does not exclude shorter lines.
    """
    fitting: set[str] = set()
    for name in sorted(lines, key=lambda name: (-uses.get(name, 0), name)):
        if len(lines[name]) + 1 <= remaining_chars:
            remaining_chars -= len(lines[name]) + 1
            fitting.add(name)
    return [lines[name] for name in lines if name in fitting]


class ActiveSkills:
    """Skills that one run has loaded. `skills`: all skills of its tenant."""

    def __init__(self, skills: Iterable[SkillSummary]) -> None:
        self._skills: Mapping[str, SkillSummary] = {skill.name: skill for skill in skills}
        self._loaded: set[str] = set()

    def record_use(self, call: ToolCall, result: ToolResult) -> str | None:
        """Record the skill that the call has loaded. Return its name; None if the call has used no skill."""
        name = call.arguments.get("name") if call.name == SKILL_TOOL else call.name
        if not result.success or not isinstance(name, str) or name not in self._skills:
            return None
        # Compare the digest: another skill with the same name may allow other tools.
        if call.name == SKILL_TOOL and result.metadata.get("digest") == self._skills[name].digest:
            self._loaded.add(name)
        return name

    def rules(self, trusted: Collection[str], tenant: str) -> tuple[Rule, ...]:
        """Return rules that allow the tools of the loaded skills. `trusted`: digests of skills that may use their
        tools without an approval.
        """
        active = [self._skills[name] for name in sorted(self._loaded) if self._skills[name].digest in trusted]
        return tuple(
            Rule("allow", allowed.tool, tenant, allowed.argv_prefix)
            for skill in active
            for allowed in skill.allowed_tools
        )


Published = TypeVar("Published")


async def _do_not_wait(_: str) -> None:
    """Default of `before_send`: do not wait."""


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one run.

    `tenant`: pays for the run. `tools` None: the tools that suit the model. `gate`: receives the failures of the model.
    `sampling`: fields of every request to the model. `before_request`: is awaited before each new request.
    """

    run: str
    tenant: str
    journal: RunJournal
    dialect: str | None = None
    profile: str | None = None
    options: ReActOptions = field(default_factory=ReActOptions)
    tools: Iterable[str] | Literal["all"] | None = None
    on_event: OnEvent = lambda _: None
    shows_output: bool = False
    priority: Priority = "interactive"
    """Priority of the run's calls."""
    approver: Approver | None = None
    """Approver of the run's calls; None: the client's approver."""
    before_send: Callable[[str], Awaitable[None]] = _do_not_wait
    """Function that waits, before the call with that id is sent, until the run has its slot again: the run may have
    released the slot while people decided about the call.
    """
    gate: GatedRun | UngatedRun = field(default_factory=UngatedRun)
    sampling: Mapping[str, object] = field(default_factory=dict)
    before_request: Callable[[], Awaitable[None]] = send_at_once
    is_chat: bool = False
    """True: the model receives only the run's own messages and no system prompt."""
    copied_steps: int = 0
    """Number of the first steps that were copied from another run (Agent)."""


class RunParts:
    """Builds the agents of one client. Methods raise the exceptions of the pool: BrokerUnavailable, ToolFailure,
    ConfigError.
    """

    def __init__(
        self, settings: OrchestratorSettings, pool: PoolConnection, approver: Approver, policy: ApprovalPolicy
    ) -> None:
        self._settings = settings
        self._pool = pool
        self.approver = approver
        """The client's approver."""
        self._logged_profiles: set[tuple[str, str]] = set()
        self._policy = policy
        self._capabilities = CapabilityCache(settings.capability_folder)
        self.skill_uses = SkillUses(pool.redis, settings.deployment)
        self.usage = UsageStore(pool.redis, settings.deployment)

    async def build_agent(self, session: Session | None, chosen_model: ChosenModel, config: RunConfig) -> Agent:
        """Return the agent of one run in an open session. `session` None: the run has no tools."""
        profile = STANDARD if config.is_chat else await self._choose_profile(chosen_model, config)
        name = "native" if config.is_chat else config.dialect or self._settings.dialect or profile.dialect
        capabilities = await find_needed_capabilities(chosen_model, name, self._capabilities)
        options = config.options
        if chosen_model.endpoint is not None:
            options = replace(
                options,
                prices=options.prices or chosen_model.prices,
                context_tokens=options.context_tokens or chosen_model.context_tokens,
            )
        options = with_window(options, self._settings, capabilities)
        specs: list[ToolSpec] = []
        skills: Sequence[SkillSummary] = ()
        switches: Mapping[str, Switch] = {}
        session_id = session.id if session is not None else None
        account = ModelAccount(
            lambda: self._pool.tenants.check_budgets(config.tenant),
            lambda spending: self.usage.count_reply(config.tenant, session_id, spending),
            options.prices,
        )
        # No journal contains the answers to model requests of tools.
        asked_by_tools = RunModel(chosen_model.model, account, MemoryJournal(account.count), UngatedRun(), {})
        questions = ModelRequests(asked_by_tools)
        if self._pool.tally is not None:
            replay = config.journal if config.journal.is_durable else None
            config = replace(config, on_event=self._pool.tally.watch_run(config.on_event, replay))
        run_call: RunCall = _refused
        files, has_shell = "", False
        if session is not None:
            info = await session.info()
            switches = switches_for(await self._pool.switches.switches(), session.tenant)
            names = profile.tools if config.tools is None else config.tools
            offer = await _of_workers(self._pool.offers.of(session.tenant))
            specs = await self._specs(offer, session.tenant, switches, names, info, options.context_tokens)
            skills = offer.skills
            has_shell = any(spec.name == SHELL_TOOL for spec in specs)
            if profile.shows_files and has_shell:
                # A resumed run lists the files again: the log has no list, and the files may have changed.
                files = await list_files(session)
            config.on_event(_ready(config.run, info))
            run_call = _Calls(
                self,
                session,
                specs,
                replace(config, options=options),
                chosen_model.model.name,
                questions,
                ActiveSkills(skills),
            ).run_call()
        dialect: Dialect = (
            PlainDialect() if config.is_chat else choose_dialect(name, capabilities, profile, has_shell=has_shell)
        )
        model = RunModel(
            chosen_model.model,
            account,
            config.journal,
            config.gate,
            config.sampling,
            config.before_request,
        )
        return Agent(
            model,
            dialect,
            specs,
            run_call,
            instruction=profile.instruction,
            profile=profile,
            files=files,
            options=options,
            on_event=config.on_event,
            run_id=config.run,
            usage_by_tools=questions.usage,
            switched_off=switches,
            skills=[skill.name for skill in skills],
            is_logged=config.journal.is_durable,
            copied_steps=config.copied_steps,
        )

    async def _choose_profile(self, chosen_model: ChosenModel, config: RunConfig) -> ModelProfile:
        """Return the profile of a run. The log says once for each model and profile why it was chosen."""
        profile, reason = await choose_profile(config.profile, chosen_model, self._capabilities)
        model = chosen_model.model.name
        if (model, profile.name) not in self._logged_profiles:
            self._logged_profiles.add((model, profile.name))
            log.info("profile_chosen", model=model, profile=profile.name, reason=reason)
        return profile

    async def specs_in(self, session: Session, names: Iterable[str] | Literal["all"]) -> list[ToolSpec]:
        """Return the tools for a model in that session. Raises SandboxUnavailable, BrokerUnavailable, ToolFailure."""
        return await _of_workers(self.specs_for(session.tenant, names, await session.info()))

    async def specs_for(
        self, tenant: str, names: Iterable[str] | Literal["all"], info: SessionInfo | None
    ) -> list[ToolSpec]:
        """Return the tools for a model of the tenant, described for the session of `info`. Raises ConfigError: no
        worker is up.
        """
        switches = switches_for(await self._pool.switches.switches(), tenant)
        return await self._specs(await self._pool.offers.of(tenant), tenant, switches, names, info)

    async def _specs(
        self,
        offer: Offer,
        tenant: str,
        switches: Mapping[str, Switch],
        names: Iterable[str] | Literal["all"],
        info: SessionInfo | None,
        context_tokens: int | None = None,
    ) -> list[ToolSpec]:
        """Return the tools. The description of skill_tool lists the tenant's skills that fit."""
        allowed = await self._pool.tenants.policy(tenant)
        offered = sorted(
            (spec for spec in offer.tools if is_offered(switches, allowed, spec)), key=lambda spec: spec.name
        )
        specs = filter_specs([info.describe_tool(spec) for spec in offered] if info is not None else offered, names)
        if not any(spec.name == SKILL_TOOL for spec in specs):
            return specs
        return disclose(specs, offer.skills, await self.skill_uses.of(tenant), context_tokens)

    @cached_property
    def people(self) -> Approver:
        """Return the approver that asks people. All runs share the approver, so that one poll serves all waiting
        calls.
        """
        return choose_people_approver(self._settings, open_approvals(self._settings, self._pool.redis, self._pool.keys))

    async def review(
        self,
        call: ToolCall,
        spec: ToolSpec,
        tenant: str,
        session: str | None,
        *,
        on_event: OnEvent = lambda _: None,
        run: str = "",
        approver: Approver | None = None,
        active: ActiveSkills | None = None,
    ) -> ToolCall | ToolResult:
        """Return the approved call, or the result that refuses the call.

        `session` None: a session is opened for this call. `approver` None: the client's approver. `active`: skills of
        the call's run.
        """
        switches, own = await self._pool.switches.switches(), await self._pool.tenants.policy(tenant)
        try:
            if is_quick(spec, call.arguments):
                refuse_before_approval(switches, own, tenant, spec, call.arguments)
            else:
                await in_tenant_thread(tenant, refuse_before_approval, switches, own, tenant, spec, call.arguments)
        except ToolFailure as failure:
            return ToolResult.failed(call, failure.code, failure.message, metadata=dict(failure.metadata))
        # Rules of skills only allow. A rule of the client or the tenant that denies or asks takes precedence.
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
            on_event=on_event,
            run=run,
        )

    async def policy_of(self, tenant: str) -> ApprovalPolicy:
        """Return the approval policy of a tenant's calls: the rules of the client and of the tenant."""
        return with_tenant_rules(self._policy, await self._pool.tenants.policy(tenant), tenant)

    def settle(self, session: Session, call: str) -> None:
        """Delete the pool's copy of a call's result, because the result is in the log now."""
        self._pool.dispatcher.settle(session.tenant, call)


class _Calls:
    """Makes the calls of one run: reviews, dispatches and publishes them. Logs reviews and results in the journal."""

    def __init__(
        self,
        parts: RunParts,
        session: Session,
        specs: list[ToolSpec],
        config: RunConfig,
        model: str,
        questions: ModelRequests,
        active: ActiveSkills,
    ) -> None:
        self._parts = parts
        self._session = session
        self._config = config
        self._questions = questions
        self._active = active
        self._specs = {spec.name: spec for spec in specs}
        self._on_waiting = once_per_reason(self._warn_of_wait)
        self._model = model

    def run_call(self) -> RunCall:
        """Return the function with which the agent executes a call."""
        journal = self._config.journal

        async def run_call(call: ToolCall) -> ToolResult:
            result = journal.result_of(call.id)
            if result is None:
                result = await (self._run_durably(call) if journal.is_durable else self._run(call))
                await journal.record_result(result)
                if journal.is_durable:
                    # Only now may the pool delete the result: until the result is in the journal, the pool has the
                    # only copy.
                    self._parts.settle(self._session, call.id)
            skill = self._active.record_use(call, result)
            if skill is not None:
                await self._parts.skill_uses.count(self._session.tenant, skill)
            return result

        return run_call

    async def _run_durably(self, call: ToolCall) -> ToolResult:
        """Execute the call. Repeat it while Redis does not answer."""
        try:
            return await retry_until_available(self._build_attempts(call, self._config.journal.now))
        except BrokerUnavailable as error:
            return ToolResult.failed(call, error.code, str(error))

    def _build_attempts(self, call: ToolCall, clock: Callable[[], float]) -> Callable[[], Awaitable[ToolResult]]:
        """Return a function that makes one attempt at the call each time it is called.

        The function raises BrokerUnavailable when the outcome is unknown. The next attempt reads the outcome from the
        call's record.
        """
        tried_at: float | None = None

        async def send() -> ToolResult:
            nonlocal tried_at
            earlier, tried_at = tried_at, tried_at or clock()
            result = await self._run(call, tried_at=earlier)
            if result.error_code in BROKER_CODES:
                raise BrokerUnavailable(result.error or "Redis does not answer")
            return result

        return send

    async def _run(self, call: ToolCall, *, tried_at: float | None = None) -> ToolResult:
        """Review, send and wait for one call. `tried_at`: time of an earlier attempt in this process, in Unix
        seconds.
        """
        spec = self._specs[call.name]
        reviewed = await self._review(call, spec)
        if isinstance(reviewed, ToolResult):
            return reviewed
        await self._config.before_send(call.id)
        self._config.on_event(CallSent(run=self._config.run, call=reviewed))
        journal, config = self._config.journal, self._config
        request = Request(
            reviewed,
            self._session.tenant,
            self._session.id,
            default_timeout_s=config.options.tool_timeout_s,
            run=config.run,
            model=self._model,
            priority=config.priority,
            handlers={MODEL: self._questions.open_call()} if spec.pool == "tools" else {},
            keeps_result=journal.is_durable,
            sent_since=journal.sent_since(call.id) or tried_at,
        )
        on_output = self._build_on_output(call.id) if self._config.shows_output else None

        async def send() -> ToolResult:
            with report_waiting(self._on_waiting):
                return await self._session.send(request, on_output)

        # A durable run waits for a limit that only delays the call. Any other run returns a result that reports the
        # limit.
        result = await (until_admitted(send) if journal.is_durable else send())
        return add_used_aliases(result, find_aliases(spec, call.arguments))

    async def _review(self, call: ToolCall, spec: ToolSpec) -> ToolCall | ToolResult:
        """Review the call as `RunParts.review` does. A logged decision is used again, so people are not asked twice."""
        journal, was_asked = self._config.journal, False

        def on_event(event: RunEvent) -> None:
            nonlocal was_asked
            was_asked |= isinstance(event, ApprovalAsked)
            self._config.on_event(event)

        logged = journal.review_of(call.id)
        if logged is not None:
            return logged
        session, config = self._session, self._config
        reviewed = await self._parts.review(
            call,
            spec,
            session.tenant,
            session.id,
            on_event=on_event,
            run=config.run,
            approver=config.approver,
            active=self._active,
        )
        if was_asked:
            await journal.record_review(call.id, reviewed)
        return reviewed

    def _warn_of_wait(self, notice: WaitNotice) -> None:
        """Publish a warning that a call waits."""
        self._config.on_event(Warned(run=self._config.run, message=notice.message))

    def _build_on_output(self, call: str) -> OnOutput:
        """Return a function that publishes the output of the call."""
        return lambda stream, text: self._config.on_event(
            OutputArrived(run=self._config.run, call_id=call, stream=stream, text=text)
        )


async def _of_workers(reading: Awaitable[Published]) -> Published:
    """Return the tools and skills that the workers publish.

    The run has a session, so workers were up before. A missing worker is therefore an outage and not a wrong setting.
    """
    try:
        return await reading
    except ConfigError as error:
        raise SandboxUnavailable(str(error)) from error


async def _refused(call: ToolCall) -> ToolResult:
    """Return the result of any call of a run without tools."""
    return ToolResult.failed(call, ErrorCode.TOOL_NOT_FOUND, f"Tool not found: {call.name}")


def _ready(run: str, info: SessionInfo) -> SandboxReady:
    """Return the event that reports the run's open session."""
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
