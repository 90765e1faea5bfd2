"""Real stacks for tests. Tests start a stack as users do, and inspect the stack from outside through engine, /proc
and Redis. Everything is removed at the end, even after an error.
"""

import asyncio
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import redis
from docker import APIClient

from benchmarks.processes import unmount_below
from benchmarks.sandboxes import list_containers, list_folders, list_pins
from tests.support.sandboxd.containers import open_engine, remove_oci, watch
from tests.support.stack.processes import read_proc
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.operations.local_stack import StackInfo, read_stack
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config

if TYPE_CHECKING:
    from toolcrew.orchestrator.sessions.session import Session

ROOT = Path(__file__).parents[3]
TOOLCREW = str(Path(sys.executable).parent / "toolcrew")
UP_S = 90.0
"""Limit for a start or a restart of a stack on a busy machine, in seconds. An idle machine needs 3 s."""
_KEPT = ("TOOLCREW_SANDBOX_IMAGE", "TOOLCREW_SANDBOX_RUNTIME", "TOOLCREW_TEST_REQUIRE")


def missing(reason: str) -> NoReturn:
    """Skip the test with the reason. Where everything must be present (TOOLCREW_TEST_REQUIRE), fail the test instead."""
    if os.environ.get("TOOLCREW_TEST_REQUIRE"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def require_engine() -> APIClient:
    """Return a client of the local engine. The engine has the sandbox image."""
    try:
        return open_engine()
    except pytest.skip.Exception as skipped:
        missing(str(skipped.msg))


def require_redis_server() -> str:
    """Return the path of redis-server."""
    try:
        return find_redis_server()
    except ConfigError as error:
        missing(str(error))


# --- Processes and containers
# -----------------------------------------------------------------------------------------


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def is_alive(pid: int) -> bool:
    """Return whether the process runs or sleeps. A zombie is not alive."""
    state = read_proc(pid, "stat").rpartition(b")")[2].split()
    return bool(state) and state[0] != b"Z"


def children_of(pid: int) -> list[int]:
    """Return the living children, oldest first."""
    # One read for each process: it may end between two.
    stats = {child: read_proc(child, "stat").rpartition(b")")[2].split() for child in all_pids()}
    found = [child for child, stat in stats.items() if stat and stat[0] != b"Z" and int(stat[1]) == pid]
    return sorted(found)


def commands_in(container: str) -> dict[int, str]:
    """Return host pid to command line of every process of a container. The control groups are read, not the engine."""
    wanted = container.encode()
    found = {
        pid: read_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        for pid in _pids_in_cgroup(wanted)
    }
    return {pid: command for pid, command in found.items() if is_alive(pid)}


def _pids_in_cgroup(container: bytes) -> list[int]:
    return [pid for pid in all_pids() if container in read_proc(pid, "cgroup")]


class Footprint:
    """Everything that processes started with `environment()` leave behind: processes, containers, volumes and
    folders.

    Processes are found by a mark in their environment, or by their working folder, because redis-server overwrites
    its environment. Containers and volumes are found by the name of a sandboxd with the mark. Folders are found by a
    TMPDIR of the footprint.
    """

    def __init__(self, api: APIClient | None = None) -> None:
        self._api = api
        self._mark = f"TOOLCREW_TEST_MARK={secrets.token_hex(8)}"
        self._names: set[str] = set()
        self.folder = Path(tempfile.mkdtemp(prefix="tct-", dir="/tmp"))  # the path of a socket is limited

    def environment(self, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return this process's environment without settings of toolcrew or of a model."""
        plain = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT or not name.startswith(("TOOLCREW_", "OPENAI_"))
        }
        name, value = self._mark.split("=")
        # Most stacks serve one or two sessions, so only tests of the warm pool turn the pool on.
        without = {"TOOLCREW_POOL_SIZE": "0"}
        own = {"TMPDIR": str(self.folder), "XDG_STATE_HOME": str(self.folder / "state"), "COLUMNS": "200"}
        return {**plain, name: value, **own, **without, **(overrides or {})}

    def processes(self) -> dict[int, str]:
        """Return pid to command line of the living processes."""
        found = {}
        for pid in all_pids():
            environ = read_proc(pid, "environ")
            if (
                pid != os.getpid()
                and (self._mark.encode() in environ.split(b"\0") or self._lives_in_folder(pid))
                and is_alive(pid)
            ):
                self._learn_name(environ)
                found[pid] = read_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def find_process(self, text: str) -> list[int]:
        """Return the processes whose command line contains `text`."""
        return [pid for pid, command in self.processes().items() if text in command]

    def containers(self) -> list[str]:
        """Return the full ids of the sandboxes of every known sandboxd, in any state."""
        if self._api is None:
            return []
        self.processes()
        return [one for name in self._names for one in list_containers(self._api, f"toolcrew.sandboxd={name}")]

    def pins(self) -> list[str]:
        """Return the containers that keep images, and folders of ended sandboxes, of every known sandboxd. The next
        sandboxd removes those of a killed one.
        """
        if self._api is None:
            return []
        labels = [f"toolcrew.sandboxd={name}" for name in self._names]
        return [one for label in labels for one in (*list_pins(self._api, label), *list_folders(label))]

    def volumes(self) -> list[str]:
        """Return the volumes of every known sandboxd."""
        if self._api is None:
            return []
        self.processes()
        listed = [
            self._api.volumes(filters={"label": [f"toolcrew.sandboxd={name}"]})["Volumes"] or [] for name in self._names
        ]
        return [str(volume["Name"]) for some in listed for volume in some]

    def folders(self) -> list[str]:
        """Return the paths in the footprint's temporary folder."""
        return sorted(path.name for path in self.folder.glob("toolcrew-*"))

    def leftovers(self) -> dict[str, Any]:
        """Return everything that exists; empty if nothing is left."""
        found = {
            "processes": self.processes(),
            "containers": self.containers(),
            "pins": self.pins(),
            "volumes": self.volumes(),
            "folders": self.folders(),
        }
        return {kind: names for kind, names in found.items() if names}

    def assert_nothing_left(self, within_s: float = 15.0) -> None:
        """Fail at the deadline with a list of everything that is left."""
        until = time.monotonic() + within_s
        while (leftovers := self.leftovers()) and time.monotonic() < until:
            time.sleep(0.1)
        assert not leftovers, f"left behind after {within_s:g} s: {leftovers}"

    def clear(self) -> None:
        """Remove everything that is left and carries the footprint's mark."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        for container in [*self.containers(), *self.pins()]:
            with contextlib.suppress(Exception):
                remove_oci(container)
                self._api.remove_container(container, force=True, v=True)  # type: ignore[union-attr]
        for volume in self.volumes():
            with contextlib.suppress(Exception):
                self._api.remove_volume(volume)  # type: ignore[union-attr]
        # A killed sandboxd leaves the mounts of its workspaces, and a folder with a mount cannot be removed.
        unmount_below(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _lives_in_folder(self, pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/cwd").startswith(f"{self.folder}/")
        except OSError:
            return False

    def _learn_name(self, environ: bytes) -> None:
        for entry in environ.split(b"\0"):
            if entry.startswith(b"TOOLCREW_SANDBOXD_NAME="):
                self._names.add(entry.partition(b"=")[2].decode())


@contextlib.contextmanager
def open_footprint(api: APIClient | None = None) -> Iterator[Footprint]:
    """Yield a footprint and clear the footprint on exit, also after a failed test."""
    footprint = Footprint(api)
    try:
        yield footprint
    finally:
        footprint.clear()


# --- Stacks
# -----------------------------------------------------------------------------------------------------------


@dataclass
class Stack:
    """A running `toolcrew up`."""

    info: StackInfo
    process: "subprocess.Popen[bytes]"
    footprint: Footprint
    api: APIClient
    broker: BrokerSettings = field(init=False)

    def __post_init__(self) -> None:
        self.broker = BrokerSettings.model_validate({"redis_url": self.info.redis_url})

    @property
    def redis_url(self) -> str:
        return self.info.redis_url

    def pid(self, role: str) -> int:
        """Return the pid of the process that has the role now. Waits for a process that is being restarted."""
        pids: list[int] = wait_until(lambda: read_stack(self.info.logs).pids[role], UP_S, f"{role} runs")
        return pids[0]

    def wait_for_another(self, role: str, than: int) -> int:
        """Wait until another process has replaced process `than`, and return the new pid."""
        return int(
            wait_until(
                lambda: (pid := self.pid(role)) != than and pid, UP_S, lambda: f"another {role}: {self.errors()}"
            )
        )

    def open_redis(self) -> "redis.Redis":
        return redis.Redis.from_url(self.redis_url, socket_timeout=10)

    def log(self, role: str) -> str:
        """Return the output of a part so far."""
        return (Path(self.info.logs) / f"{role}.log").read_text(errors="replace")

    def errors(self) -> str:
        """Return the stderr output of `toolcrew up` so far."""
        return (self.footprint.folder / "up.err").read_text(errors="replace")

    def full_id(self, short: str) -> str:
        """Return the full id of the container, as control groups name it."""
        return watch(self.api, short).id

    async def container_of(self, session: "Session") -> str:
        """Return the full id of the session's container."""
        sandbox = (await session.info()).sandbox
        assert sandbox is not None
        return self.full_id(sandbox.id)

    def has_container(self, container: str) -> bool:
        return any(name.startswith(container) for name in self.footprint.containers())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=UP_S)


