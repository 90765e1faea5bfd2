"""Rows S2-05 to S2-12 and S4-26 to S4-29 of the scenarios: search of files by name, and of their contents by a
regular expression.
"""

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace, running_guest
from tests.support.guest.guest_tools import GuestTools
from toolcrew.workers.tools.builtin import build_registry

pytestmark = needs_namespace

APP = "import os\n\n\ndef function_name(x):\n    return x\n\n\nfunction_name(1)\n"
FILES = {
    "setup.py": ("def function_name(): ...\n", 100),
    "src/app.py": (APP, 300),
    "src/deep/util.py": ("x = 1\n", 200),
    "src/app.js": ("function_name()\n", 400),
    "README.md": ("call function_name\n", 500),
}


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest() as running:
        for name, (text, changed) in FILES.items():
            path = running.workspace / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (changed, changed))
        yield running


@pytest.fixture
def tools(guest: Guest) -> GuestTools:
    return GuestTools(guest)


def search(tools: GuestTools, tool: str, **arguments: Any) -> list[str]:
    """Return the lines of a successful search, without its last lines in brackets."""
    result = tools.run(tool, **arguments)
    assert result.success, result.error
    return [line for line in str(result.output).splitlines() if not line.startswith("[")]


def test_s2_05_files_are_found_by_glob_patterns(tools: GuestTools) -> None:
    assert search(tools, "glob_tool", pattern="src/*.{py,js}") == ["src/app.js", "src/app.py"]


def test_s2_06_all_python_files_are_found(tools: GuestTools) -> None:
    assert search(tools, "glob_tool", pattern="**/*.py") == ["src/app.py", "src/deep/util.py", "setup.py"]


def test_s2_07_a_directory_is_searched_recursively(tools: GuestTools) -> None:
    assert search(tools, "glob_tool", pattern="**/*", path="src") == ["src/app.js", "src/app.py", "src/deep/util.py"]


def test_s2_08_the_newest_file_is_listed_first_and_the_rest_is_counted(tools: GuestTools) -> None:
    result = tools.run("glob_tool", pattern="**/*", limit=2)
    assert str(result.output).splitlines() == [
        "README.md",
        "src/app.js",
        "[2 of 5; newest first; raise limit (at most 2000) or narrow the pattern]",
    ]


def test_s2_09_contents_are_searched_with_regular_expressions(tools: GuestTools) -> None:
    assert search(tools, "grep_tool", pattern=r"^\s+return \w$") == ["src/app.py:5:     return x"]


def test_s2_10_a_function_definition_is_found_with_path_and_line_number(tools: GuestTools) -> None:
    assert search(tools, "grep_tool", pattern="def function_name") == [
        "src/app.py:4: def function_name(x):",
        "setup.py:1: def function_name(): ...",
    ]


def test_s2_11_only_files_of_a_type_are_searched(tools: GuestTools) -> None:
    found = search(tools, "grep_tool", pattern="function_name", include="*.py")
    assert {line.split(":")[0] for line in found} == {"src/app.py", "setup.py"}


def test_s2_12_a_match_shows_path_line_number_and_text_sorted_by_time(tools: GuestTools) -> None:
    result = tools.run("grep_tool", pattern="function_name")
    assert str(result.output).splitlines() == [
        "README.md:1: call function_name",
        "src/app.js:1: function_name()",
        "src/app.py:4: def function_name(x):",
        "src/app.py:8: function_name(1)",
        "setup.py:1: def function_name(): ...",
        "[5 matches in 4 files]",
    ]


def test_s4_26_both_search_tools_are_registered_as_read_only() -> None:
    specs = [tool.spec for name in ("glob_tool", "grep_tool") if (tool := build_registry().get(name)) is not None]
    assert [(spec.name, spec.read_only, spec.idempotent, spec.requires_permission) for spec in specs] == [
        ("glob_tool", True, True, False),
        ("grep_tool", True, True, False),
    ]


@pytest.mark.parametrize("names", [{"before": 1, "after": 1}, {"context": 1}, {"-B": 1, "-A": 1}, {"-C": 1}])
def test_s4_27_context_lines_and_file_types_are_supported(tools: GuestTools, names: dict[str, int]) -> None:
    found = search(tools, "grep_tool", pattern="return", type="py", **names)
    assert found == ["src/app.py-4- def function_name(x):", "src/app.py:5:     return x", "src/app.py-6- "]


def test_s4_28_a_glob_searches_recursively_and_returns_a_list_of_paths(tools: GuestTools) -> None:
    assert search(tools, "glob_tool", pattern="util.py") == ["src/deep/util.py"]
    assert tools.run("glob_tool", pattern="*.rs").output == "[0 of 0; newest first]"


def test_s4_25_paths_and_patterns_are_never_part_of_a_command(guest: Guest, tools: GuestTools) -> None:
    folder = guest.workspace / "odd"
    names = ["a; touch PWNED", "$(touch PWNED)", "`touch PWNED`", "-rf", 'it\'s "quoted"', "two\nlines"]
    for name in names:
        assert tools.run("write_tool", file_path=f"odd/{name}", content="needle $(touch PWNED)\n").success
        assert "needle" in str(tools.run("read_tool", file_path=f"odd/{name}").output)
        assert tools.run(
            "edit_tool", file_path=f"odd/{name}", old_string="needle", new_string="'; touch PWNED #"
        ).success
        tools.run("glob_tool", pattern=name, path="odd")
        tools.run("grep_tool", pattern="; touch PWNED", include=name, path="odd")
    assert len(list(folder.iterdir())) == len(names)
    assert not list(guest.workspace.rglob("PWNED"))
    shutil.rmtree(folder)


def test_s4_29_a_large_code_base_is_searched_in_reasonable_time(guest: Guest, tools: GuestTools) -> None:
    """20,000 files. The bound is loose, for a busy machine; benchmarks/ compares the search with its peers."""
    root = guest.workspace / "large"
    for number in range(200):
        folder = root / f"package{number}"
        folder.mkdir(parents=True)
        for file in range(100):
            (folder / f"module{file}.py").write_text(f"def function_{number}_{file}():\n    return {file}\n" * 10)
    began = time.monotonic()
    lines = search(tools, "grep_tool", pattern="function_199_99\\b", path="large", limit=5)
    assert search(tools, "glob_tool", pattern="**/module99.py", path="large", limit=5)
    assert time.monotonic() - began < 20
    assert lines[0].startswith("large/package199/module99.py:1:")
    shutil.rmtree(root)


def test_s4_29_results_are_streamed_in_their_final_order(guest: Guest) -> None:
    fields = {"path": ".", "mode": "content", "limit": 100, "max_bytes": 30_000, "max_lines": 2000, "timeout_s": 10}
    request = guest.start("grep", pattern="function_name", **fields)
    pieces = []
    while (frame := guest.next_frame()).header["ev"] != "done":
        assert frame.header["id"] == request
        pieces.append(frame.body.decode())
    assert len(pieces) == 4
    assert [piece.split(":")[0] for piece in pieces] == ["README.md", "src/app.js", "src/app.py", "setup.py"]
