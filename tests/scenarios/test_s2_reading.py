"""Rows S2-01 to S2-04, S4-16 and S4-17 of the scenarios: reading a file, a range of a file, and a missing file."""

from collections.abc import Iterator

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace, running_guest
from tests.support.guest.guest_tools import GuestTools
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.tools.builtin import build_registry

pytestmark = needs_namespace


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    with running_guest() as running:
        (running.workspace / "src").mkdir()
        (running.workspace / "src" / "app.py").write_text("".join(f"line {number}\n" for number in range(1, 101)))
        (running.workspace / "long.log").write_text("".join(f"{number}\n" for number in range(1, 2501)))
        yield running


@pytest.fixture
def tools(guest: Guest) -> GuestTools:
    return GuestTools(guest)


def numbered(first: int, last: int) -> list[str]:
    return [f"{number}\tline {number}" for number in range(first, last + 1)]


def test_s2_01_reading_a_range_of_lines_returns_less_text_than_the_file(tools: GuestTools) -> None:
    whole = tools.run("read_tool", file_path="src/app.py")
    part = tools.run("read_tool", file_path="src/app.py", offset=10, limit=5)
    assert (whole.success, part.success) == (True, True)
    assert len(str(part.output)) < len(str(whole.output)) / 10


def test_s2_02_a_complete_file_is_returned(tools: GuestTools) -> None:
    result = tools.run("read_tool", file_path="src/app.py")
    assert str(result.output).split("\n") == [*numbered(1, 100), "[end of file: 100 lines]"]


def test_s2_02_at_most_2000_lines_are_read_by_default_and_the_cut_is_marked(tools: GuestTools) -> None:
    result = tools.run("read_tool", file_path="long.log")
    lines = str(result.output).split("\n")
    assert (len(lines), lines[1999], lines[2000]) == (
        2001,
        "2000\t2000",
        "[lines 1-2000 of 2500; continue with offset=2001]",
    )
    assert result.truncated
    rest = tools.run("read_tool", file_path="long.log", offset=2001)
    assert str(rest.output).split("\n")[-1] == "[end of file: 2500 lines]"


def test_s2_02_an_explicit_limit_above_2000_lines_is_honoured(tools: GuestTools) -> None:
    result = tools.run("read_tool", file_path="long.log", limit=2400)
    assert str(result.output).split("\n")[2399:] == ["2400\t2400", "[lines 1-2400 of 2500; continue with offset=2401]"]


def test_s2_03_exactly_lines_10_to_50_are_returned(tools: GuestTools) -> None:
    result = tools.run("read_tool", file_path="src/app.py", offset=10, limit=41)
    assert str(result.output).split("\n") == [*numbered(10, 50), "[lines 10-50 of 100; continue with offset=51]"]


@pytest.mark.parametrize("wrong", ["src/ap.py", "app.py", "src/App.py", "scr/app.py", "src/app.ts"])
def test_s2_04_a_missing_file_is_an_error_with_suggested_paths(tools: GuestTools, wrong: str) -> None:
    result = tools.run("read_tool", file_path=wrong)
    assert (result.success, result.error_code) == (False, ErrorCode.FILE_NOT_FOUND)
    assert f"/{wrong}: no such file or directory" in str(result.error)
    assert "did you mean src/app.py?" in str(result.error)


def test_s2_04_paths_outside_the_allowed_folders_are_not_suggested(guest: Guest, tools: GuestTools) -> None:
    (guest.workspace.parent / "secret.txt").write_text("")
    for path in ("secret.txt", "../secret.tx", str(guest.workspace.parent / "secret.tx")):
        assert "secret.txt" not in str(tools.run("read_tool", file_path=path).error).replace(f"/{path}:", "")
    assert tools.run("read_tool", file_path="../secret.txt").error_code is ErrorCode.PATH_NOT_ALLOWED


def test_s4_16_the_registry_has_tools_to_read_write_and_edit_files() -> None:
    registry = build_registry()
    for name in ("read_tool", "write_tool", "edit_tool"):
        assert registry.get(name) is not None


def test_s4_17_a_file_is_read_by_path_and_range_and_a_missing_file_is_an_error(tools: GuestTools) -> None:
    assert "1\tline 1\n" in str(tools.run("read_tool", file_path="src/app.py").output)
    assert (
        tools.run("read_tool", file_path="src/app.py", offset=100).output == "100\tline 100\n[end of file: 100 lines]"
    )
    assert tools.run("read_tool", file_path="gone.py").error_code is ErrorCode.FILE_NOT_FOUND


def test_s4_17_a_range_after_the_end_is_an_error_with_the_number_of_lines(tools: GuestTools) -> None:
    result = tools.run("read_tool", file_path="src/app.py", offset=101)
    assert (result.error_code, "has 100 lines, none at 101" in str(result.error)) == (
        ErrorCode.OFFSET_OUT_OF_RANGE,
        True,
    )


def test_s4_17_a_long_line_is_read_to_its_end_by_following_the_footers(guest: Guest, tools: GuestTools) -> None:
    line = "".join(f"[{number}]" for number in range(2000))
    (guest.workspace / "minified.js").write_text(line)
    text, arguments = "", {"offset": 1}
    while True:
        shown, _, footer = str(tools.run("read_tool", file_path="minified.js", **arguments).output).rpartition("\n")
        text += shown.partition("\t")[2].partition("\n[note")[0]
        if "continue with" not in footer:
            break
        arguments = {
            name: int(value) for name, value in (pair.split("=") for pair in footer[:-1].partition("with ")[2].split())
        }
    assert text == line
