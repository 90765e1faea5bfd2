#!/usr/bin/env python3
"""Prints the test files that a change concerns, one per line: those that changed, and those that import a changed
module, directly or through other modules. `scripts/test --changed` runs them.

A change is what differs from the merge base with origin/main (or main), with files that are not committed. A changed
file that is not Python concerns the modules that contain its name. Tests that start programs import little of what
these run: this selection is for work in progress, and a full run comes before a merge.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.check_architecture import (  # noqa: E402
    OTHER_SOURCES,
    PACKAGES,
    Module,
    imports_of,
    is_python,
    module_name,
    source_files,
    targets,
)


def read_modules(root: Path) -> dict[str, Module]:
    """Return the Python files of the repository by module name."""
    folders = {directory: package for package, directory in PACKAGES.items()}
    folders.update({directory: directory for directory in OTHER_SOURCES})
    modules = {}
    for directory, package in folders.items():
        for file in filter(is_python, source_files(root, directory)):
            name = module_name(package, file.relative_to(root / directory))
            path = file.relative_to(root).as_posix()
            tree = ast.parse(file.read_text(encoding="utf-8"))
            modules[name] = Module(name, package, path, file.name == "__init__.py", tree)
    return modules


def find_importers(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return the modules that import each module."""
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for imported in imports_of(module):
            # Every import of a module executes toolcrew/__init__.py, whose names import most of the product.
            for target in targets(module, imported, modules) - ({"toolcrew"} - {imported.module}):
                importers[target].add(module.name)
    return importers


def find_tests(root: Path, changed: Iterable[str]) -> list[str]:
    """Return the paths of the test files that the changed paths concern."""
    modules = read_modules(root)
    by_path = {module.path: module.name for module in modules.values()}
    importers = find_importers(modules)
    found: set[str] = set()
    for path in changed:
        if path in by_path:
            found.add(by_path[path])
            if Path(path).name == "conftest.py":
                found |= {name for file, name in by_path.items() if Path(path).parent in Path(file).parents}
        elif not path.endswith(".py"):
            # The module of a package that reads the file, or the tests of a page.
            name, folder = Path(path).name, "tests" if path.startswith("docs/") else path.partition("/")[0]
            named = (module for module in modules.values() if module.path.startswith((f"{folder}/", "tests/")))
            found |= {module.name for module in named if name in (root / module.path).read_text("utf-8")}
    waiting = list(found)
    while waiting:
        new = importers[waiting.pop()] - found
        found |= new
        # Every test depends on tests/conftest.py, which starts a stack and so imports most of the product.
        waiting += [name for name in new if not name.endswith("conftest")]
    return sorted(
        modules[name].path
        for name in found
        if modules[name].path.startswith("tests/") and "/test_" in modules[name].path
    )


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def list_changed() -> list[str]:
    """Return the paths that differ from the merge base."""
    branches = _git("for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main")
    [base] = _git("merge-base", "HEAD", sorted(branches, key="origin/main".__ne__)[0])
    return [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in find_tests(ROOT, list_changed()))
