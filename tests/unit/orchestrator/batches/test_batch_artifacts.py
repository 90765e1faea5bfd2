"""Only an item's files that match its patterns are copied out, into a folder that belongs to that item alone."""

import contextlib
import io
import os
import shutil
import socket
import string
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.guest.local_guest import of_this_host
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.batches.artifacts import (
    MATCH_S,
    NO_FILE,
    ArtifactsNotWritten,
    Pattern,
    artifact_folder,
    build_folder_name,
    choose_paths,
    copy_artifacts,
)
from toolcrew.orchestrator.sessions.workspace_files import WorkspaceListing, build_list_command, parse_listing
from toolcrew.store.batches import MAX_ID_CHARS
from toolcrew.workers.sandboxd.archives.packing import pack_list

slow_property = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
IDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=MAX_ID_CHARS) | st.text(
    "aAbB./\0%~+ \u0130\u00e9", min_size=1, max_size=12
)


@slow_property
@given(IDS)
def test_a_folder_name_is_one_portable_path_component(custom_id: str) -> None:
    name = build_folder_name(custom_id)
    assert set(name) <= set(string.ascii_letters + string.digits + "-_.%~+")
    assert 0 < len(name) <= 255
    assert not name.startswith(".")
    assert not name.endswith(".")
    assert artifact_folder(Path("/artifacts"), custom_id).parent == Path("/artifacts")


@slow_property
@given(st.lists(IDS, min_size=2, max_size=6, unique=True))
@example(["A" * MAX_ID_CHARS, "a" * MAX_ID_CHARS])
def test_different_ids_have_folder_names_that_differ_ignoring_case(ids: list[str]) -> None:
    assert len({build_folder_name(custom_id).lower() for custom_id in ids}) == len(ids)


@slow_property
@given(IDS)
def test_an_unshortened_folder_name_decodes_to_the_id(custom_id: str) -> None:
    name = build_folder_name(custom_id)
    if "%+" not in name:
        assert unquote(name.partition("%~")[0]) == custom_id


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("out.csv", "out.csv", True),
        ("out.csv", "deep/out.csv", False),
        ("*.csv", "out.csv", True),
        ("*.csv", "deep/out.csv", False),
        ("**/*.csv", "out.csv", True),
        ("**/*.csv", "very/deep/out.csv", True),
        ("deep", "deep/er/out.csv", True),
        ("deep/", "deep/er/out.csv", True),
        ("/workspace/deep", "deep/out.csv", True),
        ("/workspace", "out.csv", True),
        (".", "deep/out.csv", True),
        ("**", "deep/out.csv", True),
        ("d*/out.csv", "deep/er/out.csv", False),
        ("d*/**/out.csv", "deep/er/out.csv", True),
        ("d*/**/out.csv", "deep/out.csv", True),
        ("deep/**", "deep/out.csv", True),
        ("deep/**", "deeper/out.csv", False),
        ("[a-c]?.txt", "b1.txt", True),
        ("[a-c]?.txt", "B1.txt", False),
        ("*", ".hidden", True),
        ("a\nb", "a\nb", True),
    ],
)
def test_a_pattern_matches_paths_relative_to_the_workspace(pattern: str, path: str, matches: bool) -> None:
    assert bool(choose_paths([path], [pattern])[0]) is matches


@pytest.mark.parametrize("text", ["", "..", "a/../b", "/etc", "/workspaces/a", "/workspace/../etc", "a\0b", "a" * 1025])
def test_a_pattern_outside_the_workspace_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Pattern(text)


def test_a_backtracking_pattern_ends_quickly() -> None:
    assert not choose_paths(["/".join(["a" * 250] * 60)], ["/".join(["**", "*a*a*a*a*a*a*b"] * 8)])[0]


def test_a_slow_pattern_search_ends_at_the_time_limit() -> None:
    patterns = ["/".join(["**", f"*x{number}*y"] * 40) for number in range(100)]
    paths = ["/".join(f"x{path}_{at}" for at in range(100)) for path in range(1000)]
    began = time.thread_time()
    with pytest.raises(ToolFailure) as failure:
        choose_paths(paths, patterns)
    assert failure.value.code is ErrorCode.INVALID_PATTERN
    assert time.thread_time() - began < 5 * MATCH_S


def test_many_patterns_with_many_folder_wildcards_are_matched_without_backtracking() -> None:
    """100 patterns of 40 `**` and 2,000 deep paths: 8,000 steps, and 200,000 names."""
    patterns = ["/".join(["**", "a"] * 40) + f"/x{number}" for number in range(100)]
    paths = ["/".join(["a"] * 99) + f"/x{number}" for number in range(2000)]
    selected, unmatched = choose_paths(paths, patterns)
    assert len(selected) == 100
    assert unmatched == []


@given(
    st.lists(
        st.lists(st.sampled_from(["**", "*", "a", "b", "a*", "?", "[ab]", "*b"]), min_size=1, max_size=5), max_size=4
    ),
    st.sets(st.lists(st.sampled_from(["a", "b", "ab", "c"]), min_size=1, max_size=5).map("/".join), max_size=5),
)
def test_a_set_of_patterns_selects_what_each_pattern_selects(patterns: list[list[str]], paths: set[str]) -> None:
    def matches(steps: Sequence[str], names: Sequence[str]) -> bool:
        if not steps or not names:
            return all(step == "**" for step in steps)
        if steps[0] == "**":
            return matches(steps[1:], names) or matches(steps, names[1:])
        return fnmatchcase(names[0], steps[0]) and matches(steps[1:], names[1:])

    expected = [path for path in sorted(paths) if any(matches(steps, path.split("/")) for steps in patterns)]
    assert choose_paths(paths, ["/".join(steps) for steps in patterns])[0] == expected


