"""Executes the runs and the detached batches of every tenant, as a separate service (batch_service.py) or in the
process of the API.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from toolcrew.concurrency.tasks import cancel_all
from toolcrew.contract.errors import ErrorCode, ModelDenied
from toolcrew.contract.run_events import CallFinished, Failure, FailureKind, OnEvent, RunEvent
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.approvals import DEFAULT_POLICY
from toolcrew.orchestrator.approvals.asking import choose_pool_approver, open_approvals
from toolcrew.orchestrator.approvals.policies import load_policy
from toolcrew.orchestrator.batches.detached import find_paths
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.models.choice import LOCAL
from toolcrew.orchestrator.runs.agent_builder import AgentBuilder
from toolcrew.orchestrator.runs.client_batches import until_first
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.executor import Execute, RunExecutor
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.runs.outcomes import judge_error
from toolcrew.orchestrator.runs.run_gate import RunDeferred
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.orchestrator.runs.sent_calls import SentCalls
from toolcrew.orchestrator.runs.webhooks import WebhookSender
from toolcrew.orchestrator.traces.recorder import Traces
from toolcrew.store.batches import BatchDefaults, ItemOutcome
from toolcrew.store.run_queue import RunClaim, RunQueue
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)


@asynccontextmanager
async def open_runner(
    settings: OrchestratorSettings,
    pool: PoolConnection,
    concurrency: int,
    *,
    tenants: tuple[str, ...] = (),
    has_traces: bool = True,
) -> AsyncIterator[Runner]:
    """Yield a runner for runs and batch items of all tenants, or of `tenants`, on a pool. The runner starts when its
    `run` is awaited.

    `concurrency`: runs at a time. `has_traces`: write a trace of each run. Raises ConfigError: the policy file is
    invalid.
    """
    # A service has no terminal. A rule or the approval queue decides about a call that needs an approval; without a
    # decision the call is refused.
    questions = open_approvals(settings, pool.redis, pool.keys)
    approver = choose_pool_approver(settings, questions, is_interactive=False)
    policy = load_policy(settings.approval_policy) if settings.approval_policy else DEFAULT_POLICY
    queue = RunQueue(pool.redis, settings.deployment, pool.keys)
    publisher = RunEventPublisher(pool.redis, settings.deployment)
    async with Models(settings, pool, is_service=True) as models:
        builder, traces = AgentBuilder(settings, pool, approver, policy), Traces(settings, {}) if has_traces else None
        work = build_service_executor(pool, builder, models, traces, publisher)
        sending = asyncio.create_task(WebhookSender(queue, pool.dispatcher).run(), name="send-webhooks")
        try:
            yield Runner(pool.redis, settings.deployment, queue, work, publisher, concurrency, None, tenants)
        finally:
            await cancel_all((sending,))


def build_service_executor(
    pool: PoolConnection,
    builder: AgentBuilder,
    models: Models,
    traces: Traces | None,
    publisher: RunEventPublisher | None,
) -> RunExecutor:
    """Return an executor of items of any tenant."""
    sent_calls = SentCalls()
    listeners = (sent_calls.watch,)
    return RunExecutor(
        pool, builder, models, traces, publisher, listeners, guard=ServiceGuard(models), sent_calls=sent_calls
    )


@dataclass(frozen=True)
class StopPhases:
    """The two phases in which a service stops: draining, then stopped."""

    draining: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def interrupt(self) -> None:
        """Continue to the next phase. The first call starts no more runs. The second call returns the running runs to
        the queue at once.
        """
        if self.draining.is_set():
            self.stopped.set()
        self.draining.set()


@dataclass(frozen=True)
class RunService:
    """Runner with an orderly stop.

    `grace_s`: time in seconds in which running runs can end after the first interrupt. After that time the remaining
    runs return to the queue, and another process continues them.
    """

    runner: Runner
    grace_s: float = 60.0
    stopping: StopPhases = field(default_factory=StopPhases)

    async def run(self) -> None:
        """Return when the service was interrupted and every run has ended or has returned to the queue. Raises
        ModelDenied: the model refuses this process.
        """
        await until_first(self.runner.run(), self._until_over())

    async def _until_over(self) -> None:
        """Wait until the running runs must return to the queue."""
        await self.stopping.draining.wait()
        log.info("draining", running=self.runner.running, grace_s=self.grace_s)
        self.runner.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.stopping.stopped.wait()
        log.info("runs_returned_to_queue", running=self.runner.running)


@dataclass(frozen=True)
class ServiceGuard:
    """Guard of a process that executes items of any tenant.

    Invariant: the service never reads or writes a path of this machine that a record names. A run stops when its
    tenant is removed.
    """

    models: Models

    async def __call__(
        self, claim: RunClaim, defaults: BatchDefaults, on_event: OnEvent, execute: Execute
    ) -> ItemOutcome | Failure:
        """Execute the item, or refuse it, and log its start and end."""
        log.info("run_begun", **_names(claim), is_resumed=claim.is_resumed)
        try:
            outcome = await self._check_item(claim, defaults, on_event, execute)
        except (asyncio.CancelledError, RunDeferred, ModelDenied) as reason:
            log.info("run_returned_to_queue", **_names(claim), reason=type(reason).__name__)
            raise
        failure = outcome if isinstance(outcome, Failure) else outcome.failure
        log.info(
            "run_ended",
            **_names(claim),
            failure=failure.kind.value if failure else "",
            code=failure.code if failure else "",
        )
        return outcome

    async def _check_item(
        self, claim: RunClaim, defaults: BatchDefaults, on_event: OnEvent, execute: Execute
    ) -> ItemOutcome | Failure:
        """Refuse items that a service must not execute. Execute all other items."""
        work = claim.record.item.work
        model = (work.model or defaults.model) if isinstance(work, RunBody) else None
        refusal = _refuse(claim, defaults, model)
        if refusal is not None:
            return Failure(kind=FailureKind.INPUT, code=ErrorCode.PERMISSION_DENIED.value, message=refusal)
        try:
            async with self.models.use(model):
                return await _execute_while_served(claim, on_event, execute)
        except ModelDenied as error:
            if model is None:
                raise
            # The run's line names the model that the server refuses, so only this run ends. Runs with other models
            # continue.
            return judge_error(error)


async def _execute_while_served(claim: RunClaim, on_event: OnEvent, execute: Execute) -> ItemOutcome | Failure:
    """Execute the item, but end it when its tenant is removed.

    Without this check, each call would fail and the model would be asked about the failures until a limit is reached.
    """
    unserved = asyncio.Event()

    def watch(event: RunEvent) -> None:
        on_event(event)
        if isinstance(event, CallFinished) and event.result.error_code is ErrorCode.UNKNOWN_TENANT:
            unserved.set()

    working = asyncio.ensure_future(execute(watch))
    watching = asyncio.ensure_future(unserved.wait())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        # A cancelled item leaves its session open for the process that continues the item.
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not unserved.is_set():
        return working.result()
    message = (
        f"tenant {claim.tenant} was removed while this item ran: register it again and retry the item, or leave it"
    )
    return Failure(kind=FailureKind.INPUT, code=ErrorCode.UNKNOWN_TENANT.value, message=message)


def _refuse(claim: RunClaim, defaults: BatchDefaults, model: str | None) -> str | None:
    """Return why a service does not execute the item; None if the service executes it."""
    if model == LOCAL:
        return (
            "a service does not start the local model for a batch: name a model of the service's endpoint, or submit "
            "without --detach"
        )
    return next(find_paths(claim.record.item, defaults.artifacts), None)


def _names(claim: RunClaim) -> dict[str, object]:
    """Return the log fields of a run: its names without any content."""
    return {"tenant": claim.tenant, "batch": claim.record.batch, "run": claim.run, "attempt": claim.record.attempt}
