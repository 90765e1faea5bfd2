"""Several hosts on one machine, with one Redis and one store. Each host has its own sandboxd, worker and engine
relay.

Everything is a real process that is restarted when it ends, as a service supervisor does. Tests kill and pause a
process by its role: `redis`, `tools` (the worker without sandboxes), and `<host>.engine`, `<host>.sandboxd`,
`<host>.worker`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import redis
from docker import APIClient

from tests.support.redis.redis_harness import answers
from tests.support.stack.stack import ROOT, UP_S, Footprint, children_of, end_process, open_footprint
from tests.support.stack.waiting import wait_until
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import hosts_key
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config
from toolcrew.store.connection import CONNECTION_OPTIONS

PAUSES_S = (0.0, 0.3, 1.0)
"""Pauses before a process is restarted, in seconds. The last pause is repeated."""
PASSWORD = "a-test-password"
_BIND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""A program that becomes the program of its arguments, and that the kernel kills together with its starter. A killed
test run therefore leaves no process.
"""
STEADY_S = 20.0
"""After this many seconds without an exit, the pauses start again with the first."""


def bind_to_parent(argv: Sequence[str]) -> list[str]:
    """Return the command line of a program that must not outlive this process."""
    return [sys.executable, "-c", _BIND, str(os.getpid()), *argv]


