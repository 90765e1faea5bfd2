"""Outputs that are too long for a result: stored in files of the session within a quota. Also output that is
streamed.
"""

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT, Done, Guest, needs_namespace

assert GUEST_PARENT
from guest.commands import outputs  # noqa: E402
from guest.commands.outputs import Capture, Spill  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402
from guest.processes import read_oom_kills  # noqa: E402

LIMITS = {"bytes": 1000, "lines": 20}


def run_limited(guest: Guest, script: str, **fields: object) -> Done:
    return guest.run(script, **{"spill": LIMITS, "capture": {"stdout": 1000, "stderr": 1000, "merged": 1000}, **fields})


def build_spill(output: Path, limit: int = 10) -> Spill:
    return Spill(GuestPaths((b"/nowhere",), str(output).encode()), limit, 1000)


@needs_namespace
@pytest.mark.parametrize(
    ("script", "is_long"),
    [
        ("true", False),
        ("seq 20", False),
        ("head -c 1000 /dev/zero", False),
        ("seq 21", True),
        ("head -c 1001 /dev/zero", True),
        ("seq 100000; seq 1000 >&2", True),
        ("yes | head -c 3000000", True),
        ("seq 1000; sleep 1000", True),
    ],
)
def test_output_above_the_limits_is_stored_completely_in_a_file(
    shared_guest: Guest, script: str, is_long: bool
) -> None:
    done = run_limited(shared_guest, script, timeout_s=0.3 if "sleep" in script else 10)
    assert (done["timed_out"], done["spill_failed"], done["spill"] is not None) == ("sleep" in script, False, is_long)
    if is_long:
        content = Path(done["spill"]["path"]).read_bytes()
        totals = done["streams"]
        assert len(content) == totals["merged"]["total"] == totals["stdout"]["total"] + totals["stderr"]["total"]
        assert done["spill"]["bytes"] == len(content)
        assert done["spill"]["lines"] == content.count(b"\n")
        assert done["spill"]["whole"] is True


@needs_namespace
def test_an_unwritable_output_folder_does_not_fail_a_command(shared_guest: Guest) -> None:
    shared_guest.run(f"chmod 500 {shared_guest.output}", cwd="/")
    try:
        done = run_limited(shared_guest, "seq 1000; exit 3", cwd=None, state="keep")
        assert (done["exit_code"], done["spill"], done["spill_failed"], done["state"]["outcome"]) == (
            3,
            None,
            True,
            "replaced",
        )
    finally:
        shared_guest.run(f"chmod 700 {shared_guest.output}", cwd="/")


def test_the_oldest_output_files_are_removed_above_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "QUOTA_BYTES", 1000)
    names = []
    for number in range(3):
        spill = build_spill(tmp_path)
        spill.add(bytes([65 + number]) * 400)
        assert spill.name is not None
        names.append(spill.name.decode())
        os.utime(tmp_path / names[-1], (number, number))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(names[1:])
    large = build_spill(tmp_path)
    for _ in range(7):
        large.add(b"line\n" * 40)
    assert large.name is not None
    assert [entry.name for entry in tmp_path.iterdir()] == [large.name.decode()]
    assert (large.written, large.lines, large.is_whole) == (1000, 200, False)


def test_a_cut_output_file_is_not_continued_and_only_output_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "QUOTA_BYTES", 100)
    spill = build_spill(tmp_path)
    spill.add(b"a" * 60 + b"b" * 60)
    # Output of another command gets room by the removal of an old file.
    (tmp_path / "command-00.txt").write_bytes(b"x" * 50)
    spill.add(b"c" * 20)
    assert spill.name is not None
    assert (tmp_path / spill.name.decode()).read_bytes() == b"a" * 60 + b"b" * 40
    assert (spill.written, spill.is_whole) == (100, False)
    (tmp_path / "mine.txt").write_bytes(bytes(500))
    (tmp_path / "command-link.txt").symlink_to("mine.txt")
    (tmp_path / "command-folder.txt").mkdir()
    spill = build_spill(tmp_path)
    spill.add(bytes(300))
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name != (spill.name or b"").decode()) == [
        "command-folder.txt",
        "command-link.txt",
        "mine.txt",
    ]
    assert (spill.written, spill.is_whole) == (100, False)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_output_on_a_full_disk_is_marked_as_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: real_open("/dev/full", os.O_WRONLY))
    spill = build_spill(tmp_path)
    spill.add(bytes(100))
    spill.add(bytes(100))
    assert (spill.written, spill.is_whole) == (0, False)