@contextlib.contextmanager
def open_stack(
    api: APIClient,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    *,
    workers_only: bool = True,
) -> Iterator[Stack]:
    """Run a stack for one test, and stop the stack on exit, by force if necessary. `options`: of `toolcrew up`.
    `workers_only`: without Flower and the API, which few tests need.
    """
    require_redis_server()
    with open_footprint(api) as footprint, open(footprint.folder / "up.err", "wb") as errors:
        process = subprocess.Popen(
            [TOOLCREW, "up", "--json", *(["--workers-only"] if workers_only else []), *options],
            env=footprint.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            line = read_line(process)
            if not line or "error" in json.loads(line):
                pytest.fail(
                    f"the stack did not come up: {line!r} {(footprint.folder / 'up.err').read_text(errors='replace')}"
                )
            footprint.processes()
            yield Stack(StackInfo.model_validate_json(line), process, footprint, api)
        finally:
            end_process(process)


def read_line(process: "subprocess.Popen[bytes]", within_s: float = UP_S) -> bytes:
    """Return the first line of a program's stdout; empty if the program ended or printed nothing in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], within_s)
    line = bytearray()
    # Unbuffered, because another reader needs the data after the line.
    while ready and not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return bytes(line)


def end_process(process: "subprocess.Popen[bytes]", within_s: float = 30.0) -> None:
    """Send TERM, then KILL."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class RedisServer:
    """A Redis for one test. Tests can kill the server and start it again on its port with its data."""

    def __init__(self, folder: Path, *, password: str | None) -> None:
        self._folder = folder
        self.port = reserve_port()
        self.url = f"redis://:{password}@127.0.0.1:{self.port}/0" if password else f"redis://127.0.0.1:{self.port}/0"
        self._config = write_redis_config(folder, self.port, password or "x")
        if password is None:
            lines = [line for line in self._config.read_text().splitlines() if not line.startswith("requirepass")]
            self._config.write_text("\n".join([*lines, "protected-mode no"]) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and return when it answers."""
        log = open(self._folder / "redis.log", "ab")  # noqa: SIM115  # the child process keeps the file open
        with log:
            self._process = subprocess.Popen(
                [require_redis_server(), str(self._config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(self._answers, SOON_S, "redis-server answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_timeout=2)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()


@contextlib.contextmanager
def open_redis_server(*, password: str | None = "a-test-password") -> Iterator[RedisServer]:
    """Run a Redis and stop it on exit."""
    folder = Path(tempfile.mkdtemp(prefix="tct-redis-", dir="/tmp"))
    server = RedisServer(folder, password=password)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


async def all_of(work: Iterable[Awaitable[Any]], within_s: float) -> list[Any]:
    """Return the results of all awaitables. Fails the test at the deadline."""
    async with asyncio.timeout(within_s):
        return list(await asyncio.gather(*work))
