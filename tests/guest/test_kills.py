"""All processes that a program starts end with its call. On a real pid namespace, checked from outside."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.guest.guest_harness import DEADLINE_S, GUEST_PARENT, Guest, needs_namespace, running_guest

pytestmark = needs_namespace


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest(idle_s=0.05) as running:
        yield running


_PERSISTENT_SCRIPTS = {
    "a plain child": "sleep 1000",
    "a double fork": "(setsid sh -c 'sleep 1000 & exec sleep 1001' &) ; sleep 1000",
    "a daemon": (
        "python3 -c 'import os,time\nfor _ in range(2):\n if os.fork(): os._exit(0)\n os.setsid()\ntime.sleep(1000)'; "
        "sleep 1000"
    ),
    "signals ignored": "trap '' TERM INT HUP QUIT CHLD; sleep 1000; sleep 1000",
    "stopped": "sleep 1000 & kill -STOP $!; kill -STOP $$",
    "a main thread that has ended": (
        "python3 -c 'import ctypes,threading,time\n"
        "threading.Thread(target=time.sleep,args=(1000,)).start()\nctypes.CDLL(None).syscall(60,0)' & sleep 1000"
    ),
}


@pytest.mark.parametrize("script", _PERSISTENT_SCRIPTS.values(), ids=_PERSISTENT_SCRIPTS.keys())
def test_a_timeout_kills_and_reaps_all_processes(guest: Guest, script: str) -> None:
    started = time.monotonic()
    done = guest.run(script, timeout_s=0.4)
    assert time.monotonic() - started < 30
    assert done["timed_out"] is True
    assert done["exit_code"] is None
    assert done["kill"]["survivors"] == 0
    assert done["kill"]["signalled"] >= 1
    assert guest.wait_alone(), guest.others()


@pytest.mark.parametrize(
    "background_command", ["sleep 1000 &", "setsid sleep 1000 &", "(setsid sleep 1000 & );", "(while :; do :; done) &"]
)
def test_a_background_process_that_holds_stdout_does_not_block_the_call(guest: Guest, background_command: str) -> None:
    started = time.monotonic()
    done = guest.run(f"{background_command} echo said")
    assert time.monotonic() - started < 30
    assert (done["exit_code"], done["timed_out"], done.bytes_of("stdout")) == (0, False, b"said\n")
    assert (done["kill"]["signalled"], done["kill"]["survivors"]) == (1, 0)
    assert guest.wait_alone()


_BUSY = (
    "import sys,time\nend=time.process_time()+0.1\nwhile time.process_time()<end: pass\n"
    "sys.stdout.write(sys.stdin.read())"
)


@pytest.mark.parametrize("helper", ["cat", f"python3 -c '{_BUSY}'"], ids=["cat", "busy helper"])
def test_a_helper_that_ends_soon_after_its_program_is_awaited(guest: Guest, helper: str) -> None:
    done = guest.run(f"echo through > >({helper})")
    assert (done.bytes_of("stdout"), done["kill"]) == (b"through\n", None)


def test_a_busy_background_process_without_stdout_is_killed_at_once(guest: Guest) -> None:
    program = "import time\nwhile True:\n with open('used','w') as file: print(time.process_time(), file=file)"
    done = guest.run(f'python3 -c "{program}" >/dev/null 2>&1 & until [ -s used ]; do :; done; echo said')
    assert done.bytes_of("stdout") == b"said\n"
    assert done["kill"]["signalled"] == 1
    assert guest.wait_alone()
    used = guest.run("cat used").bytes_of("stdout").split()
    # One that holds output gets half a second of the processor.
    assert not used or float(used[0]) < 0.3, used


def test_a_chain_of_forks_into_new_sessions_is_killed() -> None:
    chain = "import os\nwhile True:\n if os.fork(): os._exit(0)\n os.setsid()"
    with running_guest("ulimit -u 80;") as guest:
        done = guest.run(f"for i in 1 2 3; do python3 -c '{chain}' & done; sleep 1000", timeout_s=0.5)
        assert done["timed_out"] is True
        assert done["kill"]["survivors"] == 0
        assert guest.wait_alone()


def test_a_call_that_kills_its_supervisor_is_reported_and_leaves_no_process(guest: Guest) -> None:
    done = guest.run("setsid sleep 1000 & kill -9 $PPID; sleep 1000")
    assert (done.code, done["signal"], done["supervisor_killed"]) == (None, signal.SIGKILL, True)
    assert done["kill"]["survivors"] == 0
    assert guest.wait_alone()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["supervisor runs", "supervisor stopped"])
def test_cancel_and_timeout_end_a_call_even_with_a_stopped_supervisor(guest: Guest, is_stopped: bool) -> None:
    attack = "kill -STOP $PPID;" if is_stopped else ""
    guest.run("rm -f running")
    call = guest.start_script(f"{attack} echo $$ > running; setsid sleep 1000 & sleep 1000", timeout_s=DEADLINE_S)
    guest.wait_for_file("running")
    guest.send({"id": call, "op": "cancel"})
    done = guest.finish(call)
    assert (done["cancelled"], done["timed_out"]) == (True, False)
    assert is_stopped or done["signal"] == signal.SIGTERM
    assert guest.wait_alone()
    started = time.monotonic()
    done = guest.run(f"{attack} setsid sleep 1000 & sleep 1000", timeout_s=0.5)
    assert time.monotonic() - started < 30
    assert (done["timed_out"], done["kill"]["survivors"]) == (True, 0)
    assert guest.wait_alone()


def test_a_call_that_kills_all_its_processes_does_not_stop_pid_1(guest: Guest) -> None:
    done = guest.run("kill -9 -1")
    assert (done.code, done["signal"]) == (None, signal.SIGKILL)
    assert guest.run("echo alive").bytes_of("stdout") == b"alive\n"


def test_pid_1_ignores_signals_of_programs(guest: Guest) -> None:
    for number in (1, 2, 3, 6, 9, 10, 11, 13, 15, 17, 19, 34, 64):
        assert guest.run(f"for i in 1 2 3; do kill -{number} 1; done; true")["exit_code"] == 0
        assert guest.request("ping").header["ev"] == "pong"


def test_a_program_cannot_read_the_proc_files_of_pid_1(guest: Guest) -> None:
    done = guest.run(
        "cat /proc/1/environ; ls /proc/1/fd; head -c1 /proc/1/mem; cat /proc/$PPID/environ; ls /proc/$PPID/fd"
    )
    assert done.bytes_of("stdout") == b""
    assert done.bytes_of("stderr").count(b"Permission denied") == 5


def test_killing_one_call_does_not_affect_another_call(guest: Guest) -> None:
    neighbour = guest.start_script(
        "mkfifo gate; sleep 1000 & echo up > up; read line < gate; kill $! && echo spared", timeout_s=60
    )
    guest.wait_for_file("up")
    assert guest.run("sleep 1000 & setsid sleep 1000", timeout_s=0.3)["kill"]["method"] == "tree"
    killer = guest.run("kill -9 $PPID; sleep 1000")
    assert (killer["kill"]["survivors"], killer["kill"]["method"]) == (0, "tree")
    stopper = guest.run("kill -STOP $PPID; sleep 1000", timeout_s=0.3)
    assert (stopper["kill"]["survivors"], stopper["kill"]["method"]) == (0, "tree")
    guest.run("echo go > gate")
    assert guest.finish(neighbour).bytes_of("stdout") == b"spared\n"
    assert guest.wait_alone()


def test_a_timeout_sends_sigterm_first_and_keeps_the_final_output(guest: Guest) -> None:
    done = guest.run("trap 'echo last words; exit 5' TERM; echo first; while :; do sleep 0.01; done", timeout_s=0.3)
    assert (done["timed_out"], done["exit_code"], done["kill"]["survivors"]) == (True, 5, 0)
    assert done.bytes_of("stdout") == b"first\nlast words\n"


def test_the_end_of_stdin_ends_the_guest() -> None:
    with running_guest() as guest:
        guest.start_script("setsid sleep 1000 & echo $$ > running; sleep 1000", timeout_s=100)
        guest.wait_for_file("running")
        inside = guest.others()
        assert inside
        guest.close_stdin()
        assert guest.wait_exit() == 0


def test_a_kill_before_setsid_does_not_kill_the_supervisor() -> None:
    code = (
        "import os, time; from guest.processes import KillReport, kill_processes, read_descendants\n"
        "child = os.fork() or time.sleep(1000)\n"
        "kill_processes(read_descendants(), KillReport())\n"
        "print(os.waitpid(child, 0)[1])"
    )
    # In a group of its own: a defect would otherwise kill the tests.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=GUEST_PARENT, capture_output=True, text=True, start_new_session=True
    )
    assert (done.returncode, done.stdout) == (0, f"{signal.SIGKILL.value}\n")
