"""Copy some packages of this Python's standard library into workspace/ and compute the expected answers from the
copies.

Run from the project's folder: `python examples/repository-questions/prepare.py`. The repository contains no copy of
Python. The answers match the version of the interpreter that runs this script.
"""

import argparse
import ast
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = ("email", "html", "http", "json", "logging", "urllib")


class CannotPrepare(Exception):
    """This interpreter has no suitable sources. The message says what to do."""


def copy_packages(workspace: Path) -> None:
    """Copy the sources of PACKAGES. Delete earlier content of `workspace`. Raises CannotPrepare."""
    if workspace.exists():
        shutil.rmtree(workspace)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        sources = sorted(Path(folders[0]).rglob("*.py")) if folders else []
        if not sources:
            raise CannotPrepare(
                f"this Python has no source files of its package {name}. Run this script with a Python that has them"
            )
        for source in sources:
            target = workspace / name / source.relative_to(folders[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            # Copies only the content: sources of an interpreter may be read-only.
            target.write_bytes(source.read_bytes())


class Sources:
    """The parsed copies of the files."""

    def __init__(self, workspace: Path) -> None:
        self.texts = {
            path.relative_to(workspace).as_posix(): path.read_bytes() for path in sorted(workspace.rglob("*.py"))
        }
        self.trees = {name: ast.parse(text, name) for name, text in self.texts.items()}

    def list_classes(self, name: str) -> list[ast.ClassDef]:
        """Return the top-level classes of a file."""
        return [node for node in self.trees[name].body if isinstance(node, ast.ClassDef)]

    def find_class(self, name: str, class_name: str) -> ast.ClassDef:
        return next(node for node in self.list_classes(name) if node.name == class_name)

    def read_value(self, name: str, variable: str) -> object:
        """Return the value that a file assigns to a top-level name."""
        return ast.literal_eval(_find_assigned_value(self.trees[name].body, variable))

    def find_definer(self, definition: str) -> str:
        """Return the file that defines a top-level function or class."""
        (path,) = (
            name
            for name, tree in self.trees.items()
            if any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == definition for node in tree.body)
        )
        return path

    def count_lines(self, name: str) -> int:
        return self.texts[name].count(b"\n")

    def count_importers(self, module: str) -> int:
        """Return the number of files that import a module anywhere."""
        return sum(any(_imports(node, module) for node in ast.walk(tree)) for tree in self.trees.values())

    def count_raises(self, name: str, error: str) -> int:
        raised = [node.exc for node in ast.walk(self.trees[name]) if isinstance(node, ast.Raise)]
        return sum(
            isinstance(exc, ast.Call) and isinstance(exc.func, ast.Name) and exc.func.id == error for exc in raised
        )


def _find_assigned_value(body: list[ast.stmt], variable: str) -> ast.expr:
    for node in body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == variable for target in node.targets
        ):
            return node.value
    raise CannotPrepare(
        f"{variable} was not found: the sources of this Python are organized differently. Run this script with another "
        "version"
    )


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == module for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module == module and node.level == 0


def _read_status(sources: Sources, member: str) -> int:
    """Return the value of a member of HTTPStatus: (value, phrase, description), or only a value."""
    value = _find_assigned_value(sources.find_class("http/__init__.py", "HTTPStatus").body, member)
    first = value.elts[0] if isinstance(value, ast.Tuple) else value
    return int(ast.literal_eval(first))


def _list_methods(node: ast.ClassDef) -> list[str]:
    return [part.name for part in node.body if isinstance(part, ast.FunctionDef)]


AnswerFunction = Callable[[Sources], object]
ANSWER_FUNCTIONS: Mapping[str, AnswerFunction] = {
    "email-message-classes": lambda s: len(s.list_classes("email/message.py")),
    "logging-handler-classes": lambda s: len(s.list_classes("logging/handlers.py")),
    "cookiejar-classes": lambda s: len(s.list_classes("http/cookiejar.py")),
    "modules-of-http": lambda s: sum(name.startswith("http/") for name in s.texts),
    "modules-of-all": lambda s: len(s.texts),
    "longest-file": lambda s: max(s.texts, key=s.count_lines),
    "lines-of-json": lambda s: sum(s.count_lines(name) for name in s.texts if name.startswith("json/")),
    "where-parse_qsl": lambda s: s.find_definer("parse_qsl"),
    "where-JSONDecodeError": lambda s: s.find_definer("JSONDecodeError"),
    "where-QueueListener": lambda s: s.find_definer("QueueListener"),
    "teapot-status": lambda s: _read_status(s, "IM_A_TEAPOT"),
    "too-many-requests-status": lambda s: _read_status(s, "TOO_MANY_REQUESTS"),
    "https-port": lambda s: s.read_value("http/client.py", "HTTPS_PORT"),
    "logging-warning-level": lambda s: s.read_value("logging/__init__.py", "WARNING"),
    "smtp-handler-base": lambda s: ast.unparse(s.find_class("logging/handlers.py", "SMTPHandler").bases[0]),
    "http-connection-line": lambda s: s.find_class("http/client.py", "HTTPConnection").lineno,
    "importers-of-base64": lambda s: s.count_importers("base64"),
    "decoder-raises": lambda s: s.count_raises("json/decoder.py", "JSONDecodeError"),
    "html-parser-handlers": lambda s: sum(
        name.startswith("handle_") for name in _list_methods(s.find_class("html/parser.py", "HTMLParser"))
    ),
    "urllib-parse-exports": lambda s: len(list(s.read_value("urllib/parse.py", "__all__"))),  # type: ignore[call-overload]
}


def compute_expected(workspace: Path) -> list[dict[str, object]]:
    """Return the rows of expected.jsonl. Raises CannotPrepare."""
    sources = Sources(workspace)
    rows: list[dict[str, object]] = []
    for name, answer in ANSWER_FUNCTIONS.items():
        try:
            value = answer(sources)
        except (KeyError, StopIteration, ValueError) as error:
            raise CannotPrepare(
                f"the question {name} has no answer in this Python ({error!r}). Run this script with another version"
            ) from None
        is_number = isinstance(value, int)
        rows.append(
            {
                "id": name,
                "kind": "number" if is_number else "text",
                "answer": str(value),
                **({"tolerance": 0} if is_number else {}),
            }
        )
    return rows


def prepare(folder: Path) -> int:
    """Write workspace/ and expected.jsonl in `folder`. Return the number of answers."""
    copy_packages(folder / "workspace")
    rows = compute_expected(folder / "workspace")
    (folder / "expected.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Copy sources of this Python and compute the expected answers of the batch."
    )
    parser.add_argument(
        "--into", type=Path, default=HERE, help="folder to write to; default: the folder of this example"
    )
    arguments = parser.parse_args()
    try:
        arguments.into.mkdir(parents=True, exist_ok=True)
        count = prepare(arguments.into)
    except (CannotPrepare, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    version = ".".join(map(str, sys.version_info[:3]))
    sys.stdout.write(
        f"{arguments.into / 'workspace'}: {', '.join(PACKAGES)} of Python {version}; {count} expected answers\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
