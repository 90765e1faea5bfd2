"""A batch has one row per item over its two files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ConfigError
from orchestrator.batches import row_files, rows
from orchestrator.batches.row_files import RowFile, RowFiles, RowsNotWritten
from tests.batch_rows import any_row, build_outcome, ids_of, room_for


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "out.jsonl", tmp_path / "err.jsonl"


def test_an_item_that_succeeds_later_leaves_the_errors_when_all_is_settled(pair: tuple[Path, Path]) -> None:
    with RowFiles.open(*pair, any_row) as files:
        files.append([build_outcome(name, fails=True) for name in "abc"])
        pair[1].chmod(0o640)
        files.append([build_outcome("b")])
        assert sorted(files.failed) == ["a", "c"]
        assert ids_of(pair[1]) == ["a", "b", "c"]
        files.settle()
        files.append([build_outcome("d", fails=True)])
        assert [ids_of(path) for path in pair] == [["b"], ["a", "c", "d"]]
        with pytest.raises(ConfigError, match="another process"):
            RowFile.open(pair[1], any_row)
    assert pair[1].stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(pair[0].parent)) == ["err.jsonl", "out.jsonl"]


def test_what_was_not_settled_is_known_and_settled_after_a_crash(pair: tuple[Path, Path]) -> None:
    with RowFiles.open(*pair, any_row) as files:
        files.append([build_outcome("a", fails=True), build_outcome("b", fails=True)])
        files.append([build_outcome("a")])
    with RowFiles.open(*pair, any_row) as files:
        assert (sorted(files.succeeded), sorted(files.failed)) == (["a"], ["b"])
        files.settle()
    assert [ids_of(path) for path in pair] == [["a"], ["b"]]


def test_of_two_failures_the_newer_is_kept_and_a_success_stays(pair: tuple[Path, Path]) -> None:
    with RowFiles.open(*pair, any_row) as files:
        files.append([build_outcome("a", fails=True, text="first"), build_outcome("b")])
        assert files.append([build_outcome("a", fails=True, text="second"), build_outcome("b", fails=True)]) == []
        files.settle()
    (row,) = [json.loads(line) for line in pair[1].read_text().splitlines()]
    assert (row["custom_id"], row["error"]["message"]) == ("a", "second")


def test_newer_failures_are_not_held_without_end(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MAX_HELD_BYTES", 100)
    with RowFiles.open(*pair, any_row) as files:
        files.append([build_outcome("a", fails=True, text="first")])
        files.append([build_outcome("a", fails=True, text="second" * 20)])
        assert b"second" in pair[1].read_bytes()


def test_a_disk_that_is_full_when_all_is_settled_leaves_both_files_as_they_were(pair: tuple[Path, Path]) -> None:
    with RowFiles.open(*pair, any_row) as files:
        files.append([build_outcome(name, fails=True) for name in "abc"])
        files.append([build_outcome("b")])
        before = [path.read_bytes() for path in pair]
        with room_for(10), pytest.raises(RowsNotWritten, match="free space"):
            files.settle()
        assert [path.read_bytes() for path in pair] == before
        assert len(os.listdir(pair[0].parent)) == 2
        files.settle()
    assert ids_of(pair[1]) == ["a", "c"]


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    (tmp_path / "link").symlink_to("out")
    os.link(tmp_path / "out", tmp_path / "hard")
    for other in ("out", "link", "hard"):
        with pytest.raises(ConfigError, match="are the same file"):
            RowFiles.open(tmp_path / "out", tmp_path / other, any_row)


def test_an_errors_file_that_cannot_be_had_gives_the_output_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create its folder"):
        RowFiles.open(tmp_path / "out", tmp_path / "none" / "err", any_row)
    RowFile.open(tmp_path / "out", any_row).close()


@pytest.mark.parametrize("body", [{"number": 10**5000}, {"text": "x" * 2000}])
def test_a_row_that_could_not_be_read_again_is_a_failure_and_holds_up_no_other(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 1000)
    with RowFiles.open(*pair, any_row) as files:
        assert files.append([build_outcome("a").model_copy(update={"body": body}), build_outcome("b")]) == ["b", "a"]
    assert [ids_of(path) for path in pair] == [["b"], ["a"]]
    assert "its row cannot be stored: the row " in pair[1].read_text()
