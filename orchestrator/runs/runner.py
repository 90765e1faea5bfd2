"""Executes the runs of a deployment: claims runs, renews their leases, and ends each run exactly once.

Invariant: at most one process owns a run at a time. Every write of the owner (log entry, outcome, return to the
queue) carries the token of its claim. A process that has lost its lease therefore cannot change the run, even if the
process does not know about the loss.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from toolcrew.concurrency.tasks import cancel_all, check_cancelled
from toolcrew.contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ModelDenied
from toolcrew.contract.run_events import (
    PROGRESS_EVENTS,
    BatchNotice,
    CallFinished,
    Failure,
    FailureKind,
    RunClaimed,
    RunEvent,
    RunRetried,
    StepFinished,
)
from toolcrew.orchestrator.runs.event_publisher import RunEventPublisher
from toolcrew.orchestrator.runs.executor import RunExecutor
from toolcrew.orchestrator.runs.journal import Journal
from toolcrew.orchestrator.runs.outcomes import build_outcome, judge_error, judge_losses
from toolcrew.orchestrator.runs.run_forks import load_copied_steps
from toolcrew.orchestrator.runs.run_gate import QUOTA_RETRY_S, RunDeferred
from toolcrew.store.batches import (
    NO_BATCH,
    RUN_DEFAULTS,
    BatchDefaults,
    ItemOutcome,
    build_ended,
)
from toolcrew.store.connection import RedisClient
from toolcrew.store.run_log import RunLog, RunTaken
from toolcrew.store.run_queue import RunClaim, RunQueue
from toolcrew.store.stored_runs import LEASE_S, BatchCancelled
from toolcrew.telemetry.logs import bound, get_logger

log = get_logger(__name__)

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks for waiting runs, while slots are free."""
RENEWALS_A_LEASE = 4
CANCELS_S = 0.5
DEFAULTS_FRESH_S = 2.0
"""Age up to which the defaults of a batch are used without another read, in seconds."""
MAX_LOSSES = 5
"""Number of processes that may die in a row while they execute a run that makes no progress. After that the run fails,
because it probably kills these processes.
"""
DOUBTFUL_LOSSES = 3
"""Number of owners (processes that execute the run) that must have died before a run counts as doubtful: it may kill
the process. A process executes only one doubtful run at a time, because the death of the process counts as a loss for
each of its runs.
"""
MAX_DENIALS = 10
"""Number of processes in a row that may stop because their model denied them during a run. After that the run fails:
it may be the cause.
"""
TRIAL_S = 30.0
"""Seconds that other doubtful runs wait for a doubtful run that executes but makes no progress."""
STORE_S = 1.0
"""Seconds in which the runs of a process that ends may still store their outcomes."""
RETRY_AFTER_S = (2.0, 10.0, 60.0)
"""Pauses before an item is retried after its first, second, ... infrastructure failure, in seconds. The runner adds a
random part of up to half the pause, so that not all items return at once.
"""


@dataclass
class _ActiveRun:
    """A run that this process owns."""

    claim: RunClaim
    task: "asyncio.Task[None]"
    journal: Journal | None = None
    began: float = field(default_factory=time.monotonic)
    is_doubtful: bool = False
    """True if the run may have killed its earlier owners."""
    is_taken: bool = False
    is_cancelled: bool = False
    is_ending: bool = False
    """True while the outcome is being stored. The token of the claim protects this write, so the task must not be
    cancelled.
    """
    is_interrupted: bool = False
    """True after the task has handled its cancellation."""
    steps: set[int] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    """Ids of the calls of this attempt, including logged calls."""

    @property
    def is_on_trial(self) -> bool:
        """Return whether the run is doubtful and has made no progress in this process, so that it may still kill the
        process.
        """
        has_grown = self.journal is not None and self.journal.has_grown
        return self.is_doubtful and not has_grown and self.seconds < TRIAL_S

    @property
    def seconds(self) -> float:
        """Return the time since this process claimed the run."""
        return time.monotonic() - self.began

    def count(self, event: RunEvent) -> None:
        """Count the steps and calls that the end event of the run reports."""
        if isinstance(event, StepFinished):
            self.steps.add(event.step)
        elif isinstance(event, CallFinished):
            self.calls.add(event.result.call_id)


