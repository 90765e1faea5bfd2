"""Background jobs of the guest, on a real pid namespace: started, read, given input and ended. A check from outside
shows that no process remains.
"""

import select
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import DEADLINE_S, GUEST_PARENT, Done, Guest, needs_namespace, running_guest
from tests.support.stack.processes import read_proc
from tests.support.stack.waiting import wait_until

assert GUEST_PARENT
from guest.commands.job_log import JobLog  # noqa: E402
from guest.jobs import MAX_JOBS  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402


@pytest.fixture
def guest() -> Iterator[Guest]:
    with running_guest(idle_s=0.05) as running:
        yield running


def start(guest: Guest, script: str, **fields: object) -> Done:
    raw = script.encode()
    defaults = {"script_bytes": len(raw), "label": "a job", "wait_ms": 0, "max_bytes": 10_000, "timeout_s": 10}
    return guest.request("job_start", raw, **{**defaults, **fields})


def send_job_request(guest: Guest, verb: str, job: str = "job-1", body: bytes = b"", **fields: object) -> Done:
    limit = {} if verb == "input" else {"max_bytes": 10_000}
    return guest.request(f"job_{verb}", body, **{"job": job, "timeout_s": 10, **limit, **fields})


def read_until(guest: Guest, expected: bytes, output: bytes = b"", job: str = "job-1") -> bytes:
    """Poll a job until it has printed this text. `output` is its earlier output."""
    give_up_at = time.monotonic() + DEADLINE_S
    while expected not in output:
        assert time.monotonic() < give_up_at, output
        output += send_job_request(guest, "poll", job).bytes_of("merged")
    return output


def start_and_await_output(guest: Guest, script: str, expected: bytes = b"up\n", job: str = "job-1") -> None:
    """Start a job and wait until its reply, or that of a poll, contains this output."""
    read_until(guest, expected, start(guest, script).bytes_of("merged"), job)


def wait(condition: Callable[[], bool]) -> None:
    wait_until(condition, DEADLINE_S, "see the condition", 0.002)


def find_processes(guest: Guest, name: str) -> list[int]:
    """Return the live processes of this name, by their pids outside the sandbox."""
    return [pid for pid, state in guest.others().items() if state != "Z" and name.encode() in read_proc(pid, "comm")]


pytestmark = needs_namespace


def test_a_job_continues_after_its_call_and_during_other_calls(guest: Guest) -> None:
    start_and_await_output(guest, "echo up; read line; echo got $line; sleep 1000")
    assert guest.run("echo beside", cwd=None, state="keep").bytes_of("stdout") == b"beside\n"
    assert send_job_request(guest, "input", body=b"words\n")["pending"] == 0
    assert read_until(guest, b"got words\n") == b"got words\n"
    assert (guest.output / "jobs" / "job-1.log").read_bytes() == b"up\ngot words\n"


def test_a_job_leaves_the_logs_of_an_earlier_sandbox(guest: Guest) -> None:
    """A fork, a restore and a replaced sandbox start a new guest on the files of an earlier one."""
    guest.run(f"mkdir -p {guest.output}/jobs; cd {guest.output}/jobs; echo old | tee job-1.log > job-2.log")
    done = start(guest, "echo new", wait_ms=5000)
    assert (done["job"]["job"], done["job"]["state"], done.bytes_of("merged")) == ("job-3", "exited", b"new\n")
    assert guest.run(f"cat {guest.output}/jobs/*.log").bytes_of("stdout") == b"old\nold\nnew\n"


def test_a_job_inherits_the_session_state_without_changing_it(guest: Guest) -> None:
    guest.run("mkdir sub; cd sub; export A=1; f() { echo f$A; }", cwd=None, state="keep")
    done = start(guest, "f; pwd; cd /tmp; export A=2; f() { echo g; }", wait_ms=5000)
    assert done.bytes_of("merged").decode() == f"f1\n{guest.workspace}/sub\n"
    assert (done["job"]["state"], done["job"]["exit_code"]) == ("exited", 0)
    assert guest.run("f; pwd", cwd=None, state="keep").bytes_of("stdout").decode() == f"f1\n{guest.workspace}/sub\n"


def test_killing_a_job_ends_all_its_processes(guest: Guest) -> None:
    script = "trap '' TERM; sleep 1001 & (setsid sh -c 'sleep 1002 & exec sleep 1003' &); echo up; wait; sleep 1004"
    start_and_await_output(guest, script)
    wait(lambda: len(find_processes(guest, "sleep")) == 3)
    done = send_job_request(guest, "kill")
    assert (done["job"]["state"], done["kill"]["survivors"]) == ("killed", 0)
    assert find_processes(guest, "sleep") == []
    assert guest.wait_alone(), guest.others()


_KEEPER_CANNOT_KILL = (
    "import os; from guest import processes; from guest.commands import job_keeper;"
    "send = processes._kill; processes._kill = lambda target: send(target) if os.getpid() == 1 else None;"
    "processes.kill_below.__defaults__ = (None, 0.1); job_keeper.GRACE_S = 0.1"
)
"""Kills of a keeper fail and end after a short time. Kills of PID 1 succeed."""


