"""Measure edit_tool: one replacement in a 10 MB file and in a small file.

The baselines are reading and writing the file in the same place, and an empty round trip.
"""

import asyncio
import contextlib
import time

from benchmarks.processes import running_sandboxd
from benchmarks.report import Case, Report, median, timed
from benchmarks.report import interleave as run_interleaved
from benchmarks.sizes import size
from toolcrew.contract.calls import ToolCall, ToolContext
from toolcrew.workers.sandbox_client import SandboxClient, sandbox_id
from toolcrew.workers.tools.base import ToolEnvironment, WorkerResources
from toolcrew.workers.tools.edit import EDIT_TOOL

ROUNDS = size(60, 2)
WARM_UP = size(6, 1)
_LARGE = "".join(f"{number:08d} " + "x" * 42 + "\n" for number in range(1, 200_001)).encode()
_SMALL = _LARGE[:80_000]
_FILES = {"large.txt": _LARGE, "small.txt": _SMALL}
_MARKS = ("00001000 x", "00001000 y")
# Baseline program: the least work that changes a byte of a file and never leaves a partial file. The program measures
# its own time, so the start of the interpreter is not included.
_FLOOR = """
import os, sys, time
name = sys.argv[1]
started = time.perf_counter()
with open(name, "rb") as file:
    data = file.read()
with open(name + ".new", "wb") as file:
    file.write(data)
    os.fsync(file.fileno())
os.rename(name + ".new", name)
print(time.perf_counter() - started)
"""


class ToolRun:
    """Handler of edit_tool over one sandbox."""

    def __init__(self, client: SandboxClient) -> None:
        now = time.time()
        self._context = ToolContext(tenant="bench", session="edit", sent_at=now, deadline_at=now + 3600)
        self._client = client
        self._turn = dict.fromkeys(_FILES, 0)

    def edit(self, name: str) -> None:
        turn = self._turn[name]
        self._turn[name] = 1 - turn
        arguments = {
            "file_path": name,
            "old_string": _MARKS[turn],
            "new_string": _MARKS[1 - turn],
            "replace_all": False,
        }
        call = ToolCall(id="bench", name="edit_tool", arguments=arguments)
        outcome = EDIT_TOOL.handler(
            arguments, ToolEnvironment(call, self._context, WorkerResources({}, client=self._client))
        )
        if not str(outcome.output).startswith("replaced 1 "):
            raise RuntimeError(f"the edit was not made: {outcome.error or outcome.output}")


class Floor:
    """Baseline program in the same sandbox."""

    def __init__(self, client: SandboxClient, sandbox: str) -> None:
        self._client = client
        self._sandbox = sandbox

    def measure(self, name: str) -> float:
        request = {
            "op": "exec",
            "argv": ["python3", "-c", _FLOOR, name],
            "script_bytes": 0,
            "cwd": "/workspace",
            "env": {},
            "timeout_s": 30.0,
        }
        response = self._client.call(
            self._sandbox, {**request, "capture": {"stdout": 4096, "stderr": 4096}}, call_id="bench"
        )
        if response.done["exit_code"] != 0:
            raise RuntimeError(f"the floor failed: {response.streams}")
        return float(response.streams["stdout"])


def run(rounds: int = ROUNDS) -> Report:
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        name = client.open("bench", "edit")
        assert name == sandbox_id("bench", "edit")
        for file, content in _FILES.items():
            client.call(
                name,
                {"op": "write_file", "path": file, "mode": "overwrite", "timeout_s": 30.0},
                content,
                call_id="bench",
            )
        tool, floor = ToolRun(client), Floor(client, name)
        cases: dict[str, Case] = {
            "ping": timed(lambda: client.call(name, {"op": "ping"})),
            "floor_large": lambda: floor.measure("floor-large.txt"),
            "large": timed(lambda: tool.edit("large.txt")),
            "floor_small": lambda: floor.measure("floor-small.txt"),
            "small": timed(lambda: tool.edit("small.txt")),
        }
        for file, content in _FILES.items():
            request = {"op": "write_file", "path": f"floor-{file}", "mode": "overwrite", "timeout_s": 30.0}
            client.call(name, request, content, call_id="bench")
        seconds = asyncio.run(run_interleaved(cases, rounds, WARM_UP))
    return _report(seconds, rounds)


def _report(seconds: dict[str, list[float]], rounds: int) -> Report:
    report = Report("edit_tool", notes=[f"medians of {rounds} interleaved rounds after {WARM_UP} to warm up"])
    report.add_ms("ping", seconds["ping"], "floor: empty round trip through sandboxd")
    report.add_ms(
        "floor_large", seconds["floor_large"], "floor: read, write, fsync and rename of 10 MB in the same place"
    )
    report.add_ms("large", seconds["large"], "ours: edit_tool over sandboxd, one replacement in 10 MB")
    report.add_ms(
        "floor_small", seconds["floor_small"], "floor: read, write, fsync and rename of 80 KB in the same place"
    )
    report.add_ms("small", seconds["small"], "ours: edit_tool over sandboxd, one replacement in 80 KB")
    middle = {name: median(values) for name, values in seconds.items()}
    report.add("large_ratio", middle["large"] / middle["floor_large"], "10 MB, ours / floor", at_most=2.0)
    return report
