"""Measure one warm `bash -c true`: on the host, with `docker exec`, through the guest alone, and through the whole of
sandboxd.

An empty round trip is measured as well.
"""

import asyncio
import contextlib
import os
import subprocess

from benchmarks.engine_peer import DirectGuest, exec_peer, open_api, raw_container, sandbox_config
from benchmarks.processes import guest_on_pipes, running_sandboxd
from benchmarks.report import Case, Report, median, timed
from benchmarks.report import interleave as run_interleaved
from benchmarks.sizes import size
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES

ROUNDS = size(300, 2)
WARM_UP = size(20, 1)
EXEC_SETTLE_S = 0.02
"""Pause after an exec, in seconds. The engine works on an exec a little longer than its client waits."""
SCRIPT = b"true"
REQUEST = {
    "op": "exec",
    "argv": None,
    "script_bytes": len(SCRIPT),
    "cwd": None,
    "env": {},
    "state": "keep",
    "timeout_s": 30.0,
    "capture": {"stdout": MAX_OUTPUT_BYTES, "stderr": MAX_OUTPUT_BYTES, "merged": MAX_OUTPUT_BYTES},
    "spill": {"bytes": MAX_OUTPUT_BYTES, "lines": MAX_LINES},
}
"""Request that workers/tools/shell.py sends for bash_tool."""
_BASH = ["/bin/bash", "--noprofile", "--norc", "-c", "true"]


def host_spawn() -> None:
    """Run the program directly on the host in the cheapest way: posix_spawn and wait, without a pipe."""
    pid = os.posix_spawn(_BASH[0], _BASH, os.environ)
    os.waitpid(pid, 0)


def host_subprocess() -> None:
    """Run a program as plain Python does: subprocess with two pipes."""
    subprocess.run(_BASH, stdin=subprocess.DEVNULL, capture_output=True, check=True)


def sandbox_call(client: SandboxClient, name: str) -> None:
    """Make one warm call through sandboxd, as bash_tool does."""
    done = client.call(name, REQUEST, SCRIPT, call_id="bench").done
    if done["exit_code"] != 0:
        raise RuntimeError(f"the call did not succeed: {done}")


def _run_guest(guest: DirectGuest) -> None:
    done = guest.call(REQUEST, SCRIPT)
    if done.get("exit_code") != 0:
        raise RuntimeError(f"the call did not succeed: {done}")


def run(rounds: int = ROUNDS) -> Report:
    config = sandbox_config()
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        name = client.open("bench", "warm")
        api = open_api()
        stack.callback(api.close)
        container, sock = stack.enter_context(raw_container(api, config))
        attached = DirectGuest(sock.recv, sock.sendall, multiplexed=True)
        cases: dict[str, Case] = {
            "host_spawn": timed(host_spawn),
            "host_subprocess": timed(host_subprocess),
            "ours": timed(lambda: sandbox_call(client, name)),
            "ping": timed(lambda: client.call(name, {"op": "ping"})),
            "attached_guest": timed(lambda: _run_guest(attached)),
        }
        if os.geteuid() == 0:
            process = stack.enter_context(guest_on_pipes())
            assert process.stdin is not None
            assert process.stdout is not None
            out, into = process.stdout.fileno(), process.stdin.fileno()
            piped = DirectGuest(lambda size: os.read(out, size), lambda data: os.write(into, data), multiplexed=False)
            cases["piped_guest"] = timed(lambda: _run_guest(piped))
        cases["docker_exec"] = timed(exec_peer(api, container), settle_s=EXEC_SETTLE_S)
        seconds = asyncio.run(run_interleaved(cases, rounds, WARM_UP))
    return _report(seconds, rounds)


def _report(seconds: dict[str, list[float]], rounds: int) -> Report:
    report = Report("warm_call", notes=[f"medians of {rounds} interleaved rounds after {WARM_UP} to warm up"])
    report.add_ms("floor_host_spawn", seconds["host_spawn"], "floor: host bash -c true, posix_spawn, no pipes")
    report.add_ms(
        "floor_host_subprocess", seconds["host_subprocess"], "floor: host bash -c true, subprocess.run with its output"
    )
    report.add_ms("peer_docker_exec", seconds["docker_exec"], "peer: docker exec of it in a container like it")
    report.add_ms("ours", seconds["ours"], "ours: SandboxClient.call through sandboxd")
    report.add_ms("ping", seconds["ping"], "ours: empty round trip through sandboxd (ping)")
    report.add_ms("attached_guest", seconds["attached_guest"], "split: guest by the engine's attach, no sandboxd")
    if "piped_guest" in seconds:
        report.add_ms("piped_guest", seconds["piped_guest"], "split: guest on plain pipes, no container")
    middle = {name: median(values) for name, values in seconds.items()}
    report.add("docker_exec_ratio", middle["docker_exec"] / middle["ours"], "docker exec / ours", at_least=12.0)
    report.add("host_ratio", middle["ours"] / middle["host_subprocess"], "ours / host with its output", at_most=2.5)
    report.add("host_spawn_ratio", middle["ours"] / middle["host_spawn"], "ours / host without pipes")
    return report
