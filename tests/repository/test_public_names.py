"""The public names of the package `toolcrew`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import toolcrew
import toolcrew.celery
from tests.support.stack.stack import ROOT

# verifiers cannot be installed together with the other extras.
NOT_INSTALLED = {"ToolcrewEnv", "ToolcrewHarness", "ToolcrewTaskset"}
USERS = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]


def read_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toolcrew"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_type_checkers_see_the_names_that_programs_get() -> None:
    tree = ast.parse(Path(toolcrew.__file__).read_text())
    assert dict((name, module) for module, name in read_imports(tree)) == toolcrew._MODULE_OF


@pytest.mark.parametrize("name", sorted(set(toolcrew.__all__) - NOT_INSTALLED))
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(toolcrew, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ToolClinet'"):
        toolcrew.ToolClinet  # noqa: B018


def test_pages_and_examples_import_only_public_names() -> None:
    found = {
        (path.name, module, name)
        for path in USERS
        for source in (
            [path.read_text()]
            if path.suffix == ".py"
            else map(dedent, re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
        )
        for module, name in read_imports(ast.parse(source))
    }
    assert len(found) > 20
    public = {"toolcrew": toolcrew.__all__, "toolcrew.celery": toolcrew.celery.__all__}
    assert {(page, name) for page, module, name in found if name not in public.get(module, ())} == set()
