"""Runs one claimed item to its outcome. A resumed run continues after the last entry of its log."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from toolcrew.concurrency.tasks import is_being_cancelled, retry_until_available
from toolcrew.contract.calls import ToolResult, pick_fields
from toolcrew.contract.errors import (
    ConfigError,
    ContextWindowExceeded,
    ErrorCode,
    ModelDenied,
    ModelRefused,
)
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.model_endpoints import Prices
from toolcrew.contract.plurals import count
from toolcrew.contract.run_events import (
    BatchNotice,
    CallFinished,
    Failure,
    OnEvent,
    RunReady,
    SubmissionTaken,
    Warned,
    pass_to,
)
from toolcrew.contract.run_spec import ItemEnvironment, RunBody, RunLimits
from toolcrew.contract.session_spec import DEFAULT_TTL_S, MAX_TTL_S, SessionSpec
from toolcrew.orchestrator.admission import until_admitted
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.approvals.asking import QueueApprover
from toolcrew.orchestrator.batches.rows import build_answer_body, build_call_body
from toolcrew.orchestrator.dialects.model import Message
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.loop.agent import RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.choice import FALLBACK_WARNING, ChosenModel
from toolcrew.orchestrator.models.notices import report_notices
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.grading import Grading, is_gradable, list_start_files
from toolcrew.orchestrator.runs.item_artifacts import CopiedOut, copy_item_artifacts
from toolcrew.orchestrator.runs.item_sessions import ItemSessions
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.runs.outcomes import build_outcome, judge_call, judge_error, judge_run
from toolcrew.orchestrator.runs.run_config import RunConfig
from toolcrew.orchestrator.runs.run_forks import name_attempt
from toolcrew.orchestrator.runs.run_gate import GatedRun, RunDeferred, RunGate
from toolcrew.orchestrator.runs.run_slots import RunSlots, SlotReleasingApprover
from toolcrew.orchestrator.runs.sent_calls import SentCalls
from toolcrew.orchestrator.sessions.session import Session, build_call
from toolcrew.orchestrator.traces.recorder import Traces
from toolcrew.orchestrator.tracing import RunSpans, TracedRun, current_run, within_run
from toolcrew.store.batches import CHAT_URL, NO_BATCH, BatchDefaults, BatchItem, CallBody, ItemOutcome
from toolcrew.store.run_queue import RunClaim
from toolcrew.store.slots import Priority

LEAST_WALL_S = 1.0
"""Minimum time, in seconds, that a resumed run gets even if its time limit has passed. The run replays its log in this
time, so that its result covers the whole log.
"""


Execute = Callable[[OnEvent], Awaitable[ItemOutcome]]
"""Executes one item, reports its events to the given listener, and returns its outcome."""
Guard = Callable[[RunClaim, BatchDefaults, OnEvent, Execute], Awaitable[ItemOutcome | Failure]]
"""Executes an item with the last argument. Returns a failure instead for an item that this process must not execute, or
not any longer.
"""


async def allow_all(_claim: RunClaim, _: BatchDefaults, on_event: OnEvent, execute: Execute) -> ItemOutcome | Failure:
    """Execute every item: the guard of a process that executes only runs of its own user."""
    return await execute(on_event)


@dataclass
class RunExecutor:
    """Executes items of any batch on one pool.

    `work` returns an outcome, or raises RunDeferred when the run has to wait. The caller cancels `work` when this
    process no longer owns the run.

    `traces` None: write no traces. `publisher`: publishes the events of durable runs; None: publish none. `listeners`:
    return further listeners for the events of a run's agent. `approver`: decides about the calls of every run; None:
    the defaults of the batch choose between the client's approver and people. `sent_calls`: the running calls of runs
    in sessions that existed before them. `priority`: priority of the items' calls.

    The gate makes runs wait while their endpoint is down; the slots limit the runs of this process. The code that
    claims runs checks both first.
    """

    pool: PoolConnection
    builder: AgentBuilder
    models: Models
    traces: Traces | None = None
    publisher: RunEventPublisher | None = None
    listeners: Sequence[Callable[[RunClaim], OnEvent]] = ()
    guard: Guard = allow_all
    approver: Approver | None = None
    sent_calls: SentCalls | None = None
    priority: Priority = "batch"
    gate: RunGate = field(default_factory=RunGate)
    slots: RunSlots = field(default_factory=RunSlots)

    def __post_init__(self) -> None:
        self._sessions = ItemSessions(self.pool, self.slots)
        self._grading = Grading(self._sessions)
        self._interrupted: dict[tuple[str, str], RunSpans] = {}
        self._warned: set[tuple[str, str]] = set()

    async def work(self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent) -> ItemOutcome:
        """Run the item and return its outcome. The session is closed before the return. If this method is cancelled
        or raises, the session stays open for the process that continues the run.

        Raises RunDeferred: the run has to wait. Raises ModelDenied: no run of this process can continue.
        """

        async def execute(on_event: OnEvent) -> ItemOutcome:
            with self._traced(claim, journal) as spans:
                outcome = await self._run_item(claim, journal, defaults, on_event)
                if spans is not None:
                    spans.finish(outcome.failure.code if outcome.failure is not None else None)
            return outcome

        outcome = await self.guard(claim, defaults, on_event, execute)
        if isinstance(outcome, Failure):
            await self.abandon(claim, journal)
            return build_outcome(claim, outcome)
        return outcome

    def forget(self, claim: RunClaim) -> None:
        """Forget what this process keeps about an interrupted run. The process that continues the run reports its
        spans.
        """
        self._interrupted.pop((claim.tenant, claim.run), None)
        if self.sent_calls is not None:
            self.sent_calls.forget(claim)

    @contextmanager
    def _traced(self, claim: RunClaim, journal: Journal) -> Iterator[RunSpans | None]:
        """Yield the spans of the run; None without a tracer. The caller finishes the spans. If the run is interrupted,
        the spans are kept until `forget` or `abandon`.
        """
        tracer, record, run = self.pool.tracer, claim.record, _run_name(claim)
        if tracer is None:
            yield None
            return
        traced = TracedRun(
            claim.tenant,
            run,
            batch=record.batch,
            attempt=record.attempt,
            earlier=_run_name(claim, record.attempt - 1) if record.attempt > 1 else None,
            began_at=journal.began_at,
            is_agent=isinstance(record.item.work, RunBody),
        )
        spans = RunSpans(
            tracer, traced, lambda call: journal.result_of(call) is not None if call else journal.has_reply
        )
        try:
            with within_run(spans):
                yield spans
        except (asyncio.CancelledError, RunDeferred, ModelDenied):
            self._interrupted[claim.tenant, claim.run] = spans
            raise

    async def _run_item(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent
    ) -> ItemOutcome:
        """Set up the item's session, execute the item, close the session, and return the outcome. Errors of the item
        become its failure; errors that make the run wait are raised.
        """
        item, began = claim.record.item, time.monotonic()
        own_model = item.work.model if isinstance(item.work, RunBody) else None
        session: Session | None = None
        is_configured = False
        try:
            # Chats need this check too: a tenant without permissions may not run them.
            await retry_until_available(lambda: self.pool.tenants.policy(claim.tenant))
            if journal.submission is not None:
                return await self._grade(claim, journal, journal.submission)
            if isinstance(item.work, RunBody):
                chosen_model = await self.models.get(claim.tenant, own_model or defaults.model)
                is_configured = chosen_model.endpoint is not None
                if not is_configured:
                    self.gate.check_model(own_model)
                self.gate.of(chosen_model.endpoint).hold()
            session = (
                await retry_until_available(lambda: self._session(claim, journal, defaults))
                if _needs_session(item)
                else None
            )
            on_event(RunReady(run=claim.run, setup_s=time.monotonic() - began))
            journal.begin()
            body, failure = await self._execute(claim, journal, defaults, session, on_event)
            if session is not None and item.grader is not None and is_gradable(failure):
                submission = await self._grading.take(session, item.grader, journal, body, failure)
                await self._sessions.close(session)
                session = None
                return await self._grade(claim, journal, submission)
        except Exception as error:  # any error ends only this item; the batch continues
            # An endpoint that denies its key or its model is no reason to stop runs with other models.
            is_denied = is_configured and isinstance(error, ModelDenied)
            if not is_denied and (instead := self.gate.classify(error, own_model)) is not None:
                # The run continues later in the same session, so the session must stay open.
                session = None
                raise instead from error
            body, failure = journal.submission.body if journal.submission is not None else None, judge_error(error)
            if session is None:
                # The sandbox may exist on a host even if opening the session failed.
                await self.abandon(claim, journal)
        finally:
            # A cancelled task means that another process may continue the run, so the session stays open in that
            # case.
            if session is not None and item.environment.session is None and not is_being_cancelled():
                await self._sessions.close(session)
        return build_outcome(claim, failure, body)

    async def _grade(self, claim: RunClaim, journal: Journal, submission: SubmissionTaken) -> ItemOutcome:
        """Grade an item whose agent has ended, and return its outcome. If agent and grader have failed, the outcome
        reports the failure of the grader.
        """
        grader = claim.record.item.grader
        assert grader is not None
        graded = await self._grading.grade(claim.tenant, grader, journal, submission)
        await journal.drop_artifacts()
        outcome = build_outcome(claim, graded.failure or submission.failure, submission.body)
        return outcome.model_copy(update={"grade": graded.grade, "output": graded.output})

    async def abandon(self, claim: RunClaim, journal: Journal) -> None:
        """Remove the session of a run that does not continue, if it can be reached, and finish the run's spans. In a
        session that existed before the run, end only the run's calls.
        """
        spans = self._interrupted.pop((claim.tenant, claim.run), None)
        if spans is not None:
            spans.finish(ErrorCode.CANCELLED.value)
        await self._sessions.abandon_last(claim.tenant, journal)
        if self.sent_calls is not None:
            await self.sent_calls.cancel(claim, self.pool.dispatcher)

    async def release_states(self, claim: RunClaim, journal: Journal) -> None:
        """Close the kept states of a run that is cancelled or starts again."""
        await self._sessions.release_states(claim.tenant, journal)

    async def _session(self, claim: RunClaim, journal: Journal, defaults: BatchDefaults) -> Session:
        """Return the session of the item or of the run's log, or open a new session."""
        environment, pool = claim.record.item.environment, self.pool
        if environment.session is not None:
            return await Session.attach(pool.dispatcher, pool.blobs, tenant=claim.tenant, session=environment.session)
        if journal.session is not None:
            return self._sessions.resume(claim.tenant, journal.session.info)
        if journal.opening is not None:
            await self.abandon(claim, journal)
        ttl_s = MAX_TTL_S if keeps_states(claim.record.item) else DEFAULT_TTL_S
        spec = pick_fields(SessionSpec, environment.with_defaults(defaults.options), ttl_s=ttl_s)
        return await self._sessions.open(claim.tenant, journal, spec)

    async def _execute(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, session: Session | None, on_event: OnEvent
    ) -> tuple[dict[str, Any] | None, Failure | None]:
        """Execute the item. Return the body of its row and its failure; the failure is None for a success."""
        work, grader = claim.record.item.work, claim.record.item.grader
        if session is not None and grader is not None:
            await list_start_files(session, grader)
        if isinstance(work, RunBody):
            try:
                return await self._run_agent(claim, work, journal, defaults, session, on_event)
            except (ContextWindowExceeded, ModelRefused) as error:
                return None, judge_error(error)
        assert session is not None
        result = await self._send_single_call(claim, journal, work, session, on_event)
        artifacts = await copy_item_artifacts(claim.record.item, journal, defaults, session, on_event)
        return build_call_body(result, **artifacts), judge_call(result)

    async def _run_agent(
        self,
        claim: RunClaim,
        work: RunBody,
        journal: Journal,
        defaults: BatchDefaults,
        session: Session | None,
        on_event: OnEvent,
    ) -> tuple[dict[str, Any], Failure | None]:
        """Run the agent of an item. Return the same values as `_execute`."""
        item, agent_run = claim.record.item, _run_name(claim)
        chosen_model = await self.models.get(claim.tenant, work.model or defaults.model)
        options, is_over = _options(work.limits, defaults, chosen_model.prices), False
        if options.max_wall_s is not None:
            # Earlier processes have already used a part of the time limit.
            remaining_s = options.max_wall_s - journal.spent_wall_s
            is_over = remaining_s <= 0
            wall_s = max(LEAST_WALL_S, remaining_s) if journal.is_resumed else remaining_s
            options = options.model_copy(update={"max_wall_s": wall_s})
        if chosen_model.is_fallback:
            self._warn_once(claim, FALLBACK_WARNING, on_event)
        journal.bill(session.id if session is not None else None)
        gate = GatedRun(self.gate.of(chosen_model.endpoint), claim.run)

        async def prepare_request() -> None:
            if is_over:
                # Wait until the time limit cancels the run. A new reply would cost money and would not be used.
                await asyncio.get_running_loop().create_future()
            if session is None or not work.keep_states:
                return
            journal.check_session()
            if problem := await self._sessions.keep_state(session, journal):
                message = f"the state of the session after {count(journal.steps, 'step')} was not stored: {problem}"
                on_event(Warned(run=agent_run, message=message))

        async with AsyncExitStack() as stack:
            on_event = await stack.enter_async_context(self._listen(claim, on_event))
            on_event = stack.enter_context(self.observe(claim.tenant, agent_run, on_event, current_run()))
            config = RunConfig(
                run=agent_run,
                tenant=claim.tenant,
                journal=journal,
                dialect=work.dialect or defaults.dialect,
                profile=work.profile or defaults.profile,
                options=options,
                tools=work.tools,
                on_event=on_event,
                shows_output=self.publisher is not None and claim.record.batch == NO_BATCH,
                priority=self.priority,
                approver=self.approver or (self.builder.reviewer.people if defaults.asks_people else None),
                gate=gate,
                sampling=work.sampling,
                before_request=prepare_request,
                is_chat=item.url == CHAT_URL,
                copied_steps=item.forked_from.step if item.forked_from is not None else 0,
            )
            history = [dict(message) for message in work.history]
            run = await self.run_agent(session, chosen_model, config, work.instruction, history)
            if run.stop_reason is StopReason.MAX_WALL:
                gate.check_answered()
        artifacts = (
            await copy_item_artifacts(item, journal, defaults, session, on_event)
            if session is not None
            else CopiedOut()
        )
        name, began_at, is_standing = (
            chosen_model.model.name,
            claim.record.started_at,
            claim.record.batch == NO_BATCH,
        )
        is_own = item.environment.session is None and journal.session is not None
        sandbox_s = max(0.0, journal.now() - journal.session.at) if is_own and journal.session else 0.0
        body = build_answer_body(
            item.url,
            run,
            model=name,
            created=began_at,
            has_transcript=is_standing,
            sandbox_s=sandbox_s,
            **artifacts,
        )
        return body, judge_run(run)

    def _warn_once(self, claim: RunClaim, message: str, on_event: OnEvent) -> None:
        """Add a warning to the item's batch. The batch receives the warning only once."""
        batch = claim.tenant, claim.record.batch
        if batch not in self._warned and claim.record.batch != NO_BATCH:
            self._warned.add(batch)
            on_event(BatchNotice(message=message, is_warning=True))

    @contextmanager
    def observe(self, tenant: str, run: str, on_event: OnEvent, spans: RunSpans | None) -> Iterator[OnEvent]:
        """Yield the listener for the events of an agent: it also writes its trace and its spans. What the model's
        requests wait for becomes a warning.
        """
        with ExitStack() as stack:
            if self.traces is not None:
                on_event = pass_to(stack.enter_context(self.traces.open(tenant, run)).on_event, on_event)
            if spans is not None:
                on_event = pass_to(spans.on_event, on_event)
            stack.enter_context(report_notices(lambda message: on_event(Warned(run=run, message=message))))
            yield on_event

    async def run_agent(
        self,
        session: Session | None,
        chosen_model: ChosenModel,
        config: RunConfig,
        instruction: str,
        history: Sequence[Message] = (),
    ) -> RunResult:
        """Run an agent in an open session until it answers or reaches a limit. `session` None: the run has no tools.

        Raises the exceptions of the pool and of the model.
        """
        if (spans := current_run()) is not None:
            spans.know_model(chosen_model.model)
        async with self.slots.run() as slot:
            approver = config.approver or self.builder.reviewer.approver
            if isinstance(approver, QueueApprover):
                # The run releases its slot while it waits for people.
                approver = SlotReleasingApprover(approver, slot)
            config = replace(config, approver=approver, before_send=slot.wait)
            with config.gate.prepare():
                agent = await retry_until_available(lambda: self.builder.build_agent(session, chosen_model, config))
            agent = replace(agent, run_call=slot.wrap(agent.run_call))
            return await agent.run(instruction, history=history)

    @asynccontextmanager
    async def _listen(self, claim: RunClaim, on_event: OnEvent) -> AsyncIterator[OnEvent]:
        """Yield the listener for a run's events. Publish the events of a durable run."""
        on_event = pass_to(on_event, *(listen(claim) for listen in self.listeners))
        if claim.record.batch != NO_BATCH or self.publisher is None:
            yield on_event
            return
        async with self.publisher.open(claim.tenant, claim.run, claim.token, claim.record.attempt) as buffer:
            yield pass_to(on_event, buffer.on_event)

    async def _send_single_call(
        self, claim: RunClaim, journal: Journal, work: CallBody, session: Session, on_event: OnEvent
    ) -> ToolResult:
        """Send the single call of an item without an agent. Return the logged result if there is one."""
        call_id = _run_name(claim)
        result = journal.result_of(call_id)
        if result is not None:
            on_event(CallFinished(run=claim.run, result=result, seconds=result.clocks.total_s))
            return result
        began = time.monotonic()
        call = build_call(work.name, work.arguments, call_id)
        if isinstance(call, ToolResult):
            result = call
        else:
            request = Request(
                call,
                session.tenant,
                session.id,
                timeout_s=work.timeout_s,
                priority=self.priority,
                run=claim.run,
                keeps_result=True,
                sent_since=journal.began_at if journal.is_resumed else None,
            )
            result = await until_admitted(lambda: session.send(request))
        await journal.record_result(result)
        self.pool.dispatcher.settle(claim.tenant, call_id)
        on_event(CallFinished(run=claim.run, result=result, seconds=time.monotonic() - began))
        return result


