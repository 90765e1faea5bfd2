"""Attacks on the limit of a call: continue after the limit, or prevent the call's end. The other work of the session
must not suffer.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd
from tests.support.stack.stack import commands_in
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.workers.sandbox_client import GuestResponse

pytestmark = pytest.mark.stack

LIMIT_S = 1.0
GRACE_S = 2.0
BUSY_S = 10.0
"""Further seconds in which the answer of an ended call arrives on a busy machine."""
ENDS_BEFORE_S = 60.0
"""Limit of calls that end by themselves, in seconds."""
_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, 56)
_VFORK, _SIBLING, _SILENT = 0x4000 | 17, 0x8000 | 17, 0


def python(source: str) -> str:
    return f"python3 - <<'END'\nimport os, signal, sys, threading, time\n{source}\nEND"


def clone_script(flags: int, then: str = "sleep 1000") -> str:
    """Return a script that starts a process through the bare system call. vfork blocks its parent so that only a kill
    ends the parent; other flags escape the parent's wait.
    """
    return f"perl -e '$| = 1; my $child = syscall({_CLONE}, {flags}, 0, 0, 0, 0); {then}'"


DAEMON = """
if os.fork(): sys.exit()
os.setsid()
if os.fork(): sys.exit()
os.closerange(0, 1024)
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(1000)
"""
THREADS = """
def spin():
    while True: pass
try:
    while True: threading.Thread(target=spin, daemon=True).start()
