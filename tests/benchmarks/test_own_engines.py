"""Engines and sandboxds of benchmarks leave nothing behind, also when they were killed."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from docker import APIClient

from benchmarks import __main__ as benchmarks
from benchmarks.image_hosts import running_engine
from benchmarks.processes import temporary_folder
from tests.support.stack.stack import missing, open_footprint, require_engine
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.mounts import list_mounts


@pytest.fixture
def engine_program() -> None:
    require_engine().close()
    if os.geteuid() != 0:
        missing("an engine is started by root: run the tests as root")


@pytest.mark.stack
def test_folder_of_a_killed_engine_is_removed(engine_program: None) -> None:
    with temporary_folder("/dev/shm") as folder, running_engine(folder) as api:
        assert isinstance(api, APIClient)
        # The engine mounts its data folder on itself, and cannot remove that mount when it is killed.
        assert folder / "data" in list_mounts()
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    assert not folder.exists()
    assert not [place for place in list_mounts() if place.is_relative_to(folder)]
    assert str(folder) not in list_command_lines()


@contextmanager
def footprint_folder() -> Iterator[Path]:
    with open_footprint() as footprint:
        yield footprint.folder


@pytest.mark.parametrize("open_folder", [temporary_folder, footprint_folder])
def test_temporary_folder_is_removed_with_the_mounts_in_it(
    open_folder: Callable[[], AbstractContextManager[Path]],
) -> None:
    if os.geteuid() != 0:
        missing("only root can mount: run the tests as root")
    with open_folder() as folder:
        for place in (folder / "a b", folder / "a b" / "inner"):
            place.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "toolcrew-test", str(place)], check=True)
            (place / "file").touch()
    assert not folder.exists()


def test_failed_benchmark_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {"search": OSError("busy"), "loop_step": KeyError("x"), "simulator": SandboxUnavailable("full")}

    def run(name: str, *_: object, **__: object) -> object:
        if name in reports:
            raise reports[name]
        return benchmarks.Report(name)

    monkeypatch.setattr(benchmarks, "_run", run)
    assert benchmarks.main(["--json", *reports, "forks"]) == 1
    output = capsys.readouterr()
    assert '"forks"' in output.out
    assert [name in output.out for name in reports] == [False] * 3
    assert all(f"bench: {name}: " in output.err for name in reports)


def list_command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:  # it has ended just now
            continue
    return "\n".join(found)
