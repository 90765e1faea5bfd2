"""The guest when the sandbox runs out of memory: its system calls fail with ENOMEM, or the OOM killer chooses a program.

The faults are injected into a real guest in a pid namespace.
"""

from pathlib import Path

import pytest

from tests.support.guest.guest_harness import DEADLINE_S, Guest, needs_namespace, running_guest
from tests.support.stack.waiting import wait_until

pytestmark = needs_namespace

# Fails the first calls of a function of os that match, in each process anew.
_FAIL = """
import errno, os
real_{name}, left_{name} = os.{name}, [{times}]
def {name}(*arguments):
    if left_{name}[0] and ({condition}):
        left_{name}[0] -= 1
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return real_{name}(*arguments)
os.{name} = {name}
"""
_ALWAYS = 1_000_000_000
_IS_PIPE = "os.fstat(arguments[0]).st_mode & 0o170000 == 0o010000"


def fail(name: str, condition: str, times: int) -> str:
    return _FAIL.format(name=name, condition=condition, times=times)


@pytest.mark.parametrize("times", [1, 5, _ALWAYS])
@pytest.mark.parametrize("attack", ["", "kill -9 $PPID;"], ids=["timeout", "supervisor killed"])
def test_all_processes_are_killed_when_process_scans_fail(attack: str, times: int) -> None:
    faults = fail("listdir", "arguments == ('/proc',)", times)
    with running_guest(idle_s=0.05, faults=faults) as guest:
        done = guest.run(f"setsid sleep 1000 & {attack} sleep 1000", timeout_s=10 if attack else 0.3)

        assert (done["timed_out"], done.header.get("supervisor_killed", False)) == (not attack, bool(attack))
        assert done["kill"]["survivors"] == 0
        assert guest.wait_alone(), guest.others()
        assert guest.run("echo well").bytes_of("stdout") == b"well\n"


def test_a_process_with_a_failed_stat_read_is_killed() -> None:
    faults = fail("open", "str(arguments[0]).endswith('/stat')", 14)
    with running_guest(idle_s=0.05, faults=faults) as guest:
        done = guest.run("setsid sleep 1000 & sleep 1000", timeout_s=0.3)

        assert done["kill"]["survivors"] == 0
        assert guest.wait_alone(), guest.others()


@pytest.mark.parametrize("pipe", ["PID 1", "supervisor"])
def test_output_is_complete_after_temporary_pipe_write_failures(pipe: str) -> None:
    condition = {"PID 1": "arguments[0] == 1", "supervisor": f"os.getpid() != 1 and {_IS_PIPE}"}[pipe]
    with running_guest(faults=fail("write", condition, 20)) as guest:
        done = guest.run("seq 20000")

        assert done["exit_code"] == 0
        assert done.bytes_of("stdout") == b"".join(b"%d\n" % number for number in range(1, 20001))


@pytest.mark.parametrize("error", ["OSError(12, 'Cannot allocate memory')", "MemoryError('no memory')"])
def test_a_fatal_guest_error_is_reported_with_its_reason(error: str) -> None:
    """A request that was read in part cannot be read again: the sandbox ends, with a reason for its calls."""
    faults = f"""
from guest.frames import FrameDecoder
def feed(*arguments):
    raise {error}
FrameDecoder.feed = feed
"""
    with running_guest(faults=faults) as guest:
        guest.send({"id": "0" * 32, "op": "ping", "body_bytes": 0})
        frame = guest.next_frame()

        assert frame.header["ev"] == "fatal"
        assert frame.header["message"].startswith(f"the guest failed: {error.partition('(')[0]}: ")
        assert guest.wait_exit() == 1


def test_children_started_before_the_oom_mark_are_marked_too() -> None:
    """On a busy host, a supervisor may mark its program late. Unmarked children would then outlive marked programs of
    other calls.
    """
    faults = """
import os, time
from guest.commands import execution
mark = execution.offer_to_oom_killer
def mark_late(pid):
    while not os.path.exists(paths[0] + b"/started"):
        time.sleep(0.002)
    mark(pid)
execution.offer_to_oom_killer = mark_late
"""
    with running_guest(faults=faults) as guest:
        guest.start_script(
            "sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000; true' &); echo > started; wait", timeout_s=60
        )
        guest.wait_for_file("started")
        wait_until(lambda: read_scores(guest) == ["0", *["200"] * 5], DEADLINE_S, lambda: str(read_scores(guest)), 0.01)


def read_scores(guest: Guest) -> list[str]:
    """Return oom_score_adj of every process but PID 1: of one supervisor, and of the programs."""
    return sorted(Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in guest.others())