@dataclass
class Runner:
    """Claims and executes runs in one process.

    `concurrency`: run slots of this process. The limit of a batch applies to all processes together. `only`: claim
    only runs of this tenant and batch. None: claim durable runs, and runs of all detached batches (batches that
    services run), only of `tenants` if that is not empty. `run_defaults`: defaults of durable runs.
    """

    client: RedisClient
    deployment: str
    queue: RunQueue
    work: RunExecutor
    publisher: RunEventPublisher
    concurrency: int
    only: tuple[str, str] | None
    tenants: tuple[str, ...] = ()
    run_defaults: BatchDefaults = RUN_DEFAULTS
    _active: dict[tuple[str, str], _ActiveRun] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _defaults: dict[tuple[str, str], tuple[float, BatchDefaults]] = field(default_factory=dict)
    _is_draining: bool = False
    _is_stopped: bool = False
    _waiting_for_model: set[tuple[str, str]] = field(default_factory=set)
    _over_quota: set[tuple[str, str]] = field(default_factory=set)
    _denied: ModelDenied | None = None

    @property
    def running(self) -> int:
        """Return how many runs this process holds and executes now."""
        return len(self._active)

    async def run(self) -> None:
        """Execute runs until `drain` was called and the last run has ended, until `stop` was called, or until this
        method is cancelled. The last two return the running runs to the queue, and another process continues them.

        Raises ModelDenied: the model refuses this process. The runs return to the queue, and none of them fails.
        """
        async with self._serving(self.concurrency):
            await self._work_until_drained()
        if self._denied is not None:
            raise self._denied

    async def run_claimed(self, claim: RunClaim) -> None:
        """Execute one run that this process has claimed, until the run has ended or another process owns it. A
        cancellation cancels the run.
        """
        async with self._serving(1):
            active = self._begin(claim)
            try:
                await asyncio.wait((active.task,))
            except asyncio.CancelledError:
                # Cancel the run and do not return it to the queue, where another process would execute it without its
                # user.
                self._end_cancelled(((claim.tenant, claim.run),))
                raise

    @asynccontextmanager
    async def _serving(self, slots: int) -> AsyncIterator[None]:
        """Renew leases and check for cancelled runs during the block. Then end all runs and publish their events."""
        self.work.slots.configure(slots, self._active)
        renewing = asyncio.create_task(self._renew_regularly(), name="renew-runs")
        cancelling = asyncio.create_task(self._poll_cancels(), name="poll-cancels")
        try:
            yield
        finally:
            # The shield lets the runs return to the queue even if this task is cancelled a second time.
            await asyncio.shield(self._end_all())
            await cancel_all((renewing, cancelling))
            await self.publisher.flush()

    def drain(self) -> None:
        """Claim no more runs. Running runs continue to their end."""
        self._is_draining = True
        self._freed.set()

    def stop(self) -> None:
        """Return the running runs to the queue at once."""
        self._is_stopped = True
        self.drain()

    async def _work_until_drained(self) -> None:
        """Claim runs for free slots until the runner has drained or is stopped, or the model refuses this process."""
        while self._denied is None and not self._is_stopped and not (self._is_draining and not self._active):
            check_cancelled()
            # Cleared before the claim: if a run ends while Redis answers, the event is set again, and the wait below
            # ends at once.
            self._freed.clear()
            self._publish_recovery()
            free = self.work.slots.count_free()
            if not self._is_draining and (free_places := self.work.gate.admit(free, len(self._active))) > 0:
                with self.work.slots.reserve(free_places):
                    await self._claim(free_places)
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._freed.wait()
        self._publish_recovery()

    async def _claim(self, count: int) -> None:
        """Claim up to `count` runs and start their tasks."""
        try:
            claims = await self.queue.claim(count, self.only, self.tenants)
        except BrokerUnavailable as error:
            log.warning("runs_not_claimed", error=str(error))
            return
        for claim in claims:
            key = (claim.tenant, claim.run)
            earlier = self._active.get(key)
            if earlier is not None:
                # This process already executes the run, but its lease expired while Redis did not answer, and the
                # process has claimed the run again. The first task has the old token and cannot log anything. End that
                # task before the new one starts.
                earlier.is_taken = True
                await cancel_all((earlier.task,))
            self._begin(claim)

    def _begin(self, claim: RunClaim) -> _ActiveRun:
        """Start the task of a claimed run."""
        active = _ActiveRun(claim, asyncio.create_task(self._hold(claim), name=f"run-{claim.run}"))
        self._active[claim.tenant, claim.run] = active
        return active

    async def _hold(self, claim: RunClaim) -> None:
        """Execute a claimed run in its own task. Handles the cancellation of the task and unexpected errors."""
        key = (claim.tenant, claim.run)
        active = self._active[key]
        try:
            with bound(tenant=claim.tenant, batch=claim.record.batch, run=claim.run):
                await self._work_one(claim, active)
        except asyncio.CancelledError:
            await self._let_go(claim, active)
        except Exception:  # an unexpected error ends one run here; another process continues it after its lease
            log.exception("run_interrupted", run=claim.run)
        finally:
            self.work.forget(claim)
            # Remove only this claim: the entry may already belong to a later claim of the same run.
            if self._active.get(key) is active:
                del self._active[key]
            self._freed.set()

    async def _work_one(self, claim: RunClaim, active: _ActiveRun) -> None:
        """Execute a claimed run and store its outcome, or return the run to the queue."""
        record = claim.record
        if record.losses >= MAX_LOSSES:
            # Do not read the log: reading the log may be what killed the earlier owners.
            await self.queue.close_sessions(claim.tenant, [claim.run])
            await self._finish(
                claim, active, build_outcome(claim, judge_losses(record.losses)), BatchDefaults(retries=0)
            )
            return
        if record.losses >= DOUBTFUL_LOSSES and any(other.is_on_trial for other in self._active.values()):
            await self._give_back(claim, active, CHECK_INTERVAL_S * random.uniform(1.0, 2.0))
            return
        active.is_doubtful = record.losses >= DOUBTFUL_LOSSES
        claimed = RunClaimed(
            run=claim.run,
            orchestrator=self.queue.owner,
            is_resumed=claim.is_resumed,
            waited_s=max(0.0, record.started_at - record.queued_at),
        )
        self._publish(claim, claimed)
        try:
            run_log, defaults = await self._load(claim)
        except RunTaken:
            active.is_taken = True
            return
        except ConfigError as error:
            # The log cannot be continued, so the effects of the run are unknown. An automatic retry could repeat
            # them.
            await self.queue.close_sessions(claim.tenant, [claim.run])
            failure = Failure(kind=FailureKind.INFRASTRUCTURE, code=error.code.value, message=str(error))
            await self._finish(claim, active, build_outcome(claim, failure), BatchDefaults(retries=0))
            return
        active.journal = Journal(run_log, lambda: self._lose(active))

        def on_event(event: RunEvent) -> None:
            active.count(event)
            self._publish(claim, event)

        try:
            outcome = await self.work.work(claim, active.journal, defaults, on_event)
            # A library may have swallowed the cancellation of this task. The outcome must then not be stored.
            check_cancelled()
        except RunDeferred as reason:
            await self._defer(claim, reason)
        except ModelDenied as error:
            if self.only is None and error.is_unknown_model and defaults.model is not None:
                # Only this batch names a model that the endpoint does not know, so other batches continue.
                await self.work.abandon(claim, active.journal)
                await self._finish(claim, active, build_outcome(claim, judge_error(error)), defaults)
                return
            # The cause is in this process, such as a wrong API key, so return its runs to the queue. Other processes
            # continue them.
            self._denied = error
            if self.only is None and record.denials >= MAX_DENIALS:
                await self.work.abandon(claim, active.journal)
                await self._finish(claim, active, build_outcome(claim, judge_error(error)), BatchDefaults(retries=0))
            else:
                await self._give_back(claim, active, is_denied=self.only is None)
        else:
            await self._finish(claim, active, outcome, defaults)

    async def _load(self, claim: RunClaim) -> tuple[RunLog, BatchDefaults]:
        """Return the log of a run and the defaults of its batch.

        Waits while Redis does not answer: without its log, the run would pay for replies and execute calls twice.
        Raises ConfigError: the log cannot be continued. Raises RunTaken.
        """
        while True:
            try:
                run_log = await RunLog.load(self.client, self.deployment, self.queue.keys, claim.attempt)
                await load_copied_steps(self.queue, claim, run_log)
                return run_log, await self._defaults_of(claim)
            except BrokerUnavailable as error:
                log.warning("run_not_loaded", run=claim.run, error=str(error))
                await asyncio.sleep(CHECK_INTERVAL_S)

    async def _defer(self, claim: RunClaim, reason: RunDeferred) -> None:
        """Put a run that has to wait back into the queue. Publishes the reason once for each batch."""
        batch, after_s = (claim.tenant, claim.record.batch), QUOTA_RETRY_S * random.uniform(1.0, 2.0)
        if reason.cause == "endpoint":
            after_s = reason.after_s * random.uniform(1.0, 1.5)
            self._publish_once(
                self._waiting_for_model, batch, f"the batch waits for its model, and its items do not fail: {reason}"
            )
        elif reason.cause == "quota":
            if self.only is not None:
                self.work.gate.record_quota_limit(len(self._active) - 1)
            self._publish_once(
                self._over_quota, batch, f"items above the tenant's limits wait and do not fail: {reason}"
            )
        await self._give_back(claim, self._active[claim.tenant, claim.run], after_s)

    def _publish_once(self, reported: set[tuple[str, str]], batch: tuple[str, str], message: str) -> None:
        """Publish the message unless `reported` contains the batch."""
        if batch not in reported:
            reported.add(batch)
            self._publish_notice(batch, message)

    def _publish_recovery(self) -> None:
        """Publish a notice in the batches that waited for the model, if the model answers again."""
        if not self.work.gate.is_down:
            for batch in self._waiting_for_model:
                self._publish_notice(batch, "the model answers again: the batch continues")
            self._waiting_for_model.clear()

    def _publish_notice(self, batch: tuple[str, str], message: str) -> None:
        """Publish a notice in the batch."""
        self.publisher.add(*batch, BatchNotice(message=message))

    def _publish(self, claim: RunClaim, event: RunEvent) -> None:
        """Add an event of a run to the stream of its batch, if the progress of the batch counts events of this type."""
        record = claim.record
        if isinstance(event, CallFinished):
            event = event.without_output()
        if isinstance(event, PROGRESS_EVENTS) and not isinstance(event, BatchNotice):
            # The agent loop names attempts after the first differently. Events of a batch carry the run id without
            # the attempt.
            event = replace(event, run=claim.run, attempt=record.attempt, item=record.item.custom_id)
        if isinstance(event, PROGRESS_EVENTS):
            self.publisher.add(claim.tenant, record.batch, event)

    async def _finish(self, claim: RunClaim, active: _ActiveRun, outcome: ItemOutcome, defaults: BatchDefaults) -> None:
        """Store the outcome, or queue the next attempt. Waits while Redis does not answer, so that no outcome is
        lost.
        """
        failure, times = outcome.failure, claim.record.attempt - claim.record.first_attempt + 1
        is_retried = failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and times <= defaults.retries
        if failure is not None and failure.code == ErrorCode.BUDGET_EXCEEDED:
            is_retried = False  # the budget is reset only hours later
        # From here on, a lost lease or a cancelled run does not cancel the task. The token decides whether the write
        # counts.
        active.is_ending = True
        while True:
            try:
                if is_retried:
                    after_s = RETRY_AFTER_S[min(times, len(RETRY_AFTER_S)) - 1] * random.uniform(1.0, 1.5)
                    is_ours = await self.queue.give_back(claim, after_s=after_s, is_new=True)
                else:
                    is_ours = await self.queue.finish(claim, outcome, calls=len(active.calls), seconds=active.seconds)
                break
            except BatchCancelled:
                # The batch was cancelled, so no further attempt is queued. The failure is stored as the outcome.
                is_retried = False
            except BrokerUnavailable as error:
                log.warning("outcome_not_recorded", run=claim.run, error=str(error))
                await asyncio.sleep(CHECK_INTERVAL_S)
        # The event follows the write. A process that dies in between loses an event, which the batch's counters show
        # anyway; in the other order it could report an end that never happened.
        if is_ours:
            if is_retried and active.journal is not None:
                await self.work.release_states(claim, active.journal)
            self._publish_end(claim, active, outcome, is_retried=is_retried)

    def _publish_end(self, claim: RunClaim, active: _ActiveRun, outcome: ItemOutcome, *, is_retried: bool) -> None:
        """Publish the retry or the end of a run."""
        record, failure = claim.record, outcome.failure
        if is_retried and failure is not None:
            item, attempt = record.item.custom_id, record.attempt + 1
            event: RunEvent = RunRetried(run=claim.run, attempt=attempt, item=item, failure=failure)
        else:
            ended = build_ended(outcome, time.time())
            steps = max(ended.steps, len(active.steps))
            event = replace(ended, steps=steps, calls=len(active.calls), seconds=active.seconds)
        self.publisher.add(claim.tenant, record.batch, event)

    async def _let_go(self, claim: RunClaim, active: _ActiveRun) -> None:
        """Release a run because another process owns it, its batch is cancelled, or this process ends."""
        active.is_ending = active.is_interrupted = True
        if active.is_taken:
            # The session belongs to the process that has the run now.
            return
        # If Redis does not answer, the lease expires and another process continues the run.
        with suppress(BrokerUnavailable):
            if active.is_cancelled:
                await self._cancel(claim, active)
            else:
                await self._give_back(claim, active)

    async def _give_back(
        self, claim: RunClaim, active: _ActiveRun, after_s: float = 0.0, *, is_denied: bool = False
    ) -> None:
        """Put a run back into the queue unchanged. A run of a cancelled batch ends."""
        try:
            await self.queue.give_back(claim, after_s=after_s, is_denied=is_denied)
        except BatchCancelled:
            await self._cancel(claim, active)

    async def _cancel(self, claim: RunClaim, active: _ActiveRun) -> None:
        """Close the session of a cancelled run and store the cancellation as its outcome."""
        if active.journal is not None:
            await self.work.abandon(claim, active.journal)
            await self.work.release_states(claim, active.journal)
        else:
            await self.queue.close_sessions(claim.tenant, [claim.run])
        message = (
            "the run was cancelled" if claim.record.batch == NO_BATCH else "the batch was cancelled while this item ran"
        )
        failure = Failure(kind=FailureKind.CANCELLED, code=ErrorCode.CANCELLED.value, message=message)
        outcome = build_outcome(claim, failure)
        if await self.queue.finish(claim, outcome, calls=len(active.calls), seconds=active.seconds):
            self._publish_end(claim, active, outcome, is_retried=False)

    def _lose(self, active: _ActiveRun) -> None:
        """Cancel the task of a run that another process owns."""
        active.is_taken = True
        active.task.cancel()

    async def _renew_regularly(self) -> None:
        """Renew the leases of all runs several times in each lease period. Cancel the tasks of lost and cancelled
        runs.
        """
        while True:
            check_cancelled()
            await asyncio.sleep(LEASE_S / RENEWALS_A_LEASE)
            # Runs can end or start while Redis renews the leases, so the loop compares with this copy.
            active = dict(self._active)
            try:
                lost, cancelled = await self.queue.renew([one.claim for one in active.values()])
            except BrokerUnavailable as error:
                log.warning("runs_not_renewed", runs=len(active), error=str(error))
                continue
            # A run that has just ended has no owner, and its key may already belong to a new task. A run that is
            # ending must not be cancelled.
            for key in lost:
                if self._active.get(key) is active[key] and not active[key].is_ending:
                    self._lose(active[key])
            self._end_cancelled(cancelled)

    async def _poll_cancels(self) -> None:
        """Check for cancelled durable runs often. Clients cancel each durable run separately and wait for the end."""
        while True:
            check_cancelled()
            await asyncio.sleep(CANCELS_S)
            # Without a durable run there is nothing to ask Redis for, twice a second in every idle process.
            if any(one.claim.record.batch == NO_BATCH for one in self._active.values()):
                with suppress(BrokerUnavailable):
                    self._end_cancelled(await self.queue.cancels())

    def _end_cancelled(self, runs: Iterable[tuple[str, str]]) -> None:
        """Cancel the tasks of these runs, except tasks that are storing their outcome."""
        for active in (self._active[key] for key in runs if key in self._active):
            if not active.is_ending:
                active.is_cancelled = True
                active.task.cancel()

    async def _end_all(self) -> None:
        """Cancel all runs. Repeats the cancellation until each task has handled it. A task that stores its outcome is
        cancelled only after STORE_S: otherwise the outcome could be in Redis without its end event.
        """
        active, store_until = {one.task: one for one in self._active.values()}, time.monotonic() + STORE_S

        def is_ending(task: "asyncio.Task[None]") -> bool:
            run = active[task]
            return run.is_interrupted or (run.is_ending and time.monotonic() < store_until)

        await cancel_all(active, is_ending)

    async def _defaults_of(self, claim: RunClaim) -> BatchDefaults:
        """Return the defaults of the claim's batch. A second submission of the batch may change the defaults."""
        key, now = (claim.tenant, claim.record.batch), time.monotonic()
        if claim.record.batch == NO_BATCH:
            return self.run_defaults
        self._defaults = {batch: entry for batch, entry in self._defaults.items() if now - entry[0] < DEFAULTS_FRESH_S}
        if key not in self._defaults:
            self._defaults[key] = now, (await self.queue.batches.get(*key)).defaults
        return self._defaults[key][1]
