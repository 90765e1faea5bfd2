"""Containers for tests that inspect or attack the sandbox profile. The configuration is the real one; a shell
replaces the guest.
"""

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
import requests.exceptions
from docker import APIClient

from benchmarks.sandboxes import FOLDERS, find_own
from tests.support.stack.waiting import wait_until
from toolcrew.workers.sandboxd.cgroups import PARENT, Cgroups
from toolcrew.workers.sandboxd.runtime import bundle
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.hardening import SandboxLimits, SandboxSpec, build_container_config
from toolcrew.workers.sandboxd.runtime.oci import FOLDER, OciRuntime, find_obstacle, find_program
from toolcrew.workers.sandboxd.runtime.seccomp import load_seccomp_profile

IMAGE = os.environ.get("TOOLCREW_SANDBOX_IMAGE", "toolcrew-sandbox:dev")
RUNTIME = os.environ.get("TOOLCREW_SANDBOX_RUNTIME", "runc")
LABELS = {"toolcrew.test": "1"}
ANSWER_S = 90.0


@dataclass(frozen=True)
class Answer:
    """The exit status of a script in a box, with both output streams unchanged."""

    status: int
    output: str


def open_engine() -> APIClient:
    """Return a client of the local engine. Skips the test if the engine or the image is missing; fails the test
    instead if TOOLCREW_TEST_REQUIRE is set.
    """
    try:
        api = docker.from_env(timeout=60).api
        api.inspect_image(IMAGE)  # type: ignore[no-untyped-call]
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        missing = f"no Docker engine with the image {IMAGE}: {error}"
        if os.environ.get("TOOLCREW_TEST_REQUIRE"):
            pytest.fail(missing)
        pytest.skip(missing)
    return api


def build_config(api: APIClient, *, limits: SandboxLimits | None = None, image: str = IMAGE) -> dict[str, Any]:
    """Return the profile exactly as sandboxd requests it on this engine, with the label of a test."""
    spec = SandboxSpec(
        image=image,
        runtime=RUNTIME,
        limits=limits or SandboxLimits(),
        labels=LABELS,
        seccomp=load_seccomp_profile(),
        cgroup_version=int(api.info()["CgroupVersion"]),
    )
    return build_container_config(spec)


