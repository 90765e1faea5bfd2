"""Python programs that the product starts as child processes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack.stack import ROOT

PACKAGES = ("archives", "concurrency", "contract", "orchestrator", "store", "telemetry", "workers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def find_commands(source: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first option of every command line that starts with `sys.executable`."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            yield node.lineno, ast.unparse(node.elts[1]) if len(node.elts) > 1 else ""


def test_every_python_child_ignores_the_current_folder() -> None:
    """Without -P or -I, Python executes a package of the current folder that has the name of one of ours."""
    found = [(source.relative_to(ROOT), line, option) for source in SOURCES for line, option in find_commands(source)]

    assert len(found) >= 2
    assert [place for place in found if place[2] not in ("'-P'", "'-I'")] == []


@pytest.mark.parametrize("text", ['[sys.executable, "-m", "x"]', "(sys.executable,)"])
def test_a_child_without_the_option_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(f"import sys\ncommand = {text}\n")

    assert [option for _, option in find_commands(tmp_path / "bad.py")] in (["'-m'"], [""])
