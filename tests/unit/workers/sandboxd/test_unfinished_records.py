"""Records that a killed sandboxd left unfinished."""

from pathlib import Path

from toolcrew.workers.sandboxd.records import Records


def test_a_start_removes_unfinished_records(tmp_path: Path) -> None:
    Records(tmp_path).add_container("one", 1.0)
    (record,) = tmp_path.rglob("one.json")
    record.with_suffix(".new").write_text("{")
    assert Records(tmp_path).containers() == ["one"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["one.json"]
