"""What a worker without sandboxes does beside its calls: reports, drains, and ends when it was given up."""

import time
from collections.abc import Sequence

import structlog

from contract.clock import SharedClock
from contract.hosts import HostReport
from store.connection import connect_once
from store.hosts import WorkerHostStore
from workers.celery_edge.worker_state import EXIT_RESTART, count_running, end_worker, on_stopping
from workers.heartbeat import Heartbeat
from workers.host_report import build_pool_report
from workers.processes import describe_process
from workers.settings import WorkerSettings

log = structlog.get_logger(__name__)

LOST_S = 15.0
"""How long calls that run may go on when the worker was given up: they were answered."""


class PoolLife:
    """`start` once calls are served, `stop` when the last one has ended. `worker`: the name of this incarnation, which nobody else has."""

    def __init__(self, settings: WorkerSettings, worker: str, pools: Sequence[str], clock: SharedClock) -> None:
        self._settings = settings
        self._worker = worker
        self._pools = tuple(pools)
        self._process = describe_process()
        self._started_at = time.time()
        self._is_leaving = False
        broker = settings.broker()
        hosts = WorkerHostStore(connect_once(broker), broker.deployment, clock)
        self._heartbeat = Heartbeat(hosts, self._report, clock, self._end_for_loss)

    def start(self) -> None:
        on_stopping(self._note_leaving)
        self._heartbeat.start()

    def stop(self) -> None:
        """Nothing waits for it: no queue is its own."""
        self._heartbeat.stop("drained")

    def drain(self, lossy: bool) -> bool:
        """Take no more calls, let those that run end, and end; whether that has begun. There are no files to lose."""
        if self._is_leaving:
            return False
        self._is_leaving = True
        self._heartbeat.beat_soon()
        log.info("drain_begins")
        end_worker(0)
        return True

    def _word(self) -> str:
        return self._worker.rpartition(".")[2]

    def _report(self) -> HostReport:
        return build_pool_report(
            host=self._settings.host,
            queue=self._worker,
            worker=self._word(),
            process=self._process,
            pools=self._pools,
            slots=self._settings.concurrency,
            busy=count_running(),
            draining=self._is_leaving,
            started_at=self._started_at,
        )

    def _note_leaving(self) -> None:
        self._is_leaving = True

    def _end_for_loss(self, reason: str) -> None:
        log.error("worker_ends", reason=reason, exit_code=EXIT_RESTART)
        end_worker(EXIT_RESTART, within_s=LOST_S)
