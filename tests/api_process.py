"""The API as a separate process. Tests start the process as users do, kill it by pid, and measure it from outside."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.processes import read_proc
from tests.stack import TOOLCREW, Footprint, end_process, free_port
from tests.waiting import wait_until

START_S = 60.0


@dataclass
class ApiProcess:
    """A running `toolcrew serve api`."""

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


@contextlib.contextmanager
def open_api_process(
    footprint: Footprint, redis_url: str, *, concurrency: int = 0, environment: Mapping[str, str] | None = None
) -> Iterator[ApiProcess]:
    """Run an API process that is connected to this Redis, and end it on exit. `concurrency`: of the orchestrator
    inside; 0 means no orchestrator.
    """
    port = free_port()
    log = footprint.folder / f"api-{port}.log"
    settings = {
        "TOOLCREW_REDIS_URL": redis_url,
        "TOOLCREW_API_RATE": "100000",
    }
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [TOOLCREW, "serve", "api", "--port", str(port), "--concurrency", str(concurrency), "--no-traces"],
            env=footprint.environment({**settings, **(environment or {})}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    opened = ApiProcess(process, port, log)
    try:
        wait_until(lambda: opened.has_logged("api_connected") or process.poll() is not None, START_S, opened.log)
        if process.poll() is not None:
            pytest.fail(f"the API did not start: {opened.log()}")
        wait_until(lambda: opened.has_logged("api_serving"), START_S, opened.log)
        yield opened
    finally:
        end_process(process)


def _status(pid: int) -> dict[str, str]:
    lines = read_proc(pid, "status").decode().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
