"""Works the runs of a deployment: claims them, keeps their leases, and ends each exactly once.

Invariant: a run has one holder at a time. Every write of a holder (log entry, outcome, putting back) carries the token
of its claim, so that a holder that lost its lease changes nothing, even if it does not know yet.
"""

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from contract.errors import BrokerUnavailable, ConfigError, ErrorCode, ModelDenied
from contract.run_events import (
    PROGRESS_EVENTS,
    BatchNotice,
    CallFinished,
    Failure,
    FailureKind,
    RunClaimed,
    RunEnded,
    RunEvent,
    RunRetried,
    StepFinished,
)
from orchestrator.dialects.model import Usage
from orchestrator.loop.limits import Prices
from orchestrator.runs.item_work import ItemWork, prices_of
from orchestrator.runs.journal import Journal
from orchestrator.runs.outcomes import build_outcome, judge_error, judge_losses
from orchestrator.runs.run_gate import QUOTA_RETRY_S, RunDeferred
from store.batches import HOSTED_BATCH, BatchDefaults, BatchEventWriter, Outcome, final_state
from store.connection import RedisClient
from store.run_log import RunLog
from store.runs import HOSTED_DEFAULTS, LEASE_S, BatchCancelled, RunClaim, RunQueue
from store.tasks import cancel_all, check_cancelled
from telemetry.logs import bound, get_logger

log = get_logger(__name__)

LOOK_S = 0.5
"""Pause between two looks for new runs while slots are free."""
RENEWALS_A_LEASE = 4
CANCELS_S = 0.5
DEFAULTS_FRESH_S = 2.0
"""Age up to which a batch's defaults are used without reading them again."""
MAX_LOSSES = 5
"""Holders that may die in a row without progress of the run. Then the run counts as what kills them, and fails."""
DOUBTFUL_LOSSES = 3
"""From so many losses on, a run is worked without others of that kind: if it kills its holder, the others would be
counted as losses, too.
"""
TRIAL_S = 30.0
"""Time for which others wait for a doubtful run that neither makes progress nor ends."""
RETRY_AFTER_S = (2.0, 10.0, 60.0)
"""Pauses before an item is retried after its first, second, ... infrastructure failure. Up to half as much is added at
random, so that not all items return at once.
"""


@dataclass
class _ActiveRun:
    """A run that this process holds."""

    claim: RunClaim
    task: "asyncio.Task[None]"
    journal: Journal | None = None
    began: float = field(default_factory=time.monotonic)
    prices: Prices | None = None
    is_doubtful: bool = False
    """The run may be what its former holders died of."""
    is_taken: bool = False
    is_cancelled: bool = False
    is_ending: bool = False
    """Its outcome is being stored. The claim guards that, so it is not cancelled any more."""
    is_interrupted: bool = False
    """Its task has handled its cancellation."""
    steps: set[int] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    """Ids of the calls of this attempt, including logged ones."""

    @property
    def is_on_trial(self) -> bool:
        """Return whether the run may still kill its holder: it is doubtful and has made no progress here."""
        has_grown = self.journal is not None and self.journal.has_grown
        return self.is_doubtful and not has_grown and time.monotonic() - self.began < TRIAL_S

    def count(self, event: RunEvent) -> None:
        """Count the steps and calls that the end of the run reports."""
        if isinstance(event, StepFinished):
            self.steps.add(event.step)
        elif isinstance(event, CallFinished):
            self.calls.add(event.result.call_id)

    def cost(self, body: Mapping[str, Any], usage: Usage) -> float | None:
        """Return the cost that the row has, or the price of the tokens if rows of this kind have no cost."""
        if "cost" in body or self.prices is None or not body:
            cost = body.get("cost")
            return float(cost) if cost is not None else None
        return self.prices.cost(usage)


