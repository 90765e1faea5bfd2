"""Runs $ARTIFACTS/solution.py with each input of cases.json and writes the share of right outputs to ./reward.

Start it with `exec python3 -I grade.py`. The solution may do anything. It has the user of this program, so:

- this program reads its files before the solution runs, deletes them, and cannot be inspected (not dumpable);
- every process of the solution becomes a child of this program at the latest when its parent ends (subreaper), and is
  killed before the reward is written;
- a solution that kills or stops this program has no reward.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
SECONDS, OUTPUT_BYTES, MEMORY_BYTES, PROCESSES = 10, 1 << 20, 1 << 28, 100


def limit() -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


def children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


def kill_all() -> None:
    """Kill every process that the solution has started, also those that have left its process group."""
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run(solution: str, text: str) -> bytes:
    """Return what the solution printed. Its status does not matter."""
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryDirectory() as folder,
    ):
        source.write(text.encode())
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", solution],
            stdin=source,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            preexec_fn=limit,
        )
        try:
            process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_all()
        output.seek(0)
        return output.read(OUTPUT_BYTES)


def main() -> None:
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("prctl failed")
    here = Path(__file__).resolve().parent
    cases = json.loads((here / "cases.json").read_text())
    for path in (here / "cases.json", here / "grade.py"):
        path.unlink()
    solution = os.path.join(os.environ["ARTIFACTS"], "solution.py")
    right = sum(run(solution, case["in"]).decode(errors="replace").split() == case["out"].split() for case in cases)
    reward = here / "reward"
    if reward.is_symlink() or reward.exists():
        sys.exit("the solution has written a reward")
    reward.write_text(json.dumps({"reward": right / len(cases), "right": right}))


main()
