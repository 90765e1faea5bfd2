"""Measure glob_tool and grep_tool over 50,000 files, compared with a minimal ripgrep command in the same sandbox."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from benchmarks.processes import running_sandboxd
from benchmarks.report import Case, Report, median, timed
from benchmarks.report import interleave as run_interleaved
from benchmarks.sizes import size
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.tools.text import MAX_LINES, MAX_OUTPUT_BYTES

ROUNDS = size(10, 2)
WARM_UP = 1
FILES = size(50_000, 1000)
FILES_A_FOLDER = 10
NEEDLES = FILES // 500
_PLANT = f"""
import os, random
random.seed(1)
words = ["alpha", "beta", "def handle(request):", "return None", "import os", "class Thing:", "x = 1", "# comment"]
for folder in range({FILES // FILES_A_FOLDER}):
    path = f"/workspace/tree/{{folder % 70}}/{{folder}}"
    os.makedirs(path)
    for number in range({FILES_A_FOLDER}):
        name = f"{{path}}/file{{number}}." + random.choice(["py", "js", "txt", "md", "c"])
        with open(name, "w") as file:
            file.writelines(random.choice(words) + "\\n" for _ in range(20))
            if (folder * {FILES_A_FOLDER} + number) % 500 == 0:
                file.write("needle_here = 42\\n")
        os.utime(name, (1e9 + random.random() * 1e6,) * 2)
open("/workspace/tree/.gitignore", "w").write("*.log\\nbuild/\\n__pycache__/\\n")
"""
_GLOB = {
    "op": "glob",
    "pattern": "**/*",
    "path": "/workspace/tree",
    "kind": "file",
    "limit": 100,
    "max_bytes": MAX_OUTPUT_BYTES,
}
_GREP = {
    "op": "grep",
    "path": "/workspace/tree",
    "mode": "content",
    "limit": 100,
    "max_bytes": MAX_OUTPUT_BYTES,
    "max_lines": MAX_LINES,
}


def _run(client: SandboxClient, name: str, argv: list[str], cwd: str = "/workspace/tree") -> None:
    request = {"op": "exec", "argv": argv, "cwd": cwd, "env": {}, "timeout_s": 120.0}
    done = client.call(name, {**request, "script_bytes": 0, "capture": {"stdout": 1, "stderr": 4096}}).done
    if done.get("exit_code") != 0:
        raise RuntimeError(f"{argv[0]} did not succeed: {done}")


def _search(client: SandboxClient, name: str, request: dict[str, Any], firsts: list[float]) -> Callable[[], None]:
    """Run one search; append the seconds to its first line to `firsts`."""

    def work() -> None:
        started = time.perf_counter()
        pieces: list[float] = []
        done = client.call(
            name, {**request, "timeout_s": 60.0}, on_data=lambda *_: pieces.append(time.perf_counter() - started)
        ).done
        if "error" in done or done["partial"] or not done["shown"]:
            raise RuntimeError(f"the search did not succeed: {done}")
        firsts.append(pieces[0])

    return work


def run(rounds: int = ROUNDS) -> Report:
    firsts: dict[str, list[float]] = {"glob": [], "rare": [], "common": []}
    with contextlib.ExitStack() as stack:
        sandboxd = stack.enter_context(running_sandboxd())
        client = stack.enter_context(SandboxClient(sandboxd.socket))
        name = client.open("bench", "search")
        _run(client, name, ["/usr/bin/python3", "-c", _PLANT], "/workspace")
        floor = ["/usr/bin/rg"]
        cases: dict[str, Case] = {
            "floor_glob": timed(lambda: _run(client, name, [*floor, "--files"])),
            "glob": timed(_search(client, name, _GLOB, firsts["glob"])),
            "floor_rare": timed(lambda: _run(client, name, [*floor, "needle_here", "./"])),
            "rare": timed(_search(client, name, {**_GREP, "pattern": "needle_here"}, firsts["rare"])),
            "floor_common": timed(lambda: _run(client, name, [*floor, "def", "./"])),
            "common": timed(_search(client, name, {**_GREP, "pattern": "def"}, firsts["common"])),
        }
        seconds = asyncio.run(run_interleaved(cases, rounds, WARM_UP))
    return _report(seconds, {case: values[WARM_UP:] for case, values in firsts.items()}, rounds)


def _report(seconds: dict[str, list[float]], firsts: dict[str, list[float]], rounds: int) -> Report:
    report = Report(
        "search",
        notes=[f"medians of {rounds} interleaved rounds over {FILES} files in {FILES // FILES_A_FOLDER} folders"],
    )
    labels = {"glob": "all files", "rare": f"a word of {NEEDLES} files", "common": "a word of nearly all files"}
    for case, label in labels.items():
        peer = "rg --files" if case == "glob" else "rg"
        report.add_ms(f"floor_{case}", seconds[f"floor_{case}"], f"floor: {peer} in the sandbox, unordered, {label}")
        report.add_ms(case, seconds[case], f"ours: {'glob' if case == 'glob' else 'grep'}, {label}")
        report.add_ms(f"first_{case}", firsts[case], "ours: first line")
        ratio = median(seconds[case]) / median(seconds[f"floor_{case}"])
        # glob also reads the time of every file, to return the newest; grep only of the files that match.
        report.add(f"{case}_ratio", ratio, f"ours / floor, {label}", at_most=1.7 if case == "glob" else 1.2)
        first = median(firsts[case]) / median(seconds[f"floor_{case}"])
        report.add(f"first_{case}_ratio", first, f"first line / floor, {label}")
    return report
