"""A package for a tool of an operator's own, as `toolcrew tools new` writes it: entry point, typed function, limit, and
a test that passes.
"""

import builtins
import importlib.metadata
import importlib.util
import keyword
import re
from pathlib import Path

from contract.errors import ConfigError
from contract.names import BUILTIN_TOOLS

MAX_NAME = 64
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{package}"
version = "0.1.0"
description = "The tool {name}, for the workers of toolcrew."
requires-python = ">=3.11"
dependencies = ["toolcrew"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points."toolcrew.tools"]
{name} = "{name}"

[tool.hatch.build.targets.wheel]
only-include = ["{name}.py"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

_MODULE = '''\
"""The tool {name}, for the workers of toolcrew."""

from collections.abc import Mapping
from typing import Any, Literal

from contract.functions import ErrorCode, ToolFailure, tool

SEPARATORS = {{"comma": ",", "semicolon": ";", "tab": "\\t"}}


def refuse_blank(given: Mapping[str, Any]) -> str | None:
    """A validator: what it returns is the model's error."""
    return None if given["table"].strip() else "give a table with at least one line"


# timeout_s: the hard limit of a call in seconds, after which the worker stops it wherever it is. read_only and
# idempotent: it changes nothing, so it may run beside others and be sent again. One that acts on the world says
# neither, and requires_permission=True where a person is to be asked.
@tool(timeout_s=10, read_only=True, idempotent=True, validators=[refuse_blank])
def {name}(table: str, column: str, separator: Literal["comma", "semicolon", "tab"] = "comma") -> dict[str, float]:
    """Sum up a column of a table: how many numbers it has, and their sum.

    This text is what a model reads. Write in it what the tool does and when to use it.

    Args:
        table: Lines of text; the first one names the columns.
        column: The name of the column.
        separator: What is between two cells.
    """
    head, *lines = table.strip().splitlines()
    names = [name.strip() for name in head.split(SEPARATORS[separator])]
    if column not in names:
        # A ToolFailure tells the model what is wrong and what to do. Any other exception is told as a bug.
        raise ToolFailure(ErrorCode.NO_MATCH, f"there is no column '{{column}}': the columns are {{', '.join(names)}}")
    place = names.index(column)
    try:
        numbers = [float(line.split(SEPARATORS[separator])[place]) for line in lines if line.strip()]
    except (ValueError, IndexError):
        problem = f"the column '{{column}}' needs a number in every line"
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, problem) from None
    return {{"numbers": len(numbers), "sum": sum(numbers)}}
'''

_TEST = '''\
"""The tool as a worker runs it, without any pool: arguments against the schema, validators, hard limit, one result."""

import json

from contract.functions import ErrorCode
from workers.custom.testing import LocalWorker

import {name}

WORKER = LocalWorker({name})
TABLE = "fruit,pieces\\napple,3\\npear,4\\n"


def test_a_column_is_summed_up():
    result = WORKER.call("{name}", {{"table": TABLE, "column": "pieces"}})
    assert result.error is None
    assert json.loads(result.output) == {{"numbers": 2, "sum": 7.0}}


def test_a_model_is_told_what_it_can_do_about_a_failure():
    result = WORKER.call("{name}", {{"table": TABLE, "column": "price"}})
    assert result.error_code == ErrorCode.NO_MATCH
    assert result.error == "there is no column 'price': the columns are fruit, pieces"


def test_arguments_that_do_not_fit_never_reach_the_function():
    blank = WORKER.call("{name}", {{"table": " ", "column": "pieces"}})
    unknown = WORKER.call("{name}", {{"table": TABLE, "column": "pieces", "separator": "dash"}})
    assert [blank.error_code, unknown.error_code] == [ErrorCode.INVALID_ARGUMENTS] * 2


def test_a_call_has_a_hard_limit():
    (spec,) = WORKER.specs()
    assert (spec.name, spec.timeout_s) == ("{name}", 10)
'''

_README = """\
# {package}

The tool `{name}`, for the workers of toolcrew.

```sh
pip install -e '.[test]'
pytest
```

Installed beside a worker of the kind `web`, it is served at the worker's next start:

```sh
pip install .
TOOLCREW_WORKER_KIND=web python -m workers
toolcrew tools show {name}
```

How tools get state, configuration and the model of their caller: `docs/custom-tools.md` of toolcrew.
"""


def write_skeleton(name: str, folder: Path) -> tuple[Path, list[str]]:
    """Make the package of a tool called `name` in a new folder of that name within `folder`. Gives it, and the files in
    it.

    Raises ConfigError with what to do, and writes nothing then: a name that is none or is taken, a folder that is there
    already or cannot be made.
    """
    target = folder / name
    _check_name(name)
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{target} is there already, and nothing is overwritten: choose another NAME, or another folder with --dir"
        )
    _check_importable(name)
    files = build_skeleton(name)
    try:
        target.mkdir(parents=True)
        for path, text in files.items():
            (target / path).parent.mkdir(exist_ok=True)
            (target / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): choose another folder with --dir") from error
    return target, sorted(files)


def build_skeleton(name: str) -> dict[str, str]:
    """Path within the package -> text."""
    templates = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{name}.py": _MODULE,
        f"tests/test_{name}.py": _TEST,
    }
    return {path: text.format(name=name, package=_package(name)) for path, text in templates.items()}


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        fitting = re.sub(r"[^a-z0-9]+", "_", name.lower()).lstrip("_0123456789")[:MAX_NAME].rstrip("_")
        hint = f", such as {fitting}" if fitting else ""
        raise ConfigError(
            f"'{name}' is no name for a tool and its module: write 1 to {MAX_NAME} small letters and digits, a letter "
            f"first, with single '_' between{hint}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name):
        raise ConfigError(f"'{name}' is a word of Python's own: choose another, such as {name}_tool")
    if name in BUILTIN_TOOLS:
        raise ConfigError(f"'{name}' is the name of a built-in tool: choose another, such as my_{name}")


def _check_importable(name: str) -> None:
    """The module would hide another one, or be hidden by it."""
    try:
        is_taken = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        is_taken = True
    if is_taken or _is_installed(_package(name)):
        raise ConfigError(
            f"'{name}' is the name of a Python module or package that is installed here: choose another, such as "
            f"{name}_tool"
        )


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _package(name: str) -> str:
    return name.replace("_", "-")
