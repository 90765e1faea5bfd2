"""Works the runs of a deployment: claims as many as it may, keeps them as long as it lives, ends each once."""

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
"""How often it is looked for work while there is room for some."""
RENEWALS_A_LEASE = 4
CANCELS_S = 0.5
DEFAULTS_FRESH_S = 2.0
"""How old what is known of a batch's defaults may be."""
MAX_LOSSES = 5
"""So often a run's holder may die in a row, the run having come no further: then it is taken for what kills them, and
ends.
"""
DOUBTFUL_LOSSES = 3
"""From so many on a run is tried without others of that kind: one that kills its holder would end those that only ran
beside it.
"""
TRIAL_S = 30.0
"""How long others wait for a run that is tried and neither comes further nor ends."""
RETRY_AFTER_S = (2.0, 10.0, 60.0)
"""Before an item is begun anew, after its first, second, ... infrastructure failure; half as much again, at random, so
that not all come at once.
"""


@dataclass
class _Working:
    claim: RunClaim
    task: "asyncio.Task[None]"
    journal: Journal | None = None
    began: float = field(default_factory=time.monotonic)
    prices: Prices | None = None
    is_tried: bool = False
    """It may be what its holders died of."""
    is_taken: bool = False
    is_cancelled: bool = False
    is_ending: bool = False
    """Its outcome is being noted, which its claim guards."""
    is_interrupted: bool = False
    """It has heard that it is not gone on with here."""
    steps: set[int] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    """Of this attempt, those of its log included."""

    @property
    def is_on_trial(self) -> bool:
        """Whether it is not known yet that it does no harm."""
        has_grown = self.journal is not None and self.journal.has_grown
        return self.is_tried and not has_grown and time.monotonic() - self.began < TRIAL_S

    def count(self, event: RunEvent) -> None:
        """Count the steps and calls that the end of the run reports."""
        if isinstance(event, StepFinished):
            self.steps.add(event.step)
        elif isinstance(event, CallFinished):
            self.calls.add(event.result.call_id)

    def cost(self, body: Mapping[str, Any], usage: Usage) -> float | None:
        """What its row says, or what its tokens cost where rows have no place for that."""
        if "cost" in body or self.prices is None or not body:
            told = body.get("cost")
            return float(told) if told is not None else None
        return self.prices.cost(usage)


