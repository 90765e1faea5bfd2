"""Check the repaired projects: `python examples/fix-the-test/check.py OUT.jsonl --artifacts DIR`.

Each project is assembled again from the original tests and the other files of the batch. The tests then run in a new
interpreter. This runs code that a model wrote, with limits of time and memory but with your rights. Use a machine on
which you accept this.
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
# The report starts with a token that the project cannot know. An early exit with code 0 would prove nothing.
_RUN_TESTS = """
import os, sys, unittest
token = sys.stdin.readline().strip()
report = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, sys.argv[1])
result = unittest.TestResult()
unittest.TestLoader().discover(sys.argv[1], top_level_dir=sys.argv[1]).run(result)
failed = result.failures + result.errors + [(test, "") for test in result.unexpectedSuccesses]
names = " ".join(sorted({test.id() for test, _ in failed}))
os.write(report, f"{token} {result.testsRun} {len(failed)} {len(result.skipped)} {names}".encode())
os._exit(0)
"""


def is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def assemble_project(project: Path, artifact: Path, target: Path) -> int:
    """Create the project in `target` with the batch's files and the original tests. Return the number of changed files.

    Files that the project does not have are ignored. A repair does not need new files, and they could hide modules that
    the tests import.
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
    """Return (run, failed, skipped, names of the failed tests), or the reason why there is no result."""
    token = secrets.token_hex(16)
    # The report is a file with a size limit. A flooded pipe could use all memory of this process.
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
            child.communicate(f"{token}\n".encode(), LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"the tests did not end within {LIMIT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        report.seek(0)
        output = report.read(MAX_FILE_BYTES)
    parts = output.decode(errors="replace").split(" ", 4)
    if len(parts) != 5 or parts[0] != token:
        return f"the tests stopped early (exit code {child.returncode})"
    return int(parts[1]), int(parts[2]), int(parts[3]), parts[4]


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def judge_project(line: Mapping[str, Any], artifacts: Path) -> Verdict:
    """Judge one project. `line`: its line of expected.jsonl."""
    name, tests = str(line["id"]), int(line["tests"])
    artifact = artifacts / name
    if not artifact.is_dir():
        return Verdict(name, "wrong", f"no artifacts in {artifact}: submit the batch with an artifacts folder")
    with tempfile.TemporaryDirectory(prefix="fix-the-test-") as folder:
        changed = assemble_project(HERE / "projects" / name, artifact, Path(folder) / "project")
        result = run_tests(Path(folder) / "project")
    if isinstance(result, str):
        return Verdict(name, "wrong", result)
    run, failed, skipped, names = result
    if (run, failed, skipped) == (tests, 0, 0):
        return Verdict(name, "right", f"{tests} tests pass; {changed} {'file' if changed == 1 else 'files'} changed")
    if run != tests or skipped:
        return Verdict(name, "wrong", f"{run} tests ran and {skipped} were skipped, of {tests} that must pass")
    return Verdict(name, "wrong", f"{failed} of {tests} tests fail: {names}")


def build_judge(arguments: argparse.Namespace) -> Judge:
    if not arguments.artifacts.is_dir():
        raise CannotCheck(f"{arguments.artifacts} is not a folder: give the artifacts folder of the batch")

    def judge(line: Mapping[str, Any], row: Row) -> Verdict:
        return judge_project(line, arguments.artifacts)

    return judge


if __name__ == "__main__":
    sys.exit(
        run_check(HERE, "Run the tests of the projects that a batch has repaired.", build_judge, needs_artifacts=True)
    )
