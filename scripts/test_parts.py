"""Run the whole test suite in parallel parts: `.venv/bin/python scripts/test_parts.py [ROOT]`.

A part is the test files of one directory below tests/, or a slice of a large one, run by a pytest process. Parts run
side by side, because most tests wait for programs. For a part that passes, this program prints its counts, warnings and
skips. For a part that fails, it prints the log without the tests that passed. For a part that died, it also prints the
tests that ran last. The end names the failed tests and the SLOWEST slowest tests.

A test that fails once fails the suite: the test or the product has a fault that a busy machine shows. Only where the
variable CI is set, at most MAX_REPEATED failed tests run once more when all parts have ended. A test that then passes is
printed as FLAKY with the output of its first failure, and does not fail the suite.

The exit status is that of the first failed part, otherwise 0. A signal ends every part in order, so that fixtures can
clean up.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

# Files of a part. A directory with more is cut into slices: otherwise its pytest would run alone at the end, on one
# processor. Each slice starts the shared fixtures again, so slices are not small.
MAX_FILES = 32
MAX_UNIT_FILES = 128
UNIT = "tests/unit"
# The longest directories start first, so that the suite does not wait for them at the end. Other directories follow.
LONGEST_FIRST = (
    "tests/integration",
    "tests/e2e",
    "tests/attacks",
    UNIT,
    "tests/runs",
    "tests/store",
    "tests/dispatch",
    "tests/benchmarks",
    "tests/e2e/batches",
    "tests/api",
    "tests/chaos",
    "tests/pages",
    "tests/conformance",
)
MAX_RUNNING = max(3, os.cpu_count() or 1)
PROGRESS_INTERVAL_S = 60.0
LAST_TESTS = 20
SLOWEST = 10
# More failures than this are no chance, so no test runs again. The limit is above 1, because one fixture that tests
# share fails several tests.
MAX_REPEATED = 5
TESTS_FAILED = 1
STOPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1

_PASSED = re.compile(rb" PASSED +\[ *\d+%\]$")
_PROGRESS = re.compile(rb"\[ *(\d+)%\]\n")
_COUNTED = re.compile(rb"=+ .* in [\d.]+s.* =+$")
_SUMMARY = re.compile(rb"=+ (warnings summary|short test summary info) ")
_DURATION = re.compile(rb"([\d.]+)s (?:call|setup|teardown) +(tests/\S.*)$|=+ slowest \d+ durations =+$")
_NAMED = re.compile(rb"(FAILED|ERROR) tests/")
_TITLE = re.compile(rb"_+ (?:ERROR at \w+ of )?([^_ ].*) _+$")
_RULE = re.compile(rb"=+ .* =+$")


class SuiteStopped(Exception):
    """A signal stopped the suite."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Plan:
    """A part of the test suite that can be started: its name and the arguments of its pytest."""

    name: str
    arguments: tuple[str, ...]


@dataclass
class Part:
    """A started part of the test suite, and the pytest process that runs it."""

    plan: Plan
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.plan.name

    def lines(self) -> list[bytes]:
        return self.log.read_bytes().splitlines()

    def progress(self) -> str:
        percentages = _PROGRESS.findall(self.log.read_bytes())
        return f"{self.name} {int(percentages[-1]) if percentages else 0}%"


def say(sentence: str) -> None:
    print(sentence, flush=True)