except RuntimeError: pass
time.sleep(1000)
"""
SUBREAPER = """
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
time.sleep(1000)
"""
# The script, and whether the call itself lasts until its limit. Otherwise the call has ended before, and its
# leftovers are killed at once.
EVADERS = {
    "endless output": ("yes", True),
    "silent endless loop": ("cat <(sleep 1000)", True),
    "waiting for a pipe that no process opens": ("mkfifo /tmp/fifo$$; cat /tmp/fifo$$", True),
    "ignoring every signal": ("for n in $(seq 64); do trap '' $n; done 2>/dev/null; while :; do sleep 1; done", True),
    "restarting on SIGTERM": (
        "trap 'setsid sleep 1000 & setsid sleep 1001 &' TERM; while :; do sleep 0.01; done",
        True,
    ),
    "keeping the output pipe open": ("(setsid sleep 1000 &) ; echo done", False),
    "keeping the output pipe open and printing": ("(setsid yes &) ; echo done", False),
    "endless forks": ("f() { f | f & }; f; sleep 1000", True),
    "SIGSTOP to itself": ("kill -STOP $$", True),
    "SIGSTOP to its children": ("sleep 1000 & kill -STOP $!; setsid sleep 1001 & kill -STOP $!; wait", True),
    "SIGSTOP to its group and supervisor": ("kill -STOP $PPID 0", True),
    "killing its supervisor": ("setsid sleep 1000 & kill -9 $PPID; sleep 1000", False),
    "daemonizing with a double fork": (python(DAEMON), False),
    "nohup in the background": ("nohup setsid sleep 1000 </dev/null >/dev/null 2>&1 & disown -a", False),
    "respawning": ("r() { while :; do setsid bash -c 'sleep 1000'; done; }; r & r & wait", True),
    "endless threads": (python(THREADS), True),
    "blocked in an uninterruptible wait": (clone_script(_VFORK), True),
    "clone with CLONE_PARENT": (clone_script(_SIBLING, "sleep 1000 if !$child"), False),
    "clone without an exit signal": (clone_script(_SILENT, "sleep 1000 if !$child"), False),
    "child subreaper": (python(SUBREAPER), True),
}


@pytest.fixture(scope="module")
def busy_session(sandboxd: OwnSandboxd) -> Iterator[HostileSession]:
    """Yield a session with a waiting call and a background job. Neither belongs to the attacker."""
    with sandboxd.session(session="timeouts") as session:
        session.start("exec sleep 777", state="use", timeout_s=500.0)
        session.start_job("exec sleep 888")
        # Wait until the shells have become their programs, because the command lines are compared later.
        wait_until(
            lambda: {"sleep 777", "sleep 888"} <= set(session.programs().values()),
            SOON_S,
            lambda: str(session.programs()),
        )
        yield session


@pytest.mark.parametrize(("script", "is_late"), EVADERS.values(), ids=EVADERS.keys())
def test_a_call_ends_with_all_its_processes_at_its_limit_despite(
    busy_session: HostileSession, script: str, is_late: bool
) -> None:
    """Aim: continue unseen, or hold the call and its worker beyond the limit. Other programs of the session must not
    be affected.
    """
    others = busy_session.programs()
    started = time.monotonic()
    answer = busy_session.bash(script, timeout_s=LIMIT_S if is_late else ENDS_BEFORE_S)
    took_s = time.monotonic() - started

    assert took_s < (LIMIT_S + GRACE_S + BUSY_S if is_late else ENDS_BEFORE_S)
    assert busy_session.programs() == others
    assert sorted(others.values()) == ["sleep 777", "sleep 888"]
    assert_killed(answer, is_late)
    assert busy_session.is_usable()


def assert_killed(answer: GuestResponse, is_late: bool) -> None:
    """Fail unless the report is complete and true: something received a signal, and nothing survived."""
    kill = answer.done["kill"]
    assert answer.done.get("timed_out", False) is is_late
    assert set(kill) == {"signalled", "survivors", "method", "ms"}
    assert (kill["signalled"] >= 1, kill["survivors"], kill["method"]) == (True, 0, "tree")
    assert 0 <= kill["ms"] < 1000 * GRACE_S


def test_a_program_that_kills_everything_ends_only_its_own_session_processes(sandboxd: OwnSandboxd) -> None:
    """Aim: end PID 1, or leave calls that are never answered."""
    with sandboxd.session(session="killer") as killer, sandboxd.session(session="bystander") as bystander:
        waiting = killer.start("exec sleep 777", state="use")
        bystander.start("exec sleep 999", state="use")
        killer.wait_for("sleep 777")
        bystander.wait_for("sleep 999")
        answer = killer.bash("for i in 1 2 3; do kill -9 -1; done; sleep 1000", timeout_s=LIMIT_S)

        assert answer.done["kill"]["survivors"] == 0
        assert waiting.result(GRACE_S + BUSY_S).done["kill"]["survivors"] == 0
        assert killer.programs() == {}
        assert killer.is_usable()
        assert list(bystander.programs().values()) == ["sleep 999"]


def test_a_fork_bomb_ends_with_its_call(sandboxd: OwnSandboxd) -> None:
    """Aim: leave no free process for the code that ends the call."""
    with sandboxd.session(session="bomb") as session:
        before = session.watched.pids_refused()
        # On a busy machine the bomb needs longer to take all processes.
        for limit_s in (0.7, 3.0, 10.0, 30.0):
            answer = session.bash("f() { f | f & }; f; sleep 1000", timeout_s=limit_s)
            assert answer.done["kill"]["survivors"] == 0
            assert session.programs() == {}
            assert session.is_usable()
            if session.watched.pids_refused() > before:
                return
        pytest.fail("the bomb did not reach its limit of processes")


@pytest.fixture
def frozen(sandboxd: OwnSandboxd) -> Iterator[HostileSession]:
    """Yield a session whose guest never answers. The guest is stopped from outside, which no program inside could do."""
    with sandboxd.session(session="frozen") as session:
        session.start_job("while :; do :; done")
        yield session
        unfreeze(session)


def freeze(session: HostileSession) -> None:
    os.kill(session.watched.pid, signal.SIGSTOP)


def unfreeze(session: HostileSession) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(session.watched.pid, signal.SIGCONT)


def test_a_container_with_a_frozen_guest_is_removed_two_seconds_after_the_call_limit(
    sandboxd: OwnSandboxd, frozen: HostileSession
) -> None:
    """Aim: prevent PID 1 from killing the programs, and continue."""
    call = frozen.start("sleep 1000", timeout_s=LIMIT_S)
    freeze(frozen)
    started = time.monotonic()
    done = call.result(SOON_S).done

    assert LIMIT_S + GRACE_S - 0.1 < time.monotonic() - started < LIMIT_S + GRACE_S + BUSY_S
    assert done["error"]["code"] == "TIMEOUT"
    assert (done["kill"]["method"], done["kill"]["survivors"]) == ("container", 0)
    assert frozen.watched.id not in sandboxd.footprint.containers()


def test_a_container_with_a_frozen_guest_is_removed_after_its_worker_was_killed(
    sandboxd: OwnSandboxd, frozen: HostileSession
) -> None:
    """Aim: outlive the limit because no process waits for the answer."""
    with sandboxd.start_worker(frozen.name, "exec sleep 999", 100) as worker:
        frozen.wait_for("sleep 999")
        freeze(frozen)
        worker.kill()
        frozen.watched.wait_until_removed(timeout_s=GRACE_S + BUSY_S)

    assert frozen.watched.id not in sandboxd.footprint.containers()


def test_a_fork_bomb_ends_when_sandboxd_is_killed(engine: APIClient) -> None:
    """Aim: run without a limit after the death of sandboxd. The guest sees the end of its input and must get
    processor time to act.
    """
    with open_own_sandboxd(engine) as sandboxd, sandboxd.session() as session:
        # First, while a free process is still available.
        session.start_job("trap '' TERM HUP; while :; do :; done")
        session.start("f() { f | f & }; f; sleep 1000", timeout_s=500.0)
        wait_until(lambda: session.watched.pids_refused() > 0, SOON_S, "the bomb is at its limit")
        os.kill(sandboxd.process.pid, signal.SIGKILL)
        # A machine under the bomb and other load is slow; a surviving process would live for 500 s.
        wait_until(
            lambda: not commands_in(session.watched.id),
            SOON_S,
            lambda: f"nothing of the session runs: {session.programs()}",
        )
        session.watched.wait_until_removed(timeout_s=40)

        assert sandboxd.footprint.containers() == []
