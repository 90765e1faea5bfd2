"""The faults that chaos rounds apply to the processes of a batch."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.chaos.batch_load import BatchLoad
from tests.support.stack.host_harness import Harness
from tests.support.stack.stack import UP_S
from tests.support.stack.waiting import wait_until
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.store.batches import batch_key

BatchBlow = Literal["orchestrator", "worker", "redis", "pause", "forget"]
KILLS: tuple[BatchBlow, ...] = ("orchestrator", "worker", "redis")
"""Further faults. An orchestrator is paused for longer than its leases last. Redis loses its last second of data, as
after a power failure.
"""
BATCH_BLOWS: tuple[BatchBlow, ...] = (*KILLS, "pause", "forget")
PAUSE_S = 50.0
FORGOTTEN_S = 1.0


@dataclass(frozen=True)
class Blow:
    """An applied fault. `held`: the runs that an affected orchestrator may have held."""

    kind: BatchBlow
    message: str
    held: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.message


def strike(load: BatchLoad, kind: BatchBlow, chance: random.Random) -> Blow:
    """Apply a fault and return afterwards; for a pause, return when the process continues."""
    harness = load.harness
    match kind:
        case "orchestrator" | "pause":
            return _strike_orchestrator(load, kind, chance)
        case "worker":
            role = f"{chance.choice(harness.hosts)}.worker"
            return Blow(kind, f"kill {role} ({harness.kill(role)})")
        case "redis":
            return Blow(kind, f"kill redis ({harness.kill('redis')})")
        case "forget":
            return Blow(kind, f"cut {_forget(harness)} bytes off redis")


def _strike_orchestrator(load: BatchLoad, kind: BatchBlow, chance: random.Random) -> Blow:
    load.harness.wait_redis()
    # The runs are read before and after the fault. A run that is claimed during the fault then also counts as
    # affected.
    one, held = chance.choice(load.living()), _running(load)
    pid = one.pid
    if kind == "orchestrator":
        one.kill_and_start()
    else:
        one.signal(signal.SIGSTOP)
        try:
            time.sleep(PAUSE_S)
        finally:
            one.signal(signal.SIGCONT)
    load.harness.wait_redis()
    return Blow(
        kind,
        f"{'kill' if kind == 'orchestrator' else 'pause'} orchestrator {one.name} ({pid})",
        frozenset(held | _running(load)),
    )


def _running(load: BatchLoad) -> set[str]:
    """Return the runs that the orchestrators hold now."""
    with load.harness.open_redis() as client:
        return {
            run.decode()
            for run in client.smembers(batch_key(load.harness.deployment, DEFAULT_TENANT, load.mark) + ":running")
        }


def _forget(harness: Harness) -> int:
    """Kill Redis, remove the data of its last second, and start Redis. Returns the number of removed bytes."""
    process, folder = harness.process("redis"), harness.folder / "redis"
    ends, file = len(process.ends), _newest(folder)
    before = file.stat()
    time.sleep(FORGOTTEN_S)
    # No restart until the file is cut, because a running Redis would have loaded the removed data.
    process.is_restarted = False
    try:
        process.kill()
        wait_until(lambda: len(process.ends) > ends, UP_S, "redis has ended")
    finally:
        process.is_restarted = True
    # A rewrite in the meantime started a new file, which then loses nothing.
    after = _newest(folder).stat()
    lost = after.st_size - before.st_size if after.st_ino == before.st_ino else 0
    # The file ends at a size that Redis itself had reached, so a load after a power failure sees the same data.
    if lost:
        os.truncate(file, before.st_size)
    process.start()
    harness.wait_redis()
    return lost


def _newest(folder: Path) -> Path:
    """Return the file to which Redis appends: a single file, or since Redis 7 the last of several files."""
    parts = (folder / "appendonlydir").glob("*.incr.aof")
    return max(parts, key=lambda file: int(file.name.split(".")[-3]), default=folder / "appendonly.aof")