@needs_namespace
def test_live_output_arrives_while_the_program_runs(shared_guest: Guest) -> None:
    call = shared_guest.start_script(
        "rm -f gate; mkfifo gate; echo first; read line < gate; echo second >&2", live=True, max_bytes=10_000
    )
    frame = shared_guest.next_frame()
    assert (frame.header["stream"], frame.body) == ("live", b"first\n")
    shared_guest.run("echo go > gate")
    done = shared_guest.finish(call)
    assert (done.bytes_of("live_stderr"), done["live"]) == (b"second\n", {"sent": 13, "dropped": 0})
    assert (done.bytes_of("stdout"), done.bytes_of("stderr")) == (b"first\n", b"second\n")


@needs_namespace
@pytest.mark.parametrize(
    ("script", "max_bytes", "total"),
    [
        ("for i in $(seq 200); do echo line $i; done; sleep 0.2; echo more", 500, None),
        ("yes | head -c 20000000", 100 << 20, 20_000_000),
        ("for i in $(seq 300); do echo $i; sleep 0.001; done", 1 << 20, 1092),
    ],
    ids=["small limit", "large output", "small pieces"],
)
def test_live_output_is_bounded_and_does_not_block_the_program(
    shared_guest: Guest, script: str, max_bytes: int, total: int | None
) -> None:
    call = shared_guest.start_script(script, live=True, max_bytes=max_bytes)
    frames, sent = 0, 0
    while (frame := shared_guest.next_frame()).header["ev"] == "data":
        is_live = frame.header["stream"] == "live"
        frames, sent = frames + is_live, sent + len(frame.body) * is_live
    done = frame.header
    assert (done["id"], done["exit_code"]) == (call, 0)
    assert sent == done["live"]["sent"] <= max_bytes
    assert done["live"]["sent"] + done["live"]["dropped"] == done["streams"]["stdout"]["total"]
    assert total in (None, done["streams"]["stdout"]["total"])
    if total == 1092:
        assert (done["live"]["dropped"], 1 < frames < 60) == (0, True), "many small pieces are few frames"


@given(cap=st.integers(0, 50), pieces=st.lists(st.binary(max_size=70), max_size=12))
def test_the_capture_keeps_the_first_quarter_and_the_last_three_quarters(cap: int, pieces: list[bytes]) -> None:
    capture = Capture(cap)
    for piece in pieces:
        capture.add(piece)
    data = b"".join(pieces)
    captured = capture.head() + capture.tail()
    if len(data) <= cap:
        assert captured == data
    else:
        assert captured == data[: cap // 4] + data[len(data) - (cap - cap // 4) :]
    assert capture.sizes() == {"total": len(data), "head": len(capture.head()), "tail": len(capture.tail())}


def test_the_capture_memory_is_bounded_for_small_pieces() -> None:
    capture = Capture(10_000)
    tracemalloc.start()
    try:
        for _ in range(40_000):
            capture.add(b"y")
        assert tracemalloc.get_traced_memory()[1] < 25_000
    finally:
        tracemalloc.stop()


def test_oom_kills_are_read_from_either_cgroup_version(tmp_path: Path) -> None:
    first, second = tmp_path / "memory.oom_control", tmp_path / "memory.events"
    paths = (str(first).encode(), str(second).encode())
    assert read_oom_kills(paths) is None
    second.write_text("low 0\noom 2\noom_kill 3\n")
    assert read_oom_kills(paths) == 3
    first.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert read_oom_kills(paths) == 7
