"""Builds the agent of a run: its model in a dialect, and the tools that the run may use."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode, SandboxUnavailable
from toolcrew.contract.registry import Switch, filter_specs, switches_for
from toolcrew.contract.run_events import SandboxReady, pass_to
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import SkillSummary, ToolSpec
from toolcrew.contract.tenancy import SKILL_TOOL
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy
from toolcrew.orchestrator.dialects.base import Dialect
from toolcrew.orchestrator.dialects.plain import PlainDialect
from toolcrew.orchestrator.dialects.profiles import SHELL_TOOL, STANDARD, ModelProfile
from toolcrew.orchestrator.dispatch.model_requests import ModelRequests
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.tenant_catalog import Offer, is_offered
from toolcrew.orchestrator.loop.agent import Agent, RunCall
from toolcrew.orchestrator.loop.limits import with_window
from toolcrew.orchestrator.models.capabilities import CapabilityCache
from toolcrew.orchestrator.models.choice import ChosenModel, choose_dialect, choose_profile, find_needed_capabilities
from toolcrew.orchestrator.runs.file_list import list_files
from toolcrew.orchestrator.runs.journal import MemoryJournal
from toolcrew.orchestrator.runs.model_account import ModelAccount
from toolcrew.orchestrator.runs.run_calls import CallReviewer, RunCalls
from toolcrew.orchestrator.runs.run_config import RunConfig
from toolcrew.orchestrator.runs.run_gate import UngatedRun
from toolcrew.orchestrator.runs.run_meter import RunMeter
from toolcrew.orchestrator.runs.run_model import RunModel
from toolcrew.orchestrator.runs.skill_disclosure import ActiveSkills, disclose
from toolcrew.orchestrator.sessions.session import Session, SessionInfo
from toolcrew.store.skills import SkillUses
from toolcrew.store.usage import UsageStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

Published = TypeVar("Published")


class AgentBuilder:
    """Builds the agents of one client. Methods raise the exceptions of the pool: BrokerUnavailable, ToolFailure,
    ConfigError.
    """

    def __init__(
        self, settings: OrchestratorSettings, pool: PoolConnection, approver: Approver, policy: ApprovalPolicy
    ) -> None:
        self._settings = settings
        self._pool = pool
        self.reviewer = CallReviewer(settings, pool, approver, policy)
        self._logged_profiles: set[tuple[str, str]] = set()
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
            options = options.model_copy(
                update={
                    "prices": options.prices or chosen_model.prices,
                    "context_tokens": options.context_tokens or chosen_model.context_tokens,
                }
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
        if self._pool.meter is not None:
            count = RunMeter(self._pool.meter, config.journal).on_event
            config = replace(config, on_event=pass_to(count, config.on_event))
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
            calls = RunCalls(
                self.reviewer,
                self._pool,
                session,
                specs,
                replace(config, options=options),
                questions,
                ActiveSkills(skills),
            )
            run_call = self._count_skills(calls)
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

    def _count_skills(self, calls: RunCalls) -> RunCall:
        """Return the function with which the agent executes a call. It also counts the skills that the run uses."""

        async def run_call(call: ToolCall) -> ToolResult:
            result = await calls.run(call)
            skill = calls.active.record_use(call, result)
            if skill is not None:
                await self.skill_uses.count(calls.session.tenant, skill)
            return result

        return run_call

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
