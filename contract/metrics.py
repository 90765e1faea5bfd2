"""All metrics that toolcrew reports: names, help texts, labels and bounds.

Every process adds its counters and histograms to one hash in Redis (store/metrics.py). Gauges are read at each scrape.
A field of the hash is one number: `<part>` TAB `<metric>` TAB `<label value>`... The part of a counter is empty. The
parts of a histogram are `count`, `sum` and `le:<bound>` (that bucket alone, not cumulative). The field `#<metric>`
counts the series of a metric. The number of series is bounded: values beyond the bound are added to the series OTHER.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from toolcrew.contract.errors import ErrorCode, RefusalReason

Kind = Literal["counter", "gauge", "histogram"]

OTHER = "other"
"""Label value for all values beyond a metric's bound, and for tools that no worker publishes."""
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
        ErrorCode.BUDGET_EXCEEDED,
    )
)
"""Error codes of calls that were refused by a person or by a rule."""
COUNT, SUM, BUCKET = "count", "sum", "le:"

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_BYTES = (100.0, 1000.0, 10_000.0, 100_000.0, 1_000_000.0)
_STEPS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0)
_START_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


@dataclass(frozen=True)
class Metric:
    """Metric of the closed set.

    `help`: the description, one line. `check_when`: when an operator checks the metric. `max_series`: the highest
    number of series in the deployment; 0 for gauges, which have one series per queue, host or tenant. `values`: values
    of the only label that are reported as 0 before they occur, so that the first increment is visible.
    """

    name: str
    kind: Kind
    help: str
    check_when: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    max_series: int = 0
    values: tuple[str, ...] = ()


def _counter(
    name: str, help_: str, check_when: str, *labels: str, max_series: int = 200, values: tuple[str, ...] = ()
) -> Metric:
    return Metric(name, "counter", help_, check_when, labels, (), max_series, values)


def _histogram(
    name: str, buckets: tuple[float, ...], help_: str, check_when: str, *labels: str, max_series: int = 200
) -> Metric:
    return Metric(name, "histogram", help_, check_when, labels, buckets, max_series)


def _gauge(name: str, help_: str, check_when: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help_, check_when, labels)


CALLS = _counter(
    "toolcrew_tool_calls_total",
    "Calls that have a result. Each call counts once.",
    "the share of errors by code: the operator fixes infrastructure codes (HOST_LOST, SANDBOX_UNAVAILABLE); the model "
    "causes most others",
    "tool",
    "status",
    "error_code",
    max_series=4000,
)
CALL_SECONDS = _histogram(
    "toolcrew_tool_duration_seconds",
    _SECONDS,
    "Run time of calls, without waiting.",
    "to find slow tools, and tools that have become slower",
    "tool",
)
QUEUE_WAIT_SECONDS = _histogram(
    "toolcrew_tool_queue_wait_seconds",
    _SECONDS,
    "Time from sending a call until a worker receives it; queue: host, pool.web or pool.tools.",
    "high values: too few workers of that kind, or workers that are stuck",
    "queue",
    max_series=8,
)
SANDBOX_WAIT_SECONDS = _histogram(
    "toolcrew_tool_sandbox_wait_seconds",
    _SECONDS,
    "Time that calls waited until their sandbox was ready.",
    "high values: sandboxes are often rebuilt or unpacked",
)
TRANSFER_SECONDS = _histogram(
    "toolcrew_tool_transfer_seconds",
    _SECONDS,
    "Remaining time of calls, without queue, sandbox and run time: the wait for a slot and for the result.",
    "high values: tenants wait for a slot, or Redis is slow",
)
OUTPUT_BYTES = _histogram(
    "toolcrew_tool_output_bytes",
    _BYTES,
    "Size of call outputs, in UTF-8 bytes.",
    "how much output models read",
    "tool",
    max_series=200,
)
OUTPUT_TRUNCATED = _counter(
    "toolcrew_tool_output_truncated_total",
    "Calls whose output was truncated. The output says so.",
    "a tool's output often exceeds the limit",
    "tool",
)
CALLS_ENDED = _counter(
    "toolcrew_calls_ended_total",
    "Calls by final state: done, lost (not run), unknown (may have had effects), not_run (refused or too late).",
    "lost and unknown: hosts failed",
    "state",
    max_series=8,
    values=("done", "lost", "unknown", "not_run"),
)
REFUSED_CALLS = _counter(
    "toolcrew_security_refusals_total",
    "Calls that were refused; rule: the error code, such as SECURITY_REFUSED or RATE_LIMITED.",
    "a model or a tenant tries a forbidden action, or a policy is too strict",
    "rule",
    max_series=16,
    values=REFUSALS,
)
REFUSED_ENVELOPES = _counter(
    "toolcrew_envelope_refusals_total",
    "Messages that workers did not run, by reason; signature: a process without the secret writes to Redis.",
    "investigate every reason except expired and repeated at once",
    "reason",
    max_series=16,
    values=get_args(RefusalReason),
)
APPROVALS_ASKED = _counter(
    "toolcrew_approvals_asked_total",
    "Calls that waited for an approval decision.",
    "how many decisions people have to make",
)
APPROVALS = _counter(
    "toolcrew_approvals_total",
    "Approval decisions: approved, modified, rejected (denied, also because no decision came in time).",
    "many rejections: add a policy rule that decides these calls",
    "decision",
    max_series=8,
    values=("approved", "modified", "rejected"),
)
RUNS_ENDED = _counter(
    "toolcrew_agent_runs_total",
    "Agent runs that ended; stop_reason: as in the result of the run, or aborted.",
    "runs stop at limits, or abort",
    "stop_reason",
    max_series=32,
)
ITERATIONS = _histogram(
    "toolcrew_agent_iterations", _STEPS, "Model replies per run.", "runs need more steps than before"
)
TOKENS = _counter(
    "toolcrew_llm_tokens_total",
    "Tokens as counted by the model servers; direction: input or output.",
    "how much the models cost",
    "model",
    "direction",
    max_series=200,
)
MODEL_SECONDS = _histogram(
    "toolcrew_llm_request_duration_seconds",
    _SECONDS,
    "Duration of model requests.",
    "high values: a model server is slow",
    "model",
    max_series=100,
)
SANDBOX_START_SECONDS = _histogram(
    "toolcrew_sandbox_start_seconds",
    _START_SECONDS,
    "Start time of containers, including the warm pool and the test container at the start of sandboxd.",
    "high values: the engine or the disk is overloaded",
)
SANDBOX_START_FAILURES = _counter(
    "toolcrew_sandbox_start_failures_total", "Containers that failed to start.", "the log of sandboxd has the reason"
)
SANDBOXES_LOST = _counter(
    "toolcrew_sandbox_lost_total",
    "Sandboxes that ended while a session used them; reason: ended, guest_gave_up or guest_broke_protocol.",
    "possible causes: memory limits, the engine, or an attack from inside the sandbox",
    "reason",
    max_series=8,
    values=("ended", "guest_gave_up", "guest_broke_protocol"),
)
SANDBOX_OOM = _counter(
    "toolcrew_sandbox_oom_total",
    "Commands with a process that the kernel killed because memory ran out.",
    "raise the memory of the tenant class",
)
KILLS = _counter(
    "toolcrew_sandbox_kills_total",
    "Calls whose processes were killed at a timeout or cancel; method: tree, all, or container (the last resort).",
    "container: programs of a tenant resist termination",
    "method",
    max_series=8,
    values=("tree", "all", "container"),
)
WARM_SANDBOXES = _counter(
    "toolcrew_warm_sandboxes_total",
    "Warm sandboxes that were selected for sessions: handed_out, or turned_away because they were not clean.",
    "turned_away must stay 0",
    "outcome",
    max_series=4,
    values=("handed_out", "turned_away"),
)

