"""Batch events folded into what is known of a batch. They may come twice and in any order: the same set gives the same
totals.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from contract.calls import MAX_NAME_CHARS
from orchestrator.batches.failure_groups import MAX_MESSAGE_CHARS, FailedItem, FailureGroups
from orchestrator.batches.histogram import LogHistogram, bucket_of, middle_of
from orchestrator.batches.progress_items import Heard, Item, Spent, Stage, Working
from orchestrator.batches.settled_items import SettledItems
from orchestrator.batches.snapshot import EndedItem, Note, RunningItem, Snapshot, Spread, ToolTimes
from store.batches import (
    MAX_ITEMS,
    BatchEvent,
    BatchNotice,
    CallDone,
    FailureKind,
    ItemDone,
    ItemReady,
    ItemRetried,
    ItemStarted,
    StepDone,
)

WINDOW_S = 600.0
MAX_ENDS = 50
ENOUGH_ENDS = 5
QUIET_S = 30.0
"""After so long without an end and with nothing running nobody works the batch."""
MAX_TOOLS = 200
"""A model can ask for tools that do not exist, by any name."""
OTHER_TOOLS = "(other tools)"


@dataclass
class ToolRow:
    calls: int = 0
    errors: int = 0
    seconds: LogHistogram = field(default_factory=LogHistogram)
    queued: LogHistogram = field(default_factory=LogHistogram)


class ToolTable:
    """A row a tool; names beyond MAX_TOOLS share one."""

    def __init__(self) -> None:
        self.rows: dict[str, ToolRow] = {}

    def add(self, call: CallDone) -> None:
        """One more call."""
        name = call.tool[:MAX_NAME_CHARS]
        if name not in self.rows and len(self.rows) >= MAX_TOOLS:
            name = OTHER_TOOLS
        row = self.rows.setdefault(name, ToolRow())
        row.calls += 1
        row.errors += call.error_code is not None
        row.seconds.add(call.seconds)
        row.queued.add(call.clocks.queued_s)

    def times(self) -> tuple[ToolTimes, ...]:
        """The most used first."""
        ordered = sorted(self.rows.items(), key=lambda pair: (-pair[1].calls, pair[0]))
        return tuple(
            ToolTimes(
                tool=name,
                calls=row.calls,
                errors=row.errors,
                seconds=Spread.of(row.seconds),
                queued=Spread.of(row.queued),
            )
            for name, row in ordered
        )


MAX_SLOWEST = 20
MAX_NOTES = 20
MAX_WARNINGS = 5
RATE_WINDOW_S = 10
_MAX_SECONDS = 64
_NANO = 10**9

_OfItem = ItemStarted | ItemReady | StepDone | CallDone | ItemDone | ItemRetried


class Progress:
    """Add what happens, ask how it stands. Reads no clock; keeps a few bytes of an item of which nothing more is to
    come.

    `total`: how many items there are, as far as a BatchNotice does not say more. `max_failed_rows`: so many failed
    items can be listed.
    """

    def __init__(self, total: int = 0, *, max_failed_rows: int = 0) -> None:
        self._total = total
        self._settled = SettledItems()
        self._open: dict[str, Item] = {}
        self._running: dict[str, Item] = {}
        self._known = self._done = self._failed = self._retried = self._resumed = 0
        self._groups = FailureGroups(max_failed_rows)
        self._spent = (0, 0, 0, 0)
        # Sums of floats depend on their order, those of integers do not.
        self._nano_cost, self._costs_told, self._costs_unknown = 0, 0, 0
        self._lengths, self.waits, self._setups, self._replies = (LogHistogram() for _ in range(4))
        self.tools = ToolTable()
        self._calls_at: Counter[int] = Counter()
        self._ends: list[float] = []
        self._slowest: list[tuple[float, str, int, str, str]] = []
        self._notes: list[tuple[float, str]] = []
        self._warnings: set[str] = set()
        self._first_at: float | None = None
        self.last_at = 0.0
        """When the last thing happened."""

    def add(self, batch_event: BatchEvent) -> bool:
        """Count it; False: it has been counted before, or says nothing new."""
        self.last_at = batch_event.at if self._first_at is None else max(batch_event.at, self.last_at)
        self._first_at = batch_event.at if self._first_at is None else min(batch_event.at, self._first_at)
        if isinstance(batch_event, BatchNotice):
            return self._add_note(batch_event)
        item = self._open.get(batch_event.item) or self._find(batch_event.item)
        if item.is_settled and batch_event.attempt == 1 and not isinstance(batch_event, ItemStarted | ItemReady):
            return False
        is_new = self._count(item, batch_event)
        state = item.settled_state()
        if state is None:
            self._open[batch_event.item] = item
        else:
            self._settled.put(batch_event.item, state)
            self._open.pop(batch_event.item, None)
        return is_new

    def has_end(self, name: str, attempt: int) -> bool:
        """Whether the end of that attempt at an item has been counted, or a later attempt heard of."""
        item = self._open.get(name)
        if item is None:
            return attempt == 1 and self._settled.get(name) is not None
        return (item.attempt, item.stage) >= (attempt, Stage.ENDED)

    @property
    def ended(self) -> int:
        """Items whose last attempt has ended."""
        return self._done + self._failed

    def failed_items(self) -> list[FailedItem]:
        """Those that stand as failed, by time, as far as `max_failed_rows` says."""
        return self._groups.rows()

    def running_items(self, now: float, most: int = MAX_ITEMS) -> tuple[RunningItem, ...]:
        """Those that run, the longest first."""
        aged = (
            (item.working.age(now), name, item.attempt, item.working)
            for name, item in self._running.items()
            if item.working
        )
        slowest = heapq.nsmallest(most, aged, key=lambda row: (-row[0], row[1]))
        return tuple(
            RunningItem(item=name, run=working.run, attempt=attempt, age_s=age, does=working.does())
            for age, name, attempt, working in slowest
        )

    def snapshot(self, now: float) -> Snapshot:
        """How it stands. `now`: Unix seconds."""
        total = max(self._total, self._known)
        running = len(self._running)
        queued = total - self._done - self._failed - running
        has_ended = self._total > 0 and running + queued == 0
        began = now if self._first_at is None else self._first_at
        wall = max(0.0, (self.last_at if has_ended else now) - began)
        steps, calls, prompt, completion = self._spent
        ages = [item.working.age(now) for item in self._running.values() if item.working]
        return Snapshot(
            at=now,
            total=total,
            done=self._done,
            failed=self._failed,
            running=running,
            queued=queued,
            failures=self._groups.by_kind(),
            groups=self._groups.groups(),
            retried=self._retried,
            resumed=self._resumed,
            steps=steps,
            calls=calls,
            calls_per_s=sum(count for second, count in self._calls_at.items() if now - RATE_WINDOW_S < second <= now)
            / RATE_WINDOW_S,
            calls_per_s_overall=calls / wall if wall > 0 else 0.0,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost=self._nano_cost / _NANO if self._costs_told else None,
            cost_unknown=self._costs_unknown,
            wall_s=wall,
            eta_s=estimate_arrival(now, self._total, queued, ages, self._lengths, self._ends) if self._total else None,
            slowest_running=self.running_items(now, MAX_SLOWEST),
            slowest=tuple(
                EndedItem(
                    item=item,
                    run=run,
                    attempt=attempt,
                    seconds=seconds,
                    failure=FailureKind(failure) if failure else None,
                )
                for seconds, item, attempt, run, failure in sorted(self._slowest, reverse=True)
            ),
            tools=self.tools.times(),
            waits=Spread.of(self.waits),
            setups=Spread.of(self._setups),
            replies=Spread.of(self._replies),
            notes=tuple(Note(at=at, message=message) for at, message in sorted(self._notes)),
            warnings=tuple(sorted(self._warnings)),
            has_ended=has_ended,
        )

    def _find(self, name: str) -> Item:
        state = self._settled.get(name)
        if state is not None:
            return Item.reopened(state)
        self._known += 1
        return Item()

    def _add_note(self, note: BatchNotice) -> bool:
        self._total = max(self._total, note.total or 0)
        if note.is_warning:
            return self._add_warning(note.message[:MAX_MESSAGE_CHARS])
        kept = note.at, note.message[:MAX_MESSAGE_CHARS]
        if kept in self._notes:
            return False
        _keep_largest(self._notes, kept, MAX_NOTES)
        return kept in self._notes

    def _add_warning(self, message: str) -> bool:
        """Every process that works the batch may give the same warning. The smallest are kept, so that their order does
        not matter.
        """
        kept = set(sorted({*self._warnings, message})[:MAX_WARNINGS])
        is_new, self._warnings = kept != self._warnings, kept
        return is_new

    def _count(self, item: Item, batch_event: _OfItem) -> bool:
        attempt = batch_event.attempt
        if not isinstance(batch_event, ItemDone | ItemRetried):
            self._advance(item, batch_event, Stage.RUNNING)
            if item.working is not None and attempt == item.attempt:
                _watch(item.working, batch_event)
        match batch_event:
            case ItemStarted():
                return self._count_start(item, batch_event)
            case ItemReady():
                is_new = item.hears_first(Heard.READY) if attempt == 1 else item.is_first(("ready", attempt))
                if is_new:
                    self._setups.add(batch_event.setup_s)
                return is_new
            case StepDone():
                return item.is_first(("step", attempt, batch_event.step)) and self._count_step(
                    item.of_attempt(attempt), batch_event
                )
            case CallDone():
                return item.is_first(("call", attempt, batch_event.call)) and self._count_call(
                    item.of_attempt(attempt), batch_event
                )
            case ItemRetried():
                self._advance(item, batch_event, Stage.QUEUED)
                return item.is_first(("retried", attempt))
            case ItemDone():
                is_new = self._count_end(item.of_attempt(attempt), batch_event)
                if is_new:
                    self._advance(item, batch_event, Stage.ENDED)
                return is_new

    def _count_start(self, item: Item, start: ItemStarted) -> bool:
        if start.is_resumed:
            is_new = item.hears_first(Heard.RESUMED)
            self._resumed += is_new
            return is_new
        is_new = item.hears_first(Heard.STARTED) if start.attempt == 1 else item.is_first(("started", start.attempt))
        if is_new:
            self.waits.add(start.waited_s)
        return is_new

    def _count_step(self, spent: Spent, step: StepDone) -> bool:
        self._replies.add(step.model_s)
        self._spend(spent, (1, 0, step.prompt_tokens, step.completion_tokens))
        return True

    def _count_call(self, spent: Spent, call: CallDone) -> bool:
        self.tools.add(call)
        self._spend(spent, (0, 1, 0, 0))
        self._calls_at[int(call.at)] += 1
        if len(self._calls_at) > _MAX_SECONDS:
            for second in sorted(self._calls_at)[: _MAX_SECONDS // 2]:
                del self._calls_at[second]
        return True

    def _count_end(self, spent: Spent, end: ItemDone) -> bool:
        if spent.said is not None:
            return False
        self._spend(spent, None, (end.steps, end.calls, end.prompt_tokens, end.completion_tokens))
        if end.cost is None:
            self._costs_unknown += 1
        else:
            self._costs_told += 1
            self._nano_cost += round(end.cost * _NANO)
        if end.seconds <= 0:
            # It ended before anybody told of it here, and how long it took is not known.
            return True
        _keep_largest(self._slowest, (end.seconds, end.item, end.attempt, end.run, end.failure or ""), MAX_SLOWEST)
        if end.failure != FailureKind.CANCELLED:
            self._lengths.add(end.seconds)
            _keep_largest(self._ends, end.at, MAX_ENDS)
        return True

    def _spend(
        self, spent: Spent, more: tuple[int, int, int, int] | None, said: tuple[int, int, int, int] | None = None
    ) -> None:
        before = spent.counted()
        if more is not None:
            a, b, c, d = spent.seen
            spent.seen = a + more[0], b + more[1], c + more[2], d + more[3]
        spent.said = said or spent.said
        after = spent.counted()
        a, b, c, d = self._spent
        self._spent = (
            a + after[0] - before[0],
            b + after[1] - before[1],
            c + after[2] - before[2],
            d + after[3] - before[3],
        )

    def _advance(self, item: Item, batch_event: _OfItem, stage: Stage) -> None:
        """Items go upwards only: what an earlier attempt or stage tells late moves nothing."""
        if (batch_event.attempt, stage) <= (item.attempt, item.stage):
            return
        name = batch_event.item
        if item.stage == Stage.RUNNING:
            del self._running[name]
            item.working = None
        elif item.stage == Stage.ENDED:
            self._done -= not item.reason
            self._failed -= item.reason > 0
            if item.reason:
                self._groups.leave(item.reason, name)
        self._retried += batch_event.attempt - item.attempt
        item.attempt, item.stage, item.reason = batch_event.attempt, stage, 0
        if stage == Stage.RUNNING:
            item.working = Working(batch_event.at, batch_event.run)
            self._running[name] = item
        elif isinstance(batch_event, ItemDone):
            self._end(item, batch_event)

    def _end(self, item: Item, end: ItemDone) -> None:
        if end.failure is None:
            self._done += 1
            return
        self._failed += 1
        item.reason = self._groups.number(end.failure, end.code)
        message = end.message[:MAX_MESSAGE_CHARS]
        failed = FailedItem(end.at, end.item, end.run, end.attempt, end.failure, end.code, message)
        self._groups.enter(item.reason, failed)


def _watch(working: Working, batch_event: _OfItem) -> None:
    working.first_at = min(working.first_at, batch_event.at)
    working.run = working.run or batch_event.run
    match batch_event:
        case ItemStarted():
            working.begun_at = batch_event.at if working.begun_at is None else max(working.begun_at, batch_event.at)
        case ItemReady():
            working.is_ready = True
        case StepDone():
            working.step = max(working.step, batch_event.step)
        case CallDone():
            working.last_call = max(working.last_call, (batch_event.at, batch_event.tool))


def _keep_largest(heap: list, value: object, most: int) -> None:  # type: ignore[type-arg]
    if len(heap) < most:
        heapq.heappush(heap, value)
    else:
        heapq.heappushpop(heap, value)


def estimate_arrival(
    now: float, total: int, queued: int, ages: Sequence[float], lengths: LogHistogram, ends: Iterable[float]
) -> float | None:
    """Seconds until all have ended, never negative; None: not enough is known.

    `ages`: seconds that each running item has run. `lengths`: of those that have ended. `ends`: when the last MAX_ENDS
    of them did. The longer one of two estimates counts: by the rate of the last ends, in which silence counts, and by
    lengths.
    """
    if queued + len(ages) == 0:
        return 0.0
    if lengths.count < min(ENOUGH_ENDS, max(1, total // 2)):
        return None
    recent = sorted(end for end in ends if now - WINDOW_S < end <= now)
    estimates = []
    if len(recent) >= ENOUGH_ENDS and (ages or now - recent[-1] < QUIET_S):
        estimates.append((queued + len(ages)) * (now - recent[0]) / (len(recent) - 1))
    if ages:
        estimates.append(_by_lengths(queued, ages, lengths))
    return max(estimates, default=None)


def _by_lengths(queued: int, ages: Sequence[float], lengths: LogHistogram) -> float:
    """All that is left, shared among as many as run now; and no sooner than the one of them that will take longest."""
    counted = Counter(bucket_of(max(0.0, age)) for age in ages)
    table = LifeTable(lengths, counted)
    rests = {bucket: table.rest(middle_of(bucket)) for bucket in counted}
    left = queued * table.rest(0.0) + sum(rests[bucket] * count for bucket, count in counted.items())
    return max(left / len(ages), *rests.values())


class LifeTable:
    """How long items take when some have not ended yet: those have taken at least their age. Without them the quick
    ones, which end first, would make all look quick. `ages`: how many of a bucket's age are running."""

    def __init__(self, ended: LogHistogram, ages: Counter[int]) -> None:
        at_risk, survival = ended.count + ages.total(), 1.0
        self._steps: list[tuple[float, float]] = []
        """(time, share that takes longer), by time."""
        for bucket in sorted({*ended.buckets, *ages}):
            deaths, censored = ended.buckets.get(bucket, 0), ages[bucket]
            if deaths:
                survival *= 1 - deaths / (at_risk - censored / 2)
            at_risk -= deaths + censored
            self._steps.append((middle_of(bucket), max(0.0, survival)))

    def rest(self, age: float) -> float:
        """What one of this age is expected to take yet. Older than all that ended: as long again as it has run."""
        share, area, since = 1.0, 0.0, age
        alive = next((survival for time, survival in reversed(self._steps) if time <= age), 1.0)
        if alive <= 1e-9 or not self._steps:
            return age
        share = alive
        for time, survival in self._steps:
            if time > age:
                area += share * (time - since)
                share, since = survival, time
        return (area + share * since) / alive
