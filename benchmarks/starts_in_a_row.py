"""Open a session without a pool, make one call and close it, 2,000 times in a row, and count the resources that remain.

If each sandbox leaks a resource, the counts after the first tenth of the rounds and after the last round differ.
"""

import contextlib
import time

from benchmarks.engine_peer import open_api
from benchmarks.kill_rounds import Rounds
from benchmarks.processes import RunningSandboxd, running_sandboxd
from benchmarks.report import Report, median
from benchmarks.sizes import size
from benchmarks.warm_call import sandbox_call
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.sandbox_client import SandboxClient

ROUNDS = size(2000, 20)
FIRST = ROUNDS // 10
MIB = 1024 * 1024


def run() -> Report:
    with running_sandboxd() as sandboxd, contextlib.closing(open_api()) as api:
        rounds = Rounds(sandboxd, api)
        first = [_use(rounds, sandboxd, number) for number in range(FIRST)]
        left_first = rounds.settle()
        before, paths_before = rounds.resources(), _count_paths(sandboxd)
        rest = [_use(rounds, sandboxd, number) for number in range(FIRST, ROUNDS)]
        leftovers = {**left_first, **rounds.settle()}
        after, paths_after = rounds.resources(), _count_paths(sandboxd)
    last = rest[-FIRST:]
    report = Report(
        "starts_in_a_row",
        notes=[
            f"{ROUNDS} sessions one after the other; grown: from {FIRST} to {ROUNDS} sessions",
            f"left: {leftovers or 0}",
        ],
    )
    label = "containers, control groups, mounts, loop devices, processes, records and folders left"
    report.add("left_number", sum(map(len, leftovers.values())), label, at_most=0)
    report.add("files_grown_number", after.files - before.files, "open files of sandboxd, grown", at_most=2)
    report.add("threads_grown_number", after.threads - before.threads, "threads of sandboxd, grown", at_most=2)
    report.add("paths_grown_number", paths_after - paths_before, "files and folders of its state, grown", at_most=2)
    report.add("sandboxd_grown_bytes", after.rss - before.rss, "sandboxd RSS, grown", at_most=2 * MIB)
    report.add("sandboxd_rss_bytes", after.rss, "sandboxd RSS at the end")
    report.add_ms("first", first, f"p50 of the first {FIRST}: open, one call, close")
    report.add_ms("last", last, f"p50 of the last {FIRST}")
    report.add("last_ratio", median(last) / median(first), "last / first", at_most=1.5)
    return report


def _use(rounds: Rounds, sandboxd: RunningSandboxd, number: int) -> float:
    """Return the duration of one session in seconds, without the time in which the benchmark looks for its sandbox."""
    with SandboxClient(sandboxd.socket) as client:
        name, started = f"bench:row-{number}", time.perf_counter()
        opened = client.describe_open(name, SessionSpec(ttl_s=600.0))
        sandbox_call(client, name)
        took = time.perf_counter() - started
        rounds.traces.learn(rounds.api, str(opened["sandbox"]["id"]))
        started = time.perf_counter()
        client.close(name)
        return took + time.perf_counter() - started


def _count_paths(sandboxd: RunningSandboxd) -> int:
    return sum(1 for _ in sandboxd.state.rglob("*"))
