"""Supervised processes, orphans of a dead supervisor, and the end of a local stack."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stack.stack import is_alive, read_line
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.cli import up as cli
from toolcrew.orchestrator.operations import local_stack, supervision
from toolcrew.orchestrator.operations.local_stack import StackInfo, keep
from toolcrew.orchestrator.operations.stack_data import StackData, open_stack_data
from toolcrew.orchestrator.operations.supervision import (
    MAX_ENDS,
    PAUSES_S,
    WINDOW_S,
    ChildPlan,
    End,
    ProcessSupervisor,
    choose_pause,
    die_with_supervisor,
)

FOREVER = "import time; time.sleep(600)"


class Harness:
    """A supervisor with its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[str] = []
        self.changes = 0
        self.supervisor = ProcessSupervisor(folder, report=self.reports.append, changed=self._count)

    async def start(self, role: str, program: str, *, may_finish: bool = False, stop_within_s: float = SOON_S) -> int:
        argv = (sys.executable, "-c", program)
        plan = ChildPlan(role, argv, {}, signal.SIGKILL, stop_within_s=stop_within_s, may_finish=may_finish)
        await self.supervisor.start(plan)
        return self.pid(role)

    def pid(self, role: str) -> int:
        return self.supervisor.pids()[role][0]

    def runs_as(self, role: str) -> int | None:
        pids = self.supervisor.pids()[role]
        return pids[0] if pids else None

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text()

    def _count(self) -> None:
        self.changes += 1


@asynccontextmanager
async def open_supervisor(folder: Path, *roles: str) -> AsyncIterator[Harness]:
    harness = Harness(folder)
    try:
        yield harness
    finally:
        for role in roles:
            await harness.supervisor.stop(role)


async def wait_for_replacement(harness: Harness, role: str, than: int) -> int:
    """Return the process that replaced the given one."""

    def found() -> int | None:
        pid = harness.runs_as(role)
        return pid if pid != than else None

    return int(await wait_until_async(found, SOON_S, lambda: f"another {role}: {harness.reports}"))


@asynccontextmanager
async def watching(harness: Harness) -> AsyncIterator["asyncio.Task[str]"]:
    task = asyncio.create_task(harness.supervisor.watch())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_killed_process_is_restarted_and_others_keep_running(tmp_path: Path) -> None:
    async with open_supervisor(tmp_path, "a", "b") as harness:
        first, neighbour = await harness.start("a", FOREVER), await harness.start("b", FOREVER)
        async with watching(harness):
            os.kill(first, signal.SIGKILL)
            second = await wait_for_replacement(harness, "a", first)

            assert is_alive(second)
            assert harness.pid("b") == neighbour
            assert harness.reports == ["a ended unexpectedly (SIGKILL) and is started again"]
            assert harness.changes == 2


async def test_process_that_keeps_ending_is_not_restarted_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_supervisor(tmp_path, "broken", "fine") as harness:
        monkeypatch.setattr(supervision, "PAUSES_S", (0.0, 0.01))
        await harness.start("broken", "print('cannot'); raise SystemExit(3)")
        await harness.start("fine", FOREVER)
        async with asyncio.timeout(SOON_S * 2):
            given_up = await harness.supervisor.watch()

        assert given_up == "broken"
        assert harness.log("broken").split() == ["cannot"] * MAX_ENDS
        assert (
            harness.reports[-1]
            == f"broken has ended {MAX_ENDS} times within {WINDOW_S:g} s (exit code 3) and is not started again"
        )
        assert harness.supervisor.pids()["broken"] == []


async def test_worker_that_ends_normally_is_not_restarted(tmp_path: Path) -> None:
    async with open_supervisor(tmp_path, "worker", "other") as harness:
        await harness.start("worker", "pass", may_finish=True)
        other = await harness.start("other", FOREVER)
        async with watching(harness) as task:
            await wait_until_async(lambda: harness.reports, SOON_S, "it is said")
            os.kill(other, signal.SIGTERM)
            await wait_for_replacement(harness, "other", other)

            assert harness.reports[0] == "worker has ended normally and is not started again"
            assert harness.supervisor.pids()["worker"] == []
            assert not task.done()


