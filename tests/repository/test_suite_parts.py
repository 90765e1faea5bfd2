"""The program that runs the test suite in parts: no test is left out, no failure is hidden, and a signal ends it in
order.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack.waiting import SOON_S, wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test_parts.py"
PASSES = "def test_good(): pass\n"
FAILS = "def test_bad():\n    print('what it said')\n    assert 1 == 2\n"
DIES = "import os\ndef test_first(): pass\ndef test_deadly(): os.abort()\n"
FAILS_ONCE = """
import pytest
@pytest.mark.parametrize("way", ["a-b"])
def test_race(request, way):
    first = request.config.rootpath / "first"
    if not first.exists():
        first.write_text("")
        print("what it said")
        assert 1 == 2
def test_other(request):
    with (request.config.rootpath / "runs").open("a") as runs:
        runs.write("once ")
"""
LONG_TEST = """
import time, pytest
@pytest.fixture
def harness(request):
    yield
    (request.config.rootpath / "cleared").write_text("")
def test_long(harness, request):
    (request.config.rootpath / "begun").write_text("")
    time.sleep(100)
"""


def start(root: Path, *, ci: str = "", **parts: str) -> "subprocess.Popen[str]":
    for name, source in parts.items():
        folder = root / "tests" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"test_{folder.name}.py").write_text(source)
    (root / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(root)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": ci},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(root: Path, *, ci: str = "", **parts: str) -> tuple[int, str]:
    process = start(root, ci=ci, **parts)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output


def test_failed_and_killed_parts_are_reported_last(tmp_path: Path) -> None:
    status, output = run(tmp_path, good=PASSES, bad=FAILS, deadly=DIES)

    assert status == 1
    assert "test: tests/good: 1 passed" in output
    assert "what it said" in output
    # The lines of passed tests are omitted.
    assert "test_good" not in output.partition("slowest tests:")[0]
    last = output[output.index("it ran last:") :].splitlines()
    assert last[1].startswith("tests/deadly/test_deadly.py::test_first PASSED")
    assert last[2].startswith("tests/deadly/test_deadly.py::test_deadly")
    names = output.rpartition("test: failed:\n")[2].splitlines()
    assert [name.partition(" - ")[0] for name in sorted(names)] == [
        "FAILED tests/bad/test_bad.py::test_bad",
        "tests/deadly: no result (died of SIGABRT)",
    ]


def test_test_that_fails_once_fails_the_suite(tmp_path: Path) -> None:
    status, output = run(tmp_path, good=PASSES, race=FAILS_ONCE)

    assert status == 1, output
    assert "FLAKY" not in output
    assert output.rpartition("test: failed:\n")[2].startswith("FAILED tests/race/test_race.py::test_race")


def test_test_that_fails_once_is_printed_as_flaky_with_its_first_failure_in_ci(tmp_path: Path) -> None:
    status, output = run(tmp_path, ci="true", good=PASSES, race=FAILS_ONCE)

    assert status == 0, output
    flaky = output.partition("test: FLAKY ")[2]
    assert flaky.startswith("tests/race/test_race.py::test_race[a-b]: ")
    assert "assert 1 == 2" in flaky
    assert "what it said" in flaky
    assert (tmp_path / "runs").read_text() == "once "  # what passed does not run again


def test_flaky_test_next_to_a_failed_one_is_named_in_ci(tmp_path: Path) -> None:
    status, output = run(tmp_path, ci="1", race=FAILS_ONCE + FAILS)

    assert status == 1, output
    assert "test: FLAKY tests/race/test_race.py::test_race[a-b]: " in output
    assert "test: FLAKY tests/race/test_race.py::test_bad" not in output
    assert output.rpartition("test: failed:\n")[2].startswith("FAILED tests/race/test_race.py::test_bad")


def test_more_than_five_failures_are_not_repeated_in_ci(tmp_path: Path) -> None:
    status, output = run(tmp_path, ci="true", race="\n".join(FAILS.replace("bad", f"bad_{at}") for at in range(6)))

    assert status == 1, output
    assert "again, alone" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_parts_with_cleanup(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, one=LONG_TEST)
    wait_until((tmp_path / "begun").exists, SOON_S, "the test has begun")

    process.send_signal(number)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 128 + number, output
    assert (tmp_path / "cleared").exists()