def keeps_states(item: BatchItem) -> bool:
    """Return whether the item is a run that keeps its states."""
    return isinstance(item.work, RunBody) and item.work.keep_states


def _needs_session(item: BatchItem) -> bool:
    """Return whether the item needs a sandbox. A run without tools and with a default environment needs none."""
    return isinstance(item.work, CallBody) or item.work.tools != () or item.environment != ItemEnvironment()


def _run_name(claim: RunClaim, attempt: int | None = None) -> str:
    """Return the name of the run for an attempt. `attempt` None: the current attempt."""
    return name_attempt(claim.run, attempt or claim.record.attempt)


def _prices_of(defaults: BatchDefaults) -> Prices | None:
    """Return the prices of the batch; None if a price is missing."""
    if defaults.prompt_price is None or defaults.completion_price is None:
        return None
    return Prices(defaults.prompt_price, defaults.completion_price)


def _options(limits: RunLimits, defaults: BatchDefaults, prices: Prices | None) -> ReActOptions:
    """Return the run's limits. Values of the item come first, then values of the batch, then the defaults. `prices`:
    prices of the model's endpoint. Raises ConfigError: the limits contradict each other.
    """
    fields = limits.with_defaults(defaults.limits).model_dump()
    try:
        return ReActOptions(**fields, prices=_prices_of(defaults) or prices)
    except ValidationError as error:
        reason = describe_invalid(error)
        raise ConfigError(f"the limits of the item are invalid ({reason}): correct the line") from error
