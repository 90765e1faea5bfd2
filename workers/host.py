"""Duties of a worker in addition to its calls: name, sessions, reports, checkpoints, drain, and end.

A worker that another process has declared lost (for missing reports) ends and never uses its name again.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.hosts import HEARTBEAT_S, HostReport
from toolcrew.contract.names import pool_worker
from toolcrew.contract.settings import WorkerSettings
from toolcrew.store.audit import SecretAudit
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import connect, connect_once
from toolcrew.store.hosts import WorkerHostStore
from toolcrew.store.metrics import WorkerMetricsStore
from toolcrew.store.secrets import WorkerSecrets
from toolcrew.store.sessions import WorkerSessionStore
from toolcrew.store.tenants import WorkerTenants
from toolcrew.store.usage import WorkerUsageStore
from toolcrew.workers.celery_edge.app import EXIT_RESTART, count_running, end_worker, find_sessions_at_work, on_stopping
from toolcrew.workers.checkpoints import (
    CHECK_INTERVAL_S,
    DEFAULT_EVERY_S,
    AutomaticCheckpoints,
    CheckpointMonitor,
    RecordingSandboxClient,
)
from toolcrew.workers.draining import HostDrain
from toolcrew.workers.duties import Duty
from toolcrew.workers.host_duties import (
    SECRETS_EVERY_S,
    AdoptionMonitor,
    ExpiryMonitor,
    LeftoverMonitor,
    PolicyMonitor,
    SandboxdMetrics,
    SandboxdMonitor,
    SecretsMonitor,
    UsageMonitor,
)
from toolcrew.workers.reports import (
    RETRY_S,
    Heartbeat,
    build_host_report,
    build_pool_report,
    describe_process,
    read_store,
    take_queue_name,
)
from toolcrew.workers.sandbox_client import SandboxClient

log = structlog.get_logger(__name__)

SANDBOXD_WAIT_S = 60.0
ADOPT_EVERY_S = 1.0
LEFTOVERS_EVERY_S = USAGE_EVERY_S = 10.0
LOST_S = 15.0
"""Seconds that running calls get when the worker was declared lost, or sandboxd has restarted.

The worker must then end soon, because no process waits for the results of these calls.
"""


class Host(Protocol):
    """Connects a worker to the deployment: reports, control lists, drain and end. `start` runs when the worker serves
    calls.

    `stop` runs after the last call has ended.
    """

    worker: str
    queues: tuple[str, ...]
    control_queues: tuple[str, ...]
    """Queues of the control lists that the worker reads; its own queue is first."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def drain(self, lossy: bool) -> bool:
        """Start to take the worker out of service; it ends afterwards. Return False if a drain has already started or
        is refused.

        With `lossy` the drain starts even if sessions lose their files.
        """
        ...


def build_heartbeat_duty(heartbeat: Heartbeat, stop: threading.Event) -> Duty:
    return Duty(
        "heartbeat", HEARTBEAT_S, heartbeat.beat, "worker_not_reported", stop, retry_s=RETRY_S, is_first_at_once=True
    )


@dataclass(frozen=True)
class _Facts:
    """The fields that are the same in all reports of one worker."""

    host: str
    worker: str
    process: str
    slots: int
    started_at: float

    def fields(self) -> dict[str, Any]:
        return dict(vars(self))


