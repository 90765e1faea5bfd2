"""The guest's side of the protocol: frames that it answers, frames that it ignores, and frames that end it."""

import secrets

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace, running_guest
from toolcrew.workers.sandboxd.frames import MAX_DOWN, encode_frame

pytestmark = needs_namespace


def header(**fields: object) -> bytes:
    return encode_frame(fields, max_total=MAX_DOWN)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\x06\0\0\0\x02[]",
        header(),
        header(id=1, op="no"),
        *(header(id="0" * 32, op=op) for op in ("format", None, 7)),
        header(id="1" * 32, op="exec", body_bytes=0),
    ],
    ids=["length", "not an object", "no id", "id is not text", "op is unknown", "no op", "op is not text", "id in use"],
)
def test_invalid_frames_end_the_guest_and_frames_of_unknown_calls_are_ignored(guest: Guest, raw: bytes) -> None:
    guest.send({"id": "1" * 32, "op": "exec", "body_bytes": 10})
    guest.send({"id": secrets.token_hex(16), "op": "cancel"})
    guest.send({"id": secrets.token_hex(16), "op": "data"}, b"late")
    assert guest.request("ping").header["ev"] == "pong"
    guest.send_raw(raw)
    assert guest.next_frame().header["ev"] == "fatal"
    assert guest.wait_exit() == 1


def test_a_call_cancelled_before_its_body_is_complete_is_answered_once(guest: Guest) -> None:
    for op, fields in (("exec", {"argv": None}), ("write_file", {"path": "f"})):
        call = secrets.token_hex(16)
        guest.send({"id": call, "op": op, "body_bytes": 10, **fields}, b"12345")
        guest.send({"id": call, "op": "cancel"})
        done = guest.finish(call)
        assert done["cancelled"] is True if op == "exec" else done.code == "CANCELLED"
        guest.send({"id": call, "op": "data"}, b"67890")
    assert guest.request("ping").header["ev"] == "pong"


def test_a_body_longer_than_declared_fails_only_its_call(guest: Guest) -> None:
    call = secrets.token_hex(16)
    guest.send(
        {"id": call, "op": "write_file", "body_bytes": 3, "path": "f", "mode": "overwrite", "timeout_s": 1}, b"1234"
    )
    assert guest.finish(call).code == "INVALID_ARGUMENTS"
    assert not (guest.workspace / "f").exists()


@pytest.mark.parametrize("size", [None, -1, 1.5, True, "3", 67_108_865])
def test_an_invalid_body_size_is_refused(guest: Guest, size: object) -> None:
    call = secrets.token_hex(16)
    guest.send({"id": call, "op": "exec", "body_bytes": size})
    assert guest.finish(call).code == "INVALID_ARGUMENTS"


@pytest.mark.parametrize("name", ["\u4f60" * 40_000, "/workspace" + "/a" * 100_000, "\udcff" * 40_000])
def test_a_very_long_name_fails_only_its_call(guest: Guest, name: str) -> None:
    assert guest.request("read_file", path=name, max_bytes=1, timeout_s=5).code in (
        "INVALID_ARGUMENTS",
        "PATH_NOT_ALLOWED",
    )
    assert guest.run("true", cwd=name).code in ("INVALID_ARGUMENTS", "FILE_NOT_FOUND")
    assert guest.run("true", argv=[name[:40_000]], script_bytes=0).code in ("SPAWN_FAILED", "INVALID_ARGUMENTS")
    assert guest.run("true", **{name: 1}).code == "INVALID_ARGUMENTS"


def test_a_process_limit_fails_the_call_and_not_the_guest() -> None:
    with running_guest("ulimit -u 12;") as guest:
        # Each is one process that waits, so that the last ones do not fit, at any speed.
        fillers = [guest.start_script("exec sleep 60") for _ in range(12)]
        assert guest.finish(fillers[-1]).code in ("INTERNAL", "SPAWN_FAILED")
        for call in fillers[:-1]:
            guest.send({"id": call, "op": "cancel"})
            guest.finish(call)
        assert guest.run("echo well").bytes_of("stdout") == b"well\n"
        assert guest.wait_alone()


def test_the_memory_of_pid_1_stays_bounded(guest: Guest) -> None:
    for _ in range(50):
        guest.run("head -c 1000000 /dev/zero", stdin=bytes(1 << 20))
    assert guest.resident_bytes() < 14 << 20
