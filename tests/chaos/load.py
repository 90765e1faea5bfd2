"""Orchestrators under load on a harness, each in a separate process. Killed orchestrators are excluded from the checks
and replaced.
"""

import contextlib
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.verdict import read_lines
from tests.support.stack.host_harness import Harness, bind_to_parent
from tests.support.stack.stack import ROOT, UP_S
from tests.support.stack.waiting import wait_until

END_S = 150.0
"""Limit for a driver to end its calls and close its sessions, in seconds."""


class RunningDriver:
    """An orchestrator."""

    def __init__(self, harness: Harness, name: str, sessions: int, seed: str, *, has_tools: bool) -> None:
        self.name = name
        self.out = harness.folder / f"{name}.jsonl"
        self.log = harness.folder / f"{name}.log"
        self.was_killed = False
        argv = [sys.executable, "-m", "tests.chaos.driver", name, str(self.out), str(sessions), seed]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                bind_to_parent(argv + ["--tools"] * has_tools),
                cwd=ROOT,
                env=harness.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_printed(self, event: str) -> bool:
        return self.out.exists() and any(line["event"] == event for line in read_lines(self.out))

    def end(self) -> None:
        """Request the end of the driver."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, within_s: float) -> int | None:
        """Return the exit code. A driver that does not end in time is killed; the result is then None."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None


class Load:
    """All orchestrators of a harness, living and ended."""

    def __init__(self, harness: Harness, *, drivers: int, sessions: int, seed: str, has_tools: bool) -> None:
        self._harness = harness
        self._sessions = sessions
        self._seed = seed
        self._has_tools = has_tools
        self._mark = secrets.token_hex(2)
        self.drivers: list[RunningDriver] = []
        for _ in range(drivers):
            self.add()

    def add(self) -> RunningDriver:
        number = len(self.drivers)
        driver = RunningDriver(
            self._harness, f"d{self._mark}{number}", self._sessions, f"{self._seed}-{number}", has_tools=self._has_tools
        )
        self.drivers.append(driver)
        return driver

    def living(self) -> list[RunningDriver]:
        return [driver for driver in self.drivers if not driver.was_killed]

    def killed(self) -> list[str]:
        return [driver.name for driver in self.drivers if driver.was_killed]

    def forget(self, pid: int) -> None:
        """Exclude a driver that is about to be killed, and start another driver."""
        # Marked before the kill. Otherwise the missing results of the driver would count as failures.
        next(driver for driver in self.drivers if driver.pid == pid).was_killed = True
        self.add()

    def wait_busy(self) -> None:
        """Wait until every living orchestrator has received a result."""
        for driver in self.living():
            wait_until(
                lambda driver=driver: driver.has_printed("result"),
                UP_S,
                lambda driver=driver: f"{driver.name}: {_read(driver.log)}",
            )

    def end(self) -> list[str]:
        """End all drivers in order. Returns a sentence for each unexpected end."""
        self.wait_busy()
        # All drivers are asked first, so that they end in parallel.
        for driver in self.living():
            driver.end()
        wrong = []
        for driver in self.living():
            code = driver.wait(END_S)
            if code != 0:
                wrong.append(f"orchestrator {driver.name} ended with {code}: {_read(driver.log)[-1500:]}")
        return wrong

    def kill(self) -> None:
        for driver in self.drivers:
            driver.wait(0)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextlib.contextmanager
def open_load(harness: Harness, *, drivers: int, sessions: int, seed: str, has_tools: bool) -> Iterator[Load]:
    """Run orchestrators with `sessions` sessions each. All are ended on exit."""
    load = Load(harness, drivers=drivers, sessions=sessions, seed=seed, has_tools=has_tools)
    try:
        yield load
    finally:
        load.kill()
