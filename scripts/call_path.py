"""Shows which product files and functions run for one call of bash_tool, from `Session.call` to the guest and back.

The script starts an embedded stack whose processes record the files of their functions (call_path_hook.py). After
some warm-up calls, the script records several calls. Each call has its own window, which ends SETTLE_S after the
result: the work that a process does for the call after its answer belongs to the path.

A file or function is on the path if it runs in every window. This rule excludes background work (heartbeats, sweeps),
whose periods are longer than a window. The script does not subtract an idle window, because files that calls and
background work share would be lost.

The guest runs on plain pipes instead of in a container. The guest receives the request that bash_tool sends, under
the same rule. Lua scripts, and modules that are only imported, are not counted.
"""

import argparse
import ast
import asyncio
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine_peer import DirectGuest
from benchmarks.processes import guest_on_pipes
from benchmarks.warm_call import REQUEST, SCRIPT
from scripts import call_path_hook
from toolcrew import ToolClient
from toolcrew.contract.errors import ToolcrewError

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "contract/",
    "store/",
    "telemetry/",
    "concurrency/",
    "archives/",
    "orchestrator/",
    "workers/",
    "sandbox-images/guest/",
)
ROLES = ("orchestrator", "worker", "sandboxd", "guest")
WARM_UP = 5
WINDOWS = 8
SETTLE_S = 0.1


class Recording:
    """The folder through which the recording processes and this process exchange data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = folder / "seen"
        self._seen.touch()
        (folder / "root").write_text(f"{ROOT}/")
        (folder / "switch").write_bytes(b"\0")
        with (folder / "switch").open("r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)
        shutil.copy(call_path_hook.__file__, folder / "sitecustomize.py")
        os.environ[call_path_hook.FOLDER] = str(folder)

    @contextmanager
    def window(self, number: int) -> Iterator[None]:
        """Record the functions that run in this block."""
        self._switch[0] = number
        try:
            yield
        finally:
            self._switch[0] = 0

    def functions(self) -> dict[str, dict[str, set[int]]]:
        """Return the functions on the path: role -> file that ran in every window -> first lines of its functions
        that ran.
        """
        windows: dict[str, dict[tuple[str, int], set[int]]] = {role: {} for role in ROLES}
        for line in self._seen.read_text().splitlines():
            number, role, at, path = line.split(" ", 3)
            file = path.removeprefix("toolcrew/")
            if file.startswith(FOLDERS):
                windows[role].setdefault((file, int(at)), set()).add(int(number))
                # Different functions of one file may run in each window.
                windows[role].setdefault((file, 0), set()).add(int(number))
        functions_by_role: dict[str, dict[str, set[int]]] = {role: {} for role in ROLES}
        for role, functions in windows.items():
            for name, first in sorted(function for function, numbers in functions.items() if len(numbers) == WINDOWS):
                functions_by_role[role].setdefault(name, set()).add(first)
        return {
            role: {file: firsts - {0} for file, firsts in files.items()} for role, files in functions_by_role.items()
        }


async def record_calls(recording: Recording) -> None:
    """Record this process, the worker and sandboxd."""
    os.environ["PYTHONPATH"] = str(recording.folder)
    call_path_hook.install("orchestrator")
    async with ToolClient.embedded(workers_only=True) as client, await client.open_session() as session:
        for number in range(-WARM_UP + 1, WINDOWS + 1):
            with recording.window(max(number, 0)):
                result = await session.call("bash_tool", {"command": "true"})
                await asyncio.sleep(SETTLE_S)
            if not result.success:
                raise RuntimeError(f"the call did not succeed: {result.error}")


def record_guest(recording: Recording) -> None:
    """Record the guest alone."""
    hook = f"sys.path.insert(0, {str(recording.folder)!r}); import sitecustomize; sitecustomize.install('guest');"
    with guest_on_pipes(hook) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        out, into = child.stdout.fileno(), child.stdin.fileno()
        guest = DirectGuest(lambda size: os.read(out, size), lambda data: os.write(into, data), multiplexed=False)
        for number in range(-WARM_UP + 1, WINDOWS + 1):
            with recording.window(max(number, 0)):
                done = guest.call(REQUEST, SCRIPT)
                time.sleep(SETTLE_S)
            if done.get("exit_code") != 0:
                raise RuntimeError(f"the guest's call did not succeed: {done}")


@dataclass(frozen=True)
class Size:
    """Number of lines of code of a file, and of its functions that ran. Docstrings, comments and blank lines do not
    count.
    """

    lines: int
    run: int


def measure(functions: Mapping[str, set[int]]) -> dict[str, Size]:
    """Return the size of each file, by the first lines of its functions."""
    sizes = {}
    for file, firsts in functions.items():
        text = (ROOT / file).read_text()
        code, run = find_code(text), set[int]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
                run |= set(range(first, (node.end_lineno or first) + 1)) if first in firsts else set()
        sizes[file] = Size(len(code), len(run & code))
    return sizes


def find_code(text: str) -> set[int]:
    """Return the numbers of the lines of a Python file that are neither blank nor only a comment or a docstring."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.split("#")[0].strip()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def build_report(functions: Mapping[str, Mapping[str, set[int]]]) -> dict[str, dict[str, Size]]:
    """Return the sizes: process -> file -> size. In `total` each file occurs once, with the functions that ran in any
    process.
    """
    every: dict[str, set[int]] = {}
    for files in functions.values():
        for file, firsts in files.items():
            every.setdefault(file, set()).update(firsts)
    return {**{role: measure(functions[role]) for role in ROLES}, "total": measure(every)}


def render(report: Mapping[str, Mapping[str, Size]]) -> str:
    """Format the report for people."""
    lines = []
    for role in ROLES:
        rows = (f"  {size.run:5} of {size.lines:5}  {file}" for file, size in report[role].items())
        lines += [f"{role}: {_format_sum(report[role])}", *rows, ""]
    return "\n".join([*lines, f"total, each file once: {_format_sum(report['total'])}", ""])


def to_json(report: Mapping[str, Mapping[str, Size]]) -> str:
    """Format the report for programs: the files of each process, and the sums."""
    processes = {role: {**_sum(report[role]), "by_file": _lines(report[role])} for role in ROLES}
    return json.dumps({"processes": processes, "total": _sum(report["total"])}) + "\n"


def _lines(files: Mapping[str, Size]) -> dict[str, int]:
    return {file: size.lines for file, size in files.items()}


def _sum(files: Mapping[str, Size]) -> dict[str, int]:
    sizes = files.values()
    return {"files": len(files), "lines": sum(size.lines for size in sizes), "run": sum(size.run for size in sizes)}


def _format_sum(files: Mapping[str, Size]) -> str:
    sums = _sum(files)
    return f"{sums['files']} files of {sums['lines']:,} lines of code; {sums['run']:,} of functions that run"


def main() -> int:
    parser = argparse.ArgumentParser("scripts/call_path", description="Show which files run for one call of bash_tool.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    wants_json = parser.parse_args().json
    if os.geteuid() != 0:
        sys.stderr.write("call_path: the guest needs a pid namespace; run this program as root\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="toolcrew-path-") as name:
        recording = Recording(Path(name))
        try:
            record_guest(recording)
            asyncio.run(record_calls(recording))
        except (ToolcrewError, RuntimeError) as error:
            sys.stderr.write(f"call_path: {error}\n")
            return 1
        finally:
            sys.setprofile(None)
        report = build_report(recording.functions())
    sys.stdout.write(to_json(report) if wants_json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
