"""Shows which product files run for one call of bash_tool, from `Session.call` to the guest and back.

Starts an embedded stack whose processes record the files of the functions that run in them (call_path_hook.py), and
makes some calls to warm up. Then it records several calls. Each has a window of its own, which ends SETTLE_S after the
result: the work that a process does for the call after its answer belongs to the path.

A file is on the path when it runs in every window. This keeps out background work (heartbeats, sweeps), whose periods
are longer than a window. An idle window is not subtracted: files that calls and background work share would be lost.

The guest runs on plain pipes instead of in a container. It gets the request that bash_tool sends, under the same rule.
Lua scripts, and modules of which only the import ran, are not counted.
"""

import argparse
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
from pathlib import Path
from types import MappingProxyType

from benchmarks.engine_peer import DirectGuest
from benchmarks.processes import guest_on_pipes
from benchmarks.warm_call import REQUEST, SCRIPT
from contract.errors import ToolcrewError
from orchestrator import ToolClient
from scripts import call_path_hook

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("contract/", "store/", "telemetry/", "orchestrator/", "workers/", "sandbox-images/guest/")
ROLES = ("orchestrator", "worker", "sandboxd", "guest")
WARM_UP = 5
WINDOWS = 8
SETTLE_S = 0.1
_FEWER_PARTS = MappingProxyType({"TOOLCREW_EMBEDDED_API": "false", "TOOLCREW_EMBEDDED_FLOWER": "false"})


class Recording:
    """A folder that the recording processes share with this one."""

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
        """Record what runs in this block."""
        self._switch[0] = number
        try:
            yield
        finally:
            self._switch[0] = 0

    def files(self) -> dict[str, list[str]]:
        """Role -> the files that ran in every window."""
        windows: dict[str, dict[str, set[int]]] = {role: {} for role in ROLES}
        for line in self._seen.read_text().splitlines():
            number, role, file = line.split(" ", 2)
            if file.startswith(FOLDERS):
                windows[role].setdefault(file, set()).add(int(number))
        return {role: sorted(file for file in files if len(files[file]) == WINDOWS) for role, files in windows.items()}


async def record_calls(recording: Recording) -> None:
    """Record this process, the worker and sandboxd."""
    os.environ |= {**_FEWER_PARTS, "PYTHONPATH": str(recording.folder)}
    call_path_hook.install("orchestrator")
    async with ToolClient.embedded() as client, await client.open_session() as session:
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


def count_lines(files: list[str]) -> dict[str, int]:
    """File -> its number of lines."""
    return {file: len((ROOT / file).read_bytes().splitlines()) for file in files}


def build_report(files: Mapping[str, list[str]]) -> dict[str, dict[str, int]]:
    """Process -> file -> lines; in `total` each file is there once."""
    report = {role: count_lines(files[role]) for role in ROLES}
    return {**report, "total": {file: lines for counted in report.values() for file, lines in counted.items()}}


def render(report: Mapping[str, Mapping[str, int]]) -> str:
    """Format the report for people."""
    lines = []
    for role in ROLES:
        rows = (f"  {count:5}  {file}" for file, count in report[role].items())
        lines += [f"{role}: {_format_sum(report[role])}", *rows, ""]
    return "\n".join([*lines, f"total, each file once: {_format_sum(report['total'])}", ""])


def to_json(report: Mapping[str, Mapping[str, int]]) -> str:
    """Format the report for programs: the files of each process, and the sums."""
    sums = {name: {"files": len(files), "lines": sum(files.values())} for name, files in report.items()}
    processes = {role: {**sums[role], "by_file": report[role]} for role in ROLES}
    return json.dumps({"processes": processes, "total": sums["total"]}) + "\n"


def _format_sum(files: Mapping[str, int]) -> str:
    return f"{len(files)} files, {sum(files.values()):,} lines"


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
        report = build_report(recording.files())
    sys.stdout.write(to_json(report) if wants_json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