def test_files_are_copied_with_their_folders_and_links_to_files_become_files(tmp_path: Path) -> None:
    exported, target = tmp_path / "export", tmp_path / "artifacts" / "a"
    (exported / "out").mkdir(parents=True)
    (exported / "out" / "a.csv").write_text("1,2")
    (exported / "out" / "run.sh").write_text("#!/bin/sh")
    (exported / "out" / "run.sh").chmod(0o755)
    (exported / "out" / "link").symlink_to("a.csv")
    (exported / "out" / "folder").symlink_to(".")
    (exported / "out" / "broken").symlink_to("none")
    (exported / "out" / "leading-out").symlink_to("/etc/passwd")
    (exported / "rest.txt").write_text("rest")
    copied = copy_artifacts(exported, ["out", "*.md"], target)
    assert copied.paths == ("out/a.csv", "out/link", "out/run.sh")
    assert [path for path, _ in copied.skipped] == ["out/broken", "out/folder", "out/leading-out"]
    assert (copied.unmatched, copied.bytes) == (("*.md",), 15)
    assert {path.name: path.read_text() for path in (target / "out").iterdir()} == {
        "a.csv": "1,2",
        "link": "1,2",
        "run.sh": "#!/bin/sh",
    }
    assert not (target / "out" / "link").is_symlink()
    assert os.access(target / "out" / "run.sh", os.X_OK)


def test_an_existing_artifact_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    exported, target = tmp_path / "export", tmp_path / "a"
    for folder, text in ((exported, "new"), (target, "old")):
        folder.mkdir()
        (folder / "a.txt").write_text(text)
    (target / "mine.txt").write_text("mine")
    (target / "a.txt").unlink()
    (target / "a.txt").symlink_to("mine.txt")
    copy_artifacts(exported, ["a.txt"], target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a.txt": "new", "mine.txt": "mine"}


def test_a_blocked_target_path_is_reported_and_nothing_is_written_outside(tmp_path: Path) -> None:
    (tmp_path / "export" / "out").mkdir(parents=True)
    (tmp_path / "export" / "out" / "a.txt").write_text("x")
    (tmp_path / "file").write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "out").symlink_to(tmp_path)
    for target in (tmp_path / "file", tmp_path / "linked"):
        with pytest.raises(ArtifactsNotWritten, match=r"'out/a\.txt' cannot be copied .* then resume"):
            copy_artifacts(tmp_path / "export", ["out"], target)
    assert not (tmp_path / "a.txt").exists()


@slow_property
@given(IDS, st.integers(min_value=0))
def test_ids_that_differ_only_in_case_have_different_folder_names(custom_id: str, which: int) -> None:
    position = which % len(custom_id)
    swapped = custom_id[:position] + custom_id[position].swapcase() + custom_id[position + 1 :]
    assert swapped == custom_id or build_folder_name(swapped).lower() != build_folder_name(custom_id).lower()


def build_odd_workspace(folder: Path) -> None:
    """Make a file, a named pipe, a socket, and links, as an untrusted program may leave them."""
    (folder / "a.txt").write_text("a")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(folder):
        listener.bind("sock")
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "broken\n").symlink_to("none")


def test_the_list_of_a_workspace_says_what_is_no_file(tmp_path: Path) -> None:
    build_odd_workspace(tmp_path)

    def run(*, only_others: bool) -> WorkspaceListing:
        command = of_this_host(build_list_command(str(tmp_path), only_others))
        return parse_listing(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    others = {"pipe": "p", "sock": "s", "out": "l", "broken\n": "l"}
    assert run(only_others=False) == WorkspaceListing(("a.txt",), others)
    assert run(only_others=True) == WorkspaceListing((), others)


def test_files_that_their_own_user_may_not_read_are_listed_and_packed_and_keep_their_modes() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # another user may enter it
    try:
        (folder / "closed").mkdir()
        (folder / "closed" / "a.txt").write_text("a")
        (folder / "list").write_bytes(b"closed/a.txt\0")
        other_user = 65534 if os.geteuid() == 0 else os.geteuid()
        for path in (folder, folder / "closed", folder / "closed" / "a.txt", folder / "list"):
            os.chown(path, other_user, -1)
        (folder / "closed" / "a.txt").chmod(0)
        (folder / "closed").chmod(0)

        def run(command: list[str]) -> bytes:
            return subprocess.run(
                command, user=other_user, cwd="/", stdout=subprocess.PIPE, check=True, timeout=60
            ).stdout

        listing = parse_listing(run(of_this_host(build_list_command(str(folder), only_others=False))))
        assert sorted(listing.files) == ["closed/a.txt", "list"]
        with tarfile.open(fileobj=io.BytesIO(run(pack_list(str(folder / "list"), str(folder))))) as archive:
            assert archive.getnames() == ["closed/a.txt"]
        assert not (folder / "list").exists()
        assert (folder / "closed").stat().st_mode & 0o777 == 0
        (folder / "closed").chmod(0o700)
        assert (folder / "closed" / "a.txt").stat().st_mode & 0o777 == 0
    finally:
        shutil.rmtree(folder)


def test_what_cannot_be_copied_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "a.txt").write_text("a")
    others = {"pipe": NO_FILE["p"], "sock": NO_FILE["s"], "disk": NO_FILE["b"], "elsewhere": NO_FILE["p"]}
    copied = copy_artifacts(tmp_path / "export", ["a.txt", "pipe", "s*", "disk", "none"], tmp_path / "target", others)
    assert copied.paths == ("a.txt",)
    assert dict(copied.skipped) == {name: others[name] for name in ("disk", "pipe", "sock")}
    assert copied.unmatched == ("none",)
    assert len(copied.missing()) == 4
