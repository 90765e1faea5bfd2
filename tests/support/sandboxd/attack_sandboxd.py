"""A real sandboxd without a queue, sessions that run attacks, and the host's view of both."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from tests.support.sandboxd.containers import Watched, watch
from tests.support.stack.processes import read_proc
from tests.support.stack.service_process import run_program
from tests.support.stack.stack import ROOT, UP_S, Footprint, is_alive, open_footprint
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.session_spec import EMPTY_SESSION, SessionSpec
from toolcrew.workers.sandbox_client import GuestResponse, SandboxClient

CAPTURE = {"stdout": 8192, "stderr": 8192, "merged": 8192}
WORKER = """
import json, sys
from toolcrew.workers.sandbox_client import SandboxClient
path, name, script, timeout_s = sys.argv[1:]
request = {"op": "exec", "argv": None, "script_bytes": len(script), "state": "use", "timeout_s": float(timeout_s), "capture": {}}
SandboxClient(path).call(name, request, script.encode())
"""


class Program:
    """A process of a container, seen from the host: its pid, command line and start time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.command = read_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        self.started = read_proc(pid, "stat").rpartition(b")")[2].split()[19:20]

    @property
    def identity(self) -> tuple[int, bytes]:
        """Return the pid with the start time. A pid can be reused; the pair cannot."""
        return self.pid, b"".join(self.started)


