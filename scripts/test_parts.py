"""Runs the whole test suite in parts side by side: `.venv/bin/python scripts/test_parts.py [ROOT]`.

A part is the test files of one directory below tests/, run by a pytest process. Parts run side by side, because most
tests wait for programs. For a part that passes, this program prints its counts, warnings and skips. For a part that
fails, it prints the log without the tests that passed. For a part that died, it also prints the tests that ran last. The
end names the failed tests and the SLOWEST slowest tests.

Failed tests run once more when all parts have ended, unless there are more than MOST_REPEATED. A test that lost a race
against a busy processor passes then; it is reported as flaky, and the suite passes. A test that fails again fails the
suite.

The exit status is that of the first failed part, otherwise 0. A signal ends every part in order, so that fixtures can
clean up.
"""

from __future__ import annotations

import contextlib
import ctypes
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

# What takes longest begins first, so that nobody waits for it at the end; a directory that is not named here follows.
LONGEST_FIRST = (
    "tests/integration",
    "tests/e2e",
    "tests/unit",
    "tests/benchmarks",
    "tests/e2e/batches",
    "tests/api",
    "tests/attacks",
    "tests/chaos",
    "tests/pages",
    "tests/conformance",
)
SIDE_BY_SIDE = max(3, os.cpu_count() or 1)
TOLD_EVERY_S = 60.0
LAST_TESTS = 20
SLOWEST = 10
# More failures than this are a defect, not lost races: nothing runs again.
MOST_REPEATED = 3
TESTS_FAILED = 1
STOPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1

_PASSED = re.compile(rb" PASSED +\[ *\d+%\]$")
_PROGRESS = re.compile(rb"\[ *(\d+)%\]\n")
_COUNTED = re.compile(rb"=+ .* in [\d.]+s.* =+$")
_SUMMARY = re.compile(rb"=+ (warnings summary|short test summary info) ")
_DURATION = re.compile(rb"([\d.]+)s (?:call|setup|teardown) +(tests/\S.*)$|=+ slowest \d+ durations =+$")
_NAMED = re.compile(rb"(FAILED|ERROR) tests/")


class Stopped(Exception):
    """A signal told us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Part:
    """A directory of tests and the pytest that runs it."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    def lines(self) -> list[bytes]:
        return self.log.read_bytes().splitlines()

    def progress(self) -> str:
        found = _PROGRESS.findall(self.log.read_bytes())
        return f"{self.name} {int(found[-1]) if found else 0}%"


def say(sentence: str) -> None:
    print(sentence, flush=True)


def find_parts(root: Path) -> list[str]:
    """Every directory below tests/ with a test file in it, however deep, the longest first; tests/ itself must have
    none.
    """
    files = list((root / "tests").rglob("test_*.py"))
    astray = sorted(str(file.relative_to(root)) for file in files if file.parent == root / "tests")
    if astray:
        sys.exit(f"test: put {', '.join(astray)} into a directory below tests/: only those are run")
    names = {file.parent.relative_to(root).as_posix() for file in files}
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    return sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name))


def tie_to_parent() -> None:
    """In the new process: the kernel interrupts it should this program be killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def start(root: Path, name: str, folder: Path, *, repeat: bool = False) -> Part:
    """Start the pytest of a part. `repeat`: only for the tests that failed in it before."""
    log = folder / f"{name.replace('/', '-')}{'-again' if repeat else ''}.log"
    cache = folder / f"{name.replace('/', '-')}.cache"  # each its own: pytests that share one overwrite its failures
    files = sorted(str(file.relative_to(root)) for file in (root / name).glob("test_*.py"))
    with log.open("wb") as out:
        process = subprocess.Popen(
            # With -v the log has the name of every test before it runs, whatever then becomes of this pytest.
            [
                *(sys.executable, "-m", "pytest", "-v", "-o", f"cache_dir={cache}", f"--durations={SLOWEST}"),
                *(("--last-failed", "--last-failed-no-failures", "none") if repeat else ()),
                *files,
            ],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for us, who pass it on once: a second one would break off the clearing up
            start_new_session=True,
            preexec_fn=tie_to_parent,
        )
    return Part(name, log, process)


def run_all(root: Path, folder: Path) -> Generator[Part]:
    """The parts as they end."""
    waiting, running = deque(find_parts(root)), list[Part]()
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < SIDE_BY_SIDE:
                running.append(start(root, waiting.popleft(), folder))
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                yield part
            if time.monotonic() - told > TOLD_EVERY_S:
                told = time.monotonic()
                say(f"test: at work: {', '.join(part.progress() for part in running)}")
            # Several children have no one event; a pause this short costs a run of minutes nothing.
            time.sleep(0.2)
    finally:
        end(running)


def end(running: list[Part]) -> None:
    """Interrupts what still runs and waits until it has cleared up."""
    for part in running:
        if part.process.poll() is None:
            say(f"test: ending {part.name}")
            part.process.send_signal(signal.SIGINT)
    for part in running:
        part.process.wait()


def verdict(part: Part) -> str:
    """pytest's own last line, or how it died."""
    status, lines = part.process.returncode, part.lines()
    # A program that outlives its test may say something behind it.
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


