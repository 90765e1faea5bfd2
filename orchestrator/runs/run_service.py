"""Executes the runs and the detached batches of every tenant, as a separate service (batch_service.py) or in the
process of the API.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from toolcrew.contract.calls import ToolCall
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ModelDenied
from toolcrew.contract.run_events import CallFinished, CallSent, Failure, FailureKind, OnEvent, RunEvent
from toolcrew.orchestrator.approvals import DEFAULT_POLICY
from toolcrew.orchestrator.approvals.asking import choose_pool_approver, open_approvals
from toolcrew.orchestrator.approvals.policies import load_policy
from toolcrew.orchestrator.batches.detached import find_paths
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.models.choice import LOCAL
from toolcrew.orchestrator.runs.batch_runs import until_first
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.item_work import ItemWork
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.live_text import LiveText
from toolcrew.orchestrator.runs.models import Models
from toolcrew.orchestrator.runs.outcomes import build_outcome, judge_error
from toolcrew.orchestrator.runs.run_gate import RunDeferred
from toolcrew.orchestrator.runs.run_parts import RunParts
from toolcrew.orchestrator.runs.runner import Runner
from toolcrew.orchestrator.runs.webhooks import WebhookSender
from toolcrew.orchestrator.settings import OrchestratorSettings
from toolcrew.orchestrator.traces.recorder import Traces
from toolcrew.store.batches import BatchDefaults, ItemOutcome, RunBody
from toolcrew.store.runs import RunClaim, RunQueue
from toolcrew.store.tasks import cancel_all
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_IDLE_MODELS = 8
"""Maximum number of open models that no run uses now. Each model has its own connections, and tenants may name any
number of models.
"""


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
        parts, traces = RunParts(settings, pool, approver, policy), Traces(settings, {}) if has_traces else None
        work = ServiceWork(pool, parts, models, traces, publisher)
        sending = asyncio.create_task(WebhookSender(queue, pool.dispatcher).run(), name="send-webhooks")
        try:
            yield Runner(pool.redis, settings.deployment, queue, work, publisher, concurrency, None, tenants)
        finally:
            await cancel_all((sending,))


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


class ServiceWork(ItemWork):
    """Executes items of any tenant.

    Invariant: the service never reads or writes a path of this machine that a record names. A run stops when its
    tenant is removed.
    """

    def __init__(
        self,
        pool: PoolConnection,
        parts: RunParts,
        models: Models,
        traces: Traces | None,
        publisher: RunEventPublisher | None = None,
    ) -> None:
        super().__init__(pool, parts, models, traces, publisher)
        self._users: dict[str, int] = {}
        """Number of runs that use each model, by name. The least recently used name is first."""
        self._sent: dict[tuple[str, str], set[str]] = {}
        """(tenant, run) -> ids of its running calls, for runs in a session that existed before the run."""

    async def work(self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent) -> ItemOutcome:
        """Execute the item as `ItemWork.work` does, and log its start and end."""
        log.info("run_begun", **_names(claim), is_resumed=claim.is_resumed)
        try:
            outcome = await self._check_item(claim, journal, defaults, on_event)
        except (asyncio.CancelledError, RunDeferred, ModelDenied) as reason:
            log.info("run_returned_to_queue", **_names(claim), reason=type(reason).__name__)
            raise
        failure = outcome.failure
        log.info(
            "run_ended",
            **_names(claim),
            failure=failure.kind.value if failure else "",
            code=failure.code if failure else "",
        )
        return outcome

    async def _check_item(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent
    ) -> ItemOutcome:
        """Refuse items that a service must not execute. Execute all other items."""
        work = claim.record.item.work
        model = (work.model or defaults.model) if isinstance(work, RunBody) else None
        refusal = _refuse(claim, defaults, model)
        if refusal is not None:
            await self.abandon(claim, journal)
            return build_outcome(
                claim, Failure(kind=FailureKind.INPUT, code=ErrorCode.PERMISSION_DENIED.value, message=refusal)
            )
        try:
            async with self._using(model):
                return await self._while_served(claim, journal, defaults, on_event)
        except ModelDenied as error:
            if model is None:
                raise
            # The run's line names the model that the server refuses, so only this run ends. Runs with other models
            # continue.
            await self.abandon(claim, journal)
            return build_outcome(claim, judge_error(error))

    @asynccontextmanager
    async def _using(self, model: str | None) -> AsyncIterator[None]:
        """Context manager around a run that uses the model of its line or batch. Afterwards it closes the least
        recently used models that no run uses.
        """
        if model is None:
            yield
            return
        self._users[model] = self._users.pop(model, 0) + 1
        try:
            yield
        finally:
            self._users[model] -= 1
            idle = [name for name, users in self._users.items() if users == 0]
            for name in idle[: max(0, len(idle) - MAX_IDLE_MODELS)]:
                del self._users[name]
                await self._models.close(name)

    async def _while_served(
        self, claim: RunClaim, journal: Journal, defaults: BatchDefaults, on_event: OnEvent
    ) -> ItemOutcome:
        """Execute the item as `ItemWork.work` does, but end the item when its tenant is removed.

        Without this check, each call would fail and the model would be asked about the failures until a limit is
        reached.
        """
        unserved = asyncio.Event()

        def watch(event: RunEvent) -> None:
            on_event(event)
            if isinstance(event, CallFinished) and event.result.error_code is ErrorCode.UNKNOWN_TENANT:
                unserved.set()

        working = asyncio.ensure_future(super().work(claim, journal, defaults, watch))
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
        await self.abandon(claim, journal)
        message = (
            f"tenant {claim.tenant} was removed while this item ran: register it again and retry the item, or leave it"
        )
        return build_outcome(
            claim, Failure(kind=FailureKind.INPUT, code=ErrorCode.UNKNOWN_TENANT.value, message=message)
        )

    async def abandon(self, claim: RunClaim, journal: Journal) -> None:
        """Abandon the run as `ItemWork.abandon` does. In a session that existed before the run, end only the run's
        calls.
        """
        await super().abandon(claim, journal)
        session = claim.record.item.environment.session
        for call in self._sent.pop((claim.tenant, claim.run), ()):
            order = ToolCall(id=secrets.token_hex(16), name="session.cancel", arguments={"call_id": call})
            # If Redis does not answer, the call ends at its own time limit.
            with suppress(BrokerUnavailable):
                await self._pool.dispatcher.send_order(order, claim.tenant, session)

    def drop_spans(self, claim: RunClaim) -> None:
        """Forget the run: another process continues the run."""
        super().drop_spans(claim)
        self._sent.pop((claim.tenant, claim.run), None)

    @asynccontextmanager
    async def _listen(self, claim: RunClaim, on_event: OnEvent) -> AsyncIterator[tuple[OnEvent, LiveText | None]]:
        """Listen as `ItemWork._listen` does. For a run in a session that existed before the run, also record its
        running calls.
        """
        async with super()._listen(claim, on_event) as (listen, live):
            if claim.record.item.environment.session is None:
                yield listen, live
                return
            sent = self._sent[claim.tenant, claim.run] = set()

            def record(event: RunEvent) -> None:
                listen(event)
                if isinstance(event, CallSent):
                    sent.add(event.call.id)
                elif isinstance(event, CallFinished):
                    sent.discard(event.result.call_id)

            yield record, live


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