QUEUE_MESSAGES = _gauge(
    "toolcrew_queue_messages",
    "Messages in a queue.",
    "rising values: too few workers, or workers that are stuck",
    "queue",
)
QUEUE_OLDEST = _gauge(
    "toolcrew_queue_oldest_message_seconds",
    "Age of the oldest message in a queue, from the call records; 0 for an empty queue.",
    "the best sign of a queue without workers",
    "queue",
)
QUEUE_SLOTS = _gauge(
    "toolcrew_queue_slots", "Concurrent calls that the live workers of a queue run.", "0: no worker", "queue"
)
QUEUE_SLOTS_IN_USE = _gauge(
    "toolcrew_queue_slots_in_use",
    "Slots of a queue that calls in flight use, as shown on the pages.",
    "equal to slots for a long time: too few workers",
    "queue",
)
QUEUE_CALLS = _gauge(
    "toolcrew_queue_calls",
    "Calls that admission has sent to a queue (in_flight), and calls that wait for a slot (waiting).",
    "waiting while in_flight is below slots: a tenant has reached its own limit",
    "queue",
    "state",
)
QUEUE_OLDEST_CALL = _gauge(
    "toolcrew_queue_oldest_waiting_call_seconds",
    "Waiting time of the oldest call that only lacks a free slot (its tenant is below its limits); 0 when none waits.",
    "high values: add workers",
    "queue",
)
TENANT_CALLS = _gauge(
    "toolcrew_tenant_calls",
    "Calls of a tenant that were sent to a queue or run (in_flight), and calls that wait for a slot (waiting).",
    "which tenants are busy, and which wait",
    "tenant",
    "state",
)
TENANT_USAGE = _gauge(
    "toolcrew_tenant_usage_today",
    "What a tenant used since 00:00 UTC. The 200 tenants with the most CPU time and tokens have series of their own; "
    "all others are added up as `other`.",
    "who uses the most; compare it with the tenant's budgets",
    "tenant",
    "amount",
)
TENANTS = _gauge("toolcrew_tenants", "Registered tenants.", "")
CALLS_RUNNING = _gauge(
    "toolcrew_calls", "Current calls, from the call records: queued in Redis, or running in a worker.", "", "state"
)
DEAD_QUEUES = _gauge(
    "toolcrew_dead_host_queues",
    "Queues that still have messages although their host has stopped reporting.",
    "above 0 for a long time: no orchestrator runs; any orchestrator clears them",
)
DEAD_MESSAGES = _gauge(
    "toolcrew_dead_host_queue_messages",
    "Messages in the queues of hosts that have stopped reporting.",
    "calls that have not received a result yet",
)
LOST_HOSTS = _gauge(
    "toolcrew_lost_hosts",
    "Worker processes that stopped reporting without a shutdown and are not cleared yet.",
    "a host failed, or cannot reach Redis",
)
HOSTS = _gauge(
    "toolcrew_hosts",
    "Workers that report; kind: sandbox or web; state: serving, unhealthy, draining or restarting.",
    "unhealthy: its sandboxd does not respond",
    "kind",
    "state",
)
HOST_SLOTS = _gauge("toolcrew_host_slots", "Concurrent calls that the workers of a host can run.", "", "host", "kind")
HOST_BUSY = _gauge(
    "toolcrew_host_busy",
    "Calls that the workers of a host run now.",
    "near slots for a long time: too few slots",
    "host",
    "kind",
)
HOST_SESSIONS = _gauge("toolcrew_host_sessions", "Sessions on a host.", "", "host")
HOST_MAX_SESSIONS = _gauge("toolcrew_host_max_sessions", "Highest number of sessions on a host.", "", "host")
HOST_SANDBOXES = _gauge("toolcrew_host_sandboxes", "Containers of the sessions on a host.", "", "host")
HOST_MAX_SANDBOXES = _gauge(
    "toolcrew_host_max_sandboxes",
    "Highest number of containers on a host.",
    "near this limit, the host packs idle sessions to free containers",
    "host",
)
HOST_MEMORY = _gauge(
    "toolcrew_host_memory_free_bytes",
    "Memory that is available on a host.",
    "near 0, the host starts no warm sandboxes",
    "host",
    "kind",
)
HOST_DISK = _gauge(
    "toolcrew_host_disk_free_bytes",
    "Free disk space for the workspaces of sandboxd.",
    "below a limit, the host starts no sandboxes",
    "host",
)
SANDBOXES = _gauge(
    "toolcrew_sandbox_active",
    "Sandboxes of a host by state: busy (a call runs), idle, paused, lost (will be rebuilt), warm (unassigned).",
    "",
    "host",
    "state",
)
WARM_TARGET = _gauge(
    "toolcrew_warm_pool_target",
    "Target number of warm sandboxes on a host.",
    "fewer warm sandboxes for a long time: the log of sandboxd has the reason",
    "host",
)
RUNS = _gauge(
    "toolcrew_runs",
    "Durable runs: waiting, delayed (retried later) or running.",
    "waiting but none running: start an orchestrator",
    "state",
)
BATCHES = _gauge("toolcrew_batches_waiting", "Batches that have waiting runs.", "")
APPROVALS_WAITING = _gauge(
    "toolcrew_approvals_waiting", "Calls that wait for an approval decision now.", "above 0: a person must decide"
)
REDIS_MEMORY = _gauge(
    "toolcrew_redis_memory_used_bytes", "Memory that Redis uses.", "near its limit, Redis accepts no more calls"
)
REDIS_MEMORY_MAX = _gauge("toolcrew_redis_memory_max_bytes", "Memory limit of Redis; 0: Redis has no limit.", "")
REDIS_CLIENTS = _gauge("toolcrew_redis_clients", "Connections to Redis.", "")
UNREADABLE = _gauge(
    "toolcrew_metrics_unreadable_fields",
    "Metric fields in Redis that this release does not know.",
    "an upgrade is in progress, or another program writes to the hash",
)
SCRAPE_SECONDS = _gauge("toolcrew_metrics_render_seconds", "Time to build this page.", "")
BUILD = _gauge(
    "toolcrew_build_info", "Always 1; release: the release of the process that serves this page.", "", "release"
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)}
"""All metrics by name, in the order of the metrics page."""


def clean_label(value: str) -> str:
    """Return the label value as one line of printable text, cut to MAX_LABEL_CHARS. Names of tools and models are
    untrusted input.
    """
    cut = value[:MAX_LABEL_CHARS]
    return cut if cut.isprintable() else "".join(char if char.isprintable() else "?" for char in cut)


def encode_series(metric: Metric, labels: Sequence[str]) -> str:
    """Return the text that all field names of one series end with. `labels`: results of clean_label."""
    return "\t".join((metric.name, *labels))


def overflow_series(metric: Metric) -> str:
    """Return the series OTHER, which counts all values beyond the metric's bound."""
    return encode_series(metric, [OTHER] * len(metric.labels))


def bucket_part(metric: Metric, value: float) -> str | None:
    """Return the bucket part for the value; None for a value above all bounds, which only `count` includes."""
    return next((f"{BUCKET}{bound:g}" for bound in metric.buckets if value <= bound), None)


def parse_field(field: str) -> tuple[Metric, str, tuple[str, ...]] | None:
    """Return the metric, the part and the label values that a field of the hash of metrics names; None for a field that
    no metric of this release has.
    """
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
