"""The shipped skills: the output of their scripts, and the tools that their sidecars define. The scripts use only
Python's standard library.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.records.skill_harness import SHIPPED
from toolcrew.contract.schema import prepare_arguments
from toolcrew.workers.skills.loader import load_skills

SKILLS = {skill.name: skill for skill in load_skills([SHIPPED])}
NAMES = ("table-profile", "vector-search", "word-count")
TEXTS = {
    "billing.md": (
        "# Billing\n\nInvoices are cancelled by the accounting team within two days.\nA credit note is sent "
        "afterwards.\n"
    ),
    "garden.md": "# Garden\n\nWater the tomatoes in the evening.\nRoses are cut in spring.\n",
    "deep/network.txt": "The gateway drops packets that are larger than the configured size.\n"
    + "filler line\n" * 40
    + "Retransmission begins then.\n",
    ".hidden/secret.md": "Invoices are cancelled here as well.\n",
}


def run(name: str, folder: Path, arguments: Any) -> "subprocess.CompletedProcess[str]":
    tool = SKILLS[name].tool
    script = SHIPPED / name / tool.sidecar.entrypoint
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    # Isolated: as in a sandbox there is nothing of ours, and no package.
    return subprocess.run(
        [sys.executable, "-I", script], input=text, capture_output=True, text=True, cwd=folder, timeout=60
    )


def run_skill_script(name: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    tool = SKILLS[name].tool
    done = run(name, folder, prepare_arguments(tool.spec, arguments)[0])
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    return tmp_path


def search_paths(workspace: Path, query: str, **arguments: Any) -> list[str]:
    return [
        result["path"] for result in run_skill_script("vector-search", workspace, query=query, **arguments)["results"]
    ]


def test_search_finds_words_in_text_without_spaces(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("先读取文件，然后写入。\n")
    (tmp_path / "other.md").write_text("玫瑰在春天修剪。\n")
    assert search_paths(tmp_path, "读取文件") == ["notes.md"]


def test_shipped_skills_are_valid_tools_without_packages() -> None:
    assert tuple(SKILLS) == NAMES
    for skill in SKILLS.values():
        assert skill.summary.warnings == ()
        source = ast.parse((SHIPPED / skill.name / skill.tool.sidecar.entrypoint).read_text())
        imported = {alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", ["", "[]", '{"query": 1, "files": 1}', '{"query": "!", "files": []}'])
def test_invalid_script_arguments_give_a_short_error(name: str, arguments: str, tmp_path: Path) -> None:
    done = run(name, tmp_path, arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert "give" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("how can I cancel an invoice", "billing.md"),
        ("invioces canceled", "billing.md"),
        ("watering tomato plants", "garden.md"),
        ("packet size of the gateway", "deep/network.txt"),
    ],
)
def test_search_matches_inflected_and_misspelled_words(workspace: Path, query: str, path: str) -> None:
    assert search_paths(workspace, query)[0] == path


def test_search_caches_files_until_they_change(workspace: Path) -> None:
    assert search_paths(workspace, "roses") == ["garden.md"]
    files = sorted((workspace / ".toolcrew" / "vector-search").iterdir())
    assert len(files) == 3
    before = [path.stat().st_mtime_ns for path in files]
    assert search_paths(workspace, "roses") == ["garden.md"]
    assert [path.stat().st_mtime_ns for path in files] == before
    (workspace / "garden.md").write_text("Nothing grows.\n")
    (workspace / "billing.md").write_text("Roses are invoiced.\n")
    for path in files:
        path.write_text("{" if path != files[0] else path.read_text())
    assert search_paths(workspace, "roses") == ["billing.md"]


def test_table_profile_describes_each_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "id;when;amount;paid;zip;note\n1;2026-01-02;1.5;true;01067;a\n2;2026-02-01;3;false;53111;a\n3;;NA;true;01067;\n"
    )
    table = run_skill_script("table-profile", tmp_path, files=["t.csv"], top=1)["t.csv"]
    columns = {column.pop("name"): column for column in table["columns"]}
    assert (table["rows"], "notes" in table) == (3, False)
    assert columns["id"] == {
        "type": "integer",
        "missing": 0,
        "distinct": 3,
        "least": 1,
        "most": 3,
        "mean": 2.0,
        "top": [["1", 1]],
    }
    assert (columns["when"]["type"], columns["when"]["missing"], columns["when"]["most"]) == ("date", 1, "2026-02-01")
    assert (columns["amount"]["type"], columns["amount"]["mean"]) == ("number", 2.25)
    # A code, for its zeros in front; with others it is no number, either.
    assert columns["paid"]["type"] == "boolean"
    assert columns["zip"]["kinds"] == {"text": 2, "integer": 1}
    assert columns["note"]["top"] == [["a", 2]]


def test_table_profile_notes_malformed_rows(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("a\tb\n1\t2\n1\n1\t2\t3\n")
    (tmp_path / "t.jsonl").write_text('{"a": 1}\nno json\n[1]\n{"b": {"x": 1}}\n\n')
    tables = run_skill_script("table-profile", tmp_path, files=["t.tsv", "t.jsonl", "none.csv"])
    assert tables["t.tsv"]["notes"] == ["line 3 has 1 cells, the head has 2", "line 4 has 3 cells, the head has 2"]
    assert (tables["t.jsonl"]["rows"], len(tables["t.jsonl"]["notes"])) == (2, 2)
    assert {column["name"]: column["missing"] for column in tables["t.jsonl"]["columns"]} == {"a": 1, "b": 1}
    assert tables["none.csv"] == {"error": "No such file or directory"}


def test_table_profile_bounds_the_distinct_values_of_a_large_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n\n" + "".join(f"{number}\n" for number in range(30_000)))
    (column,) = run_skill_script("table-profile", tmp_path, files=["t.csv"], top=0)["t.csv"]["columns"]
    assert column["distinct"] == 10_000
    assert column["distinct_is_more"] is True
    assert column["most"] == 29_999
    assert column["mean"] == 14_999.5


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"a,b\n", b'"', b"\n\n\n", b"{", os.urandom(4000)])
def test_table_profile_answers_for_any_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert "t.csv" in run_skill_script("table-profile", tmp_path, files=["t.csv"])
