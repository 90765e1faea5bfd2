"""The guest's unified diffs: correct if complete, and fast for any texts."""

import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guest_harness import GUEST_PARENT

assert GUEST_PARENT

from guest.files.diffs import Diff, build_diff, find_changes  # noqa: E402


def diff(old: bytes, new: bytes, max_lines: int = 60) -> Diff:
    return build_diff(old, new, lambda line: line.decode("utf-8", "replace"), max_lines)


def test_line_ends_are_no_difference_but_a_missing_last_one_is() -> None:
    assert diff(b"a\r\nb\r\n", b"a\nb\n").text == ""
    assert diff(b"a\n", b"a").text == "@@ -1,1 +1,1 @@\n-a\n+a\n\\ no newline at the end of the file"


def test_what_does_not_fit_is_said() -> None:
    old, new = b"a\n" * 100, b"b\n" * 100
    assert (diff(old, new).is_whole, diff(old, new).text.count("\n")) == (False, 59)
    assert diff(old, new, 300).is_whole is True


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_patch_makes_the_new_text_of_the_old_one(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=30))
    other = list(lines)
    for at, line in data.draw(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([b"x", b"a", None])), max_size=6)):
        if line is None and other:
            other.pop(min(at, len(other) - 1))
        elif line is not None:
            other.insert(at, line)
    old, new = (b"\n".join(part) + data.draw(st.sampled_from([b"", b"\n"])) * bool(part) for part in (lines, other))
    made = diff(old, new, 10_000)
    assert made.is_whole
    file = tmp_path_factory.mktemp("patch") / "f"
    file.write_bytes(old)
    if made.text:
        marked = made.text.replace("\\ no newline at the end of the file", "\\ No newline at end of file")
        subprocess.run(
            ["patch", "-s", file], input=f"--- f\n+++ f\n{marked}\n".encode(), check=True, capture_output=True
        )
    assert (file.read_bytes() if file.exists() else b"") == new


@settings(max_examples=200, deadline=None)
@given(
    old=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12),
    new=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12),
)
def test_no_fewer_changes_would_do(old: list[bytes], new: list[bytes]) -> None:
    changes, is_whole = find_changes(old, new)
    common = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i in range(len(old)):
        for j in range(len(new)):
            common[i + 1][j + 1] = common[i][j] + 1 if old[i] == new[j] else max(common[i][j + 1], common[i + 1][j])
    assert (len(changes), is_whole) == (len(old) + len(new) - 2 * common[-1][-1], True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\n" * 4_000_000, b"a\n" * 2_000_000),
        (b"a\nb\n" * 500_000, b"b\na\na\n" * 500_000),
        (bytes(range(256)) * 8000, bytes(range(255, -1, -1)) * 8000),
        (b"x" * 3_000_000, b"y" * 3_000_000),
        (b"", b"line\n" * 500_000),
    ],
)
def test_no_texts_take_long_or_a_long_answer(old: bytes, new: bytes) -> None:
    started = time.monotonic()
    made = diff(old, new)
    assert time.monotonic() - started < 3
    assert (made.is_whole, len(made.text) <= 32_768, bool(made.text)) == (False, True, True)
