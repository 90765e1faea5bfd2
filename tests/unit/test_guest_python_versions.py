"""The guest runs on the Python of any image, from 3.9 on, and reports an older one. These checks need no other
Python; scripts/check-guest-pythons runs the guest on the real versions.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest_harness import GUEST_PARENT, needs_namespace, running_guest

GUEST = GUEST_PARENT / "guest"
FILES = sorted(GUEST.rglob("*.py"))
# Names added after 3.9: modules, attributes of any object, and keyword arguments of calls.
NEWER_MODULES = {"tomllib"}
GONE_MODULES = {
    "aifc",
    "asynchat",
    "asyncore",
    "audioop",
    "binhex",
    "cgi",
    "cgitb",
    "chunk",
    "crypt",
    "distutils",
    "formatter",
    "imghdr",
}
GONE_MODULES |= {
    "imp",
    "lib2to3",
    "mailcap",
    "nntplib",
    "ossaudiodev",
    "parser",
    "pipes",
    "smtpd",
    "sndhdr",
    "spwd",
    "symbol",
    "telnetlib",
}
GONE_MODULES |= {"uu", "xdrlib"}
NEWER_NAMES = {
    "pairwise",
    "batched",
    "bit_count",
    "aiter",
    "anext",
    "eventfd",
    "eventfd_read",
    "eventfd_write",
    "splice",
    "EncodingWarning",
}
NEWER_NAMES |= {
    "orig_argv",
    "stdlib_module_names",
    "ExceptionGroup",
    "BaseExceptionGroup",
    "add_note",
    "file_digest",
    "StrEnum",
    "UTC",
}
NEWER_NAMES |= {
    "NOFLAG",
    "exp2",
    "cbrt",
    "getencoding",
    "process_cpu_count",
    "login_tty",
    "sumprod",
    "PIDFD_NONBLOCK",
    "aclosing",
}
NEWER_KEYWORDS = {
    "zip": {"strict"},
    "bisect": {"key"},
    "bisect_left": {"key"},
    "bisect_right": {"key"},
    "insort": {"key"},
}
NEWER_KEYWORDS |= {
    "dataclass": {"slots", "kw_only", "match_args"},
    "mkdtemp": {"delete"},
    "map": {"strict"},
    "read_text": {"newline"},
}
# As `os.unshare`: names that are only newer where their module has them.
_MODULE_NAMES = {
    ("contextlib", "chdir"),
    ("contextlib", "aclosing"),
    ("os", "unshare"),
    ("os", "setns"),
    ("sys", "exception"),
    ("operator", "call"),
}


def walk_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run time evaluates, without annotations and without code for type checkers or newer
    Pythons.
    """
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        if (
            isinstance(node, (ast.If, ast.IfExp))
            and name == "body"
            and ast.unparse(node.test).startswith(("TYPE_CHECKING", "sys.version_info >="))
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk_run_time(child)


def find_newer(tree: ast.Module) -> list[str]:
    """Return the names in a file that exist only after Python 3.9, or only up to Python 3.12."""
    found = []
    for node in walk_run_time(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [
                f"{line}: module {name}" for name in modules if name.split(".")[0] in NEWER_MODULES | GONE_MODULES
            ]
            if isinstance(node, ast.ImportFrom):
                found += [f"{line}: {alias.name}" for alias in node.names if alias.name in NEWER_NAMES]
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in NEWER_NAMES or (owner, node.attr) in _MODULE_NAMES:
                found.append(f"{line}: .{node.attr}")
        if isinstance(node, ast.Name) and node.id in NEWER_NAMES:
            found.append(f"{line}: {node.id}")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            found += [
                f"{line}: {called}({word.arg}=)" for word in node.keywords if word.arg in NEWER_KEYWORDS.get(called, ())
            ]
            if called in ("isinstance", "issubclass") and isinstance(node.args[-1], ast.BinOp):
                found.append(f"{line}: {called} with X | Y")
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and _is_newer_pattern(node.value):
            found.append(f"{line}: a pattern with an atomic group")
    return found


def _is_newer_pattern(text: str | bytes) -> bool:
    return (b"(?>" if isinstance(text, bytes) else "(?>") in text  # type: ignore[operator]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(GUEST)))
def test_the_guest_needs_no_python_newer_than_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    assert find_newer(tree) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(GUEST)))
def test_no_annotation_is_looked_at_when_the_guest_runs(path: Path) -> None:
    """`X | None` in one would end the guest on 3.9."""
    tree = ast.parse(path.read_text())
    has_annotations = any(isinstance(node, (ast.AnnAssign, ast.arg, ast.FunctionDef)) for node in ast.walk(tree))
    assert not has_annotations or "from __future__ import annotations" in path.read_text()


@pytest.mark.parametrize(
    "source",
    [
        "zip(a, b, strict=True)",
        "itertools.pairwise(x)",
        "import tomllib",
        "isinstance(x, int | str)",
        "(1).bit_count()",
        "import pipes",
        "os.eventfd(0)",
        "from itertools import pairwise",
        "bisect_left(a, x, key=f)",
        "contextlib.chdir(x)",
        "re.compile('(?>a)')",
    ],
)
def test_what_is_newer_is_found(source: str) -> None:
    assert find_newer(ast.parse(source))


def test_what_only_a_type_checker_or_a_newer_python_reads_is_not() -> None:
    source = (
        "if TYPE_CHECKING:\n    import tomllib\nif sys.version_info >= (3, 11):\n    import tomllib\nx: int | str = 1\n"
    )
    source += "group = '(?>' if sys.version_info >= (3, 11) else '(?:'\n"
    assert find_newer(ast.parse(source)) == []


@needs_namespace
def test_patterns_of_many_parts_match_on_the_guests_own_python() -> None:
    with running_guest() as guest:
        guest.run("mkdir -p a/b/c d; touch a/b/c/one_two_three.py a/b/one_three_two.py d/one_two_three.py")
        limits = {"limit": 10, "max_bytes": 9999, "timeout_s": 9, "kind": "file"}
        assert guest.request("glob", pattern="*ne*two*th*.py", path=".", **limits)["total"] == 2
        done = guest.request("glob", pattern="**/b/**/{c,x}/**/*_*_*.py", path=".", **limits)
        assert (done.bytes_of("lines"), done["bad_rules"]) == (b"a/b/c/one_two_three.py\n", [])


# --- the entry point --------------------------------------------------------------------------------------------------


def boot(before: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the entry point as a program, after some lines of Python."""
    code = (
        f"import sys, runpy\nsys.path.insert(0, {str(GUEST_PARENT)!r})\n{before}\n"
        f"runpy.run_path({str(GUEST / 'boot.py')!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *arguments], capture_output=True, text=True, timeout=30
    )


def test_the_entry_point_can_be_read_by_any_python_3() -> None:
    source = (GUEST / "boot.py").read_text()
    assert "from __future__" not in source
    assert 'f"' not in source
    ast.parse(source, feature_version=(3, 4))


def test_an_old_python_is_told_in_one_line() -> None:
    done = boot("sys.version_info = (3, 6, 9)")
    assert done.stderr == "toolcrew guest: this image's python3 is 3.6; Python 3.9 or later is needed\n"
    assert done.returncode == 1


def test_a_python_without_a_part_of_its_library_is_told_in_one_line() -> None:
    done = boot("sys.modules['ctypes'] = None")
    assert done.stderr.startswith("toolcrew guest: this image's python3 lacks a part of the standard library: ")
    assert "ctypes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_option_is_told_in_one_line() -> None:
    done = boot("", "--life", "nan")
    assert done.stderr == "toolcrew guest: --life nan is no number of seconds\n"
