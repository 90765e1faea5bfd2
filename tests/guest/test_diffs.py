"""The guest's unified diffs: correct if complete, and fast for any texts."""

import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT

from guest.files.diffs import Diff, build_diff, find_changes  # noqa: E402


def diff(old: bytes, new: bytes, max_lines: int = 60) -> Diff:
    return build_diff(old, new, lambda line: line.decode("utf-8", "replace"), max_lines)


def test_only_a_missing_final_line_end_is_a_difference() -> None:
    assert diff(b"a\r\nb\r\n", b"a\nb\n").text == ""
    assert diff(b"a\n", b"a").text == "@@ -1,1 +1,1 @@\n-a\n+a\n\\ no newline at the end of the file"


def test_a_cut_diff_is_marked_as_incomplete() -> None:
    old, new = b"a\n" * 100, b"b\n" * 100
    assert (diff(old, new).is_whole, diff(old, new).text.count("\n")) == (False, 59)
    assert diff(old, new, 300).is_whole is True


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_applying_the_diff_with_patch_gives_the_new_text(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = data.draw(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=30))
    other = list(lines)
    for at, line in data.draw(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([b"x", b"a", None])), max_size=6)):
        if line is None and other:
            other.pop(min(at, len(other) - 1))
        elif line is not None:
            other.insert(at, line)
    old, new = (b"\n".join(part) + data.draw(st.sampled_from([b"", b"\n"])) * bool(part) for part in (lines, other))
    result = diff(old, new, 10_000)
    assert result.is_whole
    file = tmp_path_factory.mktemp("patch") / "f"
    file.write_bytes(old)
    if result.text:
        patch_text = result.text.replace("\\ no newline at the end of the file", "\\ No newline at end of file")
        subprocess.run(
            ["patch", "-s", file], input=f"--- f\n+++ f\n{patch_text}\n".encode(), check=True, capture_output=True
        )
    assert (file.read_bytes() if file.exists() else b"") == new


@settings(max_examples=200, deadline=None)
@given(
    old=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12),
    new=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12),
)
def test_the_diff_has_the_minimum_number_of_changes(old: list[bytes], new: list[bytes]) -> None:
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
def test_a_diff_of_large_texts_is_bounded_in_time_and_size(old: bytes, new: bytes) -> None:
    started = time.process_time()
    result = diff(old, new)
    assert time.process_time() - started < 3
    assert (result.is_whole, len(result.text) <= 32_768, bool(result.text)) == (False, True, True)
