"""The rows of the table of hosts name tests that exist, and the table is written where the page has its place."""

import re
import shlex
from pathlib import Path

import pytest

from scripts import hosts

ROOT = Path(__file__).parents[2]
PYTEST_ROWS = {title: command for title, command in hosts.ROWS.items() if command.startswith(hosts.PYTEST)}
COLUMNS = {
    "Debian 12": ("Linux 6.1", {"forks": "works", "compose": "**fails**"}),
    "Debian sid": ("Linux 7.2", {"forks": "works"}),
}


@pytest.mark.parametrize("title", PYTEST_ROWS)
def test_a_row_names_files_and_tests_that_exist(title: str) -> None:
    words = shlex.split(PYTEST_ROWS[title].removeprefix(hosts.PYTEST))
    files = [ROOT / word for word in words if word.startswith("tests/")]
    names = re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files))
    chosen = words[words.index("-k") + 1].split(" or ") if "-k" in words else [""]
    assert [part for part in chosen if not any(part in name for name in names)] == []


def test_the_table_has_a_column_for_each_host_and_a_mark_for_a_row_that_was_not_run() -> None:
    lines = hosts.render(COLUMNS, {"forks": "", "compose": ""}).splitlines()
    assert lines[-4:] == [
        "|  | Debian 12 (Linux 6.1) | Debian sid (Linux 7.2) |",
        "|---|---|---|",
        "| forks | works | works |",
        "| compose | **fails** | - |",
    ]


def test_a_written_table_replaces_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{hosts.BEGIN}old\n{hosts.END}after\n")
    monkeypatch.setattr(hosts, "PAGE", page)
    hosts.write("new")
    assert page.read_text() == f"before\n{hosts.BEGIN}\nnew\n{hosts.END}after\n"


def test_the_page_has_a_place_for_the_table() -> None:
    text = hosts.PAGE.read_text()
    assert text.index(hosts.BEGIN) < text.index(hosts.END)
