"""The report of PID 1 about its sandbox: on request, and when the sandbox ends by itself."""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT, Guest, needs_namespace, running_guest
from toolcrew.workers.sandboxd.runtime.attestation import Attestation, find_dirt, parse_attestation
from toolcrew.workers.sandboxd.sandbox import build_done

assert GUEST_PARENT
from guest.loop import parse_options  # noqa: E402


def attest(guest: Guest) -> Attestation:
    """Return the report as sandboxd parses it, with sandboxd's own list of fields."""
    return parse_attestation(build_done(guest.request("attest").header))


def dirt_of(guest: Guest) -> list[str]:
    # /dev/shm is the machine's here, and others use it.
    return [line for line in find_dirt(attest(guest)) if "/dev/shm" not in line]


@needs_namespace
def test_files_and_processes_of_a_call_are_reported_as_dirt(guest: Guest) -> None:
    assert dirt_of(guest) == []
    assert guest.run("true")["exit_code"] == 0
    assert guest.others()
    assert dirt_of(guest) == []
    for folder, name in (("workspace", "a"), ("tmp", ".hidden"), ("output", ".state")):
        (getattr(guest, folder) / name).mkdir()
        assert dirt_of(guest) == [f"1 entries lie in /{folder}"]
        (getattr(guest, folder) / name).rmdir()
    call = guest.start_script("echo up > up; sleep 100", timeout_s=60)
    guest.wait_for_file("up")
    assert attest(guest).processes >= 2
    guest.send({"id": call, "op": "cancel"})
    guest.finish(call)
    for number in range(1200):
        (guest.tmp / str(number)).touch()
    assert attest(guest).entries["tmp"] == 1000


@needs_namespace
def test_an_unreadable_workspace_is_not_reported_as_empty(guest: Guest) -> None:
    """The case occurs when a mount is missing. The report must still describe the file system that is there."""
    guest.workspace.chmod(0o500)
    os.chown(guest.workspace, 0, 0)
    attestation = attest(guest)
    assert (attestation.entries["workspace"], attestation.entries["tmp"]) == (1000, 0)
    assert attestation.workspace_bytes > 0


@needs_namespace
def test_a_background_job_is_reported_as_dirt_until_it_ends(guest: Guest) -> None:
    script = b"echo up > up; read line < gate"
    guest.run("mkfifo gate")
    job = guest.request(
        "job_start", script, script_bytes=len(script), cwd=None, label="j", wait_ms=0, max_bytes=9999, timeout_s=9
    )
    guest.wait_for_file("up")
    attestation = attest(guest)
    assert (attestation.jobs, attestation.processes > 0) == (1, True)
    guest.run("echo go > gate")
    guest.request("job_poll", job=job["job"]["job"], max_bytes=9999, timeout_s=9)
    guest.request("job_kill", job=job["job"]["job"], max_bytes=9999, timeout_s=9)
    assert attest(guest).jobs == 0


@needs_namespace
def test_an_injected_process_and_its_zombie_are_reported_as_dirt(guest: Guest) -> None:
    """`docker exec` causes this case: its process is no child of PID 1, so no process reaps a dead child during its
    life.
    """
    started, hold = os.pipe(), os.pipe()
    outside = os.fork()
    if outside == 0:
        with open(f"/proc/{guest.pid}/ns/pid", "rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
        intruder = os.fork()
        if intruder == 0:
            os.close(hold[1])
            if os.fork() == 0:
                os._exit(0)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            os.write(started[1], b"x")
            os.read(hold[0], 1)
            os._exit(0)
        os.close(hold[1])
        os.waitpid(intruder, 0)
        os._exit(0)
    try:
        assert os.read(started[0], 1)
        attestation = attest(guest)
        assert (attestation.processes, attestation.zombies) == (1, 1)
    finally:
        for fd in (*started, *hold):
            os.close(fd)
        os.waitpid(outside, 0)


@needs_namespace
def test_the_report_contains_the_file_system_of_the_workspace(shared_guest: Guest) -> None:
    file_system = os.statvfs(shared_guest.workspace)
    attestation = attest(shared_guest)
    assert (attestation.workspace_bytes, attestation.workspace_inodes) == (
        file_system.f_blocks * file_system.f_frsize,
        file_system.f_files,
    )
    # The last mount that holds the workspace, as the outside sees it.
    points = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    mounts = [
        (len(point), kind) for point, kind in points if f"{shared_guest.workspace}/".startswith(point.rstrip("/") + "/")
    ]
    assert attestation.workspace_type == max(mounts, key=lambda pair: pair[0])[1]


@needs_namespace
def test_a_sandbox_ends_at_its_maximum_life_with_all_processes() -> None:
    with running_guest(options=("--life", "0.5")) as guest:
        guest.start_script("trap '' TERM; setsid sleep 100 & echo up > up; sleep 100", timeout_s=60)
        guest.wait_for_file("up")
        running = guest.others()
        assert running
        frame = guest.next_frame()
        assert frame.header == {
            "ev": "fatal",
            "message": "the sandbox reached its maximum life of 0.5 s",
            "reason": "life",
        }
        assert guest.wait_exit() != 0
        assert not any(Path(f"/proc/{pid}/ns").exists() and _is_alive(pid) for pid in running)


def _is_alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in "ZX"
    except OSError:
        return False


@needs_namespace
def test_the_maximum_life_applies_when_the_host_reads_nothing() -> None:
    started_at = time.monotonic()
    with running_guest(options=("--life", "0.5")) as guest:
        capture = {"stream": 1 << 30}
        guest.start("exec", argv=["cat", "/dev/zero"], script_bytes=0, cwd=".", env={}, timeout_s=60, capture=capture)
        assert guest.wait_exit() != 0
        assert 0.4 < time.monotonic() - started_at < 30


@needs_namespace
def test_continuous_requests_do_not_delay_the_maximum_life() -> None:
    with running_guest(options=("--life", "0.5")) as guest:
        started_at = time.monotonic()
        event = "pong"
        while event == "pong":
            assert time.monotonic() - started_at < 30
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its last word is to be read
                guest.send({"id": "0" * 32, "op": "ping"})
            event = guest.next_frame().header["ev"]
        assert event == "fatal"


@needs_namespace
def test_the_maximum_life_includes_time_while_stopped() -> None:
    with running_guest(options=("--life", "3")) as guest:
        os.kill(guest.pid, 19)
        time.sleep(3.2)  # the time that passes is what is tested
        os.kill(guest.pid, 18)
        resumed_at = time.monotonic()
        assert guest.next_frame().header["ev"] == "fatal"
        assert time.monotonic() - resumed_at < 2.5


@pytest.mark.parametrize(
    "line",
    [
        "--life", "--life 0", "--life -1", "--life nan", "--life inf", "--life 1e10", "--life x", "--cpus 0",
        "--cpus nan", "--proxy 0", "--proxy 65536", "--limit 3", "3",
    ],
)  # fmt: skip
def test_an_invalid_guest_option_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse_options(line.split())


def test_an_invalid_option_ends_the_guest_with_one_error_line() -> None:
    code = (
        f"import sys, runpy\nsys.path.insert(0, {str(GUEST_PARENT)!r})\n"
        f"runpy.run_path({str(GUEST_PARENT / 'guest/boot.py')!r}, run_name='__main__')"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, "--life", "nan"]
    process = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (process.returncode, process.stderr.count("\n"), "--life nan" in process.stderr) == (1, 1, True)
