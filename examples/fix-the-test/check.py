"""Judges the repaired projects: `python examples/fix-the-test/check.py OUT.jsonl --artifacts DIR`.

Each project is put together anew, its tests as they are here, its other files as the batch left them; then the tests
are run in a fresh interpreter. That runs what a model wrote, under limits of time and memory but with your rights: do
it where you would run that.
"""

import argparse
import contextlib
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from batch_checking import CannotCheck, Judge, Row, Verdict, run_check  # noqa: E402

LIMIT_S = 30
MEMORY_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 20
# Says by a word that the project cannot know beforehand how many tests ran: an early exit with code 0 proves nothing.
_RUN_TESTS = """
import os, sys, unittest
word = sys.stdin.readline().strip()
report = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, sys.argv[1])
result = unittest.TestResult()
unittest.TestLoader().discover(sys.argv[1], top_level_dir=sys.argv[1]).run(result)
bad = result.failures + result.errors + [(test, "") for test in result.unexpectedSuccesses]
names = " ".join(sorted({test.id() for test, _ in bad}))
os.write(report, f"{word} {result.testsRun} {len(bad)} {len(result.skipped)} {names}".encode())
os._exit(0)
"""


def is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def put_together(project: Path, artifact: Path, target: Path) -> int:
    """The project in `target`, with what the batch made of its files but for the tests; gives how many of them the
    batch had changed.

    Files that the project does not have are left out: a repair needs none, and they could stand in the way of what the
    tests import.
    """
    shutil.copytree(project, target, ignore=shutil.ignore_patterns("__pycache__"))
    changed = 0
    for original in sorted(path for path in target.rglob("*") if path.is_file() and not is_test(path)):
        name = original.relative_to(target)
        repaired = artifact / name
        is_own = repaired.resolve().is_relative_to(artifact.resolve())
        if not (is_own and repaired.is_file()) or repaired.is_symlink() or repaired.stat().st_size > MAX_FILE_BYTES:
            continue
        text = repaired.read_bytes()
        changed += text != original.read_bytes()
        original.write_bytes(text)
    return changed


def run_tests(project: Path) -> tuple[int, int, int, str] | str:
    """(run, bad, skipped, names of the bad ones), or why that cannot be said."""
    word = secrets.token_hex(16)
    # To a file, whose size has a limit: a pipe could be flooded until this process has no memory left.
    with tempfile.TemporaryFile() as report:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _RUN_TESTS, str(project)],
            cwd=project,
            env={"LANG": "C.UTF-8", "PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_set_limits,
        )
        try:
            child.communicate(f"{word}\n".encode(), LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"the tests did not end within {LIMIT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        report.seek(0)
        said = report.read(MAX_FILE_BYTES)
    parts = said.decode(errors="replace").split(" ", 4)
    if len(parts) != 5 or parts[0] != word:
        return f"the tests did not come to their end (exit code {child.returncode})"
    return int(parts[1]), int(parts[2]), int(parts[3]), parts[4]


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def judge_project(line: Mapping[str, Any], artifacts: Path) -> Verdict:
    """`line`: of expected.jsonl."""
    name, tests = str(line["id"]), int(line["tests"])
    artifact = artifacts / name
    if not artifact.is_dir():
        return Verdict(name, "wrong", f"no artifacts in {artifact}: submit the batch with its artifacts' folder")
    with tempfile.TemporaryDirectory(prefix="fix-the-test-") as folder:
        changed = put_together(HERE / "projects" / name, artifact, Path(folder) / "project")
        result = run_tests(Path(folder) / "project")
    if isinstance(result, str):
        return Verdict(name, "wrong", result)
    run, bad, skipped, names = result
    if (run, bad, skipped) == (tests, 0, 0):
        return Verdict(name, "right", f"{tests} tests pass; {changed} {'file' if changed == 1 else 'files'} changed")
    if run != tests or skipped:
        return Verdict(name, "wrong", f"{run} tests ran and {skipped} were skipped, of {tests} that are to pass")
    return Verdict(name, "wrong", f"{bad} of {tests} tests fail: {names}")


def build_judge(asked: argparse.Namespace) -> Judge:
    if not asked.artifacts.is_dir():
        raise CannotCheck(f"{asked.artifacts} is no folder: name the one that the batch put the items' files in")

    def judge(line: Mapping[str, Any], row: Row) -> Verdict:
        return judge_project(line, asked.artifacts)

    return judge


if __name__ == "__main__":
    sys.exit(
        run_check(HERE, "Runs the tests of the projects that a batch has repaired.", build_judge, needs_artifacts=True)
    )
