"""Compare two ways to start a sandbox: by sandboxd itself with an OCI runtime, and by the Docker engine.

Each round opens a session without a pool, makes one call and closes the session, first alone, then several at a time.
"""

import contextlib
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.processes import RunningSandboxd, running_sandboxd
from benchmarks.report import Report, median, percentile
from benchmarks.sizes import size
from benchmarks.warm_call import sandbox_call
from toolcrew.workers.sandbox_client import SandboxClient

ROUNDS = size(40, 2)
AT_ONCE = 8
MANY = size(160, 8)
WARM_UP = size(3, 1)
STARTS = ("engine", "oci")


def run(rounds: int = ROUNDS) -> Report:
    notes = [f"{rounds} rounds of each in turn after {WARM_UP}; then {MANY} sessions, {AT_ONCE} at a time"]
    report = Report("sandbox_starts", notes=notes)
    with contextlib.ExitStack() as stack:
        hosts = {start: stack.enter_context(running_sandboxd({"TOOLCREW_SANDBOX_START": start})) for start in STARTS}
        numbers = itertools.count()
        seconds: dict[str, list[float]] = {start: [] for start in STARTS}
        for number in range(WARM_UP + rounds):
            for start, host in hosts.items():
                took = _use(host, next(numbers))
                if number >= WARM_UP:
                    seconds[start].append(took)
        rates = {start: _many(host, numbers) for start, host in hosts.items()}
    for start in STARTS:
        limit = {"at_most": 90.0} if start == "oci" else {}
        report.add(f"{start}_p50_ms", median(seconds[start]) * 1000, f"{start}: open, one call, close", **limit)
        report.add(f"{start}_p95_ms", percentile(seconds[start], 0.95) * 1000, f"{start}: the same, p95")
        least = {"at_least": 16.0} if start == "oci" else {}
        report.add(f"{start}_per_s", rates[start][0], f"{start}: sessions a second, {AT_ONCE} at a time", **least)
        report.add(f"{start}_own_ms", rates[start][1], f"{start}: processor time of sandboxd for a session")
    ratio = median(seconds["engine"]) / median(seconds["oci"])
    report.add("engine_ratio", ratio, "engine / oci, one at a time")
    return report


def _use(host: RunningSandboxd, number: int) -> float:
    with SandboxClient(host.socket) as client:
        started = time.perf_counter()
        name = client.open("bench", f"s{number}")
        sandbox_call(client, name)
        client.close(name)
        return time.perf_counter() - started


def _many(host: RunningSandboxd, numbers: "itertools.count[int]") -> tuple[float, float]:
    """Return sessions a second, and the processor milliseconds of sandboxd for one."""
    before, started = _processor_s(host.pid), time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda number: _use(host, number), [next(numbers) for _ in range(MANY)]))
    took = time.perf_counter() - started
    return MANY / took, (_processor_s(host.pid) - before) / MANY * 1000


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
