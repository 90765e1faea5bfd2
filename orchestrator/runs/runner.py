"""Works the runs of a deployment: claims as many as it may, keeps them as long as it lives, ends each once."""

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field

import redis.asyncio

from contract.errors import BrokerUnavailable, ConfigError, ErrorCode
from orchestrator.batches.happenings import ItemDone, ItemRetried, ItemStarted
from orchestrator.batches.items import Failure, FailureKind, Outcome
from orchestrator.logs import get_logger
from orchestrator.runs.happening_stream import HappeningWriter
from orchestrator.runs.item_work import ItemWork
from orchestrator.runs.journal import Journal
from orchestrator.runs.outcomes import judge_error, status_of
from orchestrator.runs.records import BatchDefaults
from orchestrator.runs.run_log import RunLog
from orchestrator.runs.run_queue import LEASE_S, Claim, RunQueue

log = get_logger(__name__)

LOOK_S = 0.5
"""How often it is looked for work while there is room for some."""
RENEWALS_A_LEASE = 4
RETRY_AFTER_S = (2.0, 10.0, 60.0)
"""Before an item is begun anew, after its first, second, ... infrastructure failure; half as much again, at random, so that not all come at once."""


@dataclass
class _Working:
    claim: Claim
    task: "asyncio.Task[None]"
    journal: Journal | None = None
    is_taken: bool = False
    is_cancelled: bool = False