async def test_children_of_a_killed_process_end_before_its_restart(tmp_path: Path) -> None:
    program = (
        f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', '{FOREVER}']).pid, flush=True); "
        "time.sleep(600)"
    )
    async with open_supervisor(tmp_path, "parent") as harness:
        first = await harness.start("parent", program)
        child = int(await wait_until_async(lambda: harness.log("parent").strip(), SOON_S, "it has a child"))
        async with watching(harness):
            os.kill(first, signal.SIGKILL)
            await wait_for_replacement(harness, "parent", first)

            assert not is_alive(child)


async def test_suspended_process_is_stopped(tmp_path: Path) -> None:
    async with open_supervisor(tmp_path) as harness:
        pid = await harness.start("a", FOREVER)
        os.kill(pid, signal.SIGSTOP)

        await harness.supervisor.stop("a")

        assert not is_alive(pid)


async def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {FOREVER}"
    async with open_supervisor(tmp_path) as harness:
        pid = await harness.start("a", program, stop_within_s=0.1)
        await wait_until_async(lambda: harness.log("a"), SOON_S, "it has said so")

        await harness.supervisor.stop("a")

        assert not is_alive(pid)


async def test_no_process_is_restarted_after_the_supervision_ends(tmp_path: Path) -> None:
    async with open_supervisor(tmp_path, "a") as harness:
        first = await harness.start("a", FOREVER)
        async with watching(harness):
            pass
        os.kill(first, signal.SIGKILL)
        await wait_until_async(lambda: not harness.supervisor.is_running("a"), SOON_S, "it is gone")

        assert harness.reports == []
        await harness.supervisor.start_again("a")
        assert harness.pid("a") != first


@given(st.lists(st.floats(0, 10 * WINDOW_S), max_size=30))
def test_restart_pause_depends_on_recent_ends(ages: list[float]) -> None:
    now = 1_000_000.0
    ends = [*sorted(now - age for age in ages), now]

    pause_s = choose_pause(ends, now)

    recent = sum(now - at < WINDOW_S for at in ends)
    assert (pause_s is None) == (recent >= MAX_ENDS)
    assert pause_s is None or pause_s == PAUSES_S[min(recent, len(PAUSES_S)) - 1]


def test_end_of_a_process_shows_its_exit_code_or_signal() -> None:
    assert [str(End(code, 0.0)) for code in (0, 3, -9, -64, -99)] == [
        "exit code 0",
        "exit code 3",
        "SIGKILL",
        "SIGRTMAX",
        "signal 99",
    ]


GRACE_S = 0.3
LONG_S = 4 * GRACE_S

CHILD = f"""
import os, signal
from toolcrew.workers.lifeline import hold_lifeline
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
hold_lifeline({GRACE_S})
os.write(1, b"%d\\n" % os.getpid())
while True:
    signal.pause()
"""

SUPERVISOR = """
import os, signal, subprocess, sys
from functools import partial
from toolcrew.orchestrator.operations.supervision import die_with_supervisor
binding = partial(die_with_supervisor, os.getpid(), signal.SIGTERM) if sys.argv[2] == "bound" else None
subprocess.Popen([sys.executable, "-c", sys.argv[1]], preexec_fn=binding).wait()
"""


class SupervisedPair:
    """A keeper and its child. The child answers SIGTERM with a line and continues. Their stdout is open while either
    of them lives.
    """

    def __init__(self, supervisor: "subprocess.Popen[bytes]") -> None:
        self.supervisor = supervisor
        self.child = int(read_line(supervisor))

    def has_output_within(self, seconds: float) -> bool:
        """Return whether a line, or the end, can be read within the time."""
        return bool(select.select([self.supervisor.stdout], [], [], seconds)[0])


