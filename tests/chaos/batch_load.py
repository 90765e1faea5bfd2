"""A batch under chaos: its lines, the script of its model, and its orchestrators. Each orchestrator is a `toolcrew
batch` process that is restarted after a kill, as a supervisor does.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.verdict import read_lines
from tests.model_server.running import ModelServer
from tests.support.stack.host_harness import ChildProcess, Harness, bind_to_parent
from tests.support.stack.stack import ROOT, TOOLCREW
from tests.support.stack.waiting import SOON_S, wait_until

OBSERVED = "acts (?P<workspace>[0-9a-f]{32}) (?P<acts>[0-9,]*)"
_MARK = "[ -s .workspace ] || tr -d - < /proc/sys/kernel/random/uuid > .workspace"
_ACT = "cat .workspace >> /srv/{{item}}.{{step}}; echo {{step}} >> acts"
_LOOK = "touch acts; echo acts $(cat .workspace) $(paste -sd, acts)"
MAX_STEPS = 50
"""Limit of steps of an item: its calls, and repeated checks while the outcome of a call is unknown."""


def build_script(calls: int, call_s: float) -> list[dict[str, Any]]:
    """Return a script with `calls` calls for each item, one per step.

    Each call appends the mark of its workspace to its own file on the host. The call also appends its number to a
    file of the workspace. The answer contains both. So repeated or missing calls are visible from outside and from
    inside.
    """
    acting, looking = f"{_MARK}; {_ACT}; sleep {call_s:g}; {_LOOK}", f"{_MARK}; {_LOOK}"
    return [
        *({"kind": "rule", "when": {"step": step}, "reply": _calling(acting)} for step in range(calls)),
        {"kind": "rule", "when": {"observation": OBSERVED}, "reply": {"text": "{{match.workspace}} {{match.acts}}"}},
        {"kind": "rule", "reply": _calling(looking)},
    ]


def _calling(command: str) -> dict[str, Any]:
    return {"calls": [{"name": "bash_tool", "arguments": {"command": command}}]}


class BatchLoad:
    """A batch on a harness, and its orchestrators. `mark`: the batch's id; its items are `<mark>-<number>`."""

    def __init__(self, harness: Harness, server: ModelServer, mark: str, runs: int, concurrency: int) -> None:
        self.harness = harness
        self.server = server
        self.mark = mark
        self.items = [f"{mark}-{number}" for number in range(runs)]
        self.folder = harness.folder / mark
        self.folder.mkdir()
        self._file = self.folder / "in.jsonl"
        limits = {"max_iterations": MAX_STEPS}
        lines = [{"id": item, "instruction": f"[item {item}] act", "limits": limits} for item in self.items]
        self._file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._concurrency = str(concurrency)
        self.orchestrators: list[BatchOrchestrator] = []

    def submit(self) -> None:
        """Start the first orchestrator, which submits the file and processes the batch. After a kill it submits the
        file again.
        """
        self._start("one", "batches", "submit", str(self._file), "--id", self.mark)
        first = self.orchestrators[0]
        wait_until(lambda: first.has_printed(self.mark) or not first.is_running, SOON_S, first.log)

    def join(self) -> None:
        """Start one more orchestrator, which processes the same batch and also writes all rows."""
        self._start("two", "batches", "resume", self.mark)

    def living(self) -> list["BatchOrchestrator"]:
        return [one for one in self.orchestrators if one.is_running]

    def wait(self, within_s: float) -> list[str]:
        """Wait until all orchestrators have ended. Returns a sentence for each unexpected end."""
        for one in self.orchestrators:
            wait_until(
                lambda one=one: one.has_ended(),
                within_s,
                lambda one=one: f"{one.name} still works: {one.log()[-1500:]}",
            )
        return [
            f"orchestrator {one.name} ended with {one.code}: {one.log()[-1500:]}"
            for one in self.orchestrators
            if one.code not in (0, 1)
        ]

    def resume(self, within_s: float) -> list[str]:
        """Resume the batch once more, with the files of the first orchestrator. No more faults are applied, so
        everything must succeed.
        """
        last = BatchOrchestrator(self, "last", ["batches", "resume", self.mark], self.orchestrators[0].output)
        self.orchestrators.append(last)
        last.start()
        wait_until(lambda: not last.is_running, within_s, lambda: f"the last resume still works: {last.log()[-1500:]}")
        return [f"the last resume ended with {last.code}: {last.log()[-1500:]}"] if last.code != 0 else []

    def end(self) -> None:
        for one in self.orchestrators:
            one.end()

    def _start(self, name: str, *command: str) -> None:
        started = BatchOrchestrator(
            self, name, [*command, "--concurrency", self._concurrency], self.folder / f"{name}.jsonl"
        )
        self.orchestrators.append(started)
        started.start()


class BatchOrchestrator(ChildProcess):
    """A `toolcrew batch` process with its own files."""

    def __init__(self, load: BatchLoad, name: str, command: Sequence[str], output: Path) -> None:
        super().__init__(load.folder / f"{name}.log")
        self.name = name
        self.output = output
        self._out = load.folder / f"{name}.out"
        self._argv = bind_to_parent([str(TOOLCREW), *command, "--output", str(output)])
        self._environment = load.harness.environment(
            {"TOOLCREW_TRACES": str(load.folder / "traces"), **load.server.environment()}
        )
        self._starts_before = 0
        self._mark = load.mark

    @property
    def code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def errors(self) -> Path:
        return self.output.with_name(f"{self.output.stem}.errors.jsonl")

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of both files."""
        return [row for path in (self.output, self.errors) if path.exists() for row in read_lines(path)]

    def has_printed(self, word: str) -> bool:
        return self._out.exists() and word in self._out.read_text(errors="replace")

    def has_ended(self) -> bool:
        """Return whether the process has completed the batch. A process that could not start because Redis was
        unavailable is restarted.
        """
        if self.is_running:
            return False
        if self.code == 1 and self._count_starts() == self._starts_before:
            self.start()
            return False
        return True

    def _count_starts(self) -> int:
        """Return how often the process has started: each start prints the batch's id."""
        return self._out.read_text(errors="replace").splitlines().count(self._mark) if self._out.exists() else 0

    def start(self) -> None:
        self._starts_before = self._count_starts()
        with self._out.open("ab") as out, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )

    def kill_and_start(self) -> int:
        """Kill the process, restart it, and return the killed pid."""
        assert self._process is not None
        pid = self._process.pid
        self._process.kill()
        self._process.wait()
        self.start()
        return pid

    def signal(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
