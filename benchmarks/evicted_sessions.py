"""Measure eviction with 500 sessions in 50 containers.

Each session becomes idle, loses its container to another session, and resumes with its files and its shell.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.engine_peer import open_api
from benchmarks.memory import memory_of_process
from benchmarks.processes import RunningSandboxd, running_sandboxd
from benchmarks.report import Report, median, percentile
from benchmarks.sandboxes import list_containers
from benchmarks.sizes import size
from benchmarks.warm_call import REQUEST
from toolcrew.workers.sandbox_client import SandboxClient

SESSIONS = size(500, 3)
CONTAINERS = size(50, 2)
AT_ONCE = 2
SAMPLE_S = 0.2


@dataclass
class Count:
    """Highest number of containers that existed at once, and the number of samples."""

    most: int = 0
    samples: int = 0
    ending: threading.Event = field(default_factory=threading.Event)


def run(sessions: int = SESSIONS, containers: int = CONTAINERS, kind: str = "auto") -> Report:
    settings = {
        "TOOLCREW_MAX_SANDBOXES": str(containers),
        "TOOLCREW_MAX_SESSIONS": str(sessions + 100),
        "TOOLCREW_SANDBOX_WORKSPACE": kind,
    }
    with running_sandboxd(settings) as sandboxd, _counted(sandboxd) as count, ThreadPoolExecutor(AT_ONCE) as workers:
        with SandboxClient(sandboxd.socket) as client:
            kind = str(client.status()["workspaces"]["kind"])
        before = memory_of_process(sandboxd.pid)["rss"]
        opened = list(workers.map(partial(_leave, sandboxd.socket), range(sessions)))
        resumed = list(workers.map(partial(_resume, sandboxd.socket), range(sessions)))
        after = memory_of_process(sandboxd.pid)["rss"]
    if count.most > containers:
        raise RuntimeError(f"{count.most} containers at a time, and {containers} were allowed")
    report = Report(
        "evicted_sessions",
        notes=[
            f"{sessions} sessions in at most {containers} containers, {kind} workspaces, {AT_ONCE} calls at a time; "
            f"every session had its file and its exported variable; containers counted {count.samples} times"
        ],
    )
    report.add_ms("opened", opened, "p50 of an open with its first call; most take another session's place")
    report.add_ms("resumed", resumed, "p50 of the call that brings a session back in another's place")
    report.add("resumed_p95_ms", percentile(resumed, 0.95) * 1000, "p95 of it")
    report.add("resume_ratio", median(resumed) / median(opened), "resumed / opened")
    report.add("sandboxd_rss_bytes", after, f"sandboxd RSS with {sessions} sessions")
    report.add("sandboxd_each_bytes", (after - before) / sessions, "sandboxd RSS a session more")
    report.add("containers_ratio", count.most / containers, "the most containers at a time / allowed", at_most=1.0)
    return report


def _leave(path: Path, number: int) -> float:
    """Make the first call of a session, which writes what the second call reads. Return the seconds of opening and
    calling.
    """
    started = time.perf_counter()
    with SandboxClient(path) as client:
        name = client.open("bench", f"evicted-{number}")
        _bash(client, name, f"echo file-{number} > kept.txt; export kept=variable-{number}")
    return time.perf_counter() - started


def _resume(path: Path, number: int) -> float:
    """Make the second call of a session. Raises RuntimeError when the file or the shell state is missing."""
    started = time.perf_counter()
    with SandboxClient(path) as client:
        found = _bash(client, f"bench:evicted-{number}", 'cat kept.txt; echo "$kept"')
    took = time.perf_counter() - started
    if found.split() != [f"file-{number}", f"variable-{number}"]:
        raise RuntimeError(f"session {number} came back with {found!r}")
    return took


def _bash(client: SandboxClient, name: str, script: str) -> str:
    body = script.encode()
    answer = client.call(name, {**REQUEST, "script_bytes": len(body)}, body)
    if answer.done["exit_code"] != 0:
        raise RuntimeError(f"the call did not succeed: {answer.done}")
    return answer.streams.get("merged", b"").decode()


@contextlib.contextmanager
def _counted(sandboxd: RunningSandboxd) -> Iterator[Count]:
    """Count the containers in any state, as the engine lists them, while the block runs."""
    count, api = Count(), open_api()

    def count_containers() -> None:
        while not count.ending.wait(SAMPLE_S):
            listed = list_containers(api, f"toolcrew.sandboxd={sandboxd.name}")
            count.most = max(count.most, len(listed))
            count.samples += 1

    thread = threading.Thread(target=count_containers, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        count.ending.set()
        thread.join()
        api.close()
