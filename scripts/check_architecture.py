#!/usr/bin/env python3
"""Checks the rules of the architecture by reading the source.

The rules limit which module may import which, which files may read the environment, the length of a file, and the
number of parameters of a constructor.

    python3 scripts/check_architecture.py [ROOT]

The script prints one line per violation, `path:line: rule: sentence`, and exits with 1. Without a violation it prints
nothing and exits with 0. The script imports and runs nothing. Patterns are those of fnmatch over paths from ROOT; a
`*` also matches `/`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# --- The rules, in one place -----------------------------------------------------------------------------------------

# Import name -> directory, from ROOT. The links in toolcrew/ give the directories their import names.
PACKAGES = {
    "toolcrew": "toolcrew",
    "toolcrew.contract": "contract",
    "toolcrew.orchestrator": "orchestrator",
    "toolcrew.workers": "workers",
    "toolcrew.telemetry": "telemetry",
    "toolcrew.concurrency": "concurrency",
    "toolcrew.archives": "archives",
    "toolcrew.store": "store",
    "guest": "sandbox-images/guest",
}

_SHARED = frozenset(f"toolcrew.{package}" for package in ("contract", "telemetry", "concurrency", "archives", "store"))
# Package -> other packages of this repository that it may import. All dependencies lead to contract.
ARROWS: dict[str, frozenset[str]] = {
    "toolcrew": frozenset({"toolcrew.contract", "toolcrew.store", "toolcrew.orchestrator", "toolcrew.workers"}),
    "toolcrew.contract": frozenset(),
    "toolcrew.telemetry": frozenset({"toolcrew.contract"}),
    "toolcrew.concurrency": frozenset({"toolcrew.contract", "toolcrew.telemetry"}),
    "toolcrew.archives": frozenset({"toolcrew.contract", "toolcrew.telemetry", "toolcrew.concurrency"}),
    "toolcrew.store": frozenset({"toolcrew.contract", "toolcrew.telemetry", "toolcrew.concurrency"}),
    "toolcrew.orchestrator": _SHARED,
    "toolcrew.workers": _SHARED,
    "guest": frozenset(),
}

# The entry points of the orchestrator. `orchestrator/serve.py` combines them; shared code of two entry points is
# elsewhere.
_SURFACES = tuple(f"toolcrew.orchestrator.{folder}" for folder in ("adapters", "api", "cli", "e2b", "mcp"))

# Folder of this repository -> modules of this repository that the folder must not import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "toolcrew.orchestrator.dialects": ("toolcrew.orchestrator.dispatch", "toolcrew.store"),
    "toolcrew.orchestrator.models": ("toolcrew.orchestrator.dispatch", "toolcrew.store"),
    "toolcrew.orchestrator.loop": ("toolcrew.orchestrator.dispatch", "toolcrew.store"),
    # A program that has only a URL and a key.
    "toolcrew.orchestrator.sdk.http": (
        *sorted(_SHARED - {"toolcrew.contract", "toolcrew.archives"}),
        *(f"toolcrew.orchestrator.{folder}" for folder in ("dispatch", "loop", "operations", "runs", "sessions")),
    ),
    **dict.fromkeys(
        ("toolcrew.orchestrator.admission", "toolcrew.orchestrator.dispatch"), ("toolcrew.orchestrator.terminal",)
    ),
    **{folder: tuple(surface for surface in _SURFACES if surface != folder) for folder in _SURFACES},
}

# Packages whose folders and direct modules must not have circular imports, not even for types.
LAYERED = (
    "toolcrew.orchestrator",
    "toolcrew.workers",
    "toolcrew.workers.sandboxd",
    "guest",
    "guest.commands",
    "guest.files",
    "guest.search",
    "guest.tunnels",
)

# Package -> third-party modules that it may import. A package without an entry may import any module without a rule.
THIRD_PARTY: dict[str, frozenset[str]] = {
    "toolcrew.contract": frozenset(
        {
            "annotated_types",
            "jsonschema",
            "pydantic",
            "pydantic_core",
            "pydantic_settings",
            "referencing",
            "typing_extensions",
            "yaml",
        }
    ),
    "guest": frozenset(),
}

# Module -> the only files of this repository that may import it.
_CELERY = (
    "orchestrator/adapters/celery_*.py",
    "orchestrator/dispatch/celery_transport.py",
    "orchestrator/operations/pool_commands.py",
    "toolcrew/celery.py",
    "workers/celery_edge/*.py",
)
_REDIS = ("store/*.py", "workers/celery_edge/*.py")
_TERMINAL = (
    "orchestrator/command.py",
    "orchestrator/serve.py",
    "orchestrator/cli/*.py",
    "orchestrator/terminal/*.py",
    "orchestrator/batches/live_progress.py",
)
_MCP = ("orchestrator/mcp/*.py", "workers/mcp/http_server.py", "workers/mcp/s*.py")
WALLS: dict[str, tuple[str, ...]] = {
    "celery": _CELERY,
    "kombu": _CELERY,
    "billiard": _CELERY,
    "docker": ("workers/sandboxd/runtime/*.py",),
    "langchain_core": ("orchestrator/adapters/langchain.py",),
    "langgraph": (),
    "agents": ("orchestrator/adapters/openai_agents.py",),
    "fsspec": ("archives/fsspec_store.py",),
    "inspect_ai": (
        "orchestrator/adapters/inspect_results.py",
        "orchestrator/adapters/inspect_sandbox.py",
        "orchestrator/adapters/inspect_servers.py",
    ),
    "flower": ("orchestrator/operations/flower.py",),
    "harbor": ("orchestrator/adapters/harbor.py",),
    "verifiers": ("orchestrator/adapters/verifiers.py",),
    "pyarrow": ("orchestrator/batches/rollouts.py",),
    "openai": ("orchestrator/models/openai.py",),
    "opentelemetry": ("telemetry/otlp.py",),
    "redis": _REDIS,
    "typer": _TERMINAL,
    "rich": _TERMINAL,
    "http.server": (),
    "jinja2": ("orchestrator/api/pages/*.py", "orchestrator/offline_pages.py"),
    "markupsafe": ("orchestrator/api/pages/*.py",),
    "fastapi": ("orchestrator/api/*.py",),
    "mcp": _MCP,
    "mcp_types": _MCP,
    "starlette": (
        "orchestrator/http/*.py",
        "orchestrator/api/*.py",
        "orchestrator/e2b/*.py",
        "orchestrator/mcp/http_*.py",
    ),
    "uvicorn": ("orchestrator/http/server.py", "orchestrator/http/web_sockets.py"),
    "websockets": ("orchestrator/http/web_sockets.py", "orchestrator/sdk/http/*.py"),
    "pydantic_settings": ("contract/settings.py",),
}

# The files that may read the environment. Each exception is a line with its reason.
ENVIRONMENT_READERS = (
    "contract/settings.py",
    # These files run inside a sandbox and pass its environment to the server that they start.
    "workers/mcp/sandbox_driver.py",
    "workers/mcp/sandbox_visit.py",
    # The entry point of the guest passes the environment of the image to the programs of the sandbox.
    "sandbox-images/guest/boot.py",
)

# Modules that contract must not import: contract defines data and rules, and performs no actions.
ACTING_MODULES = (
    "asyncio", "concurrent", "ftplib", "http.client", "http.server", "multiprocessing", "select", "selectors", "shutil",
    "signal", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tempfile", "urllib.request",
)  # fmt: skip
ACTING_CALLS = frozenset({"open", "print", "input"})
ACTING_METHODS = frozenset({"read_bytes", "read_text", "write_bytes", "write_text"})

MAX_LINES = 800
# Limit for the parameters of an `__init__`, without self. A dataclass is a record and has no `__init__` of its own.
MAX_PARAMETERS = 7
# Folders whose files are only checked for length, a docstring, and bare imports.
OTHER_SOURCES = ("scripts", "tests", "benchmarks", "examples")
# A bare `import store` finds a folder of the user's project, or nothing. Only the import name is correct.
BARE_NAMES = frozenset(name.removeprefix("toolcrew.") for name in PACKAGES if name.startswith("toolcrew."))

# --- The check -------------------------------------------------------------------------------------------------------

ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


@dataclass(frozen=True, order=True)
class Violation:
    """A violation of a rule, printed as `path:line: rule: sentence`."""

    path: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence}"


@dataclass(frozen=True)
class Import:
    """An imported module, by its absolute name. `is_for_types` is true under `if TYPE_CHECKING:`."""

    module: str
    line: int
    is_for_types: bool
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """A parsed file of a package of this repository."""

    name: str
    package: str
    path: str
    is_init: bool
    tree: ast.Module
    imports: tuple[Import, ...] = field(default=())

    def may(self, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(self.path, pattern) for pattern in patterns)


def is_within(module: str, outer: str) -> bool:
    return module == outer or module.startswith(outer + ".")


def is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def walk(node: ast.AST, is_for_types: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below `node`, and whether only a type checker evaluates it (under `if TYPE_CHECKING:`)."""
    for child in ast.iter_child_nodes(node):
        below = is_for_types
        if isinstance(node, ast.If) and is_type_checking(node.test):
            below = is_for_types or child in node.body
        yield child, below
        yield from walk(child, below)