@dataclass
class Runner:
    """One process's share of the work. `concurrency`: runs at a time here; a batch's own limit holds over all processes. `only`: the tenant and the batch
    whose runs it takes; None: it serves everybody, and so must have what all of them need."""

    client: "redis.asyncio.Redis"
    deployment: str
    queue: RunQueue
    work: ItemWork
    writer: HappeningWriter
    concurrency: int
    only: tuple[str, str] | None
    _working: dict[tuple[str, str], _Working] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _defaults: dict[tuple[str, str], BatchDefaults] = field(default_factory=dict)
    _is_draining: bool = False

    @property
    def running(self) -> int:
        """How many runs are worked here now."""
        return len(self._working)

    async def run(self) -> None:
        """Until `drain` has let the last one end, or until cancelled: then what runs is given back, for another process to go on with."""
        renewing = asyncio.create_task(self._renew_regularly(), name="renew-runs")
        writing = asyncio.create_task(self.writer.run(), name="write-happenings")
        try:
            await self._until_drained()
        finally:
            await asyncio.shield(self._end_all())
            for task in (renewing, writing):
                task.cancel()
            await asyncio.gather(renewing, writing, return_exceptions=True)

    def drain(self) -> None:
        """Begin nothing any more."""
        self._is_draining = True
        self._freed.set()

    async def _until_drained(self) -> None:
        while not (self._is_draining and not self._working):
            self._freed.clear()
            room = self.concurrency - len(self._working)
            if room > 0 and not self._is_draining:
                await self._claim(room)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._freed.wait()

    async def _claim(self, room: int) -> None:
        try:
            claims = await self.queue.claim(room, self.only)
        except BrokerUnavailable as error:
            log.warning("runs_not_claimed", error=str(error))
            return
        for claim in claims:
            key = (claim.tenant, claim.run)
            earlier = self._working.get(key)
            if earlier is not None:
                # Our own, whose lease ended while Redis was away: it stops by itself, having lost its log.
                earlier.is_taken = True
                earlier.task.cancel()
                await asyncio.gather(earlier.task, return_exceptions=True)
            self._working[key] = _Working(claim, asyncio.create_task(self._worked(claim), name=f"run-{claim.run}"))

    async def _worked(self, claim: Claim) -> None:
        key = (claim.tenant, claim.run)
        began = time.monotonic()
        try:
            await self._until_ended(claim, began)
        except asyncio.CancelledError:
            await self._interrupted(claim)
        except Exception:  # the edge of a run: the runner goes on, and the lease gives this one to whoever comes next
            log.exception("run_broke_off", run=claim.run)
        finally:
            if self._working.get(key) is not None and self._working[key].claim is claim:
                del self._working[key]
            self._freed.set()

    async def _until_ended(self, claim: Claim, began: float) -> None:
        working, record = self._working[claim.tenant, claim.run], claim.record
        told = {"item": record.item.custom_id, "run": claim.run, "attempt": record.attempt}
        waited_s = max(0.0, record.started_at - record.queued_at)
        started = {**told, "at": time.time(), "is_resumed": claim.is_resumed, "waited_s": waited_s, "orchestrator": self.queue.owner}
        self.writer.tell(claim.tenant, record.batch, ItemStarted.model_validate(started))
        try:
            run_log = await RunLog.load(self.client, self.deployment, claim.tenant, claim.run, claim.word)
            defaults = await self._defaults_of(claim)
        except (BrokerUnavailable, ConfigError) as error:
            await self._ended(claim, _failed(claim, judge_error(error)), BatchDefaults(), began)
            return
        working.journal = Journal(run_log, lambda: self._lose(working))
        tell = lambda happening: self.writer.tell(claim.tenant, record.batch, happening)  # noqa: E731
        outcome = await self.work.work(claim, working.journal, defaults, tell)
        await self._ended(claim, outcome, defaults, began)

    async def _ended(self, claim: Claim, outcome: Outcome, defaults: BatchDefaults, began: float) -> None:
        """Note the outcome, or have the item begun anew. However long Redis is away: what a run came to is not lost for that."""
        failure, attempt = outcome.failure, claim.record.attempt
        is_retried = failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and attempt <= defaults.retries
        while True:
            try:
                if is_retried:
                    after_s = RETRY_AFTER_S[min(attempt, len(RETRY_AFTER_S)) - 1] * random.uniform(1.0, 1.5)
                    is_ours = await self.queue.give_back(claim, after_s=after_s, anew=True)
                else:
                    is_ours = await self.queue.finish(claim, outcome)
                break
            except BrokerUnavailable as error:
                log.warning("outcome_not_noted", run=claim.run, error=str(error))
                await asyncio.sleep(LOOK_S)
        if is_ours:
            self._tell_end(claim, outcome, began, is_retried=is_retried)

    def _tell_end(self, claim: Claim, outcome: Outcome, began: float, *, is_retried: bool) -> None:
        failure, body, record = outcome.failure, outcome.body or {}, claim.record
        told = {"at": time.time(), "item": record.item.custom_id, "run": claim.run, "attempt": record.attempt}
        if is_retried and failure is not None:
            again = {**told, "attempt": record.attempt + 1, "failure": failure.kind, "code": failure.code}
            self.writer.tell(claim.tenant, record.batch, ItemRetried.model_validate(again))
            return
        usage = body.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        done = {
            **told,
            "failure": failure.kind if failure is not None else None,
            "code": failure.code if failure is not None else "",
            "message": failure.message if failure is not None else "",
            "seconds": time.monotonic() - began,
            "steps": body.get("steps") or 0,
            "prompt_tokens": counts.get("prompt_tokens") or 0,
            "completion_tokens": counts.get("completion_tokens") or 0,
            "cost": body.get("cost"),
        }
        self.writer.tell(claim.tenant, record.batch, ItemDone.model_validate(done))

    async def _interrupted(self, claim: Claim) -> None:
        """This process does not go on with a run: it was taken, its batch is cancelled, or the process ends."""
        working = self._working[claim.tenant, claim.run]
        if working.is_taken:
            return
        with suppress(BrokerUnavailable):
            if not working.is_cancelled:
                await self.queue.give_back(claim)
                return
            if working.journal is not None:
                await self.work.abandon(claim, working.journal)
            failure = Failure(
                kind=FailureKind.CANCELLED, code=ErrorCode.CANCELLED.value, message="the batch was cancelled while this item ran"
            )
            outcome = _failed(claim, failure)
            if await self.queue.finish(claim, outcome):
                self._tell_end(claim, outcome, time.monotonic(), is_retried=False)

    def _lose(self, working: _Working) -> None:
        working.is_taken = True
        working.task.cancel()

    async def _renew_regularly(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / RENEWALS_A_LEASE)
            working = dict(self._working)
            try:
                lost, cancelled = await self.queue.renew([one.claim for one in working.values()])
            except BrokerUnavailable as error:
                log.warning("runs_not_renewed", runs=len(working), error=str(error))
                continue
            for key in lost:
                # One that has just ended is nobody's any more.
                if key in self._working and self._working[key] is working[key]:
                    self._lose(working[key])
            for key in cancelled:
                working[key].is_cancelled = True
                working[key].task.cancel()

    async def _end_all(self) -> None:
        tasks = [working.task for working in self._working.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _defaults_of(self, claim: Claim) -> BatchDefaults:
        key = (claim.tenant, claim.record.batch)
        if key not in self._defaults:
            self._defaults[key] = (await self.queue.batch(*key)).defaults
        return self._defaults[key]


def _failed(claim: Claim, failure: Failure) -> Outcome:
    record = claim.record
    return Outcome(custom_id=record.item.custom_id, run=claim.run, status_code=status_of(failure), failure=failure, attempt=record.attempt)
