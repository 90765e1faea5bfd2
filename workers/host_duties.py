"""Periodic duties of a sandbox worker for its host. Each class is one duty. Another module decides how often it
runs.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from toolcrew.contract.calls import SessionUsage
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from toolcrew.contract.hosts import HEARTBEAT_S, HostReport
from toolcrew.contract.metrics import (
    BUCKET,
    COUNT,
    KILLS,
    SANDBOX_OOM,
    SANDBOX_START_FAILURES,
    SANDBOX_START_SECONDS,
    SANDBOXES_LOST,
    SUM,
    WARM_SANDBOXES,
)
from toolcrew.contract.tenancy import SandboxPolicy, TenantPolicy
from toolcrew.store.audit import SecretAudit, SecretUse, parse_uses
from toolcrew.store.hosts import WorkerHostStore
from toolcrew.store.metrics import Counts, WorkerMetricsStore
from toolcrew.store.secrets import Secret, WorkerSecrets
from toolcrew.store.sessions import AdoptionResult, WorkerSessionStore
from toolcrew.store.usage import WorkerUsageStore
from toolcrew.workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

SECRETS_EVERY_S = 0.5
"""Interval in seconds at which secrets are sent to sandboxd. A revoked secret must become unusable within 2 seconds."""
SILENT_S = 3 * HEARTBEAT_S
"""Seconds without an answer from sandboxd after which the host gets no new sessions."""
BATCH = 500
_PARTS = (COUNT, SUM, *(f"{BUCKET}{bound:g}" for bound in SANDBOX_START_SECONDS.buckets))
_LABELLED = {"kills": KILLS, "lost": SANDBOXES_LOST}
_STATES = ("busy", "idle", "paused", "lost", "warm")


@dataclass(frozen=True)
class SandboxdSession:
    """A session as sandboxd reports it.

    - `name`: `<tenant>:<session>`.
    - `changed`: the session's files may differ from the last checkpoint.
    - `fence`: the number of the opening under which sandboxd has the session; each new host gets a higher one.
    """

    name: str
    calls: int
    jobs: int
    idle_s: float
    changed: bool
    ttl_s: float = float("inf")
    fence: int = 1

    @property
    def tenant(self) -> str:
        return self.name.partition(":")[0]

    @property
    def session(self) -> str:
        return self.name.partition(":")[2]


def parse_rows(rows: Sequence[Mapping[str, Any]]) -> list[SandboxdSession]:
    """Return the sessions in a reply of sandboxd. A session without the field `changed` counts as changed."""
    return [
        SandboxdSession(
            str(row["name"]),
            int(row.get("calls", 0)),
            int(row.get("jobs", 0)),
            float(row.get("idle_s", 0.0)),
            bool(row.get("changed", True)),
            float(row.get("ttl_s", "inf")),
            int(row.get("fence", 1)),
        )
        for row in rows
    ]


class SandboxdMonitor:
    """Keeps the last status of this host's sandboxd. Calls `on_restart` once when the boot id in the status changes."""

    def __init__(self, first: Mapping[str, Any], on_restart: Callable[[str], None]) -> None:
        self.status = first
        self._boot = str(first["boot"])
        self._last_seen_at = time.monotonic()
        self._on_restart = on_restart

    @property
    def is_silent(self) -> bool:
        """Return whether the last status is older than SILENT_S."""
        return time.monotonic() - self._last_seen_at > SILENT_S

    def read_status(self, client: SandboxClient) -> bool:
        """Read the status. Return True when sandboxd has restarted since the last status. Raises OperatorError,
        ToolFailure.
        """
        self.status = client.status()
        self._last_seen_at = time.monotonic()
        boot = str(self.status["boot"])
        if boot == self._boot:
            return False
        log.error("sandboxd_restarted", was=self._boot, now=boot)
        self._on_restart(boot)
        return True


