"""Programs in the guest: their environment and input, and the captured part of their output."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace, running_guest

pytestmark = needs_namespace


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest(idle_s=0.05) as running:
        yield running


def capture(stdout: int = 0, stderr: int = 0, merged: int = 0) -> dict[str, int]:
    return {"stdout": stdout, "stderr": stderr, "merged": merged}


def test_stdin_follows_the_script_and_a_signal_is_not_an_exit_code(guest: Guest) -> None:
    data = bytes(range(256)) * 9000
    assert guest.run("cat", stdin=data, capture=capture(stdout=4 << 20)).bytes_of("stdout") == data
    assert guest.run("cat; echo end").bytes_of("stdout") == b"end\n"
    done = guest.run("mkdir -p deep/er; kill -SEGV $$")
    assert (done["exit_code"], done["signal"]) == (None, 11)
    assert guest.run("pwd", cwd="deep/er").bytes_of("stdout").decode() == f"{guest.workspace}/deep/er\n"


def test_argv_runs_without_a_shell(guest: Guest) -> None:
    done = guest.request(
        "exec", argv=["printf", "%s|", "a b", "$HOME"], cwd="/", env={}, timeout_s=5, capture=capture(stdout=100)
    )
    assert done.bytes_of("stdout") == b"a b|$HOME|"


def test_a_program_has_three_descriptors_an_own_session_and_a_clean_environment(guest: Guest) -> None:
    done = guest.run(
        "ls /proc/self/fd | wc -l; ps -o sid= -p $$ | tr -d ' '; echo $$; umask; env | sort", env={"MINE": "1"}
    )
    lines = done.bytes_of("stdout").decode().splitlines()
    # Three, and the one ls itself opened.
    assert lines[0] == "4"
    assert lines[1] == lines[2]
    assert lines[3] == "0022"
    names = {line.split("=")[0] for line in lines[4:]}
    assert names == {
        *("PATH", "HOME", "LANG", "TERM", "PAGER", "GIT_PAGER", "GIT_TERMINAL_PROMPT", "DEBIAN_FRONTEND", "NO_COLOR"),
        *("MANPAGER", "SYSTEMD_PAGER", "GIT_EDITOR", "GIT_CONFIG_SYSTEM", "PIP_NO_INPUT"),
        *("PYTHONUNBUFFERED", "PIP_PROGRESS_BAR", "MINE", "PWD", "SHLVL", "_"),
    }


def test_no_signal_is_blocked_or_ignored(guest: Guest) -> None:
    # /usr/bin/env, because bash sets dispositions of its own; signals 32 and 33 are the C library's.
    done = guest.request(
        "exec", argv=["grep", "Sig", "/proc/self/status"], cwd=".", env={}, timeout_s=5, capture=capture(stdout=4096)
    )
    masks = dict(line.split(":\t") for line in done.bytes_of("stdout").decode().splitlines())
    assert int(masks["SigBlk"], 16) == 0
    assert int(masks["SigIgn"], 16) & ~(0b11 << 31) == 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"cwd": "absent"}, "FILE_NOT_FOUND"),
        ({"cwd": "/etc/passwd"}, "NOT_A_DIRECTORY"),
        ({"cwd": "/root/x"}, "PERMISSION_DENIED"),
        ({"argv": ["no-such-program"], "script_bytes": 0}, "SPAWN_FAILED"),
        ({"argv": ["/etc/passwd"], "script_bytes": 0}, "SPAWN_FAILED"),
        ({"argv": ["x" * 131_072], "script_bytes": 0}, "INVALID_ARGUMENTS"),
        ({"argv": ["a\0b"], "script_bytes": 0}, "INVALID_ARGUMENTS"),
        ({"argv": []}, "INVALID_ARGUMENTS"),
        ({"env": {"A=B": "x"}}, "INVALID_ARGUMENTS"),
        ({"env": {"A": 1}}, "INVALID_ARGUMENTS"),
        ({"timeout_s": 0}, "INVALID_ARGUMENTS"),
        ({"timeout_s": True}, "INVALID_ARGUMENTS"),
        ({"capture": {"stream": 1, "stdout": 1}}, "INVALID_ARGUMENTS"),
        ({"surprise": 1}, "INVALID_ARGUMENTS"),
        ({"script_bytes": 9999}, "INVALID_ARGUMENTS"),
        ({"script": b"echo a\0b"}, "INVALID_ARGUMENTS"),
        ({"script": b"#" * 131_072}, None),
    ],
)
def test_an_invalid_exec_request_is_refused_with_its_code(
    guest: Guest, fields: dict[str, Any], code: str | None
) -> None:
    done = guest.run(**{"script": "true", **fields})
    assert done.code == code, done.header
    assert guest.wait_alone()


def test_captured_output_keeps_a_quarter_head_and_the_rest_as_tail(guest: Guest) -> None:
    done = guest.run("seq 1 100000; head -c 5000 /dev/zero >&2", capture=capture(1000, 4, 0))
    expected = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert done.bytes_of("stdout") == expected[:250] + expected[-750:]
    assert done["streams"]["stdout"] == {"total": len(expected), "head": 250, "tail": 750}
    assert done["streams"]["stderr"] == {"total": 5000, "head": 1, "tail": 3}


def test_the_merged_stream_keeps_the_order_of_the_writes(guest: Guest) -> None:
    done = guest.run("for i in $(seq 200); do echo o$i; echo e$i >&2; done", capture=capture(merged=100_000))
    assert done.bytes_of("merged").decode().split() == [f"{kind}{n}" for n in range(1, 201) for kind in "oe"]
    assert done["streams"].keys() == {"merged"}
    done = guest.run("echo one; sleep 0.05; echo two >&2; sleep 0.05; echo three", capture=capture(100, 100, 100))
    assert done.bytes_of("merged") == b"one\ntwo\nthree\n"
    assert (done.bytes_of("stdout"), done.bytes_of("stderr")) == (b"one\nthree\n", b"two\n")


def test_a_stream_is_sent_up_to_its_limit_and_then_only_counted(guest: Guest) -> None:
    call = guest.start_script(
        "mkfifo gate; echo first; read line < gate; seq 100000; echo e >&2", capture={"stream": 5000}
    )
    # The program continues only after its first piece has arrived.
    frame = guest.next_frame()
    assert (frame.header["stream"], frame.body) == ("stdout", b"first\n")
    guest.run("echo go > gate")
    done = guest.finish(call)
    expected = b"first\n" + b"".join(b"%d\n" % n for n in range(1, 100_001))
    assert frame.body + done.bytes_of("stdout") == expected[:5000]
    assert done["streams"]["stdout"] == {"total": len(expected), "head": 5000, "tail": 0}
    assert done.bytes_of("stderr") == b"e\n"


def test_a_stream_without_a_reader_does_not_block_pid_1(guest: Guest) -> None:
    call = guest.start_script("yes", timeout_s=0.5, capture={"stream": 100 << 20})
    done = guest.finish(call)
    assert done["timed_out"] is True
    streams = done["streams"]["stdout"]
    assert len(done.bytes_of("stdout")) == streams["head"] <= streams["total"]
    assert guest.wait_alone()
