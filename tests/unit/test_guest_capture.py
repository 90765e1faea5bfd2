"""The guest's capture of a stream, compared with the plain definition."""

import tracemalloc
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.guest_harness import GUEST_PARENT

assert GUEST_PARENT
from guest.commands.outputs import Capture  # noqa: E402
from guest.processes import read_oom_kills  # noqa: E402


@given(cap=st.integers(0, 50), pieces=st.lists(st.binary(max_size=70), max_size=12))
def test_head_and_tail_are_the_first_quarter_and_the_last_three(cap: int, pieces: list[bytes]) -> None:
    capture = Capture(cap)
    for piece in pieces:
        capture.add(piece)
    whole = b"".join(pieces)
    captured = capture.head() + capture.tail()
    if len(whole) <= cap:
        assert captured == whole
    else:
        assert captured == whole[: cap // 4] + whole[len(whole) - (cap - cap // 4) :]
    assert capture.sizes() == {"total": len(whole), "head": len(capture.head()), "tail": len(capture.tail())}


def test_memory_is_bounded_by_the_cap_however_small_the_pieces() -> None:
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
