"""Measure forks of a session: the wait of the caller, the first calls of many forks, the disk of unused ones."""

import contextlib
import itertools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.processes import RunningSandboxd, running_sandboxd
from benchmarks.report import Report, median
from benchmarks.sizes import size
from benchmarks.warm_call import REQUEST, sandbox_call
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import SandboxClient

ROUNDS = size(15, 2)
SMALL_MIB, LARGE_MIB = 10, size(1024, 20)
FORKS = size(16, 2)
UNUSED = size(100, 2)
BURSTS = size(3, 1)
_DISK_BYTES = 3 * 1024**3


def run() -> Report:
    with contextlib.ExitStack() as stack:
        settings = {
            "TOOLCREW_SANDBOX_WORKSPACE": "image",
            "TOOLCREW_SANDBOX_WORKSPACE_BYTES": str(_DISK_BYTES),
            "TOOLCREW_MAX_SANDBOXES": str(FORKS + 8),
        }
        sandboxd = stack.enter_context(running_sandboxd(settings))
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        if client.status()["start"] != "oci":
            raise SandboxUnavailable("this host cannot start sandboxes with an OCI runtime, so its forks copy")
        report = Report("forks", notes=[f"medians of {ROUNDS} forks of one, each after a call of the parent"])
        small_s = _fork_s(client, "small", SMALL_MIB)
        large_s = _fork_s(client, "large", LARGE_MIB)
        report.add("fork_small_ms", median(small_s) * 1000, f"fork at {SMALL_MIB} MiB", at_most=30.0)
        report.add("fork_large_ms", median(large_s) * 1000, f"fork at {LARGE_MIB} MiB")
        report.add(
            "fork_large_ratio", median(large_s) / median(small_s), "fork at the larger / smaller size", at_most=2.0
        )
        answers_ms = [_burst_s(sandboxd, client, f"burst{number}") * 1000 for number in range(BURSTS)]
        report.add("first_calls_ms", median(answers_ms), f"fork, and first calls of {FORKS} at once", at_most=1500.0)
        before = _used_bytes(sandboxd)
        client.fork("bench:small", [f"bench:unused{number}" for number in range(UNUSED)])
        each = (_used_bytes(sandboxd) - before) / UNUSED
        report.add("unused_bytes", each, f"disk of an unused fork, of {UNUSED} at once", at_most=1024.0**2)
        return report


def _fork_s(client: SandboxClient, session: str, mib: int) -> list[float]:
    """Return the seconds of each fork of a session whose files have `mib` MiB."""
    name, numbers = client.open("bench", session), itertools.count()
    script = f"head -c {mib}M /dev/urandom > file && sync".encode()
    done = client.call(name, {**REQUEST, "script_bytes": len(script), "timeout_s": 300.0}, script).done
    if done["exit_code"] != 0:
        raise RuntimeError(f"the files were not written: {done}")
    seconds = []
    for _ in range(ROUNDS):
        sandbox_call(client, name)
        child = f"{name}-{next(numbers)}"
        started = time.perf_counter()
        client.fork(name, [child])
        seconds.append(time.perf_counter() - started)
        client.close(child)
    return seconds


def _burst_s(sandboxd: RunningSandboxd, client: SandboxClient, prefix: str) -> float:
    """Return the seconds until each of many forks has answered its first call."""
    sandbox_call(client, "bench:small")
    children = [f"bench:{prefix}-{number}" for number in range(FORKS)]

    def first_call(child: str) -> None:
        with SandboxClient(sandboxd.socket) as own:
            sandbox_call(own, child)

    with ThreadPoolExecutor(FORKS) as threads:
        started = time.perf_counter()
        client.fork("bench:small", children)
        list(threads.map(first_call, children))
        took = time.perf_counter() - started
    for child in children:
        client.close(child)
    return took


def _used_bytes(sandboxd: RunningSandboxd) -> int:
    # The status of du says whether a file vanished meanwhile, such as a disk of a fork that was closed.
    shown = subprocess.run(
        ["du", "-s", "-B1", str(sandboxd.state)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return int(shown.stdout.split()[0])
