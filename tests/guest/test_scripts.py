"""How scripts reach bash, and what other processes see of them and of the guest: S4-01, S4-03."""

import os
from collections.abc import Iterator

import pytest

from tests.support.guest.guest_harness import Done, Guest, needs_namespace, running_guest

# isort: split
# guest_harness extends the module path.
from guest.call_pipes import Progress, open_channel
from guest.calls import Call, SupervisorHandle
from guest.commands.scripts import hide_script
from guest.processes import KillReport

pytestmark = needs_namespace
RUN = b'builtin eval -- "$BASH_EXECUTION_STRING"'


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest(idle_s=0.05) as running:
        yield running


def run_by(guest: Guest, door: str, script: str) -> Done:
    """Run a script by one of the ways in which scripts come."""
    if door == "session shell":
        return guest.run(script, state="keep", cwd=None)
    if door == "exec":
        return guest.run("", argv=["bash", "-c", script, "name", "first"], script_bytes=0)
    if door == "job":
        fields = {"script_bytes": len(script), "cwd": None, "label": "a job", "wait_ms": 10_000, "max_bytes": 1000}
        return guest.request("job_start", script.encode(), timeout_s=20, **fields)
    return guest.run(script)


DOORS = ["script", "session shell", "exec", "job"]


# For `bash -c -n` as a program, -n is an option of bash.
@pytest.mark.parametrize("door", [door for door in DOORS if door != "exec"])
@pytest.mark.parametrize("script", ["- item", "-n foo", "--version", "-x", "--"])
def test_a_script_that_begins_with_a_dash_is_a_command(guest: Guest, door: str, script: str) -> None:
    done = run_by(guest, door, f"{script} 2>&1; echo $?")
    output = done.bytes_of("stdout") + done.bytes_of("merged")
    assert output.endswith(b"command not found\n127\n")
    assert b"eval" not in output


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("pkill -f gunicorn || true; echo next", b"next\n"),
        ("pgrep -f nothing-xyz; echo $?", b"1\n"),
        ("pkill -9 -f python3; pkill -9 -f toolcrew; pkill node; echo next", b"next\n"),
        ("ps -eo args | grep nothing-[x]yz; grep -c nothing-xyz /proc/self/environ /proc/$$/environ", None),
    ],
)
def test_a_script_is_in_no_argument_and_no_environment(
    guest: Guest, door: str, script: str, output: bytes | None
) -> None:
    done = run_by(guest, door, script)
    text = done.bytes_of("stdout") + done.bytes_of("merged")
    if output is None:
        assert b"nothing" not in text
        assert text.split(b"\n")[0].endswith(b":0")
    else:
        assert text == output


@pytest.mark.parametrize("door", ["script", "session shell", "exec"])
def test_a_script_behaves_as_one_of_bash_c(guest: Guest, door: str) -> None:
    script = (
        "[[ $- == hBc ]] && echo ${BASH_SOURCE[0]-none} $# $LINENO !! ${BASH_ENV-unset}\n"
        "cat <<END\nheredoc $((1 + 1))\nEND\n"
        "f() { return 3; }; f || echo $?\n"
        "shopt -s extglob\n[[ aa == +(a) ]] && ls /proc/self/fd | wc -l\n"
        "echo in | (exec cat)\n"
        "trap 'echo trapped' EXIT\nset -e\nfalse\necho unreachable"
    )
    done = run_by(guest, door, script)
    count = 1 if door == "exec" else 0
    expected = f"none {count} 1 !! unset\nheredoc 2\n3\n4\nin\ntrapped\n"
    assert (done.bytes_of("stdout").decode(), done["exit_code"]) == (expected, 1)
    done = run_by(guest, door, "echo first\ntrue\necho (")
    assert (done.bytes_of("stdout"), done["exit_code"]) == (b"first\n", 2)
    assert b"syntax error" in done.bytes_of("stderr")
    assert run_by(guest, door, "exit 7; echo no")["exit_code"] == 7
    assert run_by(guest, door, "kill -SEGV $$")["signal"] == 11
    data = bytes(range(1, 256)).replace(b"'", b"")
    done = guest.run(b"printf %s '" + data + b"'", state="keep" if door == "session shell" else "none")
    assert done.bytes_of("stdout") == data


