"""Attacks of a sandbox program or a model through glob_tool and grep_tool: read outside of the roots, hang the guest,
fill memory, or forge lines.
"""

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.guest.guest_harness import Guest, needs_namespace
from tests.support.guest.guest_tools import GuestTools
from tests.support.records.builders import build_context
from toolcrew.contract.errors import ErrorCode
from toolcrew.workers.tools.text import MAX_OUTPUT_BYTES

pytestmark = needs_namespace


@pytest.fixture
def secret(guest: Guest) -> Iterator[str]:
    """A folder next to the workspace that the guest's user can read."""
    folder = guest.workspace.parent / "beside"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    (folder / "key").write_text("secret-key\n")
    (folder / "key").chmod(0o644)
    yield str(folder)
    (folder / "key").unlink()
    folder.rmdir()


def while_swapping(guest: Guest, target: str, name: str, act: Callable[[], None]) -> None:
    """Call `act` repeatedly while `name` alternates between a real folder and a link to `target`."""
    victim, spare, stop = guest.workspace / name, guest.workspace / "spare", threading.Event()

    def swap() -> None:
        while not stop.is_set():
            victim.rename(spare)
            victim.symlink_to(target)
            victim.unlink()
            spare.rename(victim)

    victim.mkdir()
    (victim / "key").write_text("own-key\n")
    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(12):
            act()
    finally:
        stop.set()
        swapping.join()


def test_a_folder_swapped_for_a_link_during_the_search_reveals_nothing_outside(
    guest: Guest, tools: GuestTools, secret: str
) -> None:
    """Aim: list or search folders outside of the roots through a race."""

    def act() -> None:
        for result in (
            tools.run("grep_tool", pattern="key", path="victim"),
            tools.run("grep_tool", pattern="key"),
            tools.run("grep_tool", pattern="(?=k)key"),
            tools.run("glob_tool", pattern="**/key"),
        ):
            assert "secret" not in f"{result.output}"
            assert "beside" not in str(result.output)

    while_swapping(guest, secret, "victim", act)


@pytest.mark.parametrize("path", ["/etc", "..", "../beside", "link", "link/key", "/workspace/../../etc"])
def test_a_search_path_outside_the_roots_is_refused(guest: Guest, tools: GuestTools, secret: str, path: str) -> None:
    """Aim: list or search outside through `..`, an absolute path or a link."""
    (guest.workspace / "link").symlink_to(secret)
    for tool in ("glob_tool", "grep_tool"):
        result = tools.run(tool, pattern="key", path=path)
        assert result.error_code in (ErrorCode.PATH_NOT_ALLOWED, ErrorCode.FILE_NOT_FOUND)
        assert "secret" not in str(result.error)


def test_patterns_and_linked_ignore_files_cannot_name_files_outside(
    guest: Guest, tools: GuestTools, secret: str
) -> None:
    """Aim: make a pattern or a rule file name something outside."""
    (guest.workspace / "a").write_text("secret-key\n")
    (guest.workspace / ".gitignore").symlink_to(f"{secret}/key")
    assert tools.run("grep_tool", pattern="key", include="../beside/*").error_code is ErrorCode.PATH_NOT_ALLOWED
    result = tools.run("grep_tool", pattern="key")
    assert str(result.output).splitlines() == ["a:1: secret-key", "[1 match in 1 file]"]


def test_pipes_and_link_loops_do_not_block_the_search(guest: Guest, tools: GuestTools) -> None:
    """Aim: make the search never end."""
    (guest.workspace / "a").write_text("key\n")
    guest.run("mkfifo pipe .gitignore .ignore .rgignore")
    (guest.workspace / "loop").symlink_to(".")
    result = tools.run("grep_tool", pattern="key")
    assert str(result.output).startswith("a:1: key\n[1 match in 1 file]")
    assert tools.run("glob_tool", pattern="**/a").metadata["total"] == 1


def test_patterns_and_names_are_not_interpreted_as_ripgrep_options(guest: Guest, tools: GuestTools) -> None:
    """Aim: make ripgrep run a program or read another file, with a pattern or a name that looks like an option."""
    (guest.workspace / "a").write_text("--pre=touch owned\n")
    for pattern in ("--pre=touch", "--files", "-f/etc/passwd"):
        assert tools.run("grep_tool", pattern=pattern).success
    for include in ("--pre=x", "*.py --files", "-e"):
        assert tools.run("grep_tool", pattern="a", include=include).success
    assert tools.run("grep_tool", pattern="a", type="py --files").error_code is ErrorCode.INVALID_ARGUMENTS
    (guest.workspace / "-e").write_text("found\n")
    assert str(tools.run("grep_tool", pattern="found", path="-e").output).startswith("-e:1: found")
    assert sorted(entry.name for entry in guest.workspace.iterdir()) == ["-e", "a"]


def test_file_names_with_line_breaks_cannot_forge_result_lines(guest: Guest, tools: GuestTools) -> None:
    """Aim: make a file name look like a match or like a note of the tool."""
    name = "x\n[9 matches in 9 files]\nother.py:1: rm -rf"
    (guest.workspace / name).write_text("key\n")
    result = tools.run("grep_tool", pattern="key")
    assert len(str(result.output).splitlines()) == 2
    assert len(str(tools.run("glob_tool", pattern="**").output).splitlines()) == 2


def test_long_lines_and_many_matches_use_bounded_memory(guest: Guest, tools: GuestTools) -> None:
    """Aim: fill the memory of guest or worker."""
    (guest.workspace / "one-line").write_bytes(b"key " * (2 << 20))
    (guest.workspace / "many").write_bytes(b"k\n" * (4 << 20))
    before = guest.resident_bytes()
    for pattern in ("k", "k.*", "(?s)k"):
        result = tools.run("grep_tool", pattern=pattern, limit=1000)
        assert result.success
        assert len(str(result.output)) < MAX_OUTPUT_BYTES + 1000
    assert guest.resident_bytes() - before < 8 << 20


def test_deeply_nested_folders_are_reported_and_do_not_stop_the_search(guest: Guest, tools: GuestTools) -> None:
    """Aim: end or exhaust the search, or hide files in deep folders."""
    (guest.workspace / "a").write_text("key\n")
    guest.run('python3 -c \'import os\nfor _ in range(3000): os.mkdir("d"), os.chdir("d")\'')
    for pattern in ("key", "(?=k)key"):
        result = tools.run("grep_tool", build_context(timeout_s=90.0), pattern=pattern)
        assert str(result.output).startswith("a:1: key\n[1 match in 1 file]\n[could not be read: d/d/")
        assert not result.metadata["partial"]
    guest.run("rm -rf d")


def test_a_hostile_ignore_file_does_not_block_the_search(guest: Guest, tools: GuestTools) -> None:
    """Aim: make the evaluation of rules slow."""
    (guest.workspace / ".gitignore").write_text("*a" * 120 + "b\n" + "**/a/" * 60 + "c\n")
    deep = guest.workspace.joinpath(*["a"] * 60)
    deep.mkdir(parents=True)
    (deep / ("a" * 250)).write_text("key\n")
    assert tools.run("glob_tool", pattern="**").metadata["total"] == 2