class AdoptionMonitor:
    """Decides which of sandboxd's sessions a new worker takes over (adopts).

    The worker takes over the sessions whose record in Redis names this host. It closes sessions that run on another
    host or have ended. `begin` runs before the worker serves calls. `retry` handles the sessions that could not be
    decided or closed at once.
    """

    def __init__(self, sessions: WorkerSessionStore, hosts: WorkerHostStore, ended: Sequence[HostReport]) -> None:
        """`ended`: the unexpired reports of workers of this host that have ended."""
        self._sessions = sessions
        self._hosts = hosts
        self._ended = ended
        self._undecided: list[str] = []
        self._foreign: list[str] = []

    def begin(self, names: Iterable[str]) -> Counter[AdoptionResult]:
        """Decide for each session in `names`: take it over, close it, or decide later. `names` are all sessions of
        sandboxd.

        Return how many sessions got each decision.

        Raises BrokerUnavailable.
        """
        counts = self._adopt(list(names))
        # Delete the reports of ended workers last: without a report, orchestrators would move the sessions away before
        # this worker has them.
        for report in self._ended:
            self._hosts.dismiss(report)
        if counts:
            log.info("sessions_adopted", **{str(result): count for result, count in counts.items()})
        return counts

    def retry(self, client: SandboxClient) -> bool:
        """Run one round. Return whether all sessions are decided and closed."""
        if self._undecided:
            try:
                self._adopt(self._undecided)
            except BrokerUnavailable as error:
                log.warning("sessions_not_adopted", undecided=len(self._undecided), error=str(error))
        self._close_foreign(client)
        return not self._undecided and not self._foreign

    def _adopt(self, names: list[str]) -> Counter[AdoptionResult]:
        counts: Counter[AdoptionResult] = Counter()
        undecided = []
        for at in range(0, len(names), BATCH):
            for name, result in self._sessions.adopt(
                names[at : at + BATCH], [report.queue for report in self._ended]
            ).items():
                counts[result] += 1
                if result is AdoptionResult.HELD:
                    undecided.append(name)
                elif result in (AdoptionResult.ELSEWHERE, AdoptionResult.CLOSED) and name not in self._foreign:
                    self._foreign.append(name)
        # Replace the list only after Redis has answered for all names. After an error the next round then asks for all
        # of them again.
        self._undecided = undecided
        return counts

    def _close_foreign(self, client: SandboxClient) -> None:
        """Close sessions that another host serves, and sessions that have ended. No call may use their old files."""
        names, self._foreign = self._foreign, []
        for name in names:
            try:
                client.close(name)
                log.info("stale_session_closed", session=name.partition(":")[2])
            except (OperatorError, ToolFailure) as error:
                log.warning("stale_session_not_closed", error=str(error))
                self._foreign.append(name)


class ExpiryMonitor:
    """Removes the records (locations) of expired sessions from Redis, so that these sessions no longer count for their
    tenants.

    A session has expired when sandboxd removed it because it was idle for its time to live. A session that sandboxd
    lost for another reason may continue from a checkpoint, so its record stays.
    """

    def __init__(self, sessions: WorkerSessionStore) -> None:
        self._sessions = sessions
        self._rows: dict[str, SandboxdSession] = {}
        self._last_seen_at = time.monotonic()
        self._missing: dict[str, float] = {}

    def run_round(self, client: SandboxClient) -> int:
        """Run one round. Return the number of removed records. Raises OperatorError: the next round tries again."""
        rows = {row.name: row for row in parse_rows(client.sessions())}
        now = time.monotonic()
        # sandboxd does not report why a session is missing. So its time to live is compared with its idle time at the
        # last round plus the time since then.
        passed_s = now - self._last_seen_at
        self._missing |= {name: row.idle_s + passed_s for name, row in self._rows.items() if name not in rows}
        self._rows, self._last_seen_at = rows, now
        count = self._sessions.forget(self._missing) if self._missing else 0
        self._missing.clear()
        return count


class LeftoverMonitor:
    """Closes sessions of sandboxd that were closed in Redis or live on another host.

    A close order is lost if its worker is killed, or if the sandbox is still starting. The sandbox would otherwise stay
    until its time to live has passed. A session without any record in Redis is not closed.
    """

    def __init__(self, sessions: WorkerSessionStore) -> None:
        self._sessions = sessions

    def run_round(self, client: SandboxClient) -> int:
        """Run one round. Return the number of closed sessions.

        Raises OperatorError, ToolFailure: the next round closes the rest.
        """
        fences = {row.name: row.fence for row in parse_rows(client.sessions())}
        names, count = list(fences), 0
        for at in range(0, len(names), BATCH):
            for name in sorted(self._sessions.find_ended(names[at : at + BATCH])):
                # Name the opening (fence) to close: the session may have been opened here again since the rows were
                # read.
                if client.close(name, fence=fences[name]):
                    log.warning("leftover_session_closed", session=name.partition(":")[2])
                    count += 1
        return count


class PolicyMonitor:
    """Sends sandboxd the sandbox policies of tenants with sessions on this host when they change.

    Without this duty, a background job could use a network that its tenant has lost until the session's next call.
    `find_policy` raises ToolFailure(UNKNOWN_TENANT) and OperatorError.
    """

    def __init__(self, find_policy: Callable[[str], TenantPolicy]) -> None:
        self._find_policy = find_policy
        self._sent: dict[str, SandboxPolicy] = {}

    def run_round(self, client: SandboxClient) -> int:
        """Run one round: send the policies that have changed. Return the number of tenants with a changed policy.

        Raises OperatorError.
        """
        tenants = {str(row["name"]).partition(":")[0] for row in client.sessions()}
        self._sent = {tenant: policy for tenant, policy in self._sent.items() if tenant in tenants}
        count = 0
        for tenant in sorted(tenants):
            policy = self._find_sandbox_policy(tenant)
            if policy is not None and policy != self._sent.get(tenant):
                client.send_policy(tenant, policy)
                self._sent[tenant] = policy
                count += 1
        return count

    def _find_sandbox_policy(self, tenant: str) -> SandboxPolicy | None:
        """Return the sandbox policy of the tenant; None when it cannot be read now.

        A removed tenant keeps its last policy, without network.
        """
        try:
            return self._find_policy(tenant).sandbox
        except ToolFailure as refused:
            if refused.code is not ErrorCode.UNKNOWN_TENANT:
                raise
            return self._sent.get(tenant, SandboxPolicy()).model_copy(update={"network": "none"})
        except OperatorError as error:
            log.warning("policies_not_read", error=str(error))
            return None


