"""Sandboxds that are killed, stopped and started again under their name, with what the host and the engine see of
them.
"""

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
from contract.errors import SandboxUnavailable
from tests.attack_ground import CAPTURE
from tests.stack import ROOT, UP_S, Footprint, commands_in, end_process, open_footprint, wait_until
from workers.sandbox_client import GuestResponse, SandboxClient
from workers.sandboxd.daemon import END_FOR_GOOD

_QUICK = """
from workers.sandboxd import monitor
monitor.EXPIRE_EVERY_S = monitor.SWEEP_EVERY_S = 0.3
from workers.sandboxd.__main__ import main
raise SystemExit(main())
"""
"""sandboxd with its rounds at shorter intervals: what it does by itself is waited for."""


class Daemon:
    """One name's sandboxd, in this life and the next: its folders stay."""

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
            "TOOLCREW_SANDBOX_WORKSPACE": "tmpfs",  # the quickest to make
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
        """Returns when it answers: it has swept and taken over what was kept."""
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
        self._footprint.processes()  # learns the name, whose containers are cleared at the end

    def signal(self, number: int) -> None:
        os.kill(self.running.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._ended()

    def stop(self, *, for_good: bool = False) -> int:
        """In order; gives the exit code."""
        self.signal(END_FOR_GOOD if for_good else signal.SIGTERM)
        return self._ended()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            end_process(self._process)

    def client(self) -> SandboxClient:
        return SandboxClient(self.path)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def states(self) -> dict[str, str]:
        """Container -> state of its session; without those that have none."""
        with self.client() as client:
            return {row["container"]: row["state"] for row in client.sessions() if row["container"] is not None}

    def containers(self) -> dict[str, str]:
        """Full id -> state, as the engine lists all that carry the name."""
        label = [f"toolcrew.sandboxd={self.name}", f"toolcrew.deployment={self.environment['TOOLCREW_DEPLOYMENT']}"]
        return {str(one["Id"]): str(one["State"]) for one in self._api.containers(all=True, filters={"label": label})}

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
    """Several, in one folder and with one folder of leases."""

    def __init__(self, footprint: Footprint, api: APIClient) -> None:
        self._footprint = footprint
        self._api = api
        self._all: list[Daemon] = []

    @property
    def folder(self) -> Path:
        return self._footprint.folder

    def start(self, name: str = "a", **settings: str) -> Daemon:
        """`settings` by their names in lower case, without the prefix."""
        daemon = self.describe(name, **settings)
        daemon.start()
        return daemon

    def describe(self, name: str = "a", **settings: str) -> Daemon:
        """One that is not started."""
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
    """All are ended and cleared at the end, whatever happened."""
    with open_footprint(api) as footprint:
        daemons = Daemons(footprint, api)
        try:
            yield daemons
        finally:
            daemons.close()


def bash(client: SandboxClient, name: str, script: str, **changes: Any) -> GuestResponse:
    """A command as bash_tool sends it, to its end."""
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


def told(client: SandboxClient, name: str, script: str) -> str:
    """What it printed."""
    return bash(client, name, script).streams.get("merged", b"").decode()


def start_call(daemon: Daemon, name: str, script: str) -> "Future[GuestResponse]":
    """As `bash`, beside others: the answer, or what was raised instead."""
    answer: Future[GuestResponse] = Future()

    def run() -> None:
        try:
            with daemon.client() as client:
                answer.set_result(bash(client, name, script, timeout_s=120.0))
        except Exception as error:  # noqa: BLE001  # whoever waits for the answer gets it
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def wait_running(container: str, words: str) -> None:
    """Until a program with that command line runs in the container."""
    wait_until(lambda: words in commands_in(container).values(), 20, f"{words} runs in {container[:12]}")