class Watched:
    """A running container as the host sees it: through the engine, /proc and the control groups."""

    def __init__(self, api: APIClient, container: str) -> None:
        self.api = api
        self.id = container
        self.pid = int(self.inspect()["State"]["Pid"])
        self._cgroup_version = int(api.info()["CgroupVersion"])
        # The file disappears with PID 1, but a test may read the directory later. So the path is read now.
        self._cgroups = _read_cgroups(self.pid)

    def inspect(self) -> dict[str, Any]:
        return dict(self.api.inspect_container(self.id))

    @property
    def root(self) -> Path:
        """Return the container's file tree as a path on the host."""
        return Path(f"/proc/{self.pid}/root")

    def status_of(self, pid: int | None = None) -> dict[str, str]:
        """Return `/proc/<pid>/status` as the host sees it. The default is PID 1 of the container."""
        lines = Path(f"/proc/{pid or self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def mounts(self) -> str:
        return Path(f"/proc/{self.pid}/mountinfo").read_text()

    def cgroup_file(self, controller: str, v1: str, v2: str) -> Path:
        """Return a control file of this container, under the name that the host's cgroup version uses."""
        if self._cgroup_version == 2:
            return Path("/sys/fs/cgroup") / self._cgroups[""].lstrip("/") / v2
        return Path("/sys/fs/cgroup") / controller / self._cgroups[controller].lstrip("/") / v1

    def processes(self) -> list[int]:
        """Return the host pid of every process of the container."""
        return [int(pid) for pid in self.cgroup_file("pids", "cgroup.procs", "cgroup.procs").read_text().split()]

    def oom_kills(self) -> int:
        return self._counter(self.cgroup_file("memory", "memory.oom_control", "memory.events"), "oom_kill")

    def pids_refused(self) -> int:
        """Return how often the process limit rejected a new process."""
        return self._counter(self.cgroup_file("pids", "pids.events", "pids.events"), "max")

    def wait_until_removed(self, timeout_s: float = ANSWER_S) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            self.api.wait(self.id, timeout=int(timeout_s), condition="removed")

    def labels(self) -> dict[str, str]:
        return dict(self.inspect()["Config"]["Labels"])

    def described(self) -> str:
        """Return everything that users of the engine can read about the container."""
        return json.dumps(self.inspect())

    def is_frozen(self) -> bool:
        return bool(self.inspect()["State"]["Paused"])

    def host_id(self, inside: int) -> int:
        """Return the user id on the host of an id inside."""
        first, outside, count = map(int, Path(f"/proc/{self.pid}/uid_map").read_text().splitlines()[0].split())
        assert first <= inside < first + count
        return outside + inside - first

    def changed_files(self) -> set[str]:
        """Return the files that differ from the image, except the mount points that the engine creates."""
        engine_made = {"/dev", "/etc", "/proc", "/sys", "/run", "/tmp", "/workspace", "/output"}
        return {change["Path"] for change in self.api.diff(self.id) or []} - engine_made

    def host_folder(self) -> Path:
        """Return the folder on the host with what is written about the container there."""
        return Path(self.api.info()["DockerRootDir"]) / "containers" / self.id

    def end(self) -> None:
        """Remove the container from outside."""
        self.api.remove_container(self.id, force=True)

    @staticmethod
    def _counter(path: Path, name: str) -> int:
        return int(dict(line.split() for line in path.read_text().splitlines())[name])


def remove_oci(sandbox: str) -> None:
    """Remove what is left of a sandbox that a killed sandboxd had started."""
    if (FOLDERS / sandbox).exists():
        groups = Cgroups()
        groups.kill(sandbox, ANSWER_S)
        groups.remove(sandbox, ANSWER_S)
        shutil.rmtree(FOLDER / "state" / sandbox, ignore_errors=True)
        shutil.rmtree(FOLDERS / sandbox)


class OciWatched(Watched):
    """A running sandbox that sandboxd started without the engine, found by its control group."""

    def __init__(self, sandbox: str) -> None:
        self.id = sandbox
        self._cgroup_version = Cgroups().version
        self._cgroups = dict.fromkeys(("", "pids", "memory", "cpu", "cpuacct", "freezer"), f"/{PARENT}/{sandbox}")
        self.pid = int((FOLDERS / sandbox / "pid").read_text())

    def wait_until_removed(self, timeout_s: float = ANSWER_S) -> None:
        wait_until(lambda: not self.processes(), timeout_s, lambda: f"{self.id} still has {self.processes()}")

    def processes(self) -> list[int]:
        try:
            return super().processes()
        except FileNotFoundError:
            return []

    def labels(self) -> dict[str, str]:
        return dict(json.loads((self.host_folder() / "labels.json").read_text())["labels"])

    def described(self) -> str:
        return "".join((self.host_folder() / name).read_text() for name in ("labels.json", "config.json"))

    def host_folder(self) -> Path:
        return FOLDERS / self.id

    def changed_files(self) -> set[str]:
        """Return the files that differ from the image: there are none without a folder for changes."""
        root = next(line for line in self.mounts().splitlines() if line.split(" ")[4] == "/")
        return set() if "upperdir" not in root and ",ro" in f",{root.split(' ')[5]}" else {"/"}

    def is_frozen(self) -> bool:
        state = self.cgroup_file("freezer", "freezer.state", "cgroup.freeze").read_text().strip()
        return state in ("FROZEN", "1")

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def watch(api: APIClient, short: str) -> Watched:
    """Return the host's view of a running sandbox. `short`: the beginning of its id."""
    own = find_own(short)
    if own is not None:
        return OciWatched(own)
    return Watched(api, str(api.inspect_container(short)["Id"]))


class Shell:
    """A shell that reads commands from the attached stdin. `_receive` returns the next part of its output."""

    _channel: socket.socket

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._output = bytearray()

    def run(self, script: str, timeout_s: float = ANSWER_S) -> Answer:
        """Run the lines of `script` in a subshell with an empty stdin, and wait for the end. Fails the test after
        `timeout_s` seconds.
        """
        mark = secrets.token_hex(8)
        self.feed(f"(\n{script}\n) </dev/null 2>&1\nprintf '\\n%s %s\\n' {mark} $?\n")
        output = self.read_until(f"\n{mark} ", timeout_s)
        status = self.read_until("\n", timeout_s)
        return Answer(int(status), output)

    def feed(self, text: str) -> None:
        """Send input to the shell without waiting."""
        self._channel.sendall(text.encode())

    def close_stdin(self) -> None:
        self._channel.shutdown(socket.SHUT_WR)

    def read_until(self, mark: str, timeout_s: float = ANSWER_S) -> str:
        """Return the output before `mark`. Fails the test at the deadline, or when the container ends."""
        deadline = time.monotonic() + timeout_s
        wanted = mark.encode()
        while (at := self._output.find(wanted)) < 0:
            self._output += self._receive(deadline)
        text = bytes(self._output[:at])
        del self._output[: at + len(wanted)]
        return text.decode(errors="replace")

    def _receive(self, deadline: float) -> bytes:
        return self._receive_some(65_536, deadline)

    def _receive_some(self, most: int, deadline: float) -> bytes:
        ready, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))
        part = self._channel.recv(most) if ready else None
        if not part:
            reason = "did not answer in time" if part is None else "ended"
            pytest.fail(f"the container {reason}; output so far: {bytes(self._output[-2000:])!r}")
        return part


