"""Start sandboxes, end them in every possible way, and list the resources that remain on the host."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import docker

from benchmarks.memory import memory_of_process
from benchmarks.processes import RunningSandboxd
from benchmarks.sandboxes import find_own, list_containers, list_folders, list_groups, pid_of
from benchmarks.warm_call import sandbox_call
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd.disks.image import TEMPLATES
from toolcrew.workers.sandboxd.disks.mounts import list_mounts
from toolcrew.workers.sandboxd.frames import MAX_DOWN, encode_frame
from toolcrew.workers.sandboxd.runtime.oci import FOLDER

AT_ONCE = 4
WAYS = ("close", "timeout", "kill", "abandon", "leave")
GONE_S = 60.0
"""Longest time after the last round in which abandoned resources may exist, in seconds. Session expiry runs every 5
s.
"""
SHORT_TTL_S = 0.5
STATES = FOLDER / "state"
"""Folder with the records of the OCI runtime, by sandbox."""
_SLEEP = {"op": "exec", "argv": ["sleep", "60"], "timeout_s": 0.2}


@dataclass
class Traces:
    """Traces of observed containers that could be left on a host: container ids, and mount points that the engine made
    for them.
    """

    ids: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, api: docker.APIClient, short: str) -> int:
        """Record a running container by its id. Return the host's PID of the container's PID 1."""
        own = find_own(short)
        if own is not None:
            with self.lock:
                self.ids.add(own)
            return pid_of(api, own)
        found = api.inspect_container(short)
        graph = found["GraphDriver"]["Data"] or {}
        with self.lock:
            self.ids.add(str(found["Id"]))
            self.mounts |= {
                str(place) for place in (graph.get("MergedDir"), found["NetworkSettings"]["SandboxKey"]) if place
            }
        return int(found["State"]["Pid"])

    def left(self, sandboxd: RunningSandboxd, api: docker.APIClient) -> dict[str, list[str]]:
        """Return the resources that still exist, by kind. Kinds without a resource are omitted."""
        label = f"toolcrew.sandboxd={sandboxd.name}"
        found = {
            "containers": [*list_containers(api, label), *list_folders(label)],
            "runtime records": [name for name in self.ids if (STATES / name).exists()],
            "control groups": [str(group) for group in list_groups() if group.name in self.ids],
            "mounts": [
                point
                for point in map(str, list_mounts())
                if point in self.mounts or self._is_ours(point, sandboxd.state)
            ],
            "loop devices": [file for file in loop_files() if file.startswith(f"{sandboxd.state}/")],
            "processes": [line for line in _process_lines() if any(name in line for name in self.ids)],
            "records": [
                path.name for path in sandboxd.state.glob("*/*") if path.parent.name in ("containers", "sessions")
            ],
            "workspaces": [path.name for path in sandboxd.state.glob("workspaces/*") if path.name != TEMPLATES],
            "parcels": [str(path) for path in sandboxd.state.glob("parcels/*/*")],
        }
        return {kind: names for kind, names in found.items() if names}

    def _is_ours(self, point: str, state: Path) -> bool:
        return point.startswith(f"{state}/") or any(name in point for name in self.ids)


@dataclass(frozen=True)
class SandboxdResources:
    """Number of open files, number of threads, and resident bytes of sandboxd."""

    files: int
    threads: int
    rss: int


class Rounds:
    """Starts sandboxes and ends them. `done`: the number of sandboxes by the way in which they ended."""

    def __init__(self, sandboxd: RunningSandboxd, api: docker.APIClient) -> None:
        self.traces = Traces()
        self.done: Counter[str] = Counter()
        self._sandboxd = sandboxd
        self.api = api

    def play(self, numbers: Sequence[int], at_once: int = AT_ONCE) -> None:
        """Run one round per number, and use each way of ending in turn. Re-raises the error of a round, for example
        when sandboxd reports the wrong reason for the end of a sandbox.
        """
        with ThreadPoolExecutor(at_once) as pool:
            for way in pool.map(self._play, numbers):
                self.done[way] += 1

    def settle(self, within_s: float = GONE_S) -> dict[str, list[str]]:
        """Wait until no resource remains. Return the resources that remain at the deadline."""
        until = time.monotonic() + within_s
        while (leftovers := self.traces.left(self._sandboxd, self.api)) and time.monotonic() < until:
            time.sleep(0.2)
        return leftovers

    def resources(self) -> SandboxdResources:
        """Return the current values. Call `settle` first."""
        folder = Path(f"/proc/{self._sandboxd.pid}")
        return SandboxdResources(
            len(os.listdir(folder / "fd")),
            len(os.listdir(folder / "task")),
            memory_of_process(self._sandboxd.pid)["rss"],
        )

    def _play(self, number: int) -> str:
        way = WAYS[number % len(WAYS)]
        if way == "leave":
            self._leave_while_it_opens(number)
            return way
        with SandboxClient(self._sandboxd.socket) as client:
            short_lived = way == "abandon"
            name = f"bench:{way}-{number}"
            opened = client.describe_open(name, SessionSpec(ttl_s=SHORT_TTL_S if short_lived else 600.0))
            pid = self.traces.learn(self.api, str(opened["sandbox"]["id"]))
            sandbox_call(client, name)
            if not short_lived:
                self._end(client, name, way, pid)
        return way

    def _end(self, client: SandboxClient, name: str, way: str, pid: int) -> None:
        if way == "timeout":
            os.kill(pid, signal.SIGSTOP)  # the guest cannot answer: only the container's removal ends the call
            done = client.call(name, _SLEEP).done
            if (done.get("kill") or {}).get("method") != "container":
                raise RuntimeError(f"a call of a stopped guest ended with {done}")
        elif way == "kill":
            os.kill(pid, signal.SIGKILL)
        client.close(name)

    def _leave_while_it_opens(self, number: int) -> None:
        header = {"verb": "open", "sandbox": f"bench:leave-{number}", "image": None, "ttl_s": SHORT_TTL_S}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.connect(str(self._sandboxd.socket))
            asking.sendall(encode_frame(header, b"", max_total=MAX_DOWN))


def loop_files() -> list[str]:
    """Return the files behind the host's loop devices."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # the device can be detached at any time
            found.append(path.read_text().strip())
    return found


def _process_lines() -> Iterator[str]:
    """Yield the command line and the control groups of each process of the host."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield line + (folder / "cgroup").read_text(errors="replace")
