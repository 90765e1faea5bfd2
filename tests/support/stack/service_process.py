"""HTTP services as separate processes. Tests start a process as users do, kill it by pid, and measure it from outside."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.stack.processes import read_proc
from tests.support.stack.stack import ROOT, TOOLCREW, Footprint, end_process
from tests.support.stack.waiting import wait_until
from toolcrew.orchestrator.operations.ports import reserve_port

START_S = 90.0


@dataclass
class ApiProcess:
    """A running `toolcrew serve api` or `toolcrew serve mcp --http`."""

    process: "subprocess.Popen[bytes]"
    port: int
    log_file: Path
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """Return the output of the process so far."""
        return self.log_file.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the process immediately, as when its machine fails."""
        self.process.kill()
        self.process.wait()

    def memory_bytes(self) -> int:
        """Return the resident memory of the process, in bytes."""
        return 1024 * int(_status(self.pid)["VmRSS"].split()[0])

    def processor_s(self) -> float:
        """Return the processor time that the process has used, in seconds."""
        fields = read_proc(self.pid, "stat").rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def has_logged(self, event: str) -> bool:
        return any(json.loads(line).get("event") == event for line in self.log().splitlines() if line.startswith("{"))


def open_api_process(
    footprint: Footprint, redis_url: str, *, concurrency: int = 0, environment: Mapping[str, str] | None = None
) -> "contextlib.AbstractContextManager[ApiProcess]":
    """Run an API process that is connected to this Redis, and end it on exit. `concurrency`: of the orchestrator
    inside; 0 means no orchestrator.
    """
    arguments = ["api", "--concurrency", str(concurrency), "--no-traces", "--port"]
    settings = {"TOOLCREW_REDIS_URL": redis_url, "TOOLCREW_API_RATE": "100000", **(environment or {})}
    return open_service(footprint, "api_serving", settings, arguments)


@contextlib.contextmanager
def open_service(
    footprint: Footprint, event: str, settings: Mapping[str, str], arguments: Sequence[str]
) -> Iterator[ApiProcess]:
    """Run `toolcrew serve` with these arguments and a port, and end it on exit. Returns after the log has the event and
    reports the connection to Redis.
    """
    port = reserve_port()
    with run_program(footprint, f"service-{port}", [TOOLCREW, "serve", *arguments, str(port)], settings) as process:
        opened = ApiProcess(process, port, footprint.folder / f"service-{port}.log")
        for wanted in (event, "api_connected"):
            wait_until(lambda: opened.has_logged(wanted) or process.poll() is not None, START_S, opened.log)  # noqa: B023
        if process.poll() is not None:
            pytest.fail(f"the service did not start: {opened.log()}")
        yield opened


@contextlib.contextmanager
def run_program(
    footprint: Footprint, name: str, argv: Sequence[str], settings: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program that writes to `<name>.log` in the footprint's folder, and end it on exit."""
    with open(footprint.folder / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=footprint.environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_process(process)


def _status(pid: int) -> dict[str, str]:
    lines = read_proc(pid, "status").decode().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