class Box(Shell, Watched):
    """A running container whose PID 1 is a shell. `open_box` creates and removes the box."""

    def __init__(self, api: APIClient, container: str, channel: socket.socket) -> None:
        Watched.__init__(self, api, container)
        Shell.__init__(self, channel)

    def _receive(self, deadline: float) -> bytes:
        """Return the next part of the multiplexed stream of the engine."""
        header = self._receive_exactly(8, deadline)
        return self._receive_exactly(int.from_bytes(header[4:], "big"), deadline)

    def _receive_exactly(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            parts += self._receive_some(count - len(parts), deadline)
        return bytes(parts)


class OciBox(Shell, OciWatched):
    """A box that an OCI runtime started. `open_oci_box` creates and removes the box."""

    def __init__(self, sandbox: str, channel: socket.socket) -> None:
        OciWatched.__init__(self, sandbox)
        Shell.__init__(self, channel)


def _read_cgroups(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def create(api: APIClient, config: Mapping[str, Any]) -> dict[str, Any]:
    """Create a container from the raw configuration and return the engine's response. The caller removes the
    container.
    """
    return dict(api.create_container_from_config(dict(config)))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def open_container(api: APIClient, config: Mapping[str, Any]) -> Iterator[str]:
    """Create a container and remove it on exit, even after an error."""
    container = str(create(api, config)["Id"])
    try:
        yield container
    finally:
        with contextlib.suppress(docker.errors.NotFound):
            try:
                api.remove_container(container, force=True, v=True)
            except docker.errors.APIError as error:
                if error.status_code != 409:  # 409: the engine is already removing the container
                    raise
            api.wait(container, timeout=60, condition="removed")


@contextlib.contextmanager
def open_box(
    api: APIClient, *, limits: SandboxLimits | None = None, changes: Mapping[str, Any] | None = None
) -> Iterator[Box]:
    """Run a box under the profile. `changes` replaces entries of HostConfig, to show the effect of one entry."""
    config = build_config(api, limits=limits)
    config |= {"Entrypoint": ["/bin/sh"], "HostConfig": {**config["HostConfig"], **(changes or {})}}
    with open_container(api, config) as container:
        attached = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        with socket.socket(fileno=os.dup(attached.fileno())) as channel:
            attached.close()
            api.start(container)
            yield Box(api, container, channel)


@contextlib.contextmanager
def open_oci_box(*, limits: SandboxLimits | None = None) -> Iterator[OciBox]:
    """Run a box that sandboxd's own runtime starts, under its profile."""
    name = f"toolcrew-box-{secrets.token_hex(8)}"
    with closing(Engine()) as engine:
        runtime, spec = asyncio.run(_prepare_oci(engine, limits or SandboxLimits()))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(bundle, "guest_command", lambda _: ["/bin/sh"])
            started = asyncio.run(runtime.start(spec, name))
        started.sock.setblocking(True)
        try:
            with started.sock as channel:
                yield OciBox(started.id, channel)
        finally:
            assert started.stderr is not None
            os.close(started.stderr)
            asyncio.run(_end_oci(runtime, name))


async def _prepare_oci(engine: Engine, limits: SandboxLimits) -> tuple[OciRuntime, SandboxSpec]:
    facts = await engine.facts()
    program = find_program()
    assert find_obstacle(facts) is None
    assert program is not None
    spec = SandboxSpec(
        image=IMAGE,
        runtime=RUNTIME,
        limits=limits,
        labels=LABELS,
        seccomp=load_seccomp_profile(),
        cgroup_version=facts.cgroup_version,
        image_facts=await engine.find_image(IMAGE),
    )
    return OciRuntime(engine, program, facts), spec


async def _end_oci(runtime: OciRuntime, name: str) -> None:
    await runtime.remove(name)
    await runtime.close()


def python(source: str) -> str:
    return f"python3 - <<'END'\n{source}\nEND"


def assert_still_works(box: Box) -> None:
    """Fail unless a new program starts and the workspace can be listed. An attack may damage only its own call."""
    answer = box.run("ls /workspace >/dev/null && python3 -c 'print(6 * 7)'")

    assert answer.status == 0, answer.output
    assert answer.output.split()[-1] == "42"
