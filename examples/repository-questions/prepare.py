"""Copies a few packages of this Python's standard library into workspace/ and computes the expected answers from the
very copies.

From the project's folder: `python examples/repository-questions/prepare.py`. Nothing of Python is kept in the
repository, and the answers hold for whatever version this interpreter is.
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
    """This interpreter has no sources to ask about; the sentence says what to do."""


def copy_packages(workspace: Path) -> None:
    """The sources of PACKAGES, each below its name; what was in `workspace` before is gone. Raises CannotPrepare."""
    if workspace.exists():
        shutil.rmtree(workspace)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        sources = sorted(Path(places[0]).rglob("*.py")) if places else []
        if not sources:
            raise CannotPrepare(
                f"this Python has no sources of its package {name}: run this script with one that is installed as files"
            )
        for source in sources:
            target = workspace / name / source.relative_to(places[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            # The text alone: sources of an interpreter may be read-only.
            target.write_bytes(source.read_bytes())


class Sources:
    """The copied files, parsed."""

    def __init__(self, workspace: Path) -> None:
        self.texts = {
            path.relative_to(workspace).as_posix(): path.read_bytes() for path in sorted(workspace.rglob("*.py"))
        }
        self.trees = {name: ast.parse(text, name) for name, text in self.texts.items()}

    def classes(self, name: str) -> list[ast.ClassDef]:
        """The classes at the top of a file."""
        return [node for node in self.trees[name].body if isinstance(node, ast.ClassDef)]

    def cls(self, name: str, class_name: str) -> ast.ClassDef:
        return next(node for node in self.classes(name) if node.name == class_name)

    def value(self, name: str, variable: str) -> object:
        """What a file's top assigns to a name."""
        return ast.literal_eval(_assigned(self.trees[name].body, variable))

    def definers(self, defined: str) -> str:
        """The file that defines a function or class at its top."""
        (found,) = (
            name
            for name, tree in self.trees.items()
            if any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == defined for node in tree.body)
        )
        return found

    def lines(self, name: str) -> int:
        return self.texts[name].count(b"\n")

    def importers(self, module: str) -> int:
        """How many files import a module, anywhere in them."""
        return sum(any(_imports(node, module) for node in ast.walk(tree)) for tree in self.trees.values())

    def raises(self, name: str, error: str) -> int:
        raised = [node.exc for node in ast.walk(self.trees[name]) if isinstance(node, ast.Raise)]
        return sum(
            isinstance(exc, ast.Call) and isinstance(exc.func, ast.Name) and exc.func.id == error for exc in raised
        )


def _assigned(body: list[ast.stmt], variable: str) -> ast.expr:
    for node in body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == variable for target in node.targets
        ):
            return node.value
    raise CannotPrepare(
        f"{variable} is not where the questions look for it: this Python is laid out otherwise, run this script with "
        "another one"
    )


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == module for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module == module and node.level == 0


def _status(sources: Sources, member: str) -> int:
    """Members of HTTPStatus are (value, phrase, description) or a value alone."""
    value = _assigned(sources.cls("http/__init__.py", "HTTPStatus").body, member)
    first = value.elts[0] if isinstance(value, ast.Tuple) else value
    return int(ast.literal_eval(first))


def _methods(node: ast.ClassDef) -> list[str]:
    return [part.name for part in node.body if isinstance(part, ast.FunctionDef)]


Answer = Callable[[Sources], object]
ANSWERS: Mapping[str, Answer] = {
    "email-message-classes": lambda s: len(s.classes("email/message.py")),
    "logging-handler-classes": lambda s: len(s.classes("logging/handlers.py")),
    "cookiejar-classes": lambda s: len(s.classes("http/cookiejar.py")),
    "modules-of-http": lambda s: sum(name.startswith("http/") for name in s.texts),
    "modules-of-all": lambda s: len(s.texts),
    "longest-file": lambda s: max(s.texts, key=s.lines),
    "lines-of-json": lambda s: sum(s.lines(name) for name in s.texts if name.startswith("json/")),
    "where-parse_qsl": lambda s: s.definers("parse_qsl"),
    "where-JSONDecodeError": lambda s: s.definers("JSONDecodeError"),
    "where-QueueListener": lambda s: s.definers("QueueListener"),
    "teapot-status": lambda s: _status(s, "IM_A_TEAPOT"),
    "too-many-requests-status": lambda s: _status(s, "TOO_MANY_REQUESTS"),
    "https-port": lambda s: s.value("http/client.py", "HTTPS_PORT"),
    "logging-warning-level": lambda s: s.value("logging/__init__.py", "WARNING"),
    "smtp-handler-base": lambda s: ast.unparse(s.cls("logging/handlers.py", "SMTPHandler").bases[0]),
    "http-connection-line": lambda s: s.cls("http/client.py", "HTTPConnection").lineno,
    "importers-of-base64": lambda s: s.importers("base64"),
    "decoder-raises": lambda s: s.raises("json/decoder.py", "JSONDecodeError"),
    "html-parser-handlers": lambda s: sum(
        name.startswith("handle_") for name in _methods(s.cls("html/parser.py", "HTMLParser"))
    ),
    "urllib-parse-exports": lambda s: len(list(s.value("urllib/parse.py", "__all__"))),  # type: ignore[call-overload]
}


def compute_expected(workspace: Path) -> list[dict[str, object]]:
    """The expected answers, as expected.jsonl has them. Raises CannotPrepare."""
    sources = Sources(workspace)
    rows: list[dict[str, object]] = []
    for name, answer in ANSWERS.items():
        try:
            value = answer(sources)
        except (KeyError, StopIteration, ValueError) as error:
            raise CannotPrepare(
                f"the question {name} has no answer in this Python ({error!r}): run this script with another one"
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
    """workspace/ and expected.jsonl in `folder`; gives how many answers there are."""
    copy_packages(folder / "workspace")
    rows = compute_expected(folder / "workspace")
    (folder / "expected.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Copies sources of this Python, and computes what the batch's answers are."
    )
    parser.add_argument("--into", type=Path, default=HERE, help="folder to write to; default: this example's")
    asked = parser.parse_args()
    try:
        asked.into.mkdir(parents=True, exist_ok=True)
        count = prepare(asked.into)
    except (CannotPrepare, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    version = ".".join(map(str, sys.version_info[:3]))
    sys.stdout.write(
        f"{asked.into / 'workspace'}: {', '.join(PACKAGES)} of Python {version}; {count} expected answers\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