class SandboxHost:
    """Host of a worker that runs calls in the sandboxes of this host's sandboxd.

    The constructor runs before the worker serves calls. It waits for sandboxd, takes a queue name that contains
    sandboxd's boot id, and takes over sandboxd's sessions.

    Raises SandboxUnavailable, BrokerUnavailable, and ConfigError when another worker serves the sandboxd.
    """

    def __init__(self, settings: WorkerSettings, clock: SharedClock) -> None:
        self._settings = settings
        self._clock = clock
        self._broker = settings.broker()
        self._open_client: Callable[[], SandboxClient] = partial(SandboxClient, settings.sandboxd_socket)
        self._stop = threading.Event()
        self._stop_checkpoints = threading.Event()
        self._is_serving = False
        self._is_leaving = False
        self._drain: HostDrain | None = None
        self._drain_lock = threading.Lock()
        first = self._await_sandboxd()
        self._is_local = read_store(first) == "local"
        self._sandboxd = SandboxdMonitor(first, self._end_after_restart)
        self._facts = _Facts(settings.host, secrets.token_hex(4), describe_process(), settings.concurrency, time.time())
        hosts = WorkerHostStore(connect_once(self._broker), self._broker.deployment, clock)
        queue_name = take_queue_name(settings.host, str(first["boot"]), hosts, self._report)
        self.queue = queue_name.queue
        self.worker = self._facts.worker
        self.queues: tuple[str, ...] = (self.queue,)
        self.control_queues: tuple[str, ...] = (self.queue,)
        self._sessions = self.open_sessions()
        # Decide about the sessions before the first call: a session that has moved to another host must not serve a
        # call.
        self._adoption = AdoptionMonitor(self._sessions, hosts, queue_name.ended)
        with self._open_client() as sandboxd:
            self._adoption.begin(str(row["name"]) for row in sandboxd.sessions())
        self._heartbeat = Heartbeat(hosts, lambda: self._report(self.queue), clock, self._end_for_loss)
        self._heartbeat_duty = build_heartbeat_duty(self._heartbeat, self._stop)
        self._checkpoints = AutomaticCheckpoints(self._sessions, clock, self._stop)

    def open_sessions(self) -> WorkerSessionStore:
        """Return a session store with its own connection."""
        return WorkerSessionStore(
            connect(self._broker), self._broker.deployment, self._settings.host, self.queue, self._broker.signing_keys()
        )

    def open_call_client(self) -> SandboxClient:
        """Return a sandboxd client for one thread or process that runs calls."""
        if self._is_local:
            return self._open_client()
        return RecordingSandboxClient(self._settings.sandboxd_socket, self.open_sessions(), self._clock)

    def start(self) -> None:
        on_stopping(self._start_leaving)
        self._is_serving = True
        for duty in self._build_duties():
            duty.start()

    def stop(self) -> None:
        """Stop the duties and send the last report.

        If sandboxd has sessions, the last report tells orchestrators to wait for the next worker process. Otherwise
        they send the calls in this worker's queue elsewhere at once.
        """
        self._stop.set()
        self._stop_checkpoints.set()
        self._heartbeat.leave("restarting" if self._sandboxd.status.get("sessions") else "stopped")

    def drain(self, lossy: bool) -> bool:
        if self._is_local and not lossy:
            log.error(
                "drain_refused",
                remedy=(
                    "set TOOLCREW_WORKSPACE_STORE of every sandboxd to one store, or drain with --lossy: sessions lose "
                    "their files"
                ),
            )
            return False
        with self._drain_lock:
            if self._drain is not None:
                return False
            self._drain = HostDrain(
                self._open_client, self._sessions, self._checkpoints, find_sessions_at_work, self._stop
            )
        log.info("drain_begins")
        self._stop_checkpoints.set()
        self._heartbeat_duty.run_soon()
        threading.Thread(target=self._run_drain, args=(self._drain,), name="drain", daemon=True).start()
        return True

    def _build_duties(self) -> list[Duty]:
        """Return the periodic duties.

        Each duty has its own thread and its own client, so a silent sandboxd or Redis delays no other duty.
        """
        broker, stop, client = self._broker, self._stop, self._open_client
        policies = WorkerTenants(connect(broker), broker.deployment, broker.signing_keys())
        metrics = WorkerMetricsStore(connect_once(broker), broker.deployment)
        counts = SandboxdMetrics(metrics, self._facts.host, self.queue, lambda: self._sandboxd.status)
        expiry, leftovers = ExpiryMonitor(self._sessions), LeftoverMonitor(self._sessions)
        policy_monitor = PolicyMonitor(policies.policy)
        secrets_monitor = SecretsMonitor(
            WorkerSecrets(connect(broker), broker.deployment, broker.signing_keys()),
            SecretAudit(connect(broker), broker.deployment),
        )
        usage = UsageMonitor(WorkerUsageStore(connect(broker), broker.deployment))
        duties = [
            self._heartbeat_duty,
            Duty("sandboxd-watch", HEARTBEAT_S, partial(self._sandboxd.read_status, client()), "sandboxd_silent", stop),
            Duty(
                "sandboxd-counts", HEARTBEAT_S, counts.try_send, "sandboxd_counts_not_sent", stop, is_first_at_once=True
            ),
            Duty(
                "adoption",
                ADOPT_EVERY_S,
                partial(self._adoption.retry, client()),
                "sessions_not_adopted",
                stop,
                is_first_at_once=True,
            ),
            Duty("expiry", HEARTBEAT_S, partial(expiry.run_round, client()), "expired_sessions_not_forgotten", stop),
            Duty("leftovers", LEFTOVERS_EVERY_S, partial(leftovers.run_round, client()), "leftovers_not_closed", stop),
            Duty("usage", USAGE_EVERY_S, partial(usage.run_round, client()), "usage_not_counted", stop),
            Duty("policies", HEARTBEAT_S, partial(policy_monitor.run_round, client()), "policies_not_sent", stop),
            Duty("secrets", SECRETS_EVERY_S, partial(secrets_monitor.run_round, client()), "secrets_not_sent", stop),
        ]
        every_s = self._checkpoint_every_s()
        if every_s:
            monitor = CheckpointMonitor(client, self._sessions, self._checkpoints, every_s, self._stop_checkpoints)
            run_round, pause_s = partial(monitor.run_round, client()), min(CHECK_INTERVAL_S, every_s)
            duties.append(Duty("checkpoints", pause_s, run_round, "checkpoints_not_made", self._stop_checkpoints))
        return duties

    def _run_drain(self, drain: HostDrain) -> None:
        leave = partial(self._heartbeat.leave_drained, self._stop.is_set)
        if drain.finish(self._settings.drain_s, leave, is_lossy=self._is_local):
            log.info("drained", queue=self.queue)
            end_worker(0)

    def _report(self, queue: str) -> HostReport:
        drain = self._drain
        fields: dict[str, Any] = {"problem": f"draining: {drain.problem}"} if drain is not None else {}
        if not self._is_serving:
            fields = {"healthy": False, "problem": "starting"}
        return build_host_report(
            self._sandboxd.status,
            is_silent=self._sandboxd.is_silent,
            queue=queue,
            busy=count_running(),
            draining=drain is not None or self._is_leaving,
            **self._facts.fields(),
            **fields,
        )

    def _checkpoint_every_s(self) -> float:
        """Return the seconds between two automatic checkpoints of a session; 0: no automatic checkpoints."""
        setting_s = self._settings.checkpoint_every_s
        if not self._is_local:
            return DEFAULT_EVERY_S if setting_s is None else setting_s
        if setting_s:
            log.warning(
                "checkpoints_not_made",
                reason="the checkpoints would not leave this host",
                remedy="set TOOLCREW_WORKSPACE_STORE to a store that all hosts share",
            )
        return 0.0

    def _start_leaving(self) -> None:
        self._is_leaving = True

    def _end_for_loss(self, reason: str) -> None:
        log.error("worker_ends", reason=reason, exit_code=EXIT_RESTART)
        self._stop_checkpoints.set()
        self._stop.set()
        end_worker(EXIT_RESTART, within_s=LOST_S)

    def _end_after_restart(self, boot: str) -> None:
        """End this worker. A new worker process adopts the sessions of the restarted sandboxd under a new name."""
        log.error("worker_ends", reason=f"sandboxd was restarted (boot {boot})", exit_code=EXIT_RESTART)
        self._is_leaving = True
        self._stop_checkpoints.set()
        end_worker(EXIT_RESTART, within_s=LOST_S)

    def _await_sandboxd(self) -> dict[str, Any]:
        """Return the first status of this host's sandboxd, which may still be starting.

        Raises SandboxUnavailable: sandboxd has not answered within SANDBOXD_WAIT_S.
        """
        until = time.monotonic() + SANDBOXD_WAIT_S
        while True:
            try:
                with self._open_client() as client:
                    return client.status()
            except SandboxUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


