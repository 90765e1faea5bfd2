"""Rows reach the disk complete or not at all, and once each, also when a process dies or the disk fills up."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.runs.batch_rows import accept_any_row, build_outcome, file_size_limit, read_ids, row_bytes, rows
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.batches import row_files
from toolcrew.orchestrator.batches import rows as rows_module
from toolcrew.orchestrator.batches.row_files import RowFile, RowFiles, RowsNotWritten
from toolcrew.orchestrator.batches.rows import build_row, build_row_line

ROOT = Path(__file__).parents[4]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_row_is_appended_once_even_after_the_file_is_reopened(path: Path) -> None:
    with RowFile.open(path, accept_any_row) as file:
        assert file.append(rows("a", "b")) == ["a", "b"]
        assert file.append(rows("b", "c")) == ["c"]
    with RowFile.open(path, accept_any_row) as file:
        assert sorted(file.ids) == ["a", "b", "c"]
        assert file.append(rows("c")) == []
    assert path.read_bytes() == row_bytes("a", "b", "c")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=60
)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=8), min_size=1, max_size=4),
    cut=st.integers(min_value=0),
    hole=st.sampled_from([b"", b"\0" * 40]),
)
def test_a_file_truncated_at_any_byte_is_repaired(path: Path, texts: list[str], cut: int, hole: bytes) -> None:
    lines = [build_row_line(build_row(build_outcome(str(index), text=text))) for index, text in enumerate(texts)]
    content = b"".join(lines)
    truncated = content[: cut % (len(content) + 1)]
    path.write_bytes(truncated + hole)
    with RowFile.open(path, accept_any_row) as file:
        ids = sorted(file.ids, key=int)
        assert file.append(rows("new")) == ["new"]
    # A row that lacks nothing but its end of line is whole.
    count = sum(
        1 for index in range(len(lines)) if len(truncated + b"\n" * (not hole)) >= sum(map(len, lines[: index + 1]))
    )
    assert ids == [str(index) for index in range(count)]
    assert path.read_bytes() == b"".join(lines[:count]) + row_bytes("new")


def test_zero_blocks_between_rows_are_removed(path: Path) -> None:
    path.write_bytes(row_bytes("a") + b"\0" * 20 + row_bytes("b") + row_bytes("c"))
    with RowFile.open(path, accept_any_row) as file:
        assert sorted(file.ids) == ["a", "c"]
        assert file.dropped_bytes == 20 + len(row_bytes("b"))
        file.append(rows("b"))
    assert read_ids(path) == ["a", "c", "b"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"hello\n", "line 1 of .* is not a row"),
        (b"hello", "line 1 of .* is not a row of a batch \\(the line does not start like a row"),
        (b'{"id": "a", "instruction": "x"}', "line 1 of .* is not a row"),
        (b'{"custom_id": "a", "meth', "line 1 of .* is not a row"),
        (row_bytes("a") + b"hello\n" + row_bytes("b"), "line 2 of .* is not a row"),
        (row_bytes("a") + b"hello", "line 2 of .* is not a row"),
        (row_bytes("a")[:-9] + b"\n" + row_bytes("b"), "line 1 of .* is not a row"),
        (b"\x89PNG\0\0\0", "line 1 of .* is not a row"),
        (b"\x89PNG\0\0\0\nxx\0", "line 1 of .* is not a row"),
        (row_bytes("a", "b", "a"), "contains two rows of 'a', the second in line 3"),
    ],
)
def test_a_file_with_content_other_than_rows_is_refused_unchanged(path: Path, content: bytes, expected: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        RowFile.open(path, accept_any_row)
    assert path.read_bytes() == content


def test_rows_of_another_batch_are_refused(path: Path) -> None:
    path.write_bytes(row_bytes("a", "b") + row_bytes("c")[:-5])
    with pytest.raises(ConfigError, match="contains a row of another batch \\(line 2, 'b'\\)"):
        RowFile.open(path, lambda custom_id, run: (custom_id, run) == ("a", "run-a"))
    assert path.read_bytes() == row_bytes("a", "b") + row_bytes("c")[:-5]


def test_a_second_writer_is_refused_and_finds_complete_rows_after_a_kill(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from toolcrew.orchestrator.batches.row_files import RowFile\n"
        "from toolcrew.orchestrator.batches.rows import build_row_line\n"
        "file = RowFile.open(Path(sys.argv[1]), lambda custom_id, run: True); print('open', flush=True)\n"
        "for number in range(10**9):\n"
        "    file.append({str(number): build_row_line({'id': 'r', 'custom_id': str(number), 'response': None, 'error': "
        "None, 'x': 'y' * 50_000})})\n"
        "    print(number, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="another process"):
            RowFile.open(path, accept_any_row)
        appended = [process.stdout.readline().strip() for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        appended += process.stdout.read().split()
    with RowFile.open(path, accept_any_row) as file:
        assert set(appended) <= set(file.ids)
    assert len(read_ids(path)) == len(set(read_ids(path))) in (len(appended), len(appended) + 1)


@pytest.mark.parametrize(
    "name", ["folder", "pipe", "device", "loop", "none/out.jsonl", "x" * 300, "a\0b", "file/out.jsonl"]
)
def test_a_path_that_is_not_a_writable_file_is_refused_before_the_batch_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    expected = {"loop": "cannot be", "none/out.jsonl": "create its folder", "a\0b": "null", "x" * 300: "too long"}
    expected |= {"file/out.jsonl": "[Nn]ot a directory"}
    with pytest.raises(ConfigError, match=expected.get(name, "not a regular file")):
        RowFile.open(tmp_path / name, accept_any_row)


def test_rows_that_do_not_fit_on_the_disk_are_not_written_partially(path: Path) -> None:
    with RowFile.open(path, accept_any_row) as file:
        file.append(rows("a"))
        with file_size_limit(len(row_bytes("a")) * 2 + 10):
            with pytest.raises(RowsNotWritten, match=r"free space on its disk, then resume\. No row is lost"):
                file.append(rows("b", "c"))
            assert path.read_bytes() == row_bytes("a")
            assert list(file.ids) == ["a"]
        assert file.append(rows("b", "c")) == ["b", "c"]
    assert path.read_bytes() == row_bytes("a", "b", "c")


def test_a_full_disk_is_reported_before_the_batch_starts(path: Path) -> None:
    path.write_bytes(row_bytes("a"))
    with file_size_limit(len(row_bytes("a")) + 10), pytest.raises(ConfigError, match="free space on its disk"):
        RowFile.open(path, accept_any_row)
    assert path.read_bytes() == row_bytes("a")


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_rows_are_written_again_after_a_failed_fsync(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with RowFile.open(path, accept_any_row) as file:

        def fail(_: int) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            patched.setattr(os, "ftruncate", lambda *_: fail(0))
            with pytest.raises(RowsNotWritten):
                file.append(rows("a"))
            with pytest.raises(RowsNotWritten):
                file.append(rows("a"))
        assert file.append(rows("b")) == ["b"]
    assert path.read_bytes() == row_bytes("b")


def test_a_file_moved_or_changed_by_another_program_gets_no_rows(path: Path) -> None:
    with RowFile.open(path, accept_any_row) as file:
        file.append(rows("a"))
        with path.open("ab") as other:
            other.write(b"hello\n")
        with pytest.raises(RowsNotWritten, match="another program changed"):
            file.append(rows("b"))
        os.truncate(path, len(row_bytes("a")))
        path.rename(path.with_name("moved"))
        with pytest.raises(RowsNotWritten, match="was moved or deleted"):
            file.append(rows("b"))
        path.write_bytes(b"")
        with pytest.raises(RowsNotWritten, match="was moved or deleted"):
            file.append(rows("b"))
        path.with_name("moved").rename(path)
        file.append(rows("b"))
    assert read_ids(path) == ["a", "b"]


def test_standard_output_is_accepted_as_a_file_and_refused_as_a_pipe(path: Path) -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(ConfigError, match="not a regular file"):
            RowFile.open(Path(f"/dev/fd/{writer}"), accept_any_row)
    finally:
        os.close(reader)
        os.close(writer)
    with path.open("w") as redirected, RowFile.open(Path(f"/dev/fd/{redirected.fileno()}"), accept_any_row) as file:
        file.append(rows("a"))
    assert read_ids(path) == ["a"]


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "out.jsonl", tmp_path / "err.jsonl"


def test_settle_removes_an_error_row_of_an_item_that_succeeded_later(paths: tuple[Path, Path]) -> None:
    with RowFiles.open(*paths, accept_any_row) as files:
        files.append([build_outcome(name, fails=True) for name in "abc"])
        paths[1].chmod(0o640)
        files.append([build_outcome("b")])
        assert sorted(files.failed) == ["a", "c"]
        assert read_ids(paths[1]) == ["a", "b", "c"]
        files.settle()
        files.append([build_outcome("d", fails=True)])
        assert [read_ids(path) for path in paths] == [["b"], ["a", "c", "d"]]
        with pytest.raises(ConfigError, match="another process"):
            RowFile.open(paths[1], accept_any_row)
    assert paths[1].stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(paths[0].parent)) == ["err.jsonl", "out.jsonl"]


def test_rows_that_were_not_settled_are_settled_after_a_crash(paths: tuple[Path, Path]) -> None:
    with RowFiles.open(*paths, accept_any_row) as files:
        files.append([build_outcome("a", fails=True), build_outcome("b", fails=True)])
        files.append([build_outcome("a")])
    with RowFiles.open(*paths, accept_any_row) as files:
        assert (sorted(files.succeeded), sorted(files.failed)) == (["a"], ["b"])
        files.settle()
    assert [read_ids(path) for path in paths] == [["a"], ["b"]]


def test_settle_keeps_the_newest_failure_and_every_success(paths: tuple[Path, Path]) -> None:
    with RowFiles.open(*paths, accept_any_row) as files:
        files.append([build_outcome("a", fails=True, text="first"), build_outcome("b")])
        assert files.append([build_outcome("a", fails=True, text="second"), build_outcome("b", fails=True)]) == []
        files.settle()
    (row,) = [json.loads(line) for line in paths[1].read_text().splitlines()]
    assert (row["custom_id"], row["error"]["message"]) == ("a", "second")


def test_replaced_failures_above_the_memory_limit_are_written_at_once(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MAX_HELD_BYTES", 100)
    with RowFiles.open(*paths, accept_any_row) as files:
        files.append([build_outcome("a", fails=True, text="first")])
        files.append([build_outcome("a", fails=True, text="second" * 20)])
        assert b"second" in paths[1].read_bytes()


def test_settle_on_a_full_disk_leaves_both_files_unchanged(paths: tuple[Path, Path]) -> None:
    with RowFiles.open(*paths, accept_any_row) as files:
        files.append([build_outcome(name, fails=True) for name in "abc"])
        files.append([build_outcome("b")])
        before = [path.read_bytes() for path in paths]
        with file_size_limit(10), pytest.raises(RowsNotWritten, match="free space"):
            files.settle()
        assert [path.read_bytes() for path in paths] == before
        assert len(os.listdir(paths[0].parent)) == 2
        files.settle()
    assert read_ids(paths[1]) == ["a", "c"]


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    (tmp_path / "link").symlink_to("out")
    os.link(tmp_path / "out", tmp_path / "hard")
    for other in ("out", "link", "hard"):
        with pytest.raises(ConfigError, match="are the same file"):
            RowFiles.open(tmp_path / "out", tmp_path / other, accept_any_row)


def test_a_refused_error_file_releases_the_lock_of_the_output_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create its folder"):
        RowFiles.open(tmp_path / "out", tmp_path / "none" / "err", accept_any_row)
    RowFile.open(tmp_path / "out", accept_any_row).close()


@pytest.mark.parametrize("body", [{"number": 10**5000}, {"text": "x" * 2000}])
def test_a_row_above_the_limits_is_stored_as_a_failure(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROW_BYTES", 1000)
    with RowFiles.open(*paths, accept_any_row) as files:
        assert files.append([build_outcome("a").model_copy(update={"body": body}), build_outcome("b")]) == ["b", "a"]
    assert [read_ids(path) for path in paths] == [["b"], ["a"]]
    assert "its row cannot be stored: the row " in paths[1].read_text()


def test_a_last_row_that_lacks_only_its_end_of_line_is_kept(path: Path) -> None:
    path.write_bytes(row_bytes("a", "b")[:-1])
    with RowFile.open(path, accept_any_row) as file:
        assert (sorted(file.ids), file.dropped_bytes) == (["a", "b"], 0)
        file.append(rows("c"))
    assert path.read_bytes() == row_bytes("a", "b", "c")


def test_a_folder_without_write_permission_is_reported_before_the_batch_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="permissions of the folder"):
        RowFile.open(path, accept_any_row)


def test_appending_to_a_closed_row_file_is_refused(path: Path) -> None:
    file = RowFile.open(path, accept_any_row)
    file.close()
    file.close()
    with pytest.raises(RowsNotWritten, match="is closed"):
        file.append(rows("a"))
