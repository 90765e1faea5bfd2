"""Run `toolcrew batches submit` in a separate process and measure that process while it runs."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import child_process
from tests.model_server.running import ModelServer
from toolcrew.contract.run_events import RunClaimed, RunEnded, RunEvent, RunRetried
from toolcrew.orchestrator.batches.event_files import read_batch_events

CHECK_INTERVAL_S = 0.2


@dataclass(frozen=True)
class BatchMeasurement:
    """Measurements of a completed batch.

    `seconds`: from the start of the first item to the end of the last item. `cpu_s` and `peak_bytes` (resident): the
    process that ran the batch, from its start to its end.
    """

    seconds: float
    cpu_s: float
    peak_bytes: float
    answers: Mapping[str, str]
    failures: Sequence[str]
    retried: int
    most_in_flight: int


class BatchShell:
    """Submits batches to a pool, with a model server as the model."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._redis_url = redis_url
        self._folder = folder

    async def work(
        self, name: str, lines: Sequence[Mapping[str, Any]], server: ModelServer, concurrency: int
    ) -> BatchMeasurement:
        """Run a batch of these lines and return its measurements. Raises RuntimeError when the command fails, with
        the last lines of its output.
        """
        file, out = self._folder / f"{name}.jsonl", self._folder / f"{name}-out.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        argv = [
            str(Path(sys.executable).with_name("toolcrew")),
            "batches",
            "submit",
            str(file),
            "--output",
            str(out),
            "--id",
            name,
        ]
        environment = {
            **server.environment(),
            "TOOLCREW_REDIS_URL": self._redis_url,
            "TOOLCREW_TRACES": str(self._folder / "traces"),
            "TOOLCREW_LOG_LEVEL": "WARNING",
        }
        log = self._folder / f"{name}.log"
        cpu_s = peak = 0.0
        with child_process([*argv, "--concurrency", str(concurrency)], environment, log) as child:
            while child.poll() is None:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    # Keep the last sample: the CPU time of a process cannot be read after the process has ended.
                    cpu_s, peak = max(cpu_s, _cpu_s(child.pid)), max(peak, _peak_bytes(child.pid))
                await asyncio.sleep(CHECK_INTERVAL_S)
        if child.returncode not in (0, 1):
            raise RuntimeError(f"the batch {name} was not worked to its end: {log.read_text(errors='replace')[-2000:]}")
        seconds, retried, most = _measure_events(list(read_batch_events(out.with_name(f"{out.stem}.events.jsonl"))))
        failures = [json.dumps(row["error"]) for row in _rows(out.with_name(f"{out.stem}.errors.jsonl"))]
        answers = {row["custom_id"]: _answer(row) for row in _rows(out)}
        return BatchMeasurement(seconds, cpu_s, peak, answers, failures, retried, most)


@contextlib.contextmanager
def open_shell(redis_url: str) -> Iterator[BatchShell]:
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as folder:
        yield BatchShell(redis_url, Path(folder))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines())


def _answer(row: dict[str, Any]) -> str:
    body = row["response"]["body"]
    return str(body["answer"] if "answer" in body else body["choices"][0]["message"]["content"])


def _measure_events(batch_events: Sequence[RunEvent]) -> tuple[float, int, int]:
    """Return three figures of a batch, read from its events.

    The first figure is the seconds from the first start to the last end. The second figure is the number of restarts
    of items. The third figure is the largest number of items that ran at once.
    """
    ends = (RunEnded, RunRetried)
    changes = sorted(
        (one.at, 1 if isinstance(one, RunClaimed) else -1)
        for one in batch_events
        if isinstance(one, (RunClaimed, *ends))
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return changes[-1][0] - changes[0][0], sum(isinstance(one, RunRetried) for one in batch_events), most


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    # The line is missing for a process that has just ended.
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("VmHWM:")), 0.0)
