"""Sandboxds that tests kill, stop and start again under the same name, with the view of the host and the engine."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from docker import APIClient

from benchmarks.processes import RunningSandboxd
from benchmarks.sandboxes import list_containers
from tests.support.sandboxd.attack_sandboxd import CAPTURE
from tests.support.stack.stack import ROOT, UP_S, Footprint, commands_in, end_process, open_footprint
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient
from toolcrew.workers.sandboxd.daemon import STOP_AND_REMOVE

_QUICK = """
from toolcrew.workers.sandboxd import monitor
monitor.EXPIRE_EVERY_S = monitor.SWEEP_EVERY_S = 0.3
from toolcrew.workers.sandboxd.__main__ import main
raise SystemExit(main())
"""
"""A program that runs sandboxd with shorter intervals between its periodic rounds, because tests wait for their
effects.
"""


class Daemon:
    """The sandboxd of one name, across restarts. The folders survive a restart."""

    def __init__(self, footprint: Footprint, api: APIClient, name: str, settings: Mapping[str, str]) -> None:
        folder = footprint.folder / name
        folder.mkdir()
        self.name = f"{name}-{footprint.folder.name[4:]}"
        self.path = folder / "sandboxd.sock"
        self.state = folder / "state"
        self.environment = {
            "TOOLCREW_SANDBOXD_SOCKET": str(self.path),
            "TOOLCREW_SANDBOXD_NAME": self.name,
            "TOOLCREW_DEPLOYMENT": f"tests-{footprint.folder.name[4:]}",
            "TOOLCREW_SANDBOXD_STATE": str(self.state),
            "TOOLCREW_SANDBOXD_LEASES": str(footprint.folder / "leases"),
            "TOOLCREW_SANDBOX_WORKSPACE": "tmpfs",  # the fastest workspace to create
            **settings,
        }
        self._footprint = footprint
        self._api = api
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> RunningSandboxd:
        assert self._process is not None
        return RunningSandboxd(self._process.pid, self.path, self.name, self.state)

    def start(self) -> None:
        """Start the daemon and return when the daemon answers. Before its first answer the daemon sweeps and takes
        over the kept sessions.
        """
        with self._log.open("ab") as log:
            environment = self._footprint.environment(self.environment)
            argv = [sys.executable, "-c", _QUICK]
            self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, UP_S, self.log)
        self._footprint.processes()  # records the name, whose containers are removed on exit

    def signal(self, number: int) -> None:
        os.kill(self.running.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._ended()

    def stop(self, *, for_good: bool = False) -> int:
        """Stop the daemon in order and return the exit code."""
        self.signal(STOP_AND_REMOVE if for_good else signal.SIGTERM)
        return self._ended()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # A test may have paused the daemon, and a paused process cannot react to SIGTERM.
            self.signal(signal.SIGCONT)
            end_process(self._process)

    def client(self) -> SandboxClient:
        return SandboxClient(self.path)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def states(self) -> dict[str, str]:
        """Return container to state of its session, without containers that have no session."""
        with self.client() as client:
            return {row["container"]: row["state"] for row in client.sessions() if row["container"] is not None}

    def containers(self) -> dict[str, str]:
        """Return full id to state of every container that carries the name, as the engine lists the containers."""
        deployment = self.environment["TOOLCREW_DEPLOYMENT"]
        return list_containers(self._api, f"toolcrew.sandboxd={self.name}", f"toolcrew.deployment={deployment}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"sandboxd did not start: {self.log()}")
        with contextlib.suppress(SandboxUnavailable):
            return bool(self.status())
        return False

    def _ended(self) -> int:
        assert self._process is not None
        return self._process.wait(UP_S)


class Daemons:
    """Several daemons that share one folder and one folder of leases."""

    def __init__(self, footprint: Footprint, api: APIClient) -> None:
        self._footprint = footprint
        self._api = api
        self._all: list[Daemon] = []

    @property
    def folder(self) -> Path:
        return self._footprint.folder

    def start(self, name: str = "a", **settings: str) -> Daemon:
        """Start a daemon. `settings`: names in lower case, without the prefix."""
        daemon = self.describe(name, **settings)
        daemon.start()
        return daemon

    def describe(self, name: str = "a", **settings: str) -> Daemon:
        """Return a daemon that is not started."""
        daemon = Daemon(self._footprint, self._api, name, {_variable(key): value for key, value in settings.items()})
        self._all.append(daemon)
        return daemon

    def close(self) -> None:
        for daemon in self._all:
            daemon.close()


def _variable(key: str) -> str:
    return key.upper() if key == "docker_host" else f"TOOLCREW_{key.upper()}"


@contextlib.contextmanager
def open_daemons(api: APIClient) -> Iterator[Daemons]:
    """Yield the daemons; end all of them and remove their containers on exit, even after an error."""
    with open_footprint(api) as footprint:
        daemons = Daemons(footprint, api)
        try:
            yield daemons
        finally:
            daemons.close()


def bash(client: SandboxClient, name: str, script: str, **changes: Any) -> GuestResponse:
    """Run a command as bash_tool sends it, and return the final response."""
    body = script.encode()
    request = {
        "op": "exec",
        "argv": None,
        "script_bytes": len(body),
        "cwd": None,
        "state": "keep",
        "timeout_s": 20.0,
        "capture": CAPTURE,
    }
    return client.call(name, {**request, **changes}, body)


def run_script(client: SandboxClient, name: str, script: str) -> str:
    """Run a command and return what the command printed."""
    return bash(client, name, script).streams.get("merged", b"").decode()


def start_call(daemon: Daemon, name: str, script: str) -> "Future[GuestResponse]":
    """Run a command as `bash` does, in the background. The future holds the response or the error."""
    answer: Future[GuestResponse] = Future()

    def run() -> None:
        try:
            with daemon.client() as client:
                answer.set_result(bash(client, name, script, timeout_s=120.0))
        except Exception as error:  # noqa: BLE001  # the caller of `Future.result` receives the error
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def wait_running(container: str, text: str) -> None:
    """Wait until a program with `text` in its command line runs in the container."""
    wait_until(lambda: text in commands_in(container).values(), SOON_S, f"{text} runs in {container[:12]}")
