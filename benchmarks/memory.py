"""Measure the memory of an idle sandbox, from its cgroup, and of sandboxd without sandboxes and with many."""

import contextlib
from pathlib import Path

from benchmarks.engine_peer import memory_of, open_api
from benchmarks.processes import running_sandboxd
from benchmarks.report import Report, median
from benchmarks.sandboxes import pid_of
from benchmarks.sizes import size
from benchmarks.warm_call import sandbox_call
from toolcrew.contract.session_spec import EMPTY_SESSION
from toolcrew.workers.sandbox_client import SandboxClient

SANDBOXES = size(50, 2)
MIB = 1024 * 1024


def memory_of_process(pid: int | str) -> dict[str, int]:
    """Return the resident bytes of a process and its proportional share of them, as the kernel counts both."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in ("Rss", "Pss")}
    return {"rss": fields["Rss"], "pss": fields["Pss"]}


def run(sandboxes: int = SANDBOXES) -> Report:
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        api = open_api()
        stack.callback(api.close)
        before = memory_of_process(sandboxd.pid)
        pids = []
        for number in range(sandboxes):
            name = client.open("bench", f"memory-{number}")
            container = str(client.describe_open(name, EMPTY_SESSION)["sandbox"]["id"])
            pids.append(pid_of(api, container))
        fresh = [memory_of(pid) for pid in pids]
        for number in range(sandboxes):
            sandbox_call(client, f"bench:memory-{number}")
        used = [memory_of(pid) for pid in pids]
        after = memory_of_process(sandboxd.pid)
    report = Report(
        "memory",
        notes=[f"medians of {sandboxes} sandboxes at once; usage is the memory cgroup's, kernel memory of it included"],
    )
    own = [entry["usage"] - entry["inactive_file"] for entry in fresh]
    report.add("sandbox_bytes", median(own), "idle sandbox: usage - inactive file cache", at_most=16 * MIB)
    report.add("sandbox_raw_bytes", median([entry["usage"] for entry in fresh]), "idle sandbox: raw usage")
    own = [entry["usage"] - entry["inactive_file"] for entry in used]
    report.add("sandbox_used_bytes", median(own), "idle after one call: usage - inactive file cache", at_most=16 * MIB)
    report.add("sandbox_used_raw_bytes", median([entry["usage"] for entry in used]), "idle after one call: raw usage")
    report.add("sandboxd_empty_rss_bytes", before["rss"], "sandboxd RSS with 0 sandboxes")
    report.add("sandboxd_rss_bytes", after["rss"], f"sandboxd RSS with {sandboxes} sandboxes", at_most=80 * MIB)
    report.add("sandboxd_pss_bytes", after["pss"], f"sandboxd PSS with {sandboxes} sandboxes")
    report.add("sandboxd_each_bytes", (after["rss"] - before["rss"]) / sandboxes, "sandboxd RSS a sandbox more")
    return report
