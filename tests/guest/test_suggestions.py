"""Suggestions for a path that does not exist: ranked, bounded, and only from inside the workspace."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT, RIPGREP

assert GUEST_PARENT
from guest.fields import escaped  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402
from guest.search import suggestions  # noqa: E402
from guest.search.suggestions import missing_file  # noqa: E402


class Tree:
    """A separate workspace, /tmp and output folder."""

    def __init__(self, base: Path) -> None:
        self.workspace = base / "ws"
        self.tmp = base / "tmp"
        self.output = base / "output"
        for folder in (self.workspace, self.tmp, self.output / ".state"):
            folder.mkdir(parents=True)
        self.paths = GuestPaths((bytes(self.workspace), bytes(self.tmp)), bytes(self.output), ripgrep=RIPGREP)

    def make(self, *names: str) -> None:
        for name in names:
            path = self.workspace / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def suggest(self, path: str) -> list[str]:
        """Return the suggested paths, in order."""
        failure = missing_file(path, self.paths)
        assert failure.code == "FILE_NOT_FOUND"
        suggestions = failure.message.partition("; did you mean ")[2].partition("?")[0]
        return suggestions.replace(" or ", ", ").split(", ") if suggestions else []


LIMIT_S = suggestions.MAX_S


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    # On a busy machine the search would end before it has found anything.
    monkeypatch.setattr(suggestions, "MAX_S", 60.0)
    return Tree(tmp_path)


def test_suggestions_are_ranked_by_similarity(tree: Tree) -> None:
    tree.make("z/main.py", "Main.py", "mian.py", "main.ts", "other.py")
    assert tree.suggest("main.py") == ["z/main.py", "Main.py", "mian.py", "main.ts"]


@pytest.mark.parametrize("target", ["nowhere", "/etc/nowhere", "a\nb"])
def test_a_link_without_its_target_is_named_as_one(tree: Tree, target: str) -> None:
    tree.make("dangling.txt")
    (tree.workspace / "dangling").symlink_to(target)
    message = missing_file("dangling", tree.paths).message
    assert f"a link to {escaped(target.encode())}" in message
    assert "did you mean" not in message


def test_at_most_five_paths_are_suggested_nearest_first(tree: Tree) -> None:
    tree.make(*(f"{letter}/deep/x.py" for letter in "abcdefgh"), "src/deep/x.py")
    assert tree.suggest("src/dep/x.py")[0] == "src/deep/x.py"
    assert len(tree.suggest("src/dep/x.py")) == 5


def test_the_message_names_the_path_and_the_working_directory(tree: Tree) -> None:
    (tree.workspace / "sub").mkdir()
    (tree.output / ".state" / "folder").write_bytes(bytes(tree.workspace / "sub"))
    message = missing_file("../a/./gone.txt", tree.paths).message
    assert message.startswith(
        f"{tree.workspace}/a/gone.txt: no such file or directory; the working directory is {tree.workspace}/sub;"
    )
    assert "no name like it was found" in message


def test_a_suggestion_is_valid_from_the_working_directory(tree: Tree) -> None:
    tree.make("sub/notes.txt", "notes.txt")
    (tree.tmp / "notes.txt").write_text("")
    (tree.output / ".state" / "folder").write_bytes(bytes(tree.workspace / "sub"))
    assert set(tree.suggest("x/notes.txt")) == {"notes.txt", f"{tree.workspace}/notes.txt", f"{tree.tmp}/notes.txt"}


def test_no_path_outside_the_roots_is_suggested(tree: Tree) -> None:
    secret = tree.workspace.parent / "outside"
    secret.mkdir()
    (secret / "secret.txt").write_text("")
    (tree.workspace / "way").symlink_to(secret)
    assert tree.suggest("secret.txt") == []
    assert tree.suggest("way/secrets.txt") == []
    assert tree.suggest(str(secret / "secrets.txt")) == []


def test_files_of_the_guest_state_are_not_suggested(tree: Tree) -> None:
    (tree.output / ".state" / "folder.txt").write_text("")
    (tree.output / "long.txt").write_text("")
    assert tree.suggest("folder.txt") == []
    assert tree.suggest("long.txt") == [f"{tree.output}/long.txt"]


def test_unprintable_names_are_escaped_in_suggestions(tree: Tree) -> None:
    tree.make("dir/a\nb.txt")
    os.mkdir(bytes(tree.workspace) + b"/\xff")
    Path(os.fsdecode(bytes(tree.workspace) + b"/\xff/c\x1b.txt")).write_text("")
    assert tree.suggest("a\nb.txt") == ["dir/a\\nb.txt"]
    assert tree.suggest("c\x1b.txt") == ["\\xff/c\\x1b.txt"]
    assert "\n" not in missing_file("x\ny", tree.paths).message


@pytest.mark.parametrize("path", ["x" * 5000, "d/" * 3000 + "x", "\udcff\udcfe", "-rf", " ", "/", "."])
def test_any_path_gives_a_bounded_message(tree: Tree, path: str) -> None:
    tree.make("a.txt")
    assert len(missing_file(path, tree.paths).message) < 2000


def test_the_suggestion_search_ends_at_its_time_limit(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "MAX_S", -1.0)
    tree.make("d/main.py")
    assert tree.suggest("main.py") == []


def test_a_deep_path_is_searched_within_the_time_limit(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "MAX_S", LIMIT_S)
    deep = "d/" * 1000
    subprocess.run(["mkdir", "-p", tree.workspace / deep], check=True)
    started = time.process_time()
    assert missing_file(deep + "f", tree.paths).code == "FILE_NOT_FOUND"
    assert time.process_time() - started < LIMIT_S + 1.0
    subprocess.run(["rm", "-rf", tree.workspace], check=True)


def test_the_folder_of_the_path_is_searched_first(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "MAX_ENTRIES", 50)
    tree.make(*(f"a/{number}.bin" for number in range(100)), "deep/er/target.txt")
    assert tree.suggest("deep/er/targt.txt") == ["deep/er/target.txt"]


@given(name=st.binary(min_size=1, max_size=20))
def test_an_escaped_name_is_one_printable_line(name: bytes) -> None:
    assert escaped(name).isprintable()