@dataclass
class Runner:
    """Claims and works runs in one process. `concurrency`: run slots of this process; the limit of a batch holds over
    all processes. `only`: the tenant and batch whose runs are claimed; None: hosted runs and all detached batches, of
    `tenants` if there are any.
    """

    client: RedisClient
    deployment: str
    queue: RunQueue
    work: ItemWork
    writer: BatchEventWriter
    concurrency: int
    only: tuple[str, str] | None
    tenants: tuple[str, ...] = ()
    _active: dict[tuple[str, str], _ActiveRun] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _defaults: dict[tuple[str, str], tuple[float, BatchDefaults]] = field(default_factory=dict)
    _is_draining: bool = False
    _waiting_for_model: set[tuple[str, str]] = field(default_factory=set)
    _over_quota: set[tuple[str, str]] = field(default_factory=set)
    _denied: ModelDenied | None = None

    @property
    def running(self) -> int:
        """Return how many runs this process holds."""
        return len(self._active)

    async def run(self) -> None:
        """Work runs until `drain` was called and the last one has ended, or until cancelled: then the running ones are
        given back, and another process continues them.

        Raises ModelDenied when the model refuses this process. Its runs are given back, and none fails.
        """
        self.work.slots.configure(self.concurrency, self._active)
        renewing = asyncio.create_task(self._renew_regularly(), name="renew-runs")
        cancelling = asyncio.create_task(self._poll_cancels(), name="poll-cancels")
        writing = asyncio.create_task(self.writer.run(), name="write-batch-events")
        try:
            await self._work_until_drained()
        finally:
            await asyncio.shield(self._end_all())
            await cancel_all((renewing, cancelling, writing))
        if self._denied is not None:
            raise self._denied

    def drain(self) -> None:
        """Claim no more runs."""
        self._is_draining = True
        self._freed.set()

    async def _work_until_drained(self) -> None:
        while self._denied is None and not (self._is_draining and not self._active):
            check_cancelled()
            self._freed.clear()
            self._note_answered()
            free = self.work.slots.count_free()
            if not self._is_draining and (room := self.work.gate.admit(free, len(self._active))) > 0:
                with self.work.slots.reserve(room):
                    await self._claim(room)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._freed.wait()
        self._note_answered()

    async def _claim(self, room: int) -> None:
        try:
            claims = await self.queue.claim(room, self.only, self.tenants)
        except BrokerUnavailable as error:
            log.warning("runs_not_claimed", error=str(error))
            return
        for claim in claims:
            key = (claim.tenant, claim.run)
            earlier = self._active.get(key)
            if earlier is not None:
                # Our own run, whose lease ended while Redis did not answer. Its first task can log nothing more.
                earlier.is_taken = True
                await cancel_all((earlier.task,))
            self._active[key] = _ActiveRun(claim, asyncio.create_task(self._hold(claim), name=f"run-{claim.run}"))

    async def _hold(self, claim: RunClaim) -> None:
        key = (claim.tenant, claim.run)
        active = self._active[key]
        try:
            with bound(tenant=claim.tenant, batch=claim.record.batch, run=claim.run):
                await self._work_one(claim, active)
        except asyncio.CancelledError:
            await self._let_go(claim, active)
        except Exception:  # a defect ends one run here; after its lease another process continues it
            log.exception("run_broke_off", run=claim.run)
        finally:
            self.work.drop_spans(claim)
            if self._active.get(key) is active:
                del self._active[key]
            self._freed.set()

    async def _work_one(self, claim: RunClaim, active: _ActiveRun) -> None:
        record = claim.record
        if record.losses >= MAX_LOSSES:
            # Its log is not read: reading it may be what its holders died of.
            await self.queue.close_sessions(claim.tenant, [claim.run])
            await self._finish(
                claim, active, build_outcome(claim, judge_losses(record.losses)), BatchDefaults(retries=0)
            )
            return
        if record.losses >= DOUBTFUL_LOSSES and any(other.is_on_trial for other in self._active.values()):
            await self._give_back(claim, active, LOOK_S * random.uniform(1.0, 2.0))
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
        except ConfigError as error:
            # It is unknown what the run has done, so it is not retried automatically.
            await self.queue.close_sessions(claim.tenant, [claim.run])
            failure = Failure(kind=FailureKind.INFRASTRUCTURE, code=error.code.value, message=str(error))
            await self._finish(claim, active, build_outcome(claim, failure), BatchDefaults(retries=0))
            return
        active.journal = Journal(run_log, lambda: self._lose(active))
        active.prices = prices_of(defaults)

        def on_event(event: RunEvent) -> None:
            active.count(event)
            self._publish(claim, event)

        try:
            outcome = await self.work.work(claim, active.journal, defaults, on_event)
            check_cancelled()
        except RunDeferred as reason:
            await self._defer(claim, reason)
        except ModelDenied as error:
            if self.only is None and error.is_unknown_model and defaults.model is not None:
                # One batch names an unknown model. Other batches continue.
                await self.work.abandon(claim, active.journal)
                await self._finish(claim, active, build_outcome(claim, judge_error(error)), defaults)
                return
            self._denied = error
            await self._give_back(claim, active)
        else:
            await self._finish(claim, active, outcome, defaults)

    async def _load(self, claim: RunClaim) -> tuple[RunLog, BatchDefaults]:
        """Return the log of a run and the defaults of its batch. Waits while Redis does not answer: without its log,
        the run would pay and act twice. Raises ConfigError for a log that cannot be continued.
        """
        while True:
            try:
                run_log = await RunLog.load(self.client, self.deployment, self.queue.keys, claim.attempt)
                return run_log, await self._defaults_of(claim)
            except BrokerUnavailable as error:
                log.warning("run_not_loaded", run=claim.run, error=str(error))
                await asyncio.sleep(LOOK_S)

    async def _defer(self, claim: RunClaim, reason: RunDeferred) -> None:
        """Put back a run that has to wait. A notice says so once for each batch."""
        batch, after_s = (claim.tenant, claim.record.batch), QUOTA_RETRY_S * random.uniform(1.0, 2.0)
        if reason.cause == "endpoint":
            after_s = 0.0
            self._note_once(
                self._waiting_for_model, batch, f"the batch waits for its model, and no item fails for it: {reason}"
            )
        elif reason.cause == "quota":
            if self.only is not None:
                self.work.gate.note_quota(len(self._active) - 1)
            self._note_once(
                self._over_quota, batch, f"items beyond what the tenant may have wait, and none fails for it: {reason}"
            )
        await self._give_back(claim, self._active[claim.tenant, claim.run], after_s)

    def _note_once(self, noted: set[tuple[str, str]], batch: tuple[str, str], message: str) -> None:
        if batch not in noted:
            noted.add(batch)
            self._note(batch, message)

    def _note_answered(self) -> None:
        """Add a notice to the batches that waited for the model."""
        if self.work.gate.down_s is None:
            for batch in self._waiting_for_model:
                self._note(batch, "the model answers again: the batch goes on")
            self._waiting_for_model.clear()

    def _note(self, batch: tuple[str, str], message: str) -> None:
        self.writer.add(*batch, BatchNotice(message=message))

    def _publish(self, claim: RunClaim, event: RunEvent) -> None:
        """Add an event of a run to the stream of its batch, if the progress of a batch is counted from such events."""
        record = claim.record
        if isinstance(event, CallFinished):
            event = event.without_output()
        if isinstance(event, PROGRESS_EVENTS) and not isinstance(event, BatchNotice):
            # In the loop, an attempt after the first has another name for its run.
            event = replace(event, run=claim.run, attempt=record.attempt, item=record.item.custom_id)
        if isinstance(event, PROGRESS_EVENTS):
            self.writer.add(claim.tenant, record.batch, event)

    async def _finish(self, claim: RunClaim, active: _ActiveRun, outcome: Outcome, defaults: BatchDefaults) -> None:
        """Store the outcome, or queue the next attempt. Waits while Redis does not answer, so no outcome is lost."""
        failure, times = outcome.failure, claim.record.attempt - claim.record.first_attempt + 1
        is_retried = failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and times <= defaults.retries
        active.is_ending = True
        while True:
            try:
                if is_retried:
                    after_s = RETRY_AFTER_S[min(times, len(RETRY_AFTER_S)) - 1] * random.uniform(1.0, 1.5)
                    is_ours = await self.queue.give_back(claim, after_s=after_s, anew=True)
                else:
                    is_ours = await self.queue.finish(claim, outcome)
                break
            except BatchCancelled:
                is_retried = False
            except BrokerUnavailable as error:
                log.warning("outcome_not_noted", run=claim.run, error=str(error))
                await asyncio.sleep(LOOK_S)
        if is_ours:
            self._publish_end(claim, active, outcome, is_retried=is_retried)

    def _publish_end(self, claim: RunClaim, active: _ActiveRun, outcome: Outcome, *, is_retried: bool) -> None:
        failure, body, record = outcome.failure, outcome.body or {}, claim.record
        if is_retried and failure is not None:
            item, attempt = record.item.custom_id, record.attempt + 1
            retried = RunRetried(run=claim.run, attempt=attempt, item=item, failure=failure)
            self.writer.add(claim.tenant, record.batch, retried)
            return
        usage = _usage_of(body)
        ended = RunEnded(
            run=claim.run,
            state=final_state(failure),
            failure=failure,
            steps=max(_number(body.get("steps")), len(active.steps)),
            calls=len(active.calls),
            usage=usage,
            cost=active.cost(body, usage),
            seconds=time.monotonic() - active.began,
        )
        self._publish(claim, ended)

    async def _let_go(self, claim: RunClaim, active: _ActiveRun) -> None:
        """Let go of a run: another process has it, its batch is cancelled, or this process ends."""
        active.is_ending = active.is_interrupted = True
        if active.is_taken:
            return
        # While Redis does not answer, the lease ends, and another process continues the run.
        with suppress(BrokerUnavailable):
            if active.is_cancelled:
                await self._cancel(claim, active)
            else:
                await self._give_back(claim, active)

    async def _give_back(self, claim: RunClaim, active: _ActiveRun, after_s: float = 0.0) -> None:
        """Put a run back unchanged. A run of a batch that is being cancelled ends."""
        try:
            await self.queue.give_back(claim, after_s=after_s)
        except BatchCancelled:
            await self._cancel(claim, active)

    async def _cancel(self, claim: RunClaim, active: _ActiveRun) -> None:
        if active.journal is not None:
            await self.work.abandon(claim, active.journal)
        else:
            await self.queue.close_sessions(claim.tenant, [claim.run])
        message = (
            "the run was cancelled"
            if claim.record.batch == HOSTED_BATCH
            else "the batch was cancelled while this item ran"
        )
        failure = Failure(kind=FailureKind.CANCELLED, code=ErrorCode.CANCELLED.value, message=message)
        outcome = build_outcome(claim, failure)
        if await self.queue.finish(claim, outcome):
            self._publish_end(claim, active, outcome, is_retried=False)

    def _lose(self, active: _ActiveRun) -> None:
        active.is_taken = True
        active.task.cancel()

    async def _renew_regularly(self) -> None:
        while True:
            check_cancelled()
            await asyncio.sleep(LEASE_S / RENEWALS_A_LEASE)
            active = dict(self._active)
            try:
                lost, cancelled = await self.queue.renew([one.claim for one in active.values()])
            except BrokerUnavailable as error:
                log.warning("runs_not_renewed", runs=len(active), error=str(error))
                continue
            # A run that has just ended belongs to no process, and one that is ending must not be cancelled.
            for key in lost:
                if self._active.get(key) is active[key] and not active[key].is_ending:
                    self._lose(active[key])
            self._end_cancelled(cancelled)

    async def _poll_cancels(self) -> None:
        """Look for hosted runs that were cancelled: each is cancelled by itself, and a client waits for it."""
        while True:
            check_cancelled()
            await asyncio.sleep(CANCELS_S)
            if any(one.claim.record.batch == HOSTED_BATCH for one in self._active.values()):
                with suppress(BrokerUnavailable):
                    self._end_cancelled(await self.queue.cancels())

    def _end_cancelled(self, runs: Iterable[tuple[str, str]]) -> None:
        for active in (self._active[key] for key in runs if key in self._active):
            if not active.is_ending:
                active.is_cancelled = True
                active.task.cancel()

    async def _end_all(self) -> None:
        interrupted = {active.task: active for active in self._active.values()}
        await cancel_all(interrupted, lambda task: interrupted[task].is_interrupted)

    async def _defaults_of(self, claim: RunClaim) -> BatchDefaults:
        """Return the defaults of the claim's batch. They may change when it is submitted again."""
        key, now = (claim.tenant, claim.record.batch), time.monotonic()
        if claim.record.batch == HOSTED_BATCH:
            return HOSTED_DEFAULTS
        self._defaults = {batch: entry for batch, entry in self._defaults.items() if now - entry[0] < DEFAULTS_FRESH_S}
        if key not in self._defaults:
            self._defaults[key] = now, (await self.queue.batch(*key)).defaults
        return self._defaults[key][1]


def _usage_of(body: Mapping[str, Any]) -> Usage:
    """Return the tokens that a row's body has."""
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return Usage(*(_number(counts.get(name)) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
