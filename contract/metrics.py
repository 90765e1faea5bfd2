"""The closed set of metrics: what is counted where, under which name, with which labels and bounds.

Counters and histograms are summed up in one hash in Redis (store/metrics.py), which any process of either side adds to;
gauges are read when somebody asks. A field of the hash is one number: `<part>` TAB `<metric>` TAB `<label value>`...,
where the part of a counter is empty, and those of a histogram are `count`, `sum` and `le:<bound>` (that bucket alone).
`#<metric>` counts the series of a metric, which are bounded: whatever comes beyond goes under OTHER.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from contract.errors import ErrorCode, RefusalReason

Kind = Literal["counter", "gauge", "histogram"]

OTHER = "other"
"""Stands for the label values that are too many, or that no worker publishes."""
MAX_LABEL_CHARS = 64
SERIES_MARK = "#"
REFUSALS = tuple(
    code.value
    for code in (
        ErrorCode.TOOL_DISABLED,
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.SECURITY_REFUSED,
        ErrorCode.PATH_NOT_ALLOWED,
        ErrorCode.UNKNOWN_TENANT,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.RATE_LIMITED,
        ErrorCode.QUOTA_EXCEEDED,
    )
)
"""The codes of calls that somebody, or a rule, did not let be made."""
COUNT, SUM, BUCKET = "count", "sum", "le:"

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_BYTES = (100.0, 1000.0, 10_000.0, 100_000.0, 1_000_000.0)
_STEPS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0)
_START_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


@dataclass(frozen=True)
class Metric:
    """One metric. `help`: one line; `look`: when an operator looks at it; `most`: how many series the whole deployment
    may have of it (0: a gauge's are as many as there are queues, hosts or tenants); `values`: of its one label, told
    from the start, so that the first of a kind is seen to be one more than none."""

    name: str
    kind: Kind
    help: str
    look: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    most: int = 0
    values: tuple[str, ...] = ()


def _counter(name: str, help_: str, look: str, *labels: str, most: int = 200, values: tuple[str, ...] = ()) -> Metric:
    return Metric(name, "counter", help_, look, labels, (), most, values)


def _histogram(name: str, buckets: tuple[float, ...], help_: str, look: str, *labels: str, most: int = 200) -> Metric:
    return Metric(name, "histogram", help_, look, labels, buckets, most)


def _gauge(name: str, help_: str, look: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help_, look, labels)


CALLS = _counter(
    "toolcrew_tool_calls_total",
    "Calls that have been answered, each once, whoever answered.",
    "the share of errors, by code; codes of the infrastructure (HOST_LOST, SANDBOX_UNAVAILABLE) are yours, the others "
    "mostly the model's",
    "tool",
    "status",
    "error_code",
    most=4000,
)
CALL_SECONDS = _histogram(
    "toolcrew_tool_duration_seconds",
    _SECONDS,
    "How long calls ran, without waiting.",
    "which tool is slow, and whether it always was",
    "tool",
)
QUEUE_WAIT_SECONDS = _histogram(
    "toolcrew_tool_queue_wait_seconds",
    _SECONDS,
    "How long calls were on their way to a worker; queue: host, pool.web or pool.tools.",
    "workers of that kind are too few, or stand still",
    "queue",
    most=8,
)
SANDBOX_WAIT_SECONDS = _histogram(
    "toolcrew_tool_sandbox_wait_seconds",
    _SECONDS,
    "How long calls waited for their sandbox to be ready.",
    "sandboxes are rebuilt or unpacked often",
)
TRANSFER_SECONDS = _histogram(
    "toolcrew_tool_transfer_seconds",
    _SECONDS,
    "What calls took beside queue, sandbox and run: the wait for a slot, and for the result.",
    "tenants wait for their share, or Redis is slow",
)
OUTPUT_BYTES = _histogram(
    "toolcrew_tool_output_bytes",
    _BYTES,
    "UTF-8 bytes of calls' outputs.",
    "what models are made to read",
    "tool",
    most=200,
)
OUTPUT_TRUNCATED = _counter(
    "toolcrew_tool_output_truncated_total",
    "Calls whose output was cut, which it says.",
    "a tool's output rarely fits",
    "tool",
)
CALLS_ENDED = _counter(
    "toolcrew_calls_ended_total",
    "Calls by what is known of them at their end: done, lost (not run), unknown (may have acted), not_run (refused or "
    "too late).",
    "lost and unknown follow from hosts that went away",
    "state",
    most=8,
    values=("done", "lost", "unknown", "not_run"),
)
REFUSED_CALLS = _counter(
    "toolcrew_security_refusals_total",
    "Calls that were refused; rule: the error code, as SECURITY_REFUSED or RATE_LIMITED.",
    "a model or a tenant tries what it may not, or a policy is too narrow",
    "rule",
    most=16,
    values=REFUSALS,
)
REFUSED_ENVELOPES = _counter(
    "toolcrew_envelope_refusals_total",
    "Messages that workers did not run, by why; signature: somebody without the secret writes into Redis.",
    "anything but expired and repeated is worth a look at once",
    "reason",
    most=16,
    values=get_args(RefusalReason),
)
APPROVALS_ASKED = _counter(
    "toolcrew_approvals_asked_total", "Calls that somebody was asked about.", "how much people have to decide"
)
APPROVALS = _counter(
    "toolcrew_approvals_total",
    "Answers to those questions: approved, modified, rejected (also when nobody answered in time).",
    "many rejections: a policy could decide instead",
    "decision",
    most=8,
    values=("approved", "modified", "rejected"),
)
RUNS_ENDED = _counter(
    "toolcrew_agent_runs_total",
    "Agent runs that ended; stop_reason as in their results, or aborted.",
    "runs stop at limits or abort",
    "stop_reason",
    most=32,
)
ITERATIONS = _histogram(
    "toolcrew_agent_iterations", _STEPS, "Model replies of a run.", "runs need more steps than they did"
)
TOKENS = _counter(
    "toolcrew_llm_tokens_total",
    "Tokens as the model servers count them; direction: input or output.",
    "what the models cost",
    "model",
    "direction",
    most=200,
)
MODEL_SECONDS = _histogram(
    "toolcrew_llm_request_duration_seconds",
    _SECONDS,
    "How long model replies took.",
    "a model server is slow",
    "model",
    most=100,
)
SANDBOX_START_SECONDS = _histogram(
    "toolcrew_sandbox_start_seconds",
    _START_SECONDS,
    "How long containers took to start, those of the warm pool and the proof at sandboxd's own start included.",
    "the engine or the disk is busy",
)
SANDBOX_START_FAILURES = _counter(
    "toolcrew_sandbox_start_failures_total", "Containers that could not be started.", "see sandboxd's log"
)
SANDBOXES_LOST = _counter(
    "toolcrew_sandbox_lost_total",
    "Sandboxes that ended while a session had them; reason: ended, guest_gave_up or guest_broke_protocol.",
    "memory limits, the engine, or an attack from inside",
    "reason",
    most=8,
    values=("ended", "guest_gave_up", "guest_broke_protocol"),
)
SANDBOX_OOM = _counter(
    "toolcrew_sandbox_oom_total",
    "Commands of which the kernel killed a process for want of memory.",
    "raise a class's memory",
)
KILLS = _counter(
    "toolcrew_sandbox_kills_total",
    "Calls at whose limit or cancel something was killed; method: tree, all, or container when nothing less ended it.",
    "container: a tenant's programs resist",
    "method",
    most=8,
    values=("tree", "all", "container"),
)
WARM_SANDBOXES = _counter(
    "toolcrew_warm_sandboxes_total",
    "Warm sandboxes that sessions wanted: handed_out, or turned_away because they had not stayed clean.",
    "turned_away should stay 0",
    "outcome",
    most=4,
    values=("handed_out", "turned_away"),
)

QUEUE_MESSAGES = _gauge(
    "toolcrew_queue_messages",
    "Messages that lie in a queue.",
    "they pile up: workers are too few or stand still",
    "queue",
)
QUEUE_OLDEST = _gauge(
    "toolcrew_queue_oldest_message_seconds",
    "How long the oldest message of a queue has lain there, by the ledger; 0 when it is empty.",
    "the best sign of a queue that nobody serves",
    "queue",
)
QUEUE_SLOTS = _gauge(
    "toolcrew_queue_slots", "Calls at a time that a queue's living workers serve.", "0: nobody serves it", "queue"
)
QUEUE_SLOTS_IN_USE = _gauge(
    "toolcrew_queue_slots_in_use",
    "Slots of a queue that calls in flight use, as the pages show them.",
    "equal to slots for long: too few workers",
    "queue",
)
QUEUE_CALLS = _gauge(
    "toolcrew_queue_calls",
    "Calls that admission has let into a queue (in_flight), and that wait for a slot of it (waiting).",
    "waiting while in_flight is below slots: a tenant's own limit",
    "queue",
    "state",
)
QUEUE_OLDEST_CALL = _gauge(
    "toolcrew_queue_oldest_waiting_call_seconds",
    "How long the oldest call has waited for a slot of a queue that no limit of its own tenant stops; 0 when none "
    "waits.",
    "more workers would help",
    "queue",
)
TENANT_CALLS = _gauge(
    "toolcrew_tenant_calls",
    "Calls of a tenant that run or are on their way (in_flight), and that wait for a slot (waiting).",
    "who is busy, and who waits",
    "tenant",
    "state",
)
TENANTS = _gauge("toolcrew_tenants", "Registered tenants.", "")
CALLS_RUNNING = _gauge(
    "toolcrew_calls", "Calls now, by the ledger's words: queued in Redis, or running in a worker.", "", "state"
)
DEAD_QUEUES = _gauge(
    "toolcrew_dead_host_queues",
    "Queues of hosts that report no more and still have messages.",
    "any orchestrator clears them; none runs",
)
DEAD_MESSAGES = _gauge(
    "toolcrew_dead_host_queue_messages", "Messages in those.", "calls whose sender has not been told yet"
)
LOST_HOSTS = _gauge(
    "toolcrew_lost_hosts",
    "Worker incarnations that stopped reporting without a word and are not cleared yet.",
    "a host died, or cannot reach Redis",
)
HOSTS = _gauge(
    "toolcrew_hosts",
    "Workers that report; kind: sandbox or web; state: serving, unhealthy, draining or restarting.",
    "unhealthy: its sandboxd is silent",
    "kind",
    "state",
)
HOST_SLOTS = _gauge("toolcrew_host_slots", "Calls at a time that a host's workers run.", "", "host", "kind")
HOST_BUSY = _gauge(
    "toolcrew_host_busy", "Calls that they run now.", "busy near slots for long: too few", "host", "kind"
)
HOST_SESSIONS = _gauge("toolcrew_host_sessions", "Sessions that live on a host.", "", "host")
HOST_MAX_SESSIONS = _gauge("toolcrew_host_max_sessions", "Sessions that may.", "", "host")
HOST_SANDBOXES = _gauge("toolcrew_host_sandboxes", "Containers that a host's sessions have.", "", "host")
HOST_MAX_SANDBOXES = _gauge(
    "toolcrew_host_max_sandboxes", "Containers that it may have.", "near it idle sessions are packed away", "host"
)
HOST_MEMORY = _gauge(
    "toolcrew_host_memory_free_bytes",
    "Memory that a host could still give.",
    "near 0 no warm sandboxes are made",
    "host",
    "kind",
)
HOST_DISK = _gauge(
    "toolcrew_host_disk_free_bytes",
    "Free disk where sandboxd keeps workspaces.",
    "below a limit nothing is started",
    "host",
)
SANDBOXES = _gauge(
    "toolcrew_sandbox_active",
    "Sandboxes of a host by state: busy (a call runs), idle, paused, lost (to be rebuilt), warm (nobody's yet).",
    "",
    "host",
    "state",
)
WARM_TARGET = _gauge(
    "toolcrew_warm_pool_target",
    "Warm sandboxes that a host is to keep.",
    "warm below it for long: see sandboxd's log",
    "host",
)
RUNS = _gauge(
    "toolcrew_runs",
    "Durable runs: waiting, delayed (tried again later) or running.",
    "nobody works them: start an orchestrator",
    "state",
)
BATCHES = _gauge("toolcrew_batches_waiting", "Batches with runs that wait.", "")
APPROVALS_WAITING = _gauge(
    "toolcrew_approvals_waiting", "Questions that wait for a person now.", "somebody is to answer"
)
REDIS_MEMORY = _gauge(
    "toolcrew_redis_memory_used_bytes", "Memory that Redis uses.", "near its limit Redis takes no more calls"
)
REDIS_MEMORY_MAX = _gauge("toolcrew_redis_memory_max_bytes", "What Redis may use; 0: no limit of its own.", "")
REDIS_CLIENTS = _gauge("toolcrew_redis_clients", "Connections to Redis.", "")
UNREADABLE = _gauge(
    "toolcrew_metrics_unreadable_fields",
    "Numbers in Redis that no metric of this release has.",
    "an upgrade is under way, or somebody writes there",
)
SCRAPE_SECONDS = _gauge("toolcrew_metrics_render_seconds", "How long this page took to put together.", "")
BUILD = _gauge("toolcrew_build_info", "1; release: of the process that gives this page.", "", "release")

METRICS: dict[str, Metric] = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)}
"""All of them, by name, in the order in which they are given out."""


def clean_label(value: str) -> str:
    """A label value as it is kept: one line of printable text, cut to MAX_LABEL_CHARS. Names of tools and models are
    other people's data.
    """
    cut = value[:MAX_LABEL_CHARS]
    return cut if cut.isprintable() else "".join(char if char.isprintable() else "?" for char in cut)


def encode_series(metric: Metric, labels: Sequence[str]) -> str:
    """What the fields of one series end in. `labels`: as clean_label gives them."""
    return "\t".join((metric.name, *labels))


def spare_series(metric: Metric) -> str:
    """The series for whatever is too much."""
    return encode_series(metric, [OTHER] * len(metric.labels))


def bucket_part(metric: Metric, value: float) -> str | None:
    """The bucket of a value; None for one beyond all bounds, which only the count has."""
    return next((f"{BUCKET}{bound:g}" for bound in metric.buckets if value <= bound), None)


def parse_field(field: str) -> tuple[Metric, str, tuple[str, ...]] | None:
    """Metric, part and label values of a field; None for one that no metric of this release has."""
    part, name, *labels = field.split("\t") if "\t" in field else ("", "")
    metric = METRICS.get(name)
    if metric is None or metric.kind == "gauge" or len(labels) != len(metric.labels) or part not in _parts(metric):
        return None
    return metric, part, tuple(labels)


def _parts(metric: Metric) -> frozenset[str]:
    return _PARTS[metric.name]


_PARTS = {
    metric.name: frozenset(
        {COUNT, SUM, *(f"{BUCKET}{bound:g}" for bound in metric.buckets)} if metric.kind == "histogram" else {""}
    )
    for metric in METRICS.values()
}
