"""Measure 200 idle sandboxes: memory of each, memory of sandboxd per sandbox, and the time to start and to remove
all.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.engine_peer import memory_of, open_api
from benchmarks.memory import memory_of_process
from benchmarks.processes import running_sandboxd
from benchmarks.report import Report, median
from benchmarks.sandboxes import list_containers, pid_of
from benchmarks.sizes import size
from toolcrew.workers.sandbox_client import SandboxClient

SANDBOXES = size(200, 3)
FIRST = size(50, 1)
"""Number of sandboxes that start before the measurement. Memory that sandboxd's allocator keeps for them is not
counted.
"""
AT_ONCE = 8
IDLE_S = size(5.0, 0.5)
MIB = 1024 * 1024


def run(sandboxes: int = SANDBOXES, first: int = FIRST) -> Report:
    settings = {"TOOLCREW_MAX_SANDBOXES": str(sandboxes + 1), "TOOLCREW_IDLE_PAUSE_S": "5"}
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd(settings))
        api = open_api()
        stack.callback(api.close)
        open_s = _timed_for(range(first), lambda number: _open(sandboxd.socket, number))
        before = memory_of_process(sandboxd.pid)["rss"]
        open_s += _timed_for(range(first, sandboxes), lambda number: _open(sandboxd.socket, number))
        after = memory_of_process(sandboxd.pid)["rss"]
        containers = list_containers(api, f"toolcrew.sandboxd={sandboxd.name}")
        memory = [memory_of(pid_of(api, container)) for container in containers]
        _wait_frozen(sandboxd.socket)
        cpu_share = _cpu_share(sandboxd.pid)
        close_s = _timed_for(range(sandboxes), lambda number: _close(sandboxd.socket, number))
        leftovers = list_containers(api, f"toolcrew.sandboxd={sandboxd.name}")
    if len(containers) != sandboxes or leftovers:
        raise RuntimeError(
            f"{len(containers)} containers of {sandboxes} sandboxes, and {len(leftovers)} after all were closed"
        )
    report = Report(
        "idle_sandboxes", notes=[f"{sandboxes} sandboxes; opened and closed by {AT_ONCE} workers at a time"]
    )
    own = [entry["usage"] - entry["inactive_file"] for entry in memory]
    report.add("sandbox_bytes", median(own), "idle sandbox: usage - inactive file cache, median", at_most=16 * MIB)
    report.add("sandbox_max_bytes", max(own), "idle sandbox: the same, the largest")
    report.add("sandboxd_rss_bytes", after, f"sandboxd RSS with {sandboxes} sandboxes")
    report.add(
        "sandboxd_each_bytes", (after - before) / (sandboxes - first), "sandboxd RSS a sandbox more", at_most=64 * 1024
    )
    report.add("idle_cpu_ratio", cpu_share, "sandboxd's share of a core while all are frozen")
    report.add("open_all_ms", open_s * 1000, "all opened")
    report.add("close_all_ms", close_s * 1000, "all closed, their containers gone")
    report.add("close_open_ratio", close_s / open_s, "closed / opened")
    return report


def _timed_for(numbers: Iterable[int], work: Callable[[int], None]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, numbers))
    return time.perf_counter() - started


def _open(path: Path, number: int) -> None:
    with SandboxClient(path) as client:
        client.open("bench", f"idle-{number}")


def _close(path: Path, number: int) -> None:
    with SandboxClient(path) as client:
        client.close(f"bench:idle-{number}")


def _wait_frozen(path: Path) -> None:
    with SandboxClient(path) as client:
        while any(row["state"] != "paused" for row in client.sessions()):
            time.sleep(0.5)


def _cpu_share(pid: int) -> float:
    """Return the share of one core that a process uses over `IDLE_S`."""
    before = _cpu_s(pid)
    time.sleep(IDLE_S)
    return (_cpu_s(pid) - before) / IDLE_S


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
