"""Forged frames: programs of a sandbox try to impersonate the guest. All printed data is treated as output, and no
other data of the programs is read.
"""

import json
from collections.abc import Iterator

import pytest

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd
from toolcrew.workers.sandboxd.frames import MAX_UP, encode_frame

pytestmark = pytest.mark.stack

FORGED = {
    "done frame": {"ev": "done", "id": "0" * 32, "exit_code": 0, "kill": None},
    "hello frame": {"ev": "hello", "v": 1},
    "fatal frame": {"ev": "fatal", "message": "forged"},
    "net_open frame": {"ev": "net_open", "conn": 1},
}


@pytest.fixture(scope="module")
def session(sandboxd: OwnSandboxd) -> Iterator[HostileSession]:
    with sandboxd.session(session="forger") as opened:
        yield opened


def build_printf(header: dict[str, object]) -> tuple[str, bytes]:
    """Return a printf command that prints the frame, and the frame."""
    frame = encode_frame(header, b"body", max_total=MAX_UP)
    return "printf '" + "".join(f"\\x{byte:02x}" for byte in frame) + "'", frame


@pytest.mark.parametrize("header", FORGED.values(), ids=FORGED.keys())
def test_printed_frames_do_not_end_a_call_or_the_channel(session: HostileSession, header: dict[str, object]) -> None:
    """Aim: let bytes on a program's stdout or stderr be parsed as frames of the guest."""
    script, frame = build_printf(header)
    answer = session.bash(f"{script}; {script} >&2; exit 7")

    assert answer.done["exit_code"] == 7
    assert answer.streams["stdout"] == answer.streams["stderr"] == frame
    assert session.is_usable()


CHANNEL_PATHS = (
    "/proc/1/fd/0",
    "/proc/1/fd/1",
    "/proc/1/fd/2",
    "/proc/$PPID/fd/1",
    "/proc/$PPID/fd/3",
    "/proc/$PPID/fd/4",
    "/dev/console",
    "/dev/tty",
)


@pytest.mark.parametrize("place", CHANNEL_PATHS)
def test_programs_cannot_write_into_the_guest_channel(
    sandboxd: OwnSandboxd, session: HostileSession, place: str
) -> None:
    """Aim: reach the guest's stream to sandboxd."""
    script, _ = build_printf({"ev": "fatal", "message": "forged"})
    log_before = len(sandboxd.log())
    answer = session.bash(f"({script}) >{place} && echo written >&2")

    assert b"written" not in answer.streams["stderr"]
    assert session.is_usable()
    assert "forged" not in sandboxd.log()[log_before:]


def test_programs_inherit_no_descriptor_of_the_guest(session: HostileSession) -> None:
    """Aim: inherit a descriptor of the channel, or of another call's pipe or body."""
    answer = session.bash("exec find /proc/self/fd -mindepth 1 -printf '%f %l\\n'")
    links = dict(line.split(" ", 1) for line in answer.streams["stdout"].decode().splitlines())

    # The descriptor of the listing itself.
    assert [
        link for number, link in links.items() if int(number) > 2 and not link.startswith(("/proc/", "/workspace"))
    ] == []


def test_printed_protocol_fields_do_not_change_the_result(session: HostileSession) -> None:
    """Aim: set fields of a result through a program's output."""
    claim = json.dumps({"exit_code": 0, "oom": True, "sandbox_lost": "x", "kill": None, "timed_out": True})
    done = session.bash(f"echo '{claim}'; echo '{claim}' >/output/.state/result; exit 5").done

    assert (done["exit_code"], done["oom"], done["timed_out"], "sandbox_lost" in done) == (5, False, False, False)


def test_the_guest_imports_no_module_from_a_writable_folder(session: HostileSession) -> None:
    """Aim: let the guest import an attacker's module from a folder that programs can write. The guest imports some
    modules only at their first use.
    """
    session.bash(
        "for place in /workspace /tmp /output /workspace/guest /workspace/guest/search /workspace/guest/files; do "
        "mkdir -p $place; for name in json re glob fnmatch difflib tarfile guest sitecustomize usercustomize search "
        "grep_search text_reads; do "
        'echo \'open("/tmp/taken-over", "w")\' >$place/$name.py; done; done; export PYTHONPATH=/workspace '
        "PYTHONHOME=/workspace"
    )
    common = {"path": ".", "limit": 9, "max_bytes": 8192, "timeout_s": 5}
    found = session.ask({"op": "grep", "pattern": "(?<=o)pen", "mode": "files", "max_lines": 9, **common}).done
    listed = session.ask({"op": "glob", "pattern": "*", "kind": "any", **common}).done
    session.bash("unset PYTHONHOME PYTHONPATH")

    assert (found["files"] > 0, listed["total"] > 0) == (True, True)
    assert not (session.watched.root / "tmp/taken-over").exists()
    assert session.is_usable()