@contextlib.contextmanager
def open_supervised_pair(binding: str) -> Iterator[SupervisedPair]:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, CHILD, binding], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        yield SupervisedPair(supervisor)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.communicate()


def test_orphan_that_ignores_sigterm_is_killed_after_the_grace_period() -> None:
    with open_supervised_pair("bound") as pair:
        pair.supervisor.kill()

        assert read_line(pair.supervisor) == b"asked\n"
        assert pair.has_output_within(30)
        assert read_line(pair.supervisor) == b"", "the child has ended"


def test_process_with_a_living_supervisor_is_not_killed_after_sigterm() -> None:
    with open_supervised_pair("bound") as pair:
        os.kill(pair.child, signal.SIGTERM)

        assert read_line(pair.supervisor) == b"asked\n"
        assert not pair.has_output_within(LONG_S)


def test_unbound_child_outlives_its_parent() -> None:
    with open_supervised_pair("free") as pair:
        pair.supervisor.kill()

        assert not pair.has_output_within(LONG_S)


def test_child_of_an_already_dead_supervisor_does_not_start() -> None:
    parent = os.getppid()

    done = subprocess.run(
        [sys.executable, "-c", "print('started')"],
        preexec_fn=partial(die_with_supervisor, parent, signal.SIGTERM),
        capture_output=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, b"")


INFO = StackInfo(deployment="default", redis_url="redis://h", sandboxd_socket="/s", flower_url=None, pids={}, logs="/l")


class FakeStack:
    """A stack without processes, which serves until it is stopped."""

    def __init__(
        self, settings: OrchestratorSettings, data: StackData | None, port: int | None, *, workers_only: bool
    ) -> None:
        self.settings = settings

    def keep_image_records(self, folder: Path) -> None:
        return None

    async def start(self) -> StackInfo:
        return INFO

    async def watch(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        return None


@pytest.fixture(autouse=True)
def fake_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(local_stack, "LocalStack", FakeStack)


def send_signal(number: int) -> Callable[[StackInfo], None]:
    return lambda _: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGHUP, 0)])
def test_stack_end_is_announced_once_except_after_sighup(number: int, ends: int) -> None:
    announced: list[str] = []
    code = asyncio.run(
        keep(
            OrchestratorSettings.model_validate({}),
            send_signal(number),
            until_eof=False,
            announce_end=lambda: announced.append("end"),
        )
    )
    assert (code, len(announced)) == (0, ends)


@pytest.mark.parametrize(("is_kept", "message"), [(False, "are deleted"), (True, "are kept")])
def test_stack_end_message_says_if_data_are_kept(
    is_kept: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli._print_stack_end(is_kept=is_kept)
    assert message in capsys.readouterr().err


def test_data_folder_has_one_user_and_keeps_its_password(tmp_path: Path) -> None:
    second_opening = open_stack_data(tmp_path / "data")
    with open_stack_data(tmp_path / "data") as first, pytest.raises(ConfigError, match="another `toolcrew up` uses"):
        second_opening.__enter__()
    with open_stack_data(tmp_path / "data") as second:
        assert second == first
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data" / "redis-password").stat().st_mode) == 0o600


def test_data_folder_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data"), open_stack_data(tmp_path / "file" / "data"):
        pass


def test_data_folder_with_an_external_redis_or_a_used_port_is_refused(tmp_path: Path) -> None:
    own = OrchestratorSettings.model_validate({"redis_url": "redis://h"})
    with pytest.raises(ConfigError, match="TOOLCREW_REDIS_URL"):
        asyncio.run(keep(own, send_signal(signal.SIGINT), until_eof=False, data=tmp_path))
    settings = OrchestratorSettings.model_validate({})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"):
            asyncio.run(keep(settings, send_signal(signal.SIGINT), until_eof=False, port=port))