class HostileSession:
    """A session whose programs attack, with the host's view of its container."""

    def __init__(self, path: Path, client: SandboxClient, api: APIClient, name: str) -> None:
        self.name = name
        self.path = path
        self._client = client
        self._api = api
        self._opened_by_others: list[SandboxClient] = []
        self.watched = self.look()

    def look(self) -> Watched:
        """Return the session's current container."""
        short = str(self._client.describe_open(self.name, EMPTY_SESSION)["sandbox"]["id"])
        return watch(self._api, short)

    def bash(self, script: str, **changes: Any) -> GuestResponse:
        """Run a command as bash_tool sends it, and return the final response."""
        return self._ask(self._client, script, changes)

    def start(self, script: str, **changes: Any) -> "Future[GuestResponse]":
        """Run a command as `bash` does, in the background on a separate connection."""
        answer: Future[GuestResponse] = Future()
        # A connection carries one request at a time, so a parallel call needs its own connection.
        client = SandboxClient(self.path)
        self._opened_by_others.append(client)

        def run() -> None:
            try:
                answer.set_result(self._ask(client, script, changes))
            except Exception as error:  # noqa: BLE001  # the caller of `Future.result` receives the error
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return answer

    def start_job(self, script: str) -> None:
        request = {
            "op": "job_start",
            "script_bytes": len(script),
            "cwd": None,
            "label": "a job",
            "wait_ms": 0,
            "max_bytes": 8192,
        }
        done = self._client.call(self.name, {**request, "timeout_s": 60.0}, script.encode()).done
        assert "error" not in done, done

    def ask(self, request: Mapping[str, Any], body: bytes = b"") -> GuestResponse:
        """Send any request and return the final response."""
        return self._client.call(self.name, request, body)

    def programs(self) -> dict[tuple[int, bytes], str]:
        """Return the command lines of all processes of the container, keyed by identity. The guest and its forked
        supervisors are left out.
        """
        # Supervisors are forks of PID 1 without an exec, so they have its command line.
        own = Program(self.watched.pid).command
        found = {}
        for pid in self.watched.processes():
            # A process that ends during this loop must not hide the other processes.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if is_alive(pid):
                    program = Program(pid)
                    if program.command not in (own, ""):
                        found[program.identity] = program.command
        return found

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until `count` programs with `text` in their command line run."""
        wait_until(
            lambda: sum(text in line for line in self.programs().values()) >= count,
            SOON_S,
            lambda: f"{text}: {self.programs()}",
        )

    def is_usable(self) -> bool:
        """Return whether the next command runs in the same container and nothing of the previous command remains."""
        answer = self.bash("echo well")
        return answer.streams.get("merged") == b"well\n" and self.watched.id.startswith(answer.done["sandbox"]["id"])

    def close(self) -> None:
        for client in self._opened_by_others:
            client.disconnect()
        with contextlib.suppress(SandboxUnavailable):
            self._client.close(self.name)
        self._client.disconnect()

    def _ask(self, client: SandboxClient, script: str, changes: Mapping[str, Any]) -> GuestResponse:
        body = script.encode()
        request = {
            "op": "exec",
            "argv": None,
            "script_bytes": len(body),
            "cwd": None,
            "state": "keep",
            "timeout_s": 30.0,
            "capture": CAPTURE,
        }
        return client.call(self.name, {**request, "spill": {"bytes": 8192, "lines": 100}, **changes}, body)


class OwnSandboxd:
    """A sandboxd that belongs to the test."""

    def __init__(self, process: "subprocess.Popen[bytes]", footprint: Footprint, api: APIClient) -> None:
        self.process = process
        self.footprint = footprint
        self.api = api
        self.path = footprint.folder / "sandboxd.sock"
        self.name = f"attacks-{footprint.folder.name[4:]}"

    @contextlib.contextmanager
    def session(self, tenant: str = "acme", session: str = "s1", image: str | None = None) -> Iterator[HostileSession]:
        """Open a session and close it on exit."""
        client = SandboxClient(self.path)
        hostile = HostileSession(self.path, client, self.api, client.open(tenant, session, SessionSpec(image=image)))
        try:
            yield hostile
        finally:
            hostile.close()

    def start_worker(self, name: str, script: str, timeout_s: float) -> "subprocess.Popen[bytes]":
        """Start a process that sends a call; the test kills the process."""
        argv = [sys.executable, "-c", WORKER, str(self.path), name, script, str(timeout_s)]
        return subprocess.Popen(argv, cwd=ROOT, env=self.footprint.environment(), stderr=subprocess.DEVNULL)

    def peak_bytes(self) -> int:
        """Return the peak memory of sandboxd since `reset_peak`, in bytes."""
        return int(read_proc(self.process.pid, "status").split(b"VmHWM:")[1].split()[0]) * 1024

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def log(self) -> str:
        return (self.footprint.folder / "sandboxd.log").read_text(errors="replace")


@contextlib.contextmanager
def open_own_sandboxd(api: APIClient, environment: Mapping[str, str] | None = None) -> Iterator[OwnSandboxd]:
    """Start a sandboxd that answers, and remove its containers on exit even after an error. `environment` is added to
    the daemon's environment.
    """
    with open_footprint(api) as footprint:
        folder = footprint.folder
        own = {
            "TOOLCREW_SANDBOXD_SOCKET": str(folder / "sandboxd.sock"),
            "TOOLCREW_SANDBOXD_NAME": f"attacks-{folder.name[4:]}",
            "TOOLCREW_DEPLOYMENT": f"attacks-{folder.name[4:]}",
            "TOOLCREW_SANDBOXD_STATE": str(folder / "state"),
            "TOOLCREW_SANDBOXD_LEASES": str(folder / "leases"),
            "TOOLCREW_POOL_SIZE": "0",
            **(environment or {}),
        }
        argv = [sys.executable, "-m", "toolcrew.workers.sandboxd"]
        with run_program(footprint, "sandboxd", argv, own) as process:
            sandboxd = OwnSandboxd(process, footprint, api)
            wait_until(lambda: _answers(sandboxd), UP_S, sandboxd.log)
            footprint.processes()
            yield sandboxd


def _answers(sandboxd: OwnSandboxd) -> bool:
    if sandboxd.process.poll() is not None:
        pytest.fail(f"sandboxd did not start: {sandboxd.log()}", pytrace=False)
    with contextlib.suppress(SandboxUnavailable), SandboxClient(sandboxd.path) as client:
        return bool(client.status())
    return False