class PoolHost:
    """Host of a worker without sandboxes, which serves the queues of pools. `worker` is a name that no other process
    has had.
    """

    def __init__(self, settings: WorkerSettings, queues: Sequence[str], clock: SharedClock) -> None:
        self.worker = pool_worker(settings.host, secrets.token_hex(4))
        self.queues = tuple(queues)
        self.control_queues = (self.worker, *queues)
        self._facts = _Facts(
            settings.host, self.worker.rpartition(".")[2], describe_process(), settings.concurrency, time.time()
        )
        self._is_leaving = False
        self._stop = threading.Event()
        broker = settings.broker()
        hosts = WorkerHostStore(connect_once(broker), broker.deployment, clock)
        self._heartbeat = Heartbeat(hosts, self._report, clock, self._end_for_loss)
        self._heartbeat_duty = build_heartbeat_duty(self._heartbeat, self._stop)

    def start(self) -> None:
        on_stopping(self._start_leaving)
        self._heartbeat_duty.start()

    def stop(self) -> None:
        """Stop the duties and send the last report. No process waits for a next worker, because this one has no call
        queue of its own.
        """
        self._stop.set()
        self._heartbeat.leave("drained")

    def drain(self, lossy: bool) -> bool:
        """Stop taking calls, wait for the running calls, then end. There are no files to lose."""
        if self._is_leaving:
            return False
        self._is_leaving = True
        self._heartbeat_duty.run_soon()
        log.info("drain_begins")
        end_worker(0)
        return True

    def _report(self) -> HostReport:
        return build_pool_report(
            queue=self.worker,
            pools=self.queues,
            busy=count_running(),
            draining=self._is_leaving,
            **self._facts.fields(),
        )

    def _start_leaving(self) -> None:
        self._is_leaving = True

    def _end_for_loss(self, reason: str) -> None:
        log.error("worker_ends", reason=reason, exit_code=EXIT_RESTART)
        end_worker(EXIT_RESTART, within_s=LOST_S)
