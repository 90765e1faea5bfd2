"""Sends the counts and the present state of the host's sandboxd to the deployment's metrics."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from contract.errors import BrokerUnavailable
from contract.hosts import HEARTBEAT_S
from contract.metrics import (
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
from store.metrics import Counts, WorkerMetricsStore

log = structlog.get_logger(__name__)

_PARTS = (COUNT, SUM, *(f"{BUCKET}{bound:g}" for bound in SANDBOX_START_SECONDS.buckets))
_LABELLED = {"kills": KILLS, "lost": SANDBOXES_LOST}
_STATES = ("busy", "idle", "paused", "lost", "warm")


class SandboxdCounts:
    """A thread. `status`: returns the last status of sandboxd; another release may report less. When Redis does not answer, the counts are sent later,
    by this worker or by the next one."""

    def __init__(self, metrics: WorkerMetricsStore, host: str, queue: str, status: Callable[[], Mapping[str, Any]]) -> None:
        self._metrics = metrics
        self._host = host
        self._queue = queue
        self._status = status
        self._counts = Counts()
        self._boot = ""
        self._is_reported = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandboxd-counts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return at once. The next worker sends what is not sent yet."""
        self._stop.set()

    def keep(self) -> None:
        """Send what sandboxd reports now. Raises BrokerUnavailable."""
        status = self._status()
        if not isinstance(status.get("counts"), Mapping):
            return
        if str(status["boot"]) != self._boot:
            self._boot, self._counts = str(status["boot"]), Counts()
        _read(status, self._counts)
        self._metrics.set_gauges(self._queue, _gauges(status))
        self._metrics.absorb(f"{self._host}.{self._boot}", self._counts)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.keep()
                self._is_reported = False
            except BrokerUnavailable as error:
                if not self._is_reported:
                    log.warning("sandboxd_counts_not_kept", error=str(error))
                self._is_reported = True
            self._stop.wait(HEARTBEAT_S)


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