def find_parts(root: Path) -> list[Plan]:
    """Return the parts, the longest first: every directory below tests/ that contains a test file, in slices.
    tests/ itself must contain none.
    """
    files = sorted((root / "tests").rglob("test_*.py"))
    misplaced = [str(file.relative_to(root)) for file in files if file.parent == root / "tests"]
    if misplaced:
        sys.exit(f"test: put {', '.join(misplaced)} into a directory below tests/: only files there are run")
    directories: dict[str, list[str]] = {}
    for file in files:
        path = file.relative_to(root).as_posix()
        # The folders of unit tests mirror the packages. Each alone is too small for a part.
        folder = UNIT if path.startswith(f"{UNIT}/") else file.parent.relative_to(root).as_posix()
        directories.setdefault(folder, []).append(path)
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    found = []
    for name in sorted(directories, key=lambda name: (ranks.get(name, len(ranks)), name)):
        count = math.ceil(len(directories[name]) / (MAX_UNIT_FILES if name == UNIT else MAX_FILES))
        below = [str(file.relative_to(root)) for file in files if file.is_relative_to(root / name)]
        for number in range(count):
            label = name if count == 1 else f"{name} {number + 1} of {count}"
            # pytest reads the whole directory again for every file that is named, and once for the directory itself.
            others = sorted({*below} - {*directories[name][number::count]})
            found.append(Plan(label, (name, *(f"--ignore={other}" for other in others))))
    return found