def test_pid_1_kills_the_processes_that_survive_a_job_kill_before_it_answers() -> None:
    with running_guest(idle_s=0.05, faults=_KEEPER_CANNOT_KILL) as guest:
        start_and_await_output(guest, "trap '' TERM; sleep 1000 & echo up; wait; sleep 1000")
        done = send_job_request(guest, "kill")
        assert find_processes(guest, "sleep") == []
        assert (done["job"]["state"], done["kill"]["survivors"]) == ("killed", 0)
        assert done["kill"]["signalled"] >= 2
        job = guest.request("job_list", timeout_s=5)["jobs"][0]
        assert (job["state"], job["unread"]) == ("killed", 0)
        assert guest.wait_alone(), guest.others()


def test_a_killed_job_can_print_in_its_sigterm_handler(guest: Guest) -> None:
    start_and_await_output(guest, "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.01; done")
    done = send_job_request(guest, "kill")
    assert (b"bye\n" in done.bytes_of("merged"), done["job"]["exit_code"]) == (True, 5)


def test_a_job_survives_timeouts_and_kills_of_other_calls(guest: Guest) -> None:
    start_and_await_output(guest, "echo up; read line; echo alive")
    assert guest.run("sleep 1000 & setsid sleep 1000", timeout_s=0.2)["kill"]["survivors"] == 0
    assert guest.run("setsid sleep 1000 & kill -9 $PPID; sleep 1000")["signal"] == 9
    assert guest.run("setsid sleep 1000 & kill -STOP $PPID; sleep 1000", timeout_s=0.2)["kill"]["survivors"] == 0
    send_job_request(guest, "input", body=b"\n")
    read_until(guest, b"alive\n")


def test_killing_the_supervisor_of_a_job_ends_all_its_processes(guest: Guest) -> None:
    start(guest, "setsid sleep 1000 & sleep 1001 & echo up; kill -9 $PPID; sleep 1002")
    wait(lambda: guest.request("job_list", timeout_s=5)["jobs"][0]["state"] == "lost")
    wait(lambda: find_processes(guest, "sleep") == [])
    assert send_job_request(guest, "poll")["job"]["state"] == "lost"
    assert send_job_request(guest, "kill")["kill"] is None
    assert guest.wait_alone(), guest.others()


def test_a_stopped_job_supervisor_is_resumed_by_the_next_request(guest: Guest) -> None:
    start(guest, "until [ -e go ]; do sleep 0.01; done; kill -STOP $PPID; echo up; sleep 1000")
    # Not by a request: PID 1 would be stopped while serving that request.
    (guest.workspace / "go").touch()
    wait(lambda: "T" in guest.others().values())
    read_until(guest, b"up")
    assert send_job_request(guest, "kill")["kill"]["survivors"] == 0


def test_an_ended_job_keeps_its_exit_code_and_output_for_a_poll(guest: Guest) -> None:
    start(guest, "read line; echo last; exit 7")
    send_job_request(guest, "input", body=b"go\n")
    wait(lambda: guest.request("job_list", timeout_s=5)["jobs"][0]["state"] == "exited")
    done = send_job_request(guest, "poll")
    assert (done["job"]["exit_code"], done.bytes_of("merged")) == (7, b"last\n")
    second_poll = send_job_request(guest, "poll")
    assert (second_poll["job"]["exit_code"], second_poll.bytes_of("merged")) == (7, b"")
    assert guest.wait_alone(), guest.others()
    assert send_job_request(guest, "input", body=b"x").code == "INVALID_ARGUMENTS"


def test_a_job_end_read_together_with_an_older_reply_is_not_lost(guest: Guest) -> None:
    start(guest, "read line; exit 7")
    shells = find_processes(guest, "bash")
    # While the host takes nothing, PID 1 leaves what keepers say in their pipes: here the answer, and then the end.
    streaming_call = guest.start_script("head -c 1000000 /dev/zero")
    select.select([guest.pipes[1]], [], [], DEADLINE_S)
    input_call = guest.start("job_input", b"go\n", job="job-1", timeout_s=10)
    wait(lambda: not set(shells) & set(guest.others()))
    assert (guest.finish(streaming_call)["exit_code"], guest.finish(input_call)["job"]["state"]) == (0, "running")
    wait(lambda: guest.request("job_list", timeout_s=5)["jobs"][0]["state"] == "exited")


def test_concurrent_polls_at_the_end_of_a_job_are_all_answered(guest: Guest) -> None:
    start(guest, "true")
    calls = [guest.start("job_poll", job="job-1", max_bytes=10, timeout_s=10) for _ in range(30)]
    assert {guest.finish(call)["job"]["state"] for call in calls} <= {"running", "exited"}
    wait(lambda: send_job_request(guest, "poll")["job"]["state"] == "exited")


