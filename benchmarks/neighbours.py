"""Measure the effect of a hostile session on its neighbours.

Each figure is a warm call during an attack, as a ratio to the same call on a quiet host in the same run.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import running_sandboxd
from benchmarks.report import Report, percentile
from benchmarks.sizes import size
from benchmarks.warm_call import REQUEST, WARM_UP, sandbox_call
from toolcrew.workers.sandbox_client import SandboxClient

ROUNDS = size(3, 1)
WINDOW_S = size(1.0, 0.1)
"""Duration of each measurement in seconds. A round measures once on a quiet host and once during the attack."""
SETTLE_S = size(0.6, 0.1)
"""Delay in seconds until an attack has its full effect, and until the processes that it left are killed."""
TARGET = 2.0
_FLOOD: Mapping[str, object] = {"state": "use", "capture": {"stream": 1 << 34}, "spill": None}


@dataclass(frozen=True, eq=False)
class Attack:
    """Script of an attack that runs until it is killed. `changes`: the differences from the request that bash_tool
    would send.
    """

    key: str
    what: str
    script: str
    changes: Mapping[str, object] = field(default_factory=dict)


ATTACKS = (
    Attack("cpu", "32 busy loops", "for i in $(seq 32); do (while :; do :; done) & done; wait"),
    Attack(
        "oom",
        "programs that take all memory, one after the other",
        "while :; do python3 -c 'x = [bytearray(1 << 20) for _ in range(9999)]'; done",
    ),
    Attack("fork", "a fork bomb at its limit", "f() { f | f & }; f; sleep 60"),
    Attack(
        "disk",
        "the workspace filled and emptied",
        "while :; do dd if=/dev/zero of=/workspace/f bs=1M; rm /workspace/f; done 2>/dev/null",
    ),
    Attack(
        "inodes",
        "all inodes of the workspace taken and freed",
        "while :; do mkdir d; (cd d; seq 60000 | xargs touch); rm -r d; done",
    ),
    Attack(
        "sync",
        "a storm of fsync and sync",
        "(while :; do sync; done) & while :; do dd if=/dev/zero of=f bs=4k count=500 oflag=dsync; done 2>/dev/null",
    ),
    Attack(
        "switches", "pipes that wake each other", "for i in $(seq 16); do (yes | cat | cat >/dev/null) & done; wait"
    ),
    Attack("output", "an output flood in a command", "yes flood"),
    Attack("stream", "an output flood that a worker reads", "yes flood", _FLOOD),
)


@dataclass
class Seconds:
    """Durations of the neighbour's calls in seconds: just before the rounds of an attack, and during the rounds."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)

    def ratio(self, share: float) -> float:
        return percentile(self.attacked, share) / percentile(self.quiet, share)


def run(rounds: int = ROUNDS) -> Report:
    with running_sandboxd() as sandboxd, SandboxClient(sandboxd.socket) as client:
        neighbour = client.open("bench", "neighbour")
        for _ in range(WARM_UP):
            sandbox_call(client, neighbour)
        durations = {attack: _measure_next_to(attack, sandboxd.socket, client, neighbour, rounds) for attack in ATTACKS}
    notes = [
        (
            f"one attacker and one neighbour; {rounds} rounds an attack, each of {WINDOW_S:g} s quiet and {WINDOW_S:g} "
            "s attacked"
        )
    ]
    report = Report("neighbours", notes=notes)
    report.add_ms(
        "quiet",
        [took for seconds in durations.values() for took in seconds.quiet],
        "a warm call, p50 of the quiet halves",
    )
    for attack, seconds in durations.items():
        report.add(f"{attack.key}_ratio", seconds.ratio(0.5), f"p50 with {attack.what} / quiet", at_most=TARGET)
    for attack, seconds in durations.items():
        report.add(f"{attack.key}_p95_ratio", seconds.ratio(0.95), f"p95 with {attack.what} / quiet")
    return report


def _measure_next_to(attack: Attack, path: Path, client: SandboxClient, neighbour: str, rounds: int) -> Seconds:
    seconds = Seconds()
    attacker = client.open("bench", f"attacker-{attack.key}")
    try:
        for _ in range(rounds):
            seconds.quiet += _calls(client, neighbour)
            with _attack(attack, path, attacker):
                seconds.attacked += _calls(client, neighbour)
    finally:
        client.close(attacker)
    return seconds


def _calls(client: SandboxClient, name: str) -> list[float]:
    seconds = []
    until = time.perf_counter() + WINDOW_S
    while (started := time.perf_counter()) < until:
        sandbox_call(client, name)
        seconds.append(time.perf_counter() - started)
    return seconds


@contextlib.contextmanager
def _attack(attack: Attack, path: Path, name: str) -> Iterator[None]:
    """Run an attack from a separate worker process. Killing that process ends the attack."""
    worker = multiprocessing.get_context("spawn").Process(
        target=_ask, args=(str(path), name, attack.script, dict(attack.changes)), daemon=True
    )
    worker.start()
    try:
        time.sleep(SETTLE_S)
        yield
        if worker.exitcode is not None:
            raise RuntimeError(f"the attack '{attack.key}' ended by itself")
    finally:
        worker.kill()
        worker.join()
        time.sleep(SETTLE_S)


def _ask(path: str, name: str, script: str, changes: dict[str, Any]) -> None:
    body = script.encode()
    request = {**REQUEST, "script_bytes": len(body), "timeout_s": 120.0, **changes}
    with SandboxClient(path) as client:
        client.call(
            name,
            {key: value for key, value in request.items() if value is not None},
            body,
            on_data=lambda _stream, _data: None,
        )
