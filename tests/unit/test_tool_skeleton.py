"""`toolcrew tools new`: what it writes, and the names and folders that it does not take."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contract.errors import ConfigError
from contract.names import BUILTIN_TOOLS
from orchestrator.cli.main import app
from orchestrator.cli.tool_skeleton import build_skeleton, write_skeleton

FILES = ["README.md", "pyproject.toml", "sum_column.py", "tests/test_sum_column.py"]


def new(*arguments: str) -> tuple[int, str]:
    """Exit code and all that was said."""
    told = CliRunner().invoke(app, ["tools", "new", *arguments])
    return told.exit_code, told.output


def test_the_command_says_what_it_made_and_what_is_next(tmp_path: Path) -> None:
    code, told = new("sum_column", "--dir", str(tmp_path / "deep" / "down"))
    made = tmp_path / "deep" / "down" / "sum_column"
    assert (code, f"made {made}" in told, "pip install -e" in told) == (0, True, True)
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == FILES


def test_it_says_so_as_json_too(tmp_path: Path) -> None:
    code, told = new("sum_column", "--dir", str(tmp_path), "--json")
    assert (code, json.loads(told)) == (
        0,
        {"name": "sum_column", "folder": str(tmp_path / "sum_column"), "files": FILES},
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Sum-Column", "such as sum_column"),
        ("../escape", "such as escape"),
        ("/etc", "such as etc"),
        ("9lives", "such as lives"),
        ("a_", "such as a"),
        ("a__b", "such as a_b"),
        ("", "is no name"),
        ("é", "is no name"),
        ("x" * 65, "such as " + "x" * 64),
        ("class", "Python's own"),
        ("sum", "Python's own"),
        ("json", "installed here"),
        ("workers", "installed here"),
        ("toolcrew", "installed here"),
        *((name, "built-in") for name in sorted(BUILTIN_TOOLS)),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_another_and_nothing_is_written(
    tmp_path: Path, name: str, told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        write_skeleton(name, tmp_path / "new")
    assert told in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    there = tmp_path / "sum_column"
    if kind == "folder":
        there.mkdir()
        (there / "pyproject.toml").write_text("mine")
    elif kind == "file":
        there.write_text("mine")
    else:
        there.symlink_to(tmp_path / "elsewhere")
    code, told = new("sum_column", "--dir", str(tmp_path))
    assert (code, "nothing is overwritten" in told) == (1, True)
    assert not (tmp_path / "elsewhere").exists()
    assert kind != "folder" or [path.read_text() for path in there.iterdir()] == ["mine"]
    assert kind != "file" or there.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, told = new("sum_column", "--dir", str(tmp_path / "file"), "--json")
    assert (code, json.loads(told)["error"]["code"]) == (1, "CONFIG_MISSING")
    assert "cannot be written" in told


def test_the_document_shows_its_test_as_it_is_written() -> None:
    words = (Path(__file__).parent.parent.parent / "docs" / "custom-tools.md").read_text()
    files = build_skeleton("sum_column")
    assert files["tests/test_sum_column.py"].strip() in words
