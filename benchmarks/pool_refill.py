"""Measure what a refill of the warm pool costs running sessions.

The load is 100 calls per second, each in a session of its own, with and without a refill.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from benchmarks.processes import running_sandboxd
from benchmarks.report import Report, percentile
from benchmarks.sizes import size
from benchmarks.warm_call import sandbox_call
from toolcrew.workers.sandbox_client import SandboxClient

CALLS_PER_S = size(100.0, 20.0)
SESSIONS = size(20, 2)
REFILL = size(20, 1)
ROUNDS = size(3, 1)
QUIET_S = size(8.0, 0.5)
SETTLE_S = 1.0
TARGET = 1.5


class Load:
    """Load of sessions that make calls in turn at a steady rate. Each session has its own thread and connection."""

    def __init__(self, sandboxd_socket: str, sessions: int, calls_per_s: float) -> None:
        self._socket = sandboxd_socket
        self._sessions = sessions
        self._every_s = sessions / calls_per_s
        self._into: list[float] | None = None
        self._errors: list[Exception] = []
        self._ending = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator["Load"]:
        threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(self._sessions)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()

    @contextlib.contextmanager
    def counted(self, into: list[float]) -> Iterator[None]:
        """Count the calls that begin in this block. Re-raises the first error of a call."""
        self._into = into
        try:
            yield
        finally:
            self._into = None
        if self._errors:
            raise self._errors[0]

    def _call(self, number: int) -> None:
        try:
            with SandboxClient(self._socket) as client:
                name = client.open("bench", f"caller-{number}")
                due = time.perf_counter() + self._every_s * number / self._sessions
                while not self._ending.wait(max(0.0, due - time.perf_counter())):
                    into, due = self._into, max(due + self._every_s, time.perf_counter())
                    started = time.perf_counter()
                    sandbox_call(client, name)
                    if into is not None:
                        into.append(time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001  # `counted` raises the error in the caller's thread
            self._errors.append(error)


def run(rounds: int = ROUNDS, calls_per_s: float = CALLS_PER_S) -> Report:
    """Measure the calls without and with a refill of the pool."""
    settings = {"TOOLCREW_POOL_SIZE": str(REFILL)}
    quiet: list[float] = []
    during: list[float] = []
    quiet_s = refill_s = 0.0
    with running_sandboxd(settings) as sandboxd, SandboxClient(sandboxd.socket) as client:
        _wait_ready(client)
        with Load(str(sandboxd.socket), SESSIONS, calls_per_s).running() as load:
            _wait_sessions(client)
            for number in range(rounds):
                _wait_ready(client)
                time.sleep(SETTLE_S)
                quiet_s += _count_quiet(load, quiet)
                names = [client.open("bench", f"taken-{number}-{one}") for one in range(REFILL)]
                refill_s += _count_refill(load, client, during)
                for name in names:
                    client.close(name)
    report = Report(
        "pool_refill",
        notes=[
            (
                f"{rounds} rounds of {QUIET_S:g} s without and the refill of {REFILL} sandboxes; {SESSIONS} sessions; "
                f"asked for {calls_per_s:g} calls a second"
            )
        ],
    )
    report.add("quiet_per_s", len(quiet) / quiet_s, "calls without a refill")
    report.add("refill_per_s", REFILL * rounds / refill_s, "sandboxes made")
    report.add("during_refill_per_s", len(during) / refill_s, "calls during the refill")
    report.add_ms("quiet", quiet, "p50 of a call without a refill")
    report.add_ms("during", during, "p50 of a call during the refill")
    report.add("refill_ratio", percentile(during, 0.5) / percentile(quiet, 0.5), "p50 during / without", at_most=TARGET)
    report.add("refill_p95_ratio", percentile(during, 0.95) / percentile(quiet, 0.95), "p95 during / without")
    return report


def _count_quiet(load: Load, into: list[float]) -> float:
    """Count calls for a quiet period and return its length in seconds."""
    with load.counted(into):
        time.sleep(QUIET_S)
    return QUIET_S


def _count_refill(load: Load, client: SandboxClient, into: list[float]) -> float:
    """Count calls during a refill and return the seconds until the pool was full again."""
    started = time.perf_counter()
    with load.counted(into):
        _wait_ready(client)
    return time.perf_counter() - started


def _wait_ready(client: SandboxClient) -> None:
    while client.status()["pool"]["ready"] < REFILL:
        time.sleep(0.1)


def _wait_sessions(client: SandboxClient) -> None:
    while client.status()["sessions"] < SESSIONS:
        time.sleep(0.1)
