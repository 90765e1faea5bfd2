"""The rows of the table of hosts name tests that exist, and the table is written where the page has its place."""

import re
import shlex
from pathlib import Path

import pytest

from scripts import hosts

ROOT = Path(__file__).parents[2]
PYTEST_ROWS = {title: command for title, command in hosts.ROWS.items() if command.startswith(hosts.PYTEST)}
WORKS, FAILS = hosts.Result(works=True, date="2026-11-29"), hosts.Result(works=False, date="2026-11-30")
COLUMNS = {
    "Debian 12": hosts.Column("Linux 6.1", {"forks": WORKS, "compose": FAILS}),
    "Debian sid": hosts.Column("Linux 7.2", {"forks": WORKS}),
}


@pytest.mark.parametrize("title", PYTEST_ROWS)
def test_a_row_names_files_and_tests_that_exist(title: str) -> None:
    words = shlex.split(PYTEST_ROWS[title].removeprefix(hosts.PYTEST))
    files = [ROOT / word for word in words if word.startswith("tests/")]
    names = re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files))
    chosen = words[words.index("-k") + 1].split(" or ") if "-k" in words else [""]
    assert [part for part in chosen if not any(part in name for name in names)] == []


def test_the_table_has_a_column_for_each_host_and_says_which_row_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "ROWS", {"forks": "", "compose": ""})
    lines = hosts.render(COLUMNS).splitlines()
    assert lines[-6] == "`scripts/hosts` ran these rows between 2026-11-29 and 2026-11-30."
    assert lines[-4:] == [
        "|  | Debian 12 (Linux 6.1) | Debian sid (Linux 7.2) |",
        "|---|---|---|",
        "| forks | works | works |",
        "| compose | **fails** | not run |",
    ]


def test_a_machine_keeps_the_last_result_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "LAB", tmp_path)
    machine = hosts.Machine("sid")
    machine.folder.mkdir()
    answers = {"uname": (0, "7.2.13-amd64\n28.5.2+dfsg\ncrun version 1.28\nPython 3.14.1\n"), "exit 3": (3, "no\n")}
    monkeypatch.setattr(machine, "ssh", lambda script: next((a for t, a in answers.items() if t in script), (0, "")))
    for command in ("exit 3", "true"):
        machine.try_rows({"forks": command, "compose": "exit 3"}, hosts.OVERLAY2)
    [(title, column)] = machine.load().items()
    assert (title, column.versions) == ("Debian sid", "Linux 7.2.13, Docker 28.5.2, crun 1.28, Python 3.14.1")
    assert {row: result.works for row, result in column.rows.items()} == {"forks": True, "compose": False}


def test_a_written_table_replaces_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{hosts.BEGIN}old\n{hosts.END}after\n")
    monkeypatch.setattr(hosts, "PAGE", page)
    hosts.write("new")
    assert page.read_text() == f"before\n{hosts.BEGIN}\nnew\n{hosts.END}after\n"


def test_the_page_has_a_place_for_the_table() -> None:
    text = hosts.PAGE.read_text()
    assert text.index(hosts.BEGIN) < text.index(hosts.END)