def test_a_long_script_runs_without_a_session(guest: Guest) -> None:
    assert guest.run("#" + "'" * 262_144 + "\necho end").bytes_of("stdout") == b"end\n"


@pytest.mark.parametrize(
    ("argv", "script_at"),
    [
        (["bash", "-c", "x"], 2),
        (["/usr/bin/bash", "-lc", "x", "name", "-c"], 2),
        (["bash", "--norc", "-euo", "pipefail", "-c", "x"], 5),
        (["bash", "-c", "-e", "x"], 3),
        (["bash", "-o", "posix", "-c", "x"], None),
        (["bash", "-ic", "x"], None),
        (["bash", "-xc", "x"], None),
        (["bash", "-nc", "x"], None),
        (["bash", "--posix", "-c", "x"], None),
        (["bash", "file"], None),
        (["bash", "-c"], None),
        (["sh", "-c", "x"], None),
        (["python3", "-c", "x"], None),
    ],
)
def test_only_scripts_of_bash_are_taken_out_of_the_arguments(argv: list[str], script_at: int | None) -> None:
    raw = [argument.encode() for argument in argv]
    hidden, environment, descriptors = hide_script(raw, {b"A": b"b"})
    for fd in descriptors:
        os.close(fd)
    expected = raw if script_at is None else [*raw[:script_at], RUN, *raw[script_at + 1 :]]
    assert (hidden, len(descriptors)) == (expected, 0 if script_at is None else 2)
    assert (b"BASH_ENV" in environment) == (script_at is not None)


def test_the_file_of_the_images_own_bash_env_runs_first() -> None:
    with running_guest() as guest:
        guest.run("echo 'export FROM_FILE=$((FROM_FILE + 1)); helper() { echo helps; }' > env.sh")
        file = f"{guest.workspace}/env.sh"
        assert guest.request("set_variables", variables={"BASH_ENV": file}).code is None
        script = "helper; echo $FROM_FILE $BASH_ENV; bash -c 'echo $FROM_FILE'"
        assert guest.run(script).bytes_of("stdout").decode() == f"helps\n1 {file}\n2\n"
        # The session's shell runs the file once. Its effects are part of the shell state.
        for _ in range(2):
            done = guest.run(script, state="keep", cwd=None)
            assert done.bytes_of("stdout").decode() == f"helps\n1 {file}\n2\n"


@pytest.mark.parametrize(
    "script",
    [
        "kill -9 $PPID; sleep 1000",
        "kill -9 -1; sleep 1000",
        "setsid sleep 1000 & kill -SEGV $PPID; sleep 1000",
        "pkill -9 init; sleep 1000",
    ],
)
@pytest.mark.parametrize("door", ["script", "session shell"])
def test_a_command_that_kills_its_supervisor_ends_by_a_signal(guest: Guest, door: str, script: str) -> None:
    done = run_by(guest, door, script)
    assert done.code is None
    assert (done["exit_code"], done["signal"]) == (None, 11 if "SEGV" in script else 9)
    assert done["supervisor_killed"] is True
    assert done["kill"]["survivors"] == 0
    assert run_by(guest, door, "echo next").bytes_of("stdout") == b"next\n"
    assert guest.wait_alone(), guest.others()


@pytest.mark.parametrize(("killed_by", "code"), [(9, "CANCELLED"), (None, "INTERNAL")])
def test_a_file_request_whose_process_is_killed_does_not_blame_the_guest(killed_by: int | None, code: str) -> None:
    header = {"id": "0" * 32, "op": "read_file", "body_bytes": 0, "path": "f", "max_bytes": 1, "timeout_s": 60}
    call, progress = Call(header), Progress()
    call.prepare()
    channel, other_channel = open_channel()
    call.entrust(SupervisorHandle(0, -1, channel, progress, call), 0.0)
    progress.take()
    call.killed_by = killed_by
    error = call.build_lost_end(KillReport())["error"]
    assert isinstance(error, dict)
    assert error["code"] == code
    channel.close()
    other_channel.close()


def test_a_stopped_supervisor_ends_its_call_at_the_limit(guest: Guest) -> None:
    done = guest.run("kill -STOP $PPID; sleep 1000", timeout_s=0.5)
    assert (done["timed_out"], done.code) == (True, None)
    assert guest.run("echo next").bytes_of("stdout") == b"next\n"
    assert guest.wait_alone(), guest.others()