@dataclass
class Runner:
    """One process's share of the work. `concurrency`: runs at a time here, as Places counts; a batch's own limit holds
    over all processes. `only`: the tenant and the batch whose runs it takes; None: it takes those of all detached
    batches, of those `tenants` if there are some."""

    client: RedisClient
    deployment: str
    queue: RunQueue
    work: ItemWork
    writer: BatchEventWriter
    concurrency: int
    only: tuple[str, str] | None
    tenants: tuple[str, ...] = ()
    _working: dict[tuple[str, str], _Working] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _defaults: dict[tuple[str, str], tuple[float, BatchDefaults]] = field(default_factory=dict)
    _is_draining: bool = False
    _held: set[tuple[str, str]] = field(default_factory=set)
    _crowded: set[tuple[str, str]] = field(default_factory=set)
    _denied: ModelDenied | None = None

    @property
    def running(self) -> int:
        """How many runs are worked here now."""
        return len(self._working)

    async def run(self) -> None:
        """Until `drain` has let the last one end, or until cancelled: then what runs is given back, for another process
        to go on with.

        Raises ModelDenied when the model refuses this process: what runs is given back, and nothing has failed for it.
        """
        self.work.slots.configure(self.concurrency, self._working)
        renewing = asyncio.create_task(self._renew_regularly(), name="renew-runs")
        heeding = asyncio.create_task(self._heed_cancels(), name="heed-cancels")
        writing = asyncio.create_task(self.writer.run(), name="write-batch_events")
        try:
            await self._until_drained()
        finally:
            await asyncio.shield(self._end_all())
            await cancel_all((renewing, heeding, writing))
        if self._denied is not None:
            raise self._denied

    def drain(self) -> None:
        """Begin nothing any more."""
        self._is_draining = True
        self._freed.set()

    async def _until_drained(self) -> None:
        while self._denied is None and not (self._is_draining and not self._working):
            check_cancelled()
            self._freed.clear()
            self._tell_answered()
            free = self.work.slots.count_free()
            if not self._is_draining and (room := self.work.gate.admit(free, len(self._working))) > 0:
                with self.work.slots.reserve(room):
                    await self._claim(room)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._freed.wait()
        self._tell_answered()

    async def _claim(self, room: int) -> None:
        try:
            claims = await self.queue.claim(room, self.only, self.tenants)
        except BrokerUnavailable as error:
            log.warning("runs_not_claimed", error=str(error))
            return
        for claim in claims:
            key = (claim.tenant, claim.run)
            earlier = self._working.get(key)
            if earlier is not None:
                # Our own, whose lease ended while Redis was away: it stops by itself, having lost its log.
                earlier.is_taken = True
                await cancel_all((earlier.task,))
            self._working[key] = _Working(claim, asyncio.create_task(self._worked(claim), name=f"run-{claim.run}"))

    async def _worked(self, claim: RunClaim) -> None:
        key = (claim.tenant, claim.run)
        working = self._working[key]
        try:
            with bound(tenant=claim.tenant, batch=claim.record.batch, run=claim.run):
                await self._until_ended(claim, working)
        except asyncio.CancelledError:
            await self._interrupted(claim, working)
        except Exception:  # the edge of a run: the runner goes on, and the lease gives this one to whoever comes next
            log.exception("run_broke_off", run=claim.run)
        finally:
            self.work.drop_spans(claim)
            if self._working.get(key) is working:
                del self._working[key]
            self._freed.set()

    async def _until_ended(self, claim: RunClaim, working: _Working) -> None:
        record = claim.record
        if record.losses >= MAX_LOSSES:
            # Its log is not even read: that may be what they died of.
            await self.queue.close_sessions(claim.tenant, [claim.run])
            await self._ended(
                claim, working, build_outcome(claim, judge_losses(record.losses)), BatchDefaults(retries=0)
            )
            return
        if record.losses >= DOUBTFUL_LOSSES and any(other.is_on_trial for other in self._working.values()):
            await self._give_back(claim, working, LOOK_S * random.uniform(1.0, 2.0))
            return
        working.is_tried = record.losses >= DOUBTFUL_LOSSES
        claimed = RunClaimed(
            run=claim.run,
            orchestrator=self.queue.owner,
            is_resumed=claim.is_resumed,
            waited_s=max(0.0, record.started_at - record.queued_at),
        )
        self._publish(claim, claimed)
        try:
            run_log, defaults = await self._loaded(claim)
        except ConfigError as error:
            # What it has done is not known here: by itself it is not begun anew.
            await self.queue.close_sessions(claim.tenant, [claim.run])
            failure = Failure(kind=FailureKind.INFRASTRUCTURE, code=error.code.value, message=str(error))
            await self._ended(claim, working, build_outcome(claim, failure), BatchDefaults(retries=0))
            return
        working.journal = Journal(run_log, lambda: self._lose(working))
        working.prices = prices_of(defaults)

        def on_event(event: RunEvent) -> None:
            working.count(event)
            self._publish(claim, event)

        try:
            outcome = await self.work.work(claim, working.journal, defaults, on_event)
            check_cancelled()
        except RunDeferred as reason:
            await self._hold(claim, reason)
        except ModelDenied as error:
            if self.only is None and error.is_unknown_model and defaults.model is not None:
                # One batch names a model that is not there: the others have theirs.
                await self.work.abandon(claim, working.journal)
                await self._ended(claim, working, build_outcome(claim, judge_error(error)), defaults)
                return
            self._denied = error
            await self._give_back(claim, working)
        else:
            await self._ended(claim, working, outcome, defaults)

    async def _loaded(self, claim: RunClaim) -> tuple[RunLog, BatchDefaults]:
        """The log of a run, and what its batch says; however long Redis is away: begun anew instead, it would pay and
        act twice. Raises ConfigError for a log that cannot be gone on with."""
        while True:
            try:
                run_log = await RunLog.load(self.client, self.deployment, self.queue.keys, claim.attempt)
                return run_log, await self._defaults_of(claim)
            except BrokerUnavailable as error:
                log.warning("run_not_loaded", run=claim.run, error=str(error))
                await asyncio.sleep(LOOK_S)

    async def _hold(self, claim: RunClaim, reason: RunDeferred) -> None:
        """Put a run back that has to wait, as it is. Who watches its batch is told once what for."""
        batch, after_s = (claim.tenant, claim.record.batch), QUOTA_RETRY_S * random.uniform(1.0, 2.0)
        if reason.cause == "endpoint":
            after_s = 0.0
            self._note_once(self._held, batch, f"the batch waits for its model, and no item fails for it: {reason}")
        elif reason.cause == "quota":
            if self.only is not None:
                self.work.gate.note_quota(len(self._working) - 1)
            self._note_once(
                self._crowded, batch, f"items beyond what the tenant may have wait, and none fails for it: {reason}"
            )
        await self._give_back(claim, self._working[claim.tenant, claim.run], after_s)

    def _note_once(self, told: set[tuple[str, str]], batch: tuple[str, str], message: str) -> None:
        if batch not in told:
            told.add(batch)
            self._note(batch, message)

    def _tell_answered(self) -> None:
        """Tell the batches whose runs had to wait for the model that it is there."""
        if self.work.gate.down_s is None:
            for batch in self._held:
                self._note(batch, "the model answers again: the batch goes on")
            self._held.clear()

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

    async def _ended(self, claim: RunClaim, working: _Working, outcome: Outcome, defaults: BatchDefaults) -> None:
        """Note the outcome, or have the item begun anew. However long Redis is away: what a run came to is not lost for
        that.
        """
        failure, times = outcome.failure, claim.record.attempt - claim.record.first_attempt + 1
        is_retried = failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and times <= defaults.retries
        working.is_ending = True
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
            self._tell_end(claim, working, outcome, is_retried=is_retried)

    def _tell_end(self, claim: RunClaim, working: _Working, outcome: Outcome, *, is_retried: bool) -> None:
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
            steps=max(_number(body.get("steps")), len(working.steps)),
            calls=len(working.calls),
            usage=usage,
            cost=working.cost(body, usage),
            seconds=time.monotonic() - working.began,
        )
        self._publish(claim, ended)

    async def _interrupted(self, claim: RunClaim, working: _Working) -> None:
        """This process does not go on with a run: it was taken, its batch is cancelled, or the process ends."""
        working.is_ending = working.is_interrupted = True
        if working.is_taken:
            return
        # When Redis is away, another process goes on with it after its lease.
        with suppress(BrokerUnavailable):
            if working.is_cancelled:
                await self._cancelled(claim, working)
            else:
                await self._give_back(claim, working)

    async def _give_back(self, claim: RunClaim, working: _Working, after_s: float = 0.0) -> None:
        """Put a run back as it is; one of a batch that is being cancelled ends."""
        try:
            await self.queue.give_back(claim, after_s=after_s)
        except BatchCancelled:
            await self._cancelled(claim, working)

    async def _cancelled(self, claim: RunClaim, working: _Working) -> None:
        if working.journal is not None:
            await self.work.abandon(claim, working.journal)
        else:
            await self.queue.close_sessions(claim.tenant, [claim.run])
        told = (
            "the run was cancelled"
            if claim.record.batch == HOSTED_BATCH
            else "the batch was cancelled while this item ran"
        )
        failure = Failure(kind=FailureKind.CANCELLED, code=ErrorCode.CANCELLED.value, message=told)
        outcome = build_outcome(claim, failure)
        if await self.queue.finish(claim, outcome):
            self._tell_end(claim, working, outcome, is_retried=False)

    def _lose(self, working: _Working) -> None:
        working.is_taken = True
        working.task.cancel()

    async def _renew_regularly(self) -> None:
        while True:
            check_cancelled()
            await asyncio.sleep(LEASE_S / RENEWALS_A_LEASE)
            working = dict(self._working)
            try:
                lost, cancelled = await self.queue.renew([one.claim for one in working.values()])
            except BrokerUnavailable as error:
                log.warning("runs_not_renewed", runs=len(working), error=str(error))
                continue
            # One that has just ended is nobody's any more, and one that ends is not to be disturbed.
            for key in lost:
                if self._working.get(key) is working[key] and not working[key].is_ending:
                    self._lose(working[key])
            self._end_cancelled(cancelled)

    async def _heed_cancels(self) -> None:
        """A program's run is cancelled by itself, and somebody waits for that."""
        while True:
            check_cancelled()
            await asyncio.sleep(CANCELS_S)
            if any(one.claim.record.batch == HOSTED_BATCH for one in self._working.values()):
                with suppress(BrokerUnavailable):
                    self._end_cancelled(await self.queue.cancels())

    def _end_cancelled(self, runs: Iterable[tuple[str, str]]) -> None:
        for working in (self._working[key] for key in runs if key in self._working):
            if not working.is_ending:
                working.is_cancelled = True
                working.task.cancel()

    async def _end_all(self) -> None:
        interrupted = {working.task: working for working in self._working.values()}
        await cancel_all(interrupted, lambda task: interrupted[task].is_interrupted)

    async def _defaults_of(self, claim: RunClaim) -> BatchDefaults:
        """Of the claim's batch. They may change when it is submitted again."""
        key, now = (claim.tenant, claim.record.batch), time.monotonic()
        if claim.record.batch == HOSTED_BATCH:
            return HOSTED_DEFAULTS
        self._defaults = {of: known for of, known in self._defaults.items() if now - known[0] < DEFAULTS_FRESH_S}
        if key not in self._defaults:
            self._defaults[key] = now, (await self.queue.batch(*key)).defaults
        return self._defaults[key][1]


def _usage_of(body: Mapping[str, Any]) -> Usage:
    """What a row's body tells of tokens."""
    told = body.get("usage")
    counts = told if isinstance(told, dict) else {}
    return Usage(_number(counts.get("prompt_tokens")), _number(counts.get("completion_tokens")))


def _number(told: object) -> int:
    return told if isinstance(told, int) else 0