def tell(part: Part) -> None:
    """All there is to know of a part, but not each test that passed."""
    say(f"test: {verdict(part)}")
    lines = part.lines()
    if part.process.returncode == 0:
        summary = next((number for number, line in enumerate(lines) if _SUMMARY.match(line)), len(lines))
        lines = lines[summary:-1]
    kept = [line + b"\n" for line in lines if not _PASSED.search(line) and not _DURATION.match(line)]
    sys.stdout.buffer.write(b"".join(kept))
    sys.stdout.buffer.flush()
    if part.process.returncode not in (0, TESTS_FAILED):
        say(f"test: {part.name} died; it ran last:\n" + "\n".join(ran_last(part)))


def ran_last(part: Part) -> list[str]:
    """Names of tests, the last one begun at the end."""
    begun = [line.decode(errors="replace") for line in part.lines() if line.startswith(b"tests/") and b"::" in line]
    return begun[-LAST_TESTS:]


def find_slowest(parts: list[Part]) -> list[str]:
    """Return the slowest tests of all parts, with seconds of their setup, call or teardown."""
    found = [match for part in parts for line in part.lines() if (match := _DURATION.match(line)) and match[1]]
    longest = sorted(found, key=lambda match: float(match[1]), reverse=True)[:SLOWEST]
    return [f"{float(match[1]):7.1f} s  {match[2].decode(errors='replace')}" for match in longest]


def failures(part: Part) -> list[str]:
    """pytest's own list of what failed, and the part itself where that says nothing."""
    named = [line.decode(errors="replace") for line in part.lines() if _NAMED.match(line)]
    return named if named and part.process.returncode == TESTS_FAILED else [*named, verdict(part)]


def repeat_failed(root: Path, folder: Path, failed: list[Part]) -> list[Part]:
    """Run the failed tests once more, one part after the other. Returns the parts that still fail."""
    names = [name for part in failed for name in failures(part)]
    if len(names) > MOST_REPEATED or any(part.process.returncode != TESTS_FAILED for part in failed):
        return failed
    still_failed = []
    for part in failed:
        say(f"test: running the failed tests of {part.name} again, alone")
        repeated = start(root, part.name, folder, repeat=True)
        try:
            repeated.process.wait()
        finally:
            end([repeated])
        tell(repeated)
        if repeated.process.returncode != 0:
            still_failed.append(repeated)
        else:
            say("test: flaky, passed when run alone:\n" + "\n".join(failures(part)))
    return still_failed


def run_suite(root: Path, folder: Path) -> int:
    """Runs everything; gives the exit status."""
    ended: list[Part] = []
    with contextlib.closing(run_all(root, folder)) as parts:
        for part in parts:
            tell(part)
            ended.append(part)
    say(f"test: the {SLOWEST} slowest tests:\n" + "\n".join(find_slowest(ended)))
    failed = repeat_failed(root, folder, [part for part in ended if part.process.returncode != 0])
    if not failed:
        say("test: all parts passed")
        return 0
    say("\ntest: failed:\n" + "\n".join(line for part in failed for line in failures(part)))
    return max(failed[0].process.returncode, TESTS_FAILED)


def _stop(number: int, _frame: object) -> None:
    for other in STOPPED:
        signal.signal(other, signal.SIG_IGN)  # the parts are clearing up already
    raise Stopped(number)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]).resolve() if arguments else Path(__file__).resolve().parent.parent
    for number in STOPPED:
        signal.signal(number, _stop)
    try:
        with tempfile.TemporaryDirectory(prefix="toolcrew-test-") as folder:
            return run_suite(root, Path(folder))
    except Stopped as stopped:
        say(f"test: stopped by {stopped}")
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
