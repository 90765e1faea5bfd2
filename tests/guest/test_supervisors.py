"""Supervisors that serve one call after another: their remaining state, their end, and attacks by a hostile neighbor."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.guest.guest_harness import DEADLINE_S, GUEST_PARENT, Guest, needs_namespace
from tests.support.stack.processes import read_proc
from tests.support.stack.waiting import wait_until

assert GUEST_PARENT
from guest.call_pipes import Progress, open_channel  # noqa: E402
from guest.calls import Call, SupervisorHandle  # noqa: E402

pytestmark = needs_namespace

PRINT_SUPERVISOR = "echo $PPID"


def supervisor_of(guest: Guest, script: str = PRINT_SUPERVISOR, **fields: object) -> bytes:
    """Return the pid, inside the sandbox, of the supervisor that serves a call."""
    return guest.run(script, **fields).bytes_of("stdout").split()[-1]


def idle_supervisor(guest: Guest) -> int:
    """Return the pid of the waiting supervisor, as seen from outside the sandbox."""
    guest.run("true")
    return wait_for_one(guest)


def wait_for_one(guest: Guest) -> int:
    """Wait until exactly one process besides PID 1 exists, and return it."""
    wait_until(lambda: len(guest.others()) == 1, DEADLINE_S, lambda: str(guest.others()), 0.002)
    return next(iter(guest.others()))


def open_files(pid: int) -> dict[str, str]:
    """Return the open files by descriptor number. Files that are closed during the scan are left out."""
    directory, files = Path(f"/proc/{pid}/fd"), {}
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            files[name] = os.readlink(directory / name)
    return files


def kernel_state(pid: int) -> dict[str, str]:
    """Return the kernel state of a process that a call could leave changed."""
    names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "PPid", "NSpgid", "NSsid", "NoNewPrivs")
    lines = (line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0]: line[1] for line in lines if line[0] in names}


def test_an_idle_supervisor_ends_after_a_while(guest: Guest) -> None:
    began_at = time.monotonic()
    idle_supervisor(guest)
    assert guest.wait_alone(), guest.others()
    assert time.monotonic() - began_at > 0.5
    assert guest.run("echo again").bytes_of("stdout") == b"again\n"


def test_only_one_of_several_idle_supervisors_remains(guest: Guest) -> None:
    calls = [guest.start_script("mkfifo gate$$; echo up > up; read line < gate$$", timeout_s=60) for _ in range(4)]
    guest.run("until [ $(ls gate* | wc -l) = 4 ]; do sleep 0.01; done; for gate in gate*; do echo go > $gate; done")
    assert all(guest.finish(call)["exit_code"] == 0 for call in calls)
    wait_for_one(guest)


ENDED_BY_KILL: dict[str, tuple[str, dict[str, object]]] = {
    "timeout": (f"{PRINT_SUPERVISOR}; sleep 1000", {"timeout_s": 0.3}),
    "background process": (f"sleep 1000 & {PRINT_SUPERVISOR}", {}),
    "background process in another session": (f"(setsid sleep 1000 &); {PRINT_SUPERVISOR}", {}),
}


@pytest.mark.parametrize(("script", "fields"), ENDED_BY_KILL.values(), ids=ENDED_BY_KILL.keys())
def test_a_call_after_a_kill_has_another_supervisor(guest: Guest, script: str, fields: dict[str, object]) -> None:
    before = supervisor_of(guest, script, **fields)
    assert supervisor_of(guest) == supervisor_of(guest) != before


def test_a_call_after_a_cancel_has_another_supervisor(guest: Guest) -> None:
    call = guest.start_script(f"{PRINT_SUPERVISOR} > who; sleep 1000", timeout_s=60)
    pid = guest.wait_for_file("who")
    guest.send({"id": call, "op": "cancel"})
    assert guest.finish(call)["cancelled"] is True
    assert supervisor_of(guest) != pid.strip().encode()


def test_a_cancel_at_the_end_of_a_call_does_not_affect_the_next_call(guest: Guest) -> None:
    for _ in range(30):
        call = guest.start_script("true")
        guest.send({"id": call, "op": "cancel"})
        guest.finish(call)
        assert guest.run("echo mine").bytes_of("stdout") == b"mine\n"


def test_a_supervisor_keeps_no_files_or_state_of_its_calls(guest: Guest) -> None:
    pid = idle_supervisor(guest)
    wait_until(lambda: os.readlink(f"/proc/{pid}/cwd") == "/", DEADLINE_S, "it is at rest", 0.002)
    files, state = open_files(pid), kernel_state(pid)
    for _ in range(3):
        guest.request("write_file", b"old\n", path="deep/file", mode="overwrite", timeout_s=5)
        guest.request("write_file", b"new\n", path="deep/file", mode="append", timeout_s=5)
        guest.request("write_file", b"new\n", path="deep/file", mode="create", timeout_s=5)
        guest.request("read_file", path="deep/file", max_bytes=100, timeout_s=5)
        guest.request("read_text", path="deep/file", offset=1, limit=1, max_bytes=8192, timeout_s=5)
        guest.request("read_file", path="absent", max_bytes=100, timeout_s=5)
        guest.request("read_file", path="/etc/passwd", max_bytes=100, timeout_s=5)
        guest.run("cat; umask 0; cd /; trap '' PIPE XFSZ", stdin=b"x" * 100_000, cwd="deep")
        guest.run("true", argv=["no-such-program"], script_bytes=0)
        guest.run("true", cwd="absent")
        guest.run("exit 3", capture={"stream": 100})
        guest.run("kill -SEGV $$", capture={"merged": 100})
    assert wait_for_one(guest) == pid
    wait_until(lambda: open_files(pid) == files, DEADLINE_S, "its files are closed", 0.002)
    assert kernel_state(pid) == state
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    # /dev/null twice, PID 1's stderr, its reports and its channel.
    assert len(files) == 5


def test_a_reused_supervisor_behaves_like_a_new_one(guest: Guest) -> None:
    guest.run("true", stdin=b"x", env={"OLD": "1"})
    done = guest.run("cat; ls /proc/self/fd | wc -l; echo ${OLD-none}; umask", stdin=b"stdin\n")
    assert done.bytes_of("stdout") == b"stdin\n4\nnone\n0022\n"
    assert guest.run("cat /proc/$PPID/environ; ls /proc/$PPID/fd").bytes_of("stderr").count(b"Permission denied") == 2
    env = {f"LONG{n}": "x" * 20_000 for n in range(10)}
    assert guest.run("echo ${#LONG9}", env=env).bytes_of("stdout") == b"20000\n", "too long for one message"
    assert guest.run("printf $NAME", env={"NAME": "\udcff"}).bytes_of("stdout") == b"\xff"
    done = guest.run("(setsid sh -c 'sleep 1000 & exec sleep 1001' &) ; sleep 1000", timeout_s=0.4)
    assert (done["timed_out"], done["kill"]["survivors"], done["kill"]["method"]) == (True, 0, "tree")
    assert guest.wait_alone(), guest.others()


def test_an_idle_supervisor_has_no_descriptor_of_a_running_call(guest: Guest) -> None:
    running = guest.start_script("mkfifo gate; echo up > up; read line < gate", stdin=b"kept", timeout_s=60)
    guest.wait_for_file("up")
    guest.run("true")
    supervisors = [pid for pid in guest.others() if read_proc(pid, "cmdline").startswith(b"init")]
    assert len(supervisors) == 2

    def list_open_files() -> list[set[str]]:
        """Return the open files of the waiting process and of the serving process, from 3 on. All share PID 1's
        stderr and /dev/null.
        """
        return sorted(({file for fd, file in open_files(pid).items() if int(fd) > 2} for pid in supervisors), key=len)

    # The supervisor closes the files of its last call just after the answer.
    wait_until(lambda: len(list_open_files()[0]) == 2, DEADLINE_S, "its files are closed", 0.002)
    waiting, serving = list_open_files()
    assert not serving & waiting
    guest.run("echo go > gate")
    assert guest.finish(running)["exit_code"] == 0


@pytest.mark.parametrize("name", ["KILL", "TERM", "USR1", "INT", "STOP"])
def test_a_signal_to_the_idle_supervisor_fails_no_call(guest: Guest, name: str) -> None:
    for _ in range(5):
        os.kill(idle_supervisor(guest), signal.Signals[f"SIG{name}"])
        started = time.monotonic()
        assert guest.run("echo served").bytes_of("stdout") == b"served\n"
        assert time.monotonic() - started < 20
    os.kill(idle_supervisor(guest), signal.SIGSTOP)
    assert guest.wait_alone(), guest.others()


def test_a_call_that_its_supervisor_does_not_accept_can_be_retried() -> None:
    header = {"id": "0" * 32, "op": "read_file", "body_bytes": 0, "path": "f", "max_bytes": 1, "timeout_s": 60}
    call, progress = Call(header), Progress()
    own_channel, other_channel = open_channel()
    supervisor = SupervisorHandle(0, -1, own_channel, progress, call)
    call.prepare()
    call.entrust(supervisor, 0.0)
    assert call.check_delay(supervisor)
    assert call.can_retry(supervisor)
    progress.take()
    assert not call.check_delay(supervisor)
    assert not call.can_retry(supervisor)
    own_channel.close()
    other_channel.close()


@pytest.mark.parametrize("name", ["STOP", "KILL"])
def test_every_call_is_answered_while_all_supervisors_are_signalled(guest: Guest, name: str) -> None:
    attack = (
        "import os, signal, time\nopen('up', 'w').write('up\\n')\nend = time.monotonic() + 1.5\nspare = {1, "
        "os.getpid(), os.getppid()}\n"
        "while time.monotonic() < end:\n"
        " for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):\n"
        "  if pid not in spare:\n"
        f"   try:\n    os.kill(pid, signal.SIG{name})\n   except OSError: pass\n"
    )
    guest.run("true")
    running = guest.start_script(f'exec python3 -c "{attack}"', timeout_s=60)
    guest.wait_for_file("up")
    for _ in range(3 if name == "STOP" else 12):
        started = time.monotonic()
        done = guest.run("echo served", timeout_s=1 if name == "STOP" else 5)
        assert time.monotonic() - started < 30
        # The call was served, or a signal reached it while it ran, which the reply states.
        if name == "STOP":
            was_signalled = done.header.get("timed_out")
        else:
            was_signalled = done.code == "CANCELLED" or done["signal"] == signal.SIGKILL
        assert was_signalled or done.bytes_of("stdout") == b"served\n", done.header
    assert guest.finish(running)["exit_code"] == 0
    assert guest.run("echo calm").bytes_of("stdout") == b"calm\n"
    assert guest.wait_alone(), guest.others()


def test_killing_a_supervisor_while_another_is_idle_leaves_no_process(guest: Guest) -> None:
    running = guest.start_script(
        "mkfifo gate; echo up > up; read line < gate; setsid sleep 1000 & kill -9 $PPID; sleep 1000", timeout_s=60
    )
    guest.wait_for_file("up")
    guest.run("echo go > gate")
    done = guest.finish(running)
    assert (done["signal"], done["supervisor_killed"]) == (signal.SIGKILL, True)
    assert done["kill"]["survivors"] == 0
    assert guest.wait_alone(), guest.others()
