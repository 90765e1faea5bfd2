"""Makes metrics of what the host's sandboxd has counted: its totals go into the deployment's sums, its present state beside the host's report."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import redis
import structlog

from contract.hosts import HEARTBEAT_S, HOST_TTL_S
from contract.metric_counts import ABSORB_LUA, Counts
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
from contract.names import counted_key, host_gauges_key, metrics_key

log = structlog.get_logger(__name__)

_PARTS = (COUNT, SUM, *(f"{BUCKET}{bound:g}" for bound in SANDBOX_START_SECONDS.buckets))
_LABELLED = {"kills": KILLS, "lost": SANDBOXES_LOST}
_STATES = ("busy", "idle", "paused", "lost", "warm")


class SandboxdCounts:
    """A thread. `status`: sandboxd's last one; one of another release may tell less. `client`: one that sends every command once. Redis may be away for
    any time: what sandboxd has counted is taken when it is back, also by the next worker."""

    def __init__(self, client: "redis.Redis", deployment: str, host: str, queue: str, status: Callable[[], Mapping[str, Any]]) -> None:
        self._client = client
        self._deployment = deployment
        self._host = host
        self._queue = queue
        self._status = status
        self._counts = Counts()
        self._boot = ""
        self._absorb = client.register_script(ABSORB_LUA)
        self._is_told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandboxd-counts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; what is not taken yet the next worker takes."""
        self._stop.set()

    def keep(self) -> None:
        """Take over what sandboxd tells now. Raises redis.RedisError."""
        status = self._status()
        if not isinstance(status.get("counts"), Mapping):
            return
        if str(status["boot"]) != self._boot:
            self._boot, self._counts = str(status["boot"]), Counts()
        _read(status, self._counts)
        self._client.set(host_gauges_key(self._deployment, self._queue), json.dumps(_gauges(status)), ex=HOST_TTL_S)
        keys = [metrics_key(self._deployment), counted_key(self._deployment, f"{self._host}.{self._boot}")]
        while (sending := self._counts.pending()) is not None:
            self._absorb(keys=keys, args=list(sending.arguments))
            self._counts.settle(sending)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.keep()
                self._is_told = False
            except redis.RedisError as error:
                if not self._is_told:
                    log.warning("sandboxd_counts_not_kept", error=str(error))
                self._is_told = True
            self._stop.wait(HEARTBEAT_S)


def _read(status: Mapping[str, Any], counts: Counts) -> None:
    told = status["counts"]
    for part in _PARTS:
        counts.set_total(SANDBOX_START_SECONDS, part, _number(told.get("starts"), part))
    counts.set_total(SANDBOX_START_FAILURES, "", _number(told, "failed_starts"))
    counts.set_total(SANDBOX_OOM, "", _number(told, "oom"))
    for name, metric in _LABELLED.items():
        for label in metric.values:
            counts.set_total(metric, "", _number(told.get(name), label), label)
    for outcome in WARM_SANDBOXES.values:
        counts.set_total(WARM_SANDBOXES, "", _number(status.get("pool"), outcome), outcome)


def _gauges(status: Mapping[str, Any]) -> dict[str, Any]:
    states = status.get("states")
    return {
        "sandboxes": {state: int(_number(states, state)) for state in _STATES},
        "warm_target": int(_number(status.get("pool"), "target")),
    }


def _number(told: object, name: str) -> float:
    value = told.get(name) if isinstance(told, Mapping) else None
    return float(value) if isinstance(value, int | float) else 0.0