def statements_and_expressions(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    """Return the nodes of a tree that have a line number."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr))


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """Return the absolute module name behind `from ..x import y`."""
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + (1 if module.is_init else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports_of(module: Module) -> Iterator[Import]:
    for node, is_for_types in walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_for_types)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(absolute(module, node), node.lineno, is_for_types, names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and not name.startswith("."):
                yield Import(name, node.lineno, is_for_types)


def full_names(imported: Import) -> list[str]:
    """Return all names that an import loads: `from http import server` imports http.server as `import http.server`
    does.
    """
    return [imported.module, *(f"{imported.module}.{name}" for name in imported.names)]


def check_import(module: Module, imported: Import) -> Iterator[tuple[str, str]]:
    """Yield the rules that an import breaks, each with its sentence."""
    package, top = module.package, imported.module.partition(".")[0]
    names = full_names(imported)
    if top in ("toolcrew", "guest"):
        for other in sorted({find_package(full) for full in names} - {package, *ARROWS[package]}):
            yield "arrow", f"{package} must not import {other}"
        for folder, forbidden in FORBIDDEN.items():
            for name in forbidden:
                if is_within(module.name, folder) and any(is_within(full, name) for full in names):
                    yield "arrow", f"{folder} must not import {name}"
        return
    allowed = THIRD_PARTY.get(package)
    if allowed is not None and top not in sys.stdlib_module_names and top not in allowed:
        yield "third-party", f"{package} must not import {top}"
    for walled, patterns in WALLS.items():
        if any(is_within(name, walled) for name in names) and not module.may(patterns):
            yield "wall", f"{walled} may be imported only in {', '.join(patterns) or 'no file'}"
    if package == "toolcrew.contract":
        for acting in ACTING_MODULES:
            if any(is_within(name, acting) for name in names):
                yield "contract-acts", f"contract does no I/O and starts no process: {acting} is not allowed"


def find_package(name: str) -> str:
    """Return the package of PACKAGES that contains a module."""
    return max((package for package in PACKAGES if is_within(name, package)), key=len, default=name)


def check_bare_names(path: str, imports: Iterable[Import]) -> Iterator[Violation]:
    for imported in imports:
        top = imported.module.partition(".")[0]
        if top in BARE_NAMES:
            yield Violation(path, imported.line, "bare-name", f"write toolcrew.{top} instead of {top}")


def check_imports(module: Module) -> Iterator[Violation]:
    for imported in module.imports:
        for rule, sentence in check_import(module, imported):
            yield Violation(module.path, imported.line, rule, sentence)


def check_contract(module: Module) -> Iterator[Violation]:
    if module.package != "toolcrew.contract":
        return
    for node in statements_and_expressions(module.tree):
        action = None
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await):
            action = "async code"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ACTING_CALLS:
            action = f"{node.func.id}()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ACTING_METHODS:
            action = f".{node.func.attr}()"
        if action is not None:
            yield Violation(
                module.path, node.lineno, "contract-acts", f"contract does no I/O and is not async: {action}"
            )


def check_environment(module: Module) -> Iterator[Violation]:
    if module.may(ENVIRONMENT_READERS):
        return
    for node in statements_and_expressions(module.tree):
        name = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "posix"):
            name = node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            name = next((alias.name for alias in node.names if alias.name in ENVIRONMENT_NAMES), None)
        if name in ENVIRONMENT_NAMES:
            allowed = ", ".join(ENVIRONMENT_READERS)
            yield Violation(module.path, node.lineno, "environment", f"os.{name} may be used only in {allowed}")


def check_constructors(module: Module) -> Iterator[Violation]:
    for outer in ast.walk(module.tree):
        if not isinstance(outer, ast.ClassDef):
            continue
        for node in outer.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = node.args
                every = [
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                    arguments.vararg,
                    arguments.kwarg,
                ]
                count = len([argument for argument in every if argument is not None]) - 1
                if count > MAX_PARAMETERS:
                    sentence = f"{outer.name} has {count} parameters, at most {MAX_PARAMETERS} are allowed"
                    yield Violation(module.path, node.lineno, "constructor", sentence)


def targets(module: Module, imported: Import, by_name: dict[str, Module]) -> set[str]:
    """Return the modules of this repository that the import executes.

    The result includes the parent packages of the imported names, but not the parent packages of `module` itself,
    which are executed before `module` in any case. `from package import name` needs the package's own file if name is
    not a submodule.
    """
    submodules = {full for full in full_names(imported)[1:] if full in by_name}
    named = set(submodules)
    if len(submodules) < max(1, len(imported.names)):
        named.add(imported.module)
    around = {name[:end] for name in named for end in range(len(name)) if name[end] == "."}
    around = {name for name in around if not is_within(module.name, name)}
    return ((named | around) & by_name.keys()) - {module.name}


def check_cycles(modules: list[Module]) -> Iterator[Violation]:
    by_name = {module.name: module for module in modules}
    lines: dict[str, dict[str, tuple[str, int]]] = {module.name: {} for module in modules}
    folders: dict[str, dict[str, tuple[str, int]]] = {}
    for module in modules:
        for imported in module.imports:
            imported_names = targets(module, imported, by_name)
            location = (module.path, imported.line)
            if not imported.is_for_types:
                for target in imported_names:
                    lines[module.name].setdefault(target, location)
            for layer in (layer for layer in LAYERED if is_below(module.name, layer)):
                importer = folder_of(module.name, layer)
                for folder in {folder_of(target, layer) for target in imported_names if is_below(target, layer)} - {
                    importer
                }:
                    folders.setdefault(importer, {}).setdefault(folder, location)
    yield from circles("cycle", lines)
    yield from circles("folder-cycle", folders)


def is_below(name: str, package: str) -> bool:
    """Return whether a module is in a folder of the package or next to the folders. False for the package itself and
    its `__main__`.
    """
    return name.startswith(package + ".") and not name.endswith(".__main__")


def folder_of(name: str, package: str) -> str:
    """Return the folder of the package that contains a module, or the module itself if no folder contains it."""
    return ".".join(name.split(".")[: package.count(".") + 2])


def circles(rule: str, lines: dict[str, dict[str, tuple[str, int]]]) -> Iterator[Violation]:
    """Yield a violation for each circular import. `lines`: importer -> imported module -> path and line of the import."""
    while True:
        try:
            TopologicalSorter(lines).prepare()
        except CycleError as error:
            # In the found circle, each name comes before its importer. Reverse the order and start at a fixed name, so
            # that the message is stable.
            circle = list(reversed(error.args[1]))[:-1]
            start = circle.index(min(circle))
            circle = [*circle[start:], *circle[:start], circle[start]]
            path, line = lines[circle[0]].pop(circle[1])
            yield Violation(path, line, rule, " -> ".join(circle))
        else:
            return


def check_length(path: str, text: str) -> Iterator[Violation]:
    length = len(text.splitlines())
    if length > MAX_LINES:
        yield Violation(path, MAX_LINES + 1, "length", f"{length} lines, at most {MAX_LINES} are allowed")


def check_docstring(path: str, tree: ast.Module) -> Iterator[Violation]:
    is_empty_marker = path.startswith(OTHER_SOURCES) and path.endswith("__init__.py") and not tree.body
    if not is_empty_marker and not (ast.get_docstring(tree) or "").strip():
        yield Violation(path, 1, "docstring", "the module's docstring must state its one duty")


def is_python(file: Path) -> bool:
    if file.suffix:
        return file.suffix == ".py"
    with file.open("rb") as opened:
        return b"python" in opened.readline()


def source_files(root: Path, directory: str) -> list[Path]:
    """Return the Python files, and the scripts without a suffix."""
    pattern = "*" if directory == "scripts" else "*.py"
    paths = (root / directory).rglob(pattern)
    return sorted(path for path in paths if "__pycache__" not in path.parts and path.is_file())


def module_name(package: str, inner: Path) -> str:
    parts = [package, *inner.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def check_tree(root: Path) -> list[Violation]:
    """Return every violation below ROOT, in the order of paths and lines."""
    violations: list[Violation] = []
    modules: list[Module] = []
    folders: dict[str, str | None] = {directory: package for package, directory in PACKAGES.items()}
    folders.update(dict.fromkeys(OTHER_SOURCES))
    for directory, package in folders.items():
        for file in source_files(root, directory):
            path = file.relative_to(root).as_posix()
            try:
                text = file.read_text(encoding="utf-8")
                violations += check_length(path, text)
                if not is_python(file):
                    continue
                tree = ast.parse(text)
            except (SyntaxError, ValueError) as error:
                violations.append(
                    Violation(path, getattr(error, "lineno", None) or 1, "syntax", "the file is not valid Python")
                )
                continue
            if directory != "examples":
                violations += check_docstring(path, tree)
            name = module_name(package or directory, file.relative_to(root / directory))
            bare = Module(name, package or directory, path, file.name == "__init__.py", tree)
            imports = tuple(imports_of(bare))
            violations += check_bare_names(path, imports)
            if package is not None:
                modules.append(replace(bare, imports=imports))
    for module in modules:
        violations += [*check_imports(module), *check_contract(module), *check_environment(module)]
        violations += check_constructors(module)
    return sorted(set(violations) | set(check_cycles(modules)))


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not any(source_files(root, directory) for directory in PACKAGES.values()):
        print(f"{root}: this folder has no sources to check", file=sys.stderr)
        return 2
    violations = check_tree(root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