class ChildProcess:
    """A process of a test that may run several times, one after another, with one log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class HarnessProcess(ChildProcess):
    """A process that a thread keeps running. After `stop`, or after exit code 0, the process is not restarted."""

    def __init__(
        self, role: str, argv: Sequence[str], environment: Mapping[str, str], log: Path, tree: Path = ROOT
    ) -> None:
        super().__init__(log)
        self.role = role
        self._tree = tree
        self.environment = dict(environment)
        self.ends: list[int] = []
        """Exit codes, as in subprocess, of exits that `stop` did not request."""
        self.is_restarted = True
        self._argv = list(argv)
        self._stopping = threading.Event()
        self._has_begun = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the process and return when the process exists."""
        self._thread = threading.Thread(target=self._supervise, name=f"keeps {self.role}", daemon=True)
        self._thread.start()
        self._has_begun.wait()

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and return the pid that received the signal."""
        pid = self.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def stop(self, within_s: float = UP_S) -> None:
        """Stop the process in order and do not restart it."""
        self._stopping.set()
        if self._process is not None:
            # A paused process cannot react to SIGTERM.
            self.kill(signal.SIGCONT)
            end_process(self._process, within_s)
            self._clear()
        if self._thread is not None:
            self._thread.join(UP_S)

    def wait_for_another(self, than: int) -> int:
        """Wait until another process has replaced process `than`, and return the new pid."""
        wait_until(
            lambda: self.is_running and self.pid != than, UP_S, lambda: f"another {self.role}: {self.log()[-2000:]}"
        )
        return self.pid

    def _spawn(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bind_to_parent(self._argv),
                cwd=self._tree,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _supervise(self) -> None:
        """Start and restart the process in one thread that lives as long as the process. The kernel binds a child to
        the thread that started the child.
        """
        pauses = iter(PAUSES_S)
        self._spawn()
        self._has_begun.set()
        while True:
            started = time.monotonic()
            assert self._process is not None
            code = self._process.wait()
            if self._stopping.is_set():
                return
            # The pool children die before the restart, so that no call runs in two generations of the worker.
            self._clear()
            self.ends.append(code)
            if code == 0 or not self.is_restarted:
                return
            if time.monotonic() - started > STEADY_S:
                pauses = iter(PAUSES_S)
            if self._stopping.wait(next(pauses, PAUSES_S[-1])):
                return
            self._spawn()

    def _clear(self) -> None:
        """Kill the pool children of a killed parent, as a service supervisor does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Harness:
    """The hosts, their Redis and their store. `tally`: a folder to which every sandbox and every operator's tool can
    append.
    """

    def __init__(self, footprint: Footprint, api: APIClient, settings: Mapping[str, str]) -> None:
        self.footprint = footprint
        self.api = api
        self.folder = footprint.folder
        self.deployment = f"harness-{self.folder.name[4:]}"
        self.tally = self.folder / "tally"
        self.tally.mkdir()
        self.tally.chmod(0o777)  # the sandboxes run as another user
        self.redis_url = f"redis://:{PASSWORD}@127.0.0.1:{reserve_port()}/0"
        self.has_orphans = False
        """True after an orchestrator was killed here. Records that only this orchestrator would have updated stay
        unchanged.
        """
        self._settings = dict(settings)
        self._processes: dict[str, HarnessProcess] = {}

    @property
    def broker(self) -> BrokerSettings:
        return BrokerSettings.model_validate({"redis_url": self.redis_url, "deployment": self.deployment})

    @property
    def hosts(self) -> list[str]:
        return sorted(role.partition(".")[0] for role in self._processes if role.endswith(".sandboxd"))

    @property
    def roles(self) -> list[str]:
        return list(self._processes)

    def process(self, role: str) -> HarnessProcess:
        return self._processes[role]

    def log(self, role: str) -> str:
        return self._processes[role].log()

    def environment(self, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of an orchestrator of this deployment."""
        shared = {"TOOLCREW_REDIS_URL": self.redis_url, "TOOLCREW_DEPLOYMENT": self.deployment}
        return self.footprint.environment({**shared, **self._settings, **(overrides or {})})

    def open_redis(self) -> "redis.Redis":
        return redis.Redis.from_url(self.redis_url, socket_timeout=5, **CONNECTION_OPTIONS)

    def start_redis(self) -> None:
        folder = self.folder / "redis"
        folder.mkdir()
        config = write_redis_config(folder, int(self.redis_url.rpartition(":")[2].partition("/")[0]), PASSWORD)
        # With `everysec`, a killed Redis loses up to two seconds of writes while the disk is busy.
        with config.open("a") as file:
            file.write("appendfsync always\n")
        self._start("redis", [find_redis_server(), str(config)], {})
        self.wait_redis()

    def wait_redis(self) -> None:
        """Wait until Redis answers with its data loaded."""
        wait_until(lambda: answers(self.open_redis), UP_S, lambda: self.log("redis"))

    def start_host(self, name: str, tree: Path = ROOT, **settings: str) -> None:
        """Start a host and return when its engine relay listens. Both processes of the host run the sources of
        `tree`. `settings`: names in lower case, without the prefix.
        """
        folder = self.folder / name
        folder.mkdir()
        engine, sandboxd = folder / "engine.sock", folder / "sandboxd.sock"
        self._start(f"{name}.engine", [sys.executable, "-m", "tests.chaos.engine_relay", str(engine)], {})
        wait_until(engine.exists, UP_S, lambda: self.log(f"{name}.engine"))
        own = {f"TOOLCREW_{key.upper()}": value for key, value in settings.items()}
        daemon = {
            "TOOLCREW_SANDBOXD_SOCKET": str(sandboxd),
            "TOOLCREW_SANDBOXD_NAME": f"{name}-{self.folder.name[4:]}",
            "TOOLCREW_SANDBOXD_STATE": str(folder / "state"),
            "TOOLCREW_SANDBOXD_LEASES": str(self.folder / "leases"),
            "TOOLCREW_WORKSPACE_STORE": str(self.folder / "store"),
            "DOCKER_HOST": f"unix://{engine}",
            "TALLY": str(self.tally),
        }
        self._start(
            f"{name}.sandboxd", [sys.executable, "-m", "tests.chaos.sandboxd_with_tally"], {**daemon, **own}, tree
        )
        worker = {"TOOLCREW_HOST": name, "TOOLCREW_SANDBOXD_SOCKET": str(sandboxd), "TOOLCREW_WORKER_KIND": "sandbox"}
        self._start(f"{name}.worker", [sys.executable, "-m", "toolcrew.workers"], {**worker, **own}, tree)

    def start_tools(self, **settings: str) -> None:
        """Start a worker without sandboxes, with the tool that appends to the tally."""
        own = {f"TOOLCREW_{key.upper()}": value for key, value in settings.items()}
        worker = {
            "TOOLCREW_HOST": "tools",
            "TOOLCREW_WORKER_KIND": "web",
            "TOOLCREW_WORKER_QUEUES": '["pool.tools"]',
            "TOOLCREW_TOOL_MODULES": '["tests.chaos.tally_tool"]',
            "TOOLCREW_CONCURRENCY": "3",
            "TALLY": str(self.tally),
        }
        self._start("tools", [sys.executable, "-m", "toolcrew.workers"], {**worker, **own})

    def wait_ready(self) -> None:
        """Wait until every started worker reports."""
        wanted = len([role for role in self._processes if role.endswith(".worker") or role == "tools"])
        wait_until(lambda: self._reporting() >= wanted, UP_S, self.log_tails)
        self.footprint.processes()  # records the names whose containers are removed on exit

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal and return the pid that received the signal."""
        return self._processes[role].kill(number)

    def pause(self, role: str) -> int:
        return self.kill(role, signal.SIGSTOP)

    def resume(self, pid: int) -> None:
        """Resume a paused process, even if another process has taken its role."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def pool_children(self, role: str) -> list[int]:
        """Return the pids of the processes in which a prefork worker runs its calls."""
        return children_of(self._processes[role].pid)

    def stop(self) -> None:
        """Stop everything in order. Workers stop first, so that each worker withdraws its report; Redis stops last."""
        for parts in (("tools", "worker"), ("sandboxd",), ("engine",), ("redis",)):
            due = [one for role, one in self._processes.items() if role.rpartition(".")[2] in parts]
            with ThreadPoolExecutor(len(due) or 1) as threads:
                list(threads.map(lambda one: one.stop(20.0), due))

    def log_tails(self) -> str:
        """Return the end of every log."""
        return "\n".join(f"--- {role} (ends: {one.ends})\n{one.log()[-1500:]}" for role, one in self._processes.items())

    def _start(self, role: str, argv: Sequence[str], environment: Mapping[str, str], tree: Path = ROOT) -> None:
        started = HarnessProcess(role, argv, self.environment(environment), self.folder / f"{role}.log", tree)
        self._processes[role] = started
        started.start()

    def _reporting(self) -> int:
        try:
            with self.open_redis() as client:
                return int(client.zcount(hosts_key(self.deployment), time.time() - 8, "+inf"))
        except redis.RedisError:
            return 0


@contextlib.contextmanager
def open_harness(
    api: APIClient, *hosts: str, tools: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[Harness]:
    """Run hosts that serve calls. Everything is stopped and removed on exit, even after an error. `settings`:
    environment of every process.
    """
    with open_footprint(api) as footprint:
        harness = Harness(footprint, api, settings or {})
        try:
            harness.start_redis()
            for name in hosts:
                harness.start_host(name)
            if tools:
                harness.start_tools()
            harness.wait_ready()
            yield harness
        finally:
            harness.stop()
