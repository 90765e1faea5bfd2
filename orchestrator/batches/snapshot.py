"""What is known of a batch at one moment: what displays show, what the summary and the report say."""

from contract.calls import Record
from orchestrator.batches.histogram import LogHistogram
from store.batches import FailureKind


class Spread(Record):
    """Of many times: p50 and p95 are right to 5 %, the others exact."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, histogram: LogHistogram) -> "Spread":
        p50, p95 = histogram.quantile(0.5), histogram.quantile(0.95)
        return cls(count=histogram.count, mean_s=histogram.mean_s, p50_s=p50, p95_s=p95, max_s=histogram.max_s)


class ToolTimes(Record):
    """The calls of one tool. `seconds`: from request to result; `queued`: waiting for a worker, a part of it."""

    tool: str
    calls: int
    errors: int
    seconds: Spread
    queued: Spread


class FailureGroup(Record):
    """Items that failed alike. `item`, `run`, `message`: of one of them; "" when none is left of those that were kept
    as examples.
    """

    kind: FailureKind
    code: str
    count: int
    item: str = ""
    run: str = ""
    message: str = ""


class RunningItem(Record):
    item: str
    run: str
    attempt: int
    age_s: float
    does: str


class EndedItem(Record):
    """`failure` None: it succeeded."""

    item: str
    run: str
    attempt: int
    seconds: float
    failure: FailureKind | None


class Note(Record):
    """Something of the batch as a whole."""

    at: float
    message: str


class Snapshot(Record):
    """`done` succeeded; done + failed + running + queued = total.

    `retried`: attempts that were more than an item's first; `resumed`: items that another process went on with.
    `calls_per_s`: over the last 10 s; `calls_per_s_overall`: since the first thing that happened, pauses counted.
    `cost`: of attempts that have ended, None when none of them told; `cost_unknown`: how many of them did not.
    `wall_s`: from the first thing that happened until the last end, or now. `eta_s` None: unknown.
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
    calls_per_s: float
    calls_per_s_overall: float
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    cost_unknown: int
    wall_s: float
    eta_s: float | None
    slowest_running: tuple[RunningItem, ...]
    slowest: tuple[EndedItem, ...]
    tools: tuple[ToolTimes, ...]
    waits: Spread
    setups: Spread
    replies: Spread
    notes: tuple[Note, ...]
    warnings: tuple[str, ...] = ()
    has_ended: bool

    @property
    def ended(self) -> int:
        return self.done + self.failed
