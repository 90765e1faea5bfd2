"""Faults on a harness: a process is killed, or paused for some seconds."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tests.chaos.load import Load
from tests.support.sandboxd.containers import watch
from tests.support.stack.host_harness import Harness
from tests.support.stack.stack import is_alive
from tests.support.stack.waiting import SOON_S, wait_until

Deed = Literal["kill", "pause"]
Finder = Callable[[Harness, Load, random.Random], tuple[str, int]]
"""Chooses a process and returns its role, for reports, and its pid."""


@dataclass(frozen=True)
class Blow:
    """A fault and its target. `pause_s`: the range of the pause; None uses the terms of the round."""

    deed: Deed
    target: str
    pause_s: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.deed} {self.target}"


@dataclass(frozen=True)
class Struck:
    """An applied fault and its process."""

    role: str
    pid: int
    paused_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.role} ({self.pid})" + (f" for {self.paused_s:.1f} s" if self.paused_s else "")


def _of_host(part: str) -> Finder:
    def find(harness: Harness, load: Load, chance: random.Random) -> tuple[str, int]:
        role = f"{chance.choice(harness.hosts)}.{part}"
        return role, harness.process(role).pid

    return find


def _worker(harness: Harness, load: Load, chance: random.Random) -> tuple[str, int]:
    role = chance.choice([role for role in harness.roles if role.endswith(".worker") or role == "tools"])
    return role, harness.process(role).pid


def _worker_child(harness: Harness, load: Load, chance: random.Random) -> tuple[str, int]:
    """Choose a child of a prefork pool. The children of a worker show whether the worker has such a pool."""
    children: list[tuple[str, int]] = []

    def found() -> bool:
        workers = [role for role in harness.roles if role.endswith(".worker") or role == "tools"]
        children[:] = [(f"a child of {role}", child) for role in workers for child in harness.pool_children(role)]
        return bool(children)

    wait_until(found, SOON_S, "a worker has a pool of processes")
    return chance.choice(children)


def _redis(harness: Harness, load: Load, chance: random.Random) -> tuple[str, int]:
    return "redis", harness.process("redis").pid


def _orchestrator(harness: Harness, load: Load, chance: random.Random) -> tuple[str, int]:
    driver = chance.choice(load.living())
    return f"orchestrator {driver.name}", driver.pid


def _guest(harness: Harness, load: Load, chance: random.Random) -> tuple[str, int]:
    """Choose PID 1 of a sandbox, by its pid on the host."""
    guests: list[tuple[str, int]] = []

    def found() -> bool:
        for container in harness.footprint.containers():
            with contextlib.suppress(Exception):  # the container may already be removed
                pid = watch(harness.api, container).pid
                if pid and is_alive(pid):
                    guests.append((f"guest {container[:12]}", pid))
        return bool(guests)

    wait_until(found, SOON_S, "there is a sandbox")
    return chance.choice(guests)


TARGETS: Mapping[str, Finder] = {
    "orchestrator": _orchestrator,
    "worker": _worker,
    "worker-child": _worker_child,
    "sandboxd": _of_host("sandboxd"),
    "guest": _guest,
    "redis": _redis,
    "engine": _of_host("engine"),
}
BLOWS = [Blow(deed, target) for target in TARGETS for deed in ("kill", "pause")]  # type: ignore[arg-type]


def strike(blow: Blow, harness: Harness, load: Load, chance: random.Random, pause_s: tuple[float, float]) -> Struck:
    """Apply the fault and return afterwards; for a pause, return when the process continues."""
    role, pid = TARGETS[blow.target](harness, load, chance)
    if blow.deed == "kill":
        if blow.target == "orchestrator":
            load.forget(pid)
        _send(pid, signal.SIGKILL)
        return Struck(role, pid)
    seconds = chance.uniform(*(blow.pause_s or pause_s))
    _send(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        _send(pid, signal.SIGCONT)
    return Struck(role, pid, seconds)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
