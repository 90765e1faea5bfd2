"""Progress of a batch, counted from the events of the batch.

Invariant: the same set of events gives the same totals. Events may repeat and may arrive in any order.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from toolcrew.contract.calls import Record
from toolcrew.contract.run_events import (
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
from toolcrew.orchestrator.batches.grades import GradeSummary, ItemGrade, build_item_grade, summarize

MAX_NOTES = 20
MAX_WARNINGS = 5
MAX_GROUPS = 200
MAX_MESSAGE_CHARS = 2000
OTHER_CODES = "(other codes)"
_NANO = 10**9
_NOTHING = (0, 0, 0, 0)


class FailureGroup(Record):
    """Items that failed with the same code. `item`, `run`, `message`: item id, run id and error message of one of these
    items; "" if unknown.
    """

    kind: FailureKind
    code: str
    count: int
    item: str = ""
    run: str = ""
    message: str = ""


class Note(Record):
    """A notice about the whole batch, for display."""

    at: float
    message: str


class ProgressSnapshot(Record):
    """Progress at one moment. done + failed + running + queued = total.

    `retried`: attempts after the first attempt of each item. `resumed`: attempts that another process continued.
    Steps, calls and tokens include all attempts. `cost`: cost of attempts that have ended; None if no attempt has a
    cost. `cost_unknown`: number of ended attempts without a cost. `cpu_s`: CPU time in sandboxes of attempts
    that have ended; `sandbox_s`: time of their sessions. `wall_s`: seconds from the first event to the last
    end, or to now. The rates refer to this time.
    """

    at: float
    total: int
    done: int
    failed: int
    running: int
    queued: int
    failures: dict[FailureKind, int]
    groups: tuple[FailureGroup, ...]
    retried: int
    resumed: int
    steps: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    cost_unknown: int
    cpu_s: float
    sandbox_s: float
    wall_s: float
    items_per_s: float
    calls_per_s: float
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]
    has_ended: bool

    @property
    def ended(self) -> int:
        """Return the number of items that have ended."""
        return self.done + self.failed


class Phase(IntEnum):
    """Phase of one attempt at an item, such as running or ended."""

    QUEUED = 0
    RUNNING = 1
    ENDED = 2


@dataclass(slots=True)
class _Item:
    """Latest attempt at an item. `failure`: kind and code of the failure; None if the attempt has not failed. `grade`:
    the values for the statistics of grades, for an item with a grader.
    """

    attempt: int = 1
    phase: Phase = Phase.QUEUED
    failure: tuple[FailureKind, str] | None = None
    grade: ItemGrade | None = None


@dataclass(slots=True)
class _Attempt:
    """Counts of one attempt: steps, calls, prompt tokens and completion tokens.

    `marks`: ids of the events that have been counted. `counted`: their sum. `reported`: counts in the event that ends
    the attempt.
    """

    marks: set[Hashable] = field(default_factory=set)
    counted: tuple[int, ...] = _NOTHING
    reported: tuple[int, ...] | None = None

    def usage(self) -> tuple[int, ...]:
        """Return the larger of `counted` and `reported`, for each kind of count. Some events may be lost, and the event
        that ends the attempt may be missing.
        """
        return tuple(map(max, self.counted, self.reported or _NOTHING))


class BatchProgress:
    """Counts events. Does not read a clock. `total`: number of items, unless a notice reports more items."""

    def __init__(self, total: int = 0) -> None:
        self._total = total
        self._items: dict[str, _Item] = {}
        self._attempts: dict[tuple[str, int], _Attempt | None] = {}
        """Counts by (item, attempt). None: every event of the attempt has been counted, so its counts are no longer
        needed.
        """
        self._resumed: set[tuple[str, int]] = set()
        self._retried = 0
        self._phases = Counter[Phase]()
        """Numbers of running and ended items. All other items are queued."""
        self._failures = Counter[tuple[FailureKind, str]]()
        self._examples: dict[tuple[FailureKind, str], RunEnded] = {}
        self._usage: tuple[int, ...] = _NOTHING
        # A sum of floats depends on the order of the events. A sum of integers does not.
        self._nano_cost = self._costs = self._costs_unknown = self._nano_cpu_s = self._nano_sandbox_s = 0
        self._notes: list[tuple[float, str]] = []
        self._warnings: list[str] = []
        self._first_at: float | None = None
        self.last_at = 0.0
        """Time of the last event, in Unix seconds."""

    def add(self, event: RunEvent) -> bool:
        """Count an event. Return False if the event was counted before."""
        self.last_at = event.at if self._first_at is None else max(event.at, self.last_at)
        self._first_at = event.at if self._first_at is None else min(event.at, self._first_at)
        if isinstance(event, BatchNotice):
            return self._add_notice(event)
        key = event.item, event.attempt
        self._move(event)
        if isinstance(event, RunClaimed) and event.is_resumed:
            is_new = key not in self._resumed
            self._resumed.add(key)
            return is_new
        attempt = self._attempts.setdefault(key, _Attempt())
        mark: Hashable = type(event).__name__
        if isinstance(event, StepFinished):
            mark = event.step
        elif isinstance(event, CallFinished):
            mark = (event.result.call_id,)
        if attempt is None or mark in attempt.marks:
            return False
        attempt.marks.add(mark)
        self._spend(attempt, event)
        if attempt.reported and attempt.counted[:2] == attempt.reported[:2]:
            self._attempts[key] = None
        return True

    @property
    def ended(self) -> int:
        """Return the number of items with an ended latest attempt."""
        return self._phases[Phase.ENDED]

    def latest(self, name: str) -> tuple[int, Phase]:
        """Return the number of the latest attempt at an item, and its phase; number 0 if there is no attempt."""
        item = self._items.get(name)
        return (0, Phase.QUEUED) if item is None else (item.attempt, item.phase)

    def has_end(self, name: str, attempt: int) -> bool:
        """Return whether the attempt at the item has ended, or a later attempt has an event."""
        return self.latest(name) >= (attempt, Phase.ENDED)

    def summarize_grades(self) -> GradeSummary | None:
        """Return the statistics of the graded items; None if there are none."""
        return summarize(item.grade for item in self._items.values() if item.grade is not None)

    def snapshot(self, now: float) -> ProgressSnapshot:
        """Return the progress at `now`, in Unix seconds."""
        total, failed, running = max(self._total, len(self._items)), self._failures.total(), self._phases[Phase.RUNNING]
        has_ended = self._total > 0 and self.ended == total
        wall = max(0.0, (self.last_at if has_ended else now) - (now if self._first_at is None else self._first_at))
        steps, calls, prompt_tokens, completion_tokens = self._usage
        groups = [self._group(*key, count) for key, count in self._failures.items() if count]
        failures = {kind: sum(group.count for group in groups if group.kind == kind) for kind in FailureKind}
        return ProgressSnapshot(
            at=now,
            total=total,
            done=self.ended - failed,
            failed=failed,
            running=running,
            queued=total - self.ended - running,
            failures={kind: count for kind, count in failures.items() if count},
            groups=tuple(sorted(groups, key=lambda group: (-group.count, group.kind, group.code))),
            retried=self._retried,
            resumed=len(self._resumed),
            steps=steps,
            calls=calls,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=self._nano_cost / _NANO if self._costs else None,
            cost_unknown=self._costs_unknown,
            cpu_s=self._nano_cpu_s / _NANO,
            sandbox_s=self._nano_sandbox_s / _NANO,
            wall_s=wall,
            items_per_s=self.ended / wall if wall else 0.0,
            calls_per_s=calls / wall if wall else 0.0,
            notes=tuple(Note(at=at, message=message) for at, message in self._notes),
            warnings=tuple(self._warnings),
            has_ended=has_ended,
        )

    def _group(self, kind: FailureKind, code: str, count: int) -> FailureGroup:
        """Return a group of failures, with an example if there is one."""
        example = self._examples.get((kind, code))
        if example is None:
            return FailureGroup(kind=kind, code=code, count=count)
        message = example.failure.message[:MAX_MESSAGE_CHARS] if example.failure is not None else ""
        return FailureGroup(kind=kind, code=code, count=count, item=example.item, run=example.run, message=message)

    def _add_notice(self, notice: BatchNotice) -> bool:
        """Store the newest notices and a few warnings. Every process may send the same warnings."""
        self._total = max(self._total, notice.total or 0)
        before, message = (self._notes, self._warnings), notice.message[:MAX_MESSAGE_CHARS]
        if notice.is_warning:
            self._warnings = sorted({*self._warnings, message})[:MAX_WARNINGS]
        else:
            self._notes = sorted({*self._notes, (notice.at, message)})[-MAX_NOTES:]
        return before != (self._notes, self._warnings)

    def _spend(self, attempt: _Attempt, event: RunEvent) -> None:
        """Add the steps, calls, tokens and cost of an event to the totals."""
        before = attempt.usage()
        match event:
            case StepFinished(usage=usage):
                attempt.counted = _add(attempt.counted, (1, 0, usage.prompt_tokens, usage.completion_tokens))
            case CallFinished():
                attempt.counted = _add(attempt.counted, (0, 1, 0, 0))
            case RunEnded(usage=usage):
                attempt.reported = event.steps, event.calls, usage.prompt_tokens, usage.completion_tokens
                self._costs += event.cost is not None
                self._costs_unknown += event.cost is None
                self._nano_cost += round((event.cost or 0) * _NANO)
                self._nano_cpu_s += round(event.call_usage.cpu_s * _NANO)
                self._nano_sandbox_s += round(event.sandbox_s * _NANO)
        self._usage = _add(self._usage, (after - old for after, old in zip(attempt.usage(), before, strict=True)))

    def _move(self, event: RunEvent) -> None:
        """Move an item to the phase of its event. An item never moves back: an event of an earlier attempt or phase
        is late.
        """
        name, phase = event.item, Phase.RUNNING
        if isinstance(event, RunEnded | RunRetried):
            phase = Phase.ENDED if isinstance(event, RunEnded) else Phase.QUEUED
        item = self._items.setdefault(name, _Item())
        if (event.attempt, phase) <= (item.attempt, item.phase):
            return
        self._phases[item.phase] -= 1
        self._phases[phase] += 1
        if item.failure is not None:
            self._failures[item.failure] -= 1
            if (example := self._examples.get(item.failure)) is not None and example.item == name:
                del self._examples[item.failure]
        self._retried += event.attempt - item.attempt
        item.attempt, item.phase, item.failure, item.grade = event.attempt, phase, None, None
        if isinstance(event, RunEnded):
            item.grade = build_item_grade(event)
        if isinstance(event, RunEnded) and event.failure is not None:
            item.failure = self._add_failure(event, event.failure)

    def _add_failure(self, end: RunEnded, failure: Failure) -> tuple[FailureKind, str]:
        """Count a failure and return its group."""
        # Tools and models choose the codes. Above MAX_GROUPS, further codes share one group for each kind.
        is_known = (failure.kind, failure.code) in self._failures or len(self._failures) < MAX_GROUPS
        key = failure.kind, failure.code if is_known else OTHER_CODES
        self._failures[key] += 1
        self._examples.setdefault(key, end)
        return key


def _add(sums: tuple[int, ...], more: Iterable[int]) -> tuple[int, ...]:
    """Return the sums, element by element."""
    return tuple(first + right for first, right in zip(sums, more, strict=True))