class SecretsMonitor:
    """Sends sandboxd the secrets that its sessions use, and writes each use of a secret to the audit log.

    sandboxd forgets values that are not sent again in time, so every round sends all of them.
    """

    def __init__(self, secrets: WorkerSecrets, audit: SecretAudit) -> None:
        self._secrets = secrets
        self._audit = audit
        self._used: dict[str, list[str]] = {}
        self._unwritten: list[SecretUse] = []

    def run_round(self, client: SandboxClient) -> None:
        """Run one round. Raises OperatorError and ToolFailure."""
        # A session that was opened since the last round waits for the values of its secrets: send them at once.
        for _ in range(2):
            used = self._send(client)
            if used == self._used:
                break
            self._used = used
        self._write_uses()

    def _send(self, client: SandboxClient) -> dict[str, list[str]]:
        values = {tenant: self._find(tenant, names) for tenant, names in self._used.items()}
        answer = client.exchange_secrets(values)
        self._unwritten += parse_uses(answer["uses"])
        return dict(answer["used"])

    def _find(self, tenant: str, names: Sequence[str]) -> dict[str, Any]:
        found = self._secrets.all(tenant)
        return {name: _describe_secret(found[name]) if name in found else None for name in names}

    def _write_uses(self) -> None:
        # Keep the uses until they are written, because sandboxd reports each use only once.
        self._audit.write(self._unwritten)
        self._unwritten.clear()


def _describe_secret(secret: Secret) -> dict[str, Any]:
    return {"value": secret.value, "hosts": secret.info.hosts, "place": secret.info.place}


class UsageMonitor:
    """Records the usage of sessions that no call's result reports: idle time, background jobs, and calls with lost
    results.
    """

    def __init__(self, usage: WorkerUsageStore) -> None:
        self._usage = usage
        self._counted: dict[str, SessionUsage] = {}

    def run_round(self, client: SandboxClient) -> int:
        """Run one round. Return the number of sessions whose totals have changed. Raises OperatorError."""
        totals = {str(row.pop("name")): SessionUsage.model_validate(row) for row in client.usage()}
        changed = [name for name, usage in totals.items() if usage != self._counted.get(name)]
        for at in range(0, len(changed), BATCH):
            self._usage.count([(name.rpartition(":")[0], totals[name]) for name in changed[at : at + BATCH]])
        self._counted = totals
        return len(changed)


class SandboxdMetrics:
    """Sends counters and state of the host's sandboxd to the deployment's metrics in Redis.

    `status` returns the last status of sandboxd. A sandboxd of another release may report fewer fields. Counts that
    Redis did not receive are sent later, by this worker or the next one.
    """

    def __init__(
        self, metrics: WorkerMetricsStore, host: str, queue: str, status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._metrics = metrics
        self._host = host
        self._queue = queue
        self._status = status
        self._counts = Counts()
        self._boot = ""
        self._is_reported = False

    def send(self) -> None:
        """Send the counts of the last status. Raises BrokerUnavailable."""
        status = self._status()
        if not isinstance(status.get("counts"), Mapping):
            return
        # A new boot counts from zero. Redis stores totals for each boot, so a repeated send adds nothing twice.
        if str(status["boot"]) != self._boot:
            self._boot, self._counts = str(status["boot"]), Counts()
        _read(status, self._counts)
        self._metrics.set_gauges(self._queue, _gauges(status))
        self._metrics.absorb(f"{self._host}.{self._boot}", self._counts)

    def try_send(self) -> None:
        """Send the counts. If Redis does not answer, log this once and raise no exception."""
        try:
            self.send()
            self._is_reported = False
        except BrokerUnavailable as error:
            if not self._is_reported:
                log.warning("sandboxd_counts_not_sent", error=str(error))
            self._is_reported = True


def _read(status: Mapping[str, Any], counts: Counts) -> None:
    totals = status["counts"]
    for part in _PARTS:
        counts.set_total(SANDBOX_START_SECONDS, part, _number(totals.get("starts"), part))
    counts.set_total(SANDBOX_START_FAILURES, "", _number(totals, "failed_starts"))
    counts.set_total(SANDBOX_OOM, "", _number(totals, "oom"))
    for name, metric in _LABELLED.items():
        for label in metric.values:
            counts.set_total(metric, "", _number(totals.get(name), label), label)
    for outcome in WARM_SANDBOXES.values:
        counts.set_total(WARM_SANDBOXES, "", _number(status.get("pool"), outcome), outcome)


def _gauges(status: Mapping[str, Any]) -> dict[str, Any]:
    states = status.get("states")
    return {
        "sandboxes": {state: int(_number(states, state)) for state in _STATES},
        "warm_target": int(_number(status.get("pool"), "target")),
    }


def _number(fields: object, name: str) -> float:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    return float(value) if isinstance(value, int | float) else 0.0
