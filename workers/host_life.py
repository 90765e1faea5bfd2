"""What a sandbox worker does beside its calls: takes its name and its sessions, reports, keeps checkpoints, drains, and ends when it was given up."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from contract.clock import SharedClock
from contract.errors import SandboxUnavailable
from contract.hosts import HostReport
from store.connection import connect, connect_once
from store.hosts import WorkerHostStore
from store.metrics import WorkerMetricsStore
from store.sessions import WorkerSessionStore
from store.tenants import WorkerTenants
from workers.adoption import AdoptionMonitor
from workers.celery_edge.worker_state import EXIT_RESTART, count_running, end_worker, find_sessions_at_work, on_stopping
from workers.checkpointing import DEFAULT_EVERY_S, CheckpointMonitor
from workers.checkpoints import AutomaticCheckpoints, RecordingSandboxClient
from workers.draining import Drain
from workers.heartbeat import Heartbeat
from workers.host_report import build_host_report, read_store
from workers.host_watch import SandboxdWatch
from workers.incarnation import take_incarnation
from workers.processes import describe_process
from workers.sandbox_client import SandboxClient
from workers.sandboxd_counts import SandboxdCounts
from workers.session_monitors import ExpiryMonitor, LeftoverMonitor
from workers.settings import WorkerSettings
from workers.terms_watch import TermsWatch

log = structlog.get_logger(__name__)

SANDBOXD_WAIT_S = 60.0
LOST_S = 15.0
"""How long calls that run may go on when the worker must not: nobody waits for those of an incarnation that was given up."""


@dataclass(frozen=True)
class _Facts:
    """What is the same in all reports of one worker."""

    host: str
    worker: str
    process: str
    slots: int
    started_at: float

    def fields(self) -> dict[str, Any]:
        return dict(vars(self))


class HostLife:
    """Made before the worker serves calls: waits for sandboxd, takes the name of its boot, and takes over its sessions. `start` once calls are served,
    `stop` when the last one has ended.

    Raises SandboxUnavailable, BrokerUnavailable, and ConfigError when another worker serves the sandboxd.
    """

    def __init__(self, settings: WorkerSettings, clock: SharedClock) -> None:
        self._settings = settings
        self._clock = clock
        self._broker = settings.broker()
        self._open_client: Callable[[], SandboxClient] = partial(SandboxClient, settings.sandboxd_socket)
        self._stop = threading.Event()
        self._stop_keeping = threading.Event()
        self._is_serving = False
        self._is_leaving = False
        self._drain: Drain | None = None
        self._drain_turn = threading.Lock()
        first = self._await_sandboxd()
        self._is_local = read_store(first) == "local"
        self._watch = SandboxdWatch(self._open_client, first, self._end_for_other_boot)
        facts = _Facts(self._settings.host, secrets.token_hex(4), describe_process(), self._settings.concurrency, time.time())
        self._facts = facts
        deployment = self._broker.deployment
        hosts = WorkerHostStore(connect_once(self._broker), deployment, self._clock)
        incarnation = take_incarnation(facts.host, str(first["boot"]), hosts, self._report)
        self.queue, self.worker = incarnation.queue, facts.worker
        self._sessions = self.open_sessions()
        self._adopter = AdoptionMonitor(self._sessions, hosts, incarnation.ended, self._open_client)
        with self._open_client() as sandboxd:
            self._adopter.begin(str(row["name"]) for row in sandboxd.sessions())
        self._heartbeat = Heartbeat(hosts, lambda: self._report(self.queue), self._clock, self._end_for_loss)
        metrics = WorkerMetricsStore(connect_once(self._broker), deployment)
        self._counts = SandboxdCounts(metrics, facts.host, self.queue, lambda: self._watch.status)
        self._checkpoints = AutomaticCheckpoints(self._sessions, self._clock, self._stop)
        self._keeper = CheckpointMonitor(self._open_client, self._sessions, self._checkpoints, self._every_s(), self._stop_keeping)
        self._expiry = ExpiryMonitor(self._open_client, self._sessions, self._stop)
        self._leftovers = LeftoverMonitor(self._open_client, self._sessions, self._stop)
        self._terms = TermsWatch(
            self._open_client, WorkerTenants(connect(self._broker), deployment, self._broker.signing_keys()).policy, self._stop
        )

    def open_sessions(self) -> WorkerSessionStore:
        """Over a connection of its own."""
        return WorkerSessionStore(connect(self._broker), self._broker.deployment, self._settings.host, self.queue)

    def open_call_client(self) -> SandboxClient:
        """A client of sandboxd for one thread or process that runs calls."""
        if self._is_local:
            return self._open_client()
        return RecordingSandboxClient(self._settings.sandboxd_socket, self.open_sessions(), self._clock)

    def start(self) -> None:
        on_stopping(self._note_leaving)
        self._is_serving = True
        self._watch.start()
        self._heartbeat.start()
        self._counts.start()
        self._adopter.start()
        self._keeper.start()
        self._expiry.start()
        self._leftovers.start()
        self._terms.start()

    def stop(self) -> None:
        """With sessions, orchestrators wait for its next process. Without, they take what waits in its queue at once."""
        self._stop.set()
        self._stop_keeping.set()
        self._adopter.stop()
        self._watch.stop()
        self._counts.stop()
        self._heartbeat.stop("restarting" if self._watch.status.get("sessions") else "stopped")

    def drain(self, lossy: bool) -> bool:
        """Take the host out of service, and end; whether that has begun. `lossy`: though its checkpoints cannot leave it."""
        if self._is_local and not lossy:
            log.error(
                "drain_refused",
                remedy="set TOOLCREW_WORKSPACE_STORE of every sandboxd to one store, or drain with --lossy: sessions lose their files",
            )
            return False
        with self._drain_turn:
            if self._drain is not None:
                return False
            self._drain = Drain(self._open_client, self._sessions, self._checkpoints, find_sessions_at_work, self._stop)
        log.info("drain_begins")
        self._stop_keeping.set()
        self._heartbeat.beat_soon()
        threading.Thread(target=self._run_drain, args=(self._drain,), name="drain", daemon=True).start()
        return True

    def _run_drain(self, drain: Drain) -> None:
        leave = partial(self._heartbeat.leave_drained, self._stop.is_set)
        if drain.finish(self._settings.drain_s, leave, is_lossy=self._is_local):
            log.info("drained", queue=self.queue)
            end_worker(0)

    def _report(self, queue: str) -> HostReport:
        drain = self._drain
        told: dict[str, Any] = {"trouble": f"draining: {drain.trouble}"} if drain is not None else {}
        if not self._is_serving:
            told = {"healthy": False, "trouble": "starting"}
        is_draining = drain is not None or self._is_leaving
        return build_host_report(
            self._watch.status,
            is_silent=self._watch.is_silent,
            queue=queue,
            busy=count_running(),
            draining=is_draining,
            **self._facts.fields(),
            **told,
        )

    def _every_s(self) -> float:
        """How often checkpoints are taken; 0 for never."""
        asked = self._settings.checkpoint_every_s
        if not self._is_local:
            return DEFAULT_EVERY_S if asked is None else asked
        if asked:
            log.warning(
                "checkpoints_not_taken",
                why="they would not leave this host",
                remedy="set TOOLCREW_WORKSPACE_STORE to a store that all hosts share",
            )
        return 0.0

    def _note_leaving(self) -> None:
        self._is_leaving = True

    def _end_for_loss(self, reason: str) -> None:
        log.error("worker_ends", reason=reason, exit_code=EXIT_RESTART)
        self._stop_keeping.set()
        self._stop.set()
        end_worker(EXIT_RESTART, within_s=LOST_S)

    def _end_for_other_boot(self, boot: str) -> None:
        """Its sessions are adopted under a new name, by a worker that begins anew."""
        log.error("worker_ends", reason=f"sandboxd was started again (boot {boot})", exit_code=EXIT_RESTART)
        self._is_leaving = True
        self._stop_keeping.set()
        end_worker(EXIT_RESTART, within_s=LOST_S)

    def _await_sandboxd(self) -> dict[str, Any]:
        """The first status of this host's sandboxd, which may still be starting. Raises SandboxUnavailable when it stays silent."""
        until = time.monotonic() + SANDBOXD_WAIT_S
        while True:
            try:
                with self._open_client() as client:
                    return client.status()
            except SandboxUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
