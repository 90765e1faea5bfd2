"""Measure a command that prints 100 MB: time compared with the command alone, and memory of guest, sandboxd and
worker.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine_peer import open_api
from benchmarks.processes import running_sandboxd
from benchmarks.report import Report, median
from benchmarks.sandboxes import pid_of
from benchmarks.sizes import size
from toolcrew.contract.session_spec import EMPTY_SESSION
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES

ROUNDS = size(5, 1)
MIB = 1024 * 1024
SAMPLE_S = 0.005
LAST_LINE = size(11_900_000, 119_000)
"""Last number for `seq`: all numbers up to this one are 100 MB of output."""
COMMAND = f"seq {LAST_LINE}"
REQUEST = {
    "op": "exec",
    "argv": None,
    "cwd": None,
    "env": {},
    "state": "keep",
    "timeout_s": 120.0,
    "capture": {"stdout": MAX_OUTPUT_BYTES, "stderr": MAX_OUTPUT_BYTES, "merged": MAX_OUTPUT_BYTES},
    "spill": {"bytes": MAX_OUTPUT_BYTES, "lines": MAX_LINES},
}
"""Request that workers/tools/shell.py sends for bash_tool."""


def read_resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes, without file pages. Return 0 if the process has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
    return 0


def read_guest(pid: int) -> int:
    """Return the memory of the guest: PID 1 and its supervisors, without the programs that they run."""
    with contextlib.suppress(OSError):
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return read_resident(pid) + sum(map(read_resident, children))
    return 0


class Peaks:
    """Highest memory of each process, sampled while a block runs."""

    def __init__(self, guest: int, sandboxd: int) -> None:
        self._guest = guest
        self._sandboxd = sandboxd
        self.guest = self.sandboxd = 0
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sampler = threading.Thread(target=self._sample)
        sampler.start()
        try:
            yield
        finally:
            self._is_over.set()
            sampler.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.guest = max(self.guest, read_guest(self._guest))
            self.sandboxd = max(self.sandboxd, read_resident(self._sandboxd))


def _call(client: SandboxClient, name: str, script: str) -> float:
    """Make one call and return its duration in seconds."""
    raw = script.encode()
    started = time.perf_counter()
    done = client.call(name, {**REQUEST, "script_bytes": len(raw)}, raw, call_id="bench").done
    if done.get("exit_code") != 0:
        raise RuntimeError(f"the call did not succeed: {done}")
    return time.perf_counter() - started


def run(rounds: int = ROUNDS) -> Report:
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        name = client.open("bench", "output")
        api = open_api()
        stack.callback(api.close)
        container = str(client.describe_open(name, EMPTY_SESSION)["sandbox"]["id"])
        guest = pid_of(api, container)
        _call(client, name, "seq 10000")
        before, worker_before = Peaks(guest, sandboxd.pid), read_resident(_own_pid())
        with before.watching():
            _call(client, name, "seq 10000; sleep 0.2")
        peaks = Peaks(guest, sandboxd.pid)
        own, unread, ours = [], [], []
        with peaks.watching():
            for _ in range(rounds):
                own.append(_call(client, name, f"{COMMAND} | cat > /dev/null"))
                unread.append(_call(client, name, f"{COMMAND} > /dev/null"))
                ours.append(_call(client, name, COMMAND))
        worker = read_resident(_own_pid()) - worker_before
    report = Report(
        "bash_output", notes=[f"medians of {rounds} interleaved rounds of `{COMMAND}`, 100 MB, after one to warm up"]
    )
    report.add("own_ms", median(own) * 1000, "floor: the command into a pipe that cat empties, through sandboxd")
    report.add(
        "unread_ms", median(unread) * 1000, "floor: the command with its output to /dev/null, which takes nothing"
    )
    report.add("ours_ms", median(ours) * 1000, "ours: with its output captured, and 64 MiB of it in a file")
    report.add("time_ratio", median(ours) / median(own), "ours / the command into a pipe", at_most=1.5)
    report.add("guest_bytes", peaks.guest - before.guest, "growth of the guest, supervisor included", at_most=8 * MIB)
    report.add("sandboxd_bytes", peaks.sandboxd - before.sandboxd, "growth of sandboxd", at_most=8 * MIB)
    report.add("worker_bytes", worker, "growth of the worker's side", at_most=8 * MIB)
    return report


def _own_pid() -> int:
    return int(Path("/proc/self").readlink().name)