def tie_to_parent() -> None:
    """Ask the kernel to interrupt this new process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def start(root: Path, plan: Plan, folder: Path, *, repeat: bool = False) -> Part:
    """Start the pytest of a part. `repeat`: only for the tests that failed in it before."""
    stem = plan.name.replace("/", "-").replace(" ", "-")
    log = folder / f"{stem}{'-again' if repeat else ''}.log"
    cache = folder / f"{stem}.cache"  # one per part: pytests with a shared cache overwrite the list of failures
    with log.open("wb") as out:
        process = subprocess.Popen(
            # With -v the log contains the name of every test before it runs, even if this pytest dies.
            [
                *(sys.executable, "-m", "pytest", "-v", "-o", f"cache_dir={cache}", f"--durations={SLOWEST}"),
                *(("--last-failed", "--last-failed-no-failures", "none") if repeat else ()),
                *plan.arguments,
            ],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            # This program passes on Ctrl-C once. A second one would interrupt the clean-up.
            start_new_session=True,
            preexec_fn=tie_to_parent,
        )
    return Part(plan, log, process)


def run_all(root: Path, folder: Path) -> Generator[Part]:
    """Yield each part when it ends."""
    waiting, running = deque(find_parts(root)), list[Part]()
    reported_at = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < MAX_RUNNING:
                running.append(start(root, waiting.popleft(), folder))
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                yield part
            if time.monotonic() - reported_at > PROGRESS_INTERVAL_S:
                reported_at = time.monotonic()
                say(f"test: running: {', '.join(part.progress() for part in running)}")
            # There is no common event for several child processes. The short pause costs nothing in a run of minutes.
            time.sleep(0.2)
    finally:
        end(running)


def end(running: list[Part]) -> None:
    """Interrupt the running parts and wait for their clean-up."""
    for part in running:
        if part.process.poll() is None:
            say(f"test: ending {part.name}")
            part.process.send_signal(signal.SIGINT)
    for part in running:
        part.process.wait()


def summarize(part: Part) -> str:
    """Return the last line of pytest, or how pytest died."""
    status, lines = part.process.returncode, part.lines()
    # A program that outlives its test may print after pytest.
    last = next((line for line in reversed(lines) if _COUNTED.match(line)), None)
    counted = last.decode(errors="replace").strip("= ") if last is not None else "no result"
    death = (
        f" (died of {signal.Signals(-status).name})"
        if status < 0
        else f" (status {status})"
        if status > TESTS_FAILED
        else ""
    )
    return f"{part.name}: {counted}{death}"


def report(part: Part) -> None:
    """Print the result of a part without the tests that passed."""
    say(f"test: {summarize(part)}")
    lines = part.lines()
    if part.process.returncode == 0:
        summary = next((number for number, line in enumerate(lines) if _SUMMARY.match(line)), len(lines))
        lines = lines[summary:-1]
    shown = [line + b"\n" for line in lines if not _PASSED.search(line) and not _DURATION.match(line)]
    sys.stdout.buffer.write(b"".join(shown))
    sys.stdout.buffer.flush()
    if part.process.returncode not in (0, TESTS_FAILED):
        say(f"test: {part.name} died; it ran last:\n" + "\n".join(ran_last(part)))


def ran_last(part: Part) -> list[str]:
    """Return the names of the tests that pytest started last, in their order."""
    started = [line.decode(errors="replace") for line in part.lines() if line.startswith(b"tests/") and b"::" in line]
    return started[-LAST_TESTS:]


def find_slowest(parts: list[Part]) -> list[str]:
    """Return the slowest tests of all parts, with seconds of their setup, call or teardown."""
    durations = [match for part in parts for line in part.lines() if (match := _DURATION.match(line)) and match[1]]
    longest = sorted(durations, key=lambda match: float(match[1]), reverse=True)[:SLOWEST]
    return [f"{float(match[1]):7.1f} s  {match[2].decode(errors='replace')}" for match in longest]


def failures(part: Part) -> list[str]:
    """Return the names of the failed tests from pytest's summary. Adds a line about the part when the summary is
    missing or pytest itself failed.
    """
    named = [line.decode(errors="replace") for line in part.lines() if _NAMED.match(line)]
    return named if named and part.process.returncode == TESTS_FAILED else [*named, summarize(part)]


def first_output(part: Part, test: str) -> list[bytes]:
    """Return the output of a failed test: the lines below its title, until the next title."""
    found, is_inside = [], False
    for line in part.lines():
        if title := _TITLE.match(line):
            is_inside = title[1].decode(errors="replace") == test.partition("::")[2].replace("::", ".")
        elif _RULE.match(line):
            is_inside = False
        if is_inside:
            found.append(line)
    return found


def report_flaky(part: Part, repeated: Part) -> None:
    """Print the tests that failed in `part` and passed in `repeated`, each with the output of its first failure."""
    again = {_test_name(failure) for failure in failures(repeated)}
    for test in dict.fromkeys(_test_name(failure) for failure in failures(part)):
        if test not in again:
            output = b"\n".join(first_output(part, test)).decode(errors="replace")
            say(f"test: FLAKY {test}: it passed when it ran again. Its first failure:\n{output}")


def _test_name(failure: str) -> str:
    return failure.partition(" - ")[0].partition(" ")[2]


def repeat_failed(root: Path, folder: Path, failed: list[Part]) -> list[Part]:
    """Run the failed tests once more, one part after the other. Returns the parts that still fail."""
    names = [name for part in failed for name in failures(part)]
    if len(names) > MAX_REPEATED or any(part.process.returncode != TESTS_FAILED for part in failed):
        return failed
    still_failed = []
    for part in failed:
        say(f"test: running the failed tests of {part.name} again, alone")
        repeated = start(root, part.plan, folder, repeat=True)
        try:
            repeated.process.wait()
        finally:
            end([repeated])
        report(repeated)
        report_flaky(part, repeated)
        if repeated.process.returncode != 0:
            still_failed.append(repeated)
    return still_failed


def run_suite(root: Path, folder: Path) -> int:
    """Run all parts and return the exit status. Where CI is set, repeat the failed tests."""
    ended: list[Part] = []
    with contextlib.closing(run_all(root, folder)) as parts:
        for part in parts:
            report(part)
            ended.append(part)
    say(f"test: the {SLOWEST} slowest tests:\n" + "\n".join(find_slowest(ended)))
    failed = [part for part in ended if part.process.returncode != 0]
    if os.environ.get("CI"):
        failed = repeat_failed(root, folder, failed)
    if not failed:
        say("test: all parts passed")
        return 0
    say("\ntest: failed:\n" + "\n".join(line for part in failed for line in failures(part)))
    return max(failed[0].process.returncode, TESTS_FAILED)


def _stop(number: int, _frame: object) -> None:
    for stopping in STOPPED:
        signal.signal(stopping, signal.SIG_IGN)  # the parts already clean up
    raise SuiteStopped(number)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]).resolve() if arguments else Path(__file__).resolve().parent.parent
    for number in STOPPED:
        signal.signal(number, _stop)
    try:
        with tempfile.TemporaryDirectory(prefix="toolcrew-test-") as folder:
            return run_suite(root, Path(folder))
    except SuiteStopped as stopped:
        say(f"test: stopped by {stopped}")
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