def test_a_job_runs_until_its_last_process_ends(guest: Guest) -> None:
    start(guest, "sleep 1000 & exit 3")
    wait(lambda: send_job_request(guest, "poll")["job"]["exit_code"] == 3)
    assert send_job_request(guest, "poll")["job"]["state"] == "running"
    assert send_job_request(guest, "kill")["kill"]["signalled"] >= 1
    assert guest.wait_alone(), guest.others()


def test_unread_job_input_above_the_limit_is_refused(guest: Guest) -> None:
    start(guest, "sleep 1000")
    assert send_job_request(guest, "input", body=bytes(600_000))["pending"] > 0
    refused = send_job_request(guest, "input", body=bytes(600_000))
    assert refused.code == "INVALID_ARGUMENTS"
    assert "has not read" in refused["error"]["message"]
    assert send_job_request(guest, "kill")["kill"]["survivors"] == 0
    start_and_await_output(guest, "exec <&-; echo up; sleep 1000", job="job-2")
    assert "closed its standard input" in send_job_request(guest, "input", "job-2", body=b"x")["error"]["message"]
    assert send_job_request(guest, "poll", "job-2")["job"]["state"] == "running"
    assert "no job 'job-9'" in send_job_request(guest, "poll", "job-9")["error"]["message"]
    assert send_job_request(guest, "kill", "../x").code == "INVALID_ARGUMENTS"


def test_closed_job_input_ends_stdin(guest: Guest) -> None:
    start(guest, "ls /proc/self/fd | wc -l; cat; echo end")
    send_job_request(guest, "input", body=b"one\n")
    send_job_request(guest, "input", body=b"two\n", close=True)
    assert read_until(guest, b"end\n") == b"4\none\ntwo\nend\n", "and a job gets no descriptor of the guest"


def test_job_output_above_the_poll_limit_is_returned_as_head_and_tail(guest: Guest) -> None:
    start(guest, "read line; seq 1 100000; echo end; sleep 1000")
    send_job_request(guest, "input", body=b"\n")
    log = guest.output / "jobs" / "job-1.log"
    wait(lambda: log.read_bytes().endswith(b"end\n"))
    done = send_job_request(guest, "poll", max_bytes=400)
    assert done["streams"]["merged"]["total"] == len(log.read_bytes())
    assert done.bytes_of("merged") == log.read_bytes()[:100] + log.read_bytes()[-300:]


def test_jobs_above_the_limit_are_refused_until_one_ends(guest: Guest) -> None:
    for number in range(MAX_JOBS):
        assert start(guest, "sleep 1000", label=f"job {number}")["job"]["state"] == "running"
    refused = start(guest, "true")
    assert refused.code == "INVALID_ARGUMENTS"
    assert "kill one of job-1" in refused["error"]["message"]
    send_job_request(guest, "kill", "job-3")
    assert start(guest, "sleep 1000", wait_ms=10)["job"]["job"] == f"job-{MAX_JOBS + 1}"
    jobs = guest.request("job_list", timeout_s=5)["jobs"]
    assert [job["job"] for job in jobs][:3] == ["job-1", "job-2", "job-4"]
    assert jobs[0]["label"] == "job 0"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"cwd": "nowhere"}, "FILE_NOT_FOUND"),
        ({"cwd": "/etc"}, "PATH_NOT_ALLOWED"),
        ({"script_bytes": 99}, "INVALID_ARGUMENTS"),
    ],
)
def test_a_job_that_cannot_start_is_refused_and_not_listed(guest: Guest, fields: dict[str, object], code: str) -> None:
    assert start(guest, "true", **fields).code == code
    assert guest.request("job_list", timeout_s=5)["jobs"] == []
    assert guest.wait_alone(), guest.others()


def test_cancelling_the_start_call_of_a_job_kills_the_job(guest: Guest) -> None:
    script = b"echo > up; sleep 1000"
    call = guest.start(
        "job_start", script, script_bytes=len(script), label="x", wait_ms=9000, max_bytes=10, timeout_s=20
    )
    guest.wait_for_file("up")
    guest.send({"id": call, "op": "cancel"})
    assert guest.finish(call)["job"]["state"] == "killed"
    assert guest.wait_alone(), guest.others()


@example(pieces=[b"0123456789" * 3] * 10, max_bytes=20)
@given(pieces=st.lists(st.binary(min_size=1, max_size=30), max_size=30), max_bytes=st.integers(4, 60))
def test_a_job_log_keeps_its_end_and_counts_dropped_bytes(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], max_bytes: int
) -> None:
    output = tmp_path_factory.mktemp("output")
    log = JobLog(GuestPaths((b"/nowhere",), str(output).encode()), "job-1", 100)
    written = b"".join(pieces)
    for piece in pieces:
        log.add(piece)
    head, tail = log.read(0, max_bytes)
    log_bytes = (output / "jobs" / "job-1.log").read_bytes()
    assert log.written == len(written)
    assert len(log_bytes) < 100 + 80
    assert log_bytes.endswith(written[log.dropped :])
    assert written.endswith(tail)
    assert written.startswith(head) or not head
    if len(written) <= max_bytes and not log.dropped:
        assert head + tail == written
