"""The calls of one run: their review by rules and approvers, their dispatch, and their results."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.call_events import MODEL
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import BROKER_CODES, BrokerUnavailable, ToolFailure
from toolcrew.contract.run_events import (
    ApprovalAsked,
    CallSent,
    OnEvent,
    OutputArrived,
    RunEvent,
    Warned,
)
from toolcrew.contract.schema import find_aliases, is_quick
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.admission import WaitNotice, once_per_reason, report_waiting, until_admitted
from toolcrew.orchestrator.approvals import Approver, review
from toolcrew.orchestrator.approvals.asking import choose_people_approver, open_approvals
from toolcrew.orchestrator.approvals.policies import ApprovalPolicy
from toolcrew.orchestrator.dispatch.call_event_listener import OnOutput
from toolcrew.orchestrator.dispatch.dispatcher import add_used_aliases
from toolcrew.orchestrator.dispatch.model_requests import ModelRequests
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import refuse_before_approval, with_tenant_rules
from toolcrew.orchestrator.runs.run_config import RunConfig
from toolcrew.orchestrator.runs.skill_disclosure import ActiveSkills
from toolcrew.orchestrator.sessions.session import Session


class CallReviewer:
    """Reviews the calls of one client before they are sent."""

    def __init__(
        self, settings: OrchestratorSettings, pool: PoolConnection, approver: Approver, policy: ApprovalPolicy
    ) -> None:
        self._settings = settings
        self._pool = pool
        self.approver = approver
        """The client's approver."""
        self._policy = policy

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


@dataclass
class RunCalls:
    """Makes the calls of one run: reviews, dispatches and publishes them. Logs reviews and results in the journal."""

    reviewer: CallReviewer
    pool: PoolConnection
    session: Session
    specs: Sequence[ToolSpec]
    config: RunConfig
    questions: ModelRequests
    active: ActiveSkills

    def __post_init__(self) -> None:
        self._specs = {spec.name: spec for spec in self.specs}
        self._on_waiting = once_per_reason(self._warn_of_wait)

    async def run(self, call: ToolCall) -> ToolResult:
        """Return the logged result of the call, or execute the call and log the result before it is returned."""
        journal = self.config.journal
        logged = journal.result_of(call.id)
        if logged is not None:
            return logged
        result = await (self._run_durably(call) if journal.is_durable else self._run(call))
        await journal.record_result(result)
        if journal.is_durable:
            # Only now may the pool delete the result: until the result is in the journal, the pool has the only copy.
            self.pool.dispatcher.settle(self.session.tenant, call.id)
        return result

    async def _run_durably(self, call: ToolCall) -> ToolResult:
        """Execute the call. Repeat it while Redis does not answer."""
        try:
            return await retry_until_available(self._build_attempts(call, self.config.journal.now))
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
        await self.config.before_send(call.id)
        self.config.on_event(CallSent(run=self.config.run, call=reviewed))
        journal, config = self.config.journal, self.config
        request = Request(
            reviewed,
            self.session.tenant,
            self.session.id,
            default_timeout_s=config.options.tool_timeout_s,
            run=config.run,
            model=self.questions.model,
            priority=config.priority,
            handlers={MODEL: self.questions.open_call()} if spec.pool == "tools" else {},
            keeps_result=journal.is_durable,
            sent_since=journal.sent_since(call.id) or tried_at,
        )
        on_output = self._build_on_output(call.id) if self.config.shows_output else None

        async def send() -> ToolResult:
            with report_waiting(self._on_waiting):
                return await self.session.send(request, on_output)

        # A durable run waits for a limit that only delays the call. Any other run returns a result that reports the
        # limit.
        result = await (until_admitted(send) if journal.is_durable else send())
        return add_used_aliases(result, find_aliases(spec, call.arguments))

    async def _review(self, call: ToolCall, spec: ToolSpec) -> ToolCall | ToolResult:
        """Return the logged decision, so that people are not asked twice. Review the call if there is none."""
        journal, was_asked = self.config.journal, False

        def on_event(event: RunEvent) -> None:
            nonlocal was_asked
            was_asked |= isinstance(event, ApprovalAsked)
            self.config.on_event(event)

        logged = journal.review_of(call.id)
        if logged is not None:
            return logged
        session, config = self.session, self.config
        reviewed = await self.reviewer.review(
            call,
            spec,
            session.tenant,
            session.id,
            on_event=on_event,
            run=config.run,
            approver=config.approver,
            active=self.active,
        )
        if was_asked:
            await journal.record_review(call.id, reviewed)
        return reviewed

    def _warn_of_wait(self, notice: WaitNotice) -> None:
        """Publish a warning that a call waits."""
        self.config.on_event(Warned(run=self.config.run, message=notice.message))

    def _build_on_output(self, call: str) -> OnOutput:
        """Return a function that publishes the output of the call."""
        return lambda stream, text: self.config.on_event(
            OutputArrived(run=self.config.run, call_id=call, stream=stream, text=text)
        )
