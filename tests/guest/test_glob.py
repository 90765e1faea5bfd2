"""glob of the guest: matches of a pattern, their order, and the notice about omitted results."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT, HAS_RIPGREP_14, Guest, needs_namespace
from tests.support.guest.search_harness import Harness

assert GUEST_PARENT
from guest.failures import RequestFailure  # noqa: E402
from guest.search import glob_search  # noqa: E402
from guest.search.glob_patterns import Globs, split_list  # noqa: E402
from guest.search.names import MAX_NAME_CHARS, MAX_NAMES, build_names  # noqa: E402
from guest.search.requests import GlobRequest  # noqa: E402


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_matches_are_sorted_by_newest_and_then_by_path(harness: Harness) -> None:
    for name in ("c.py", "d/e.py", "a.py", "b.py"):
        harness.make(name)
    os.utime(harness.workspace / "a.py", (5, 5))
    os.utime(harness.workspace / "b.py", (5, 5))
    reply = harness.glob("*.py", limit=3)
    assert reply.lines == ["d/e.py", "c.py", "a.py"]
    assert (reply["total"], reply["shown"], reply["cut"]) == (4, 3, False)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", {"a.py", "src/b.py", "src/deep/c.py", ".cfg/d.py"}),
        ("**/*.py", {"a.py", "src/b.py", "src/deep/c.py", ".cfg/d.py"}),
        ("src/*.py", {"src/b.py"}),
        ("./src/*.py", {"src/b.py"}),
        ("src/**/*.py", {"src/b.py", "src/deep/c.py"}),
        ("src/**", {"src/b.py", "src/deep/c.py", "src/deep/x.tar.gz"}),
        ("**/deep/*", {"src/deep/c.py", "src/deep/x.tar.gz"}),
        ("[ab].py", {"a.py", "src/b.py"}),
        ("[!ab].py", {"src/deep/c.py", ".cfg/d.py"}),
        ("[^ab].py", {"src/deep/c.py", ".cfg/d.py"}),
        ("?.py", {"a.py", "src/b.py", "src/deep/c.py", ".cfg/d.py"}),
        ("*.{py,tar.gz}", {"a.py", "src/b.py", "src/deep/c.py", ".cfg/d.py", "src/deep/x.tar.gz"}),
        ("{src/deep,.cfg}/*.py", {"src/deep/c.py", ".cfg/d.py"}),
        ("{a,src/{b,deep/c}}.py", {"a.py", "src/b.py", "src/deep/c.py"}),
        ("a.py", {"a.py"}),
        ("\\a.py", {"a.py"}),
        ("src**", set()),
        ("nothing/*", set()),
        ("a.py/*", set()),
    ],
)
def test_a_pattern_matches_the_expected_paths(harness: Harness, pattern: str, expected: set[str]) -> None:
    for name in ("a.py", "src/b.py", "src/deep/c.py", ".cfg/d.py", "src/deep/x.tar.gz", ".git/config", "src/.hg/e.py"):
        harness.make(name)
    assert set(harness.glob(pattern).lines) == expected


@pytest.mark.parametrize("name", ["app/[slug]/page.tsx", "a{b}.txt", "what?.md", "*.star", "[", "{open"])
def test_an_existing_path_with_pattern_characters_matches_itself(harness: Harness, name: str) -> None:
    harness.make(name)
    harness.make("文.txt")
    assert harness.glob(name).lines == [name], "not twice"
    assert harness.glob("?.txt").lines == ["文.txt"], "one character in any script"


def test_ignored_paths_are_counted_and_included_on_request(harness: Harness) -> None:
    harness.make(".gitignore", "*.log\nbuild/\n!keep.log\n")
    for name in ("a.log", "keep.log", "build/b.log", "build/c/d.log"):
        harness.make(name)
    reply = harness.glob("*.log")
    # A hidden folder counts once.
    assert (reply.lines, reply["ignored"]) == (["keep.log"], 2)
    assert harness.glob("*.log", include_ignored=True)["total"] == 4


def test_an_ignored_folder_named_in_the_pattern_is_searched(harness: Harness) -> None:
    harness.make(".gitignore", "node_modules/\n")
    harness.make("node_modules/left/index.js")
    assert harness.glob("node_modules/**/*.js").lines == ["node_modules/left/index.js"]
    assert harness.glob("*", path="node_modules/left").lines == ["node_modules/left/index.js"]


@pytest.mark.xfail(HAS_RIPGREP_14, reason="ripgrep 14.1 ignores rules of parent folders that begin with /", strict=True)
def test_ignore_rules_of_parent_folders_apply(harness: Harness) -> None:
    harness.make(".gitignore", "/src/gen/*.py\n")
    harness.make("src/gen/a.py")
    harness.make("src/b.py")
    reply = harness.glob("*.py", path="src")
    assert (reply.lines, reply["ignored"]) == (["src/b.py"], 1)


def test_glob_lists_links_without_following_them(harness: Harness) -> None:
    harness.make("real/a.py")
    (harness.workspace / "link").symlink_to("real")
    (harness.workspace / "out").symlink_to("/etc/passwd")
    (harness.workspace / "loop").symlink_to(".")
    assert set(harness.glob("**").lines) == {"out", "real/a.py"}
    assert set(harness.glob("**", kind="any").lines) == {"link", "out", "loop", "real", "real/a.py"}
    assert harness.glob("**", kind="dir").lines == ["real"]


def test_the_kind_selects_files_folders_or_all(harness: Harness) -> None:
    harness.make("d/a")
    os.mkfifo(harness.workspace / "pipe")
    assert set(harness.glob("*", kind="file").lines) == {"d/a"}
    assert set(harness.glob("*", kind="dir").lines) == {"d"}
    assert set(harness.glob("*", kind="any").lines) == {"d", "d/a", "pipe"}
    assert harness.glob("d/").lines == ["d"]
    (harness.workspace / "d" / "empty").mkdir()
    harness.make(".gitignore", "d/a\n")
    assert set(harness.glob("**", kind="any").lines) == {".gitignore", "d", "d/empty", "pipe"}


def test_an_absolute_pattern_outside_the_workspace_is_refused(harness: Harness) -> None:
    harness.make("src/a.py")
    assert harness.glob(f"{harness.workspace}/src/*.py").lines == ["src/a.py"]
    assert harness.glob(f"{harness.workspace}/src/a.py").lines == ["src/a.py"]
    for pattern in ("/etc/*.conf", "/*", "../*", "src/../../*", "/etc/passwd"):
        assert harness.glob(pattern).code == "PATH_NOT_ALLOWED", pattern


def test_glob_searches_the_output_folder_without_the_guest_state(harness: Harness) -> None:
    (harness.tmp / "t.py").write_text("x")
    assert harness.glob("*.py", path=str(harness.tmp)).lines == [f"{harness.tmp}/t.py"]
    (harness.output / "long.txt").write_text("x")
    (harness.output / ".state" / "folder").write_text("secret")
    assert harness.glob("**", path=str(harness.output)).lines == [f"{harness.output}/long.txt"]
    for pattern in (".state", f"{harness.output}/.state"):
        assert harness.glob(pattern, path=str(harness.output), kind="any").lines == []
    for fields in ({"path": f"{harness.output}/.state"}, {"path": str(harness.output), "pattern": ".state/*"}):
        assert harness.glob(**{"pattern": "*", **fields}).code == "PATH_NOT_ALLOWED"


def test_a_missing_folder_is_reported_with_a_suggestion(harness: Harness) -> None:
    harness.make("source/a.py")
    reply = harness.glob("*.py", path="sorce")
    assert reply.code == "FILE_NOT_FOUND"
    assert "source" in str(reply.failure)
    assert harness.glob("*.py", path="source/a.py").code == "NOT_A_DIRECTORY"


@pytest.mark.parametrize("pattern", ["", "  ", "a\0b", "x" * 5000, "[a", "{a,b", "a\\", "[z-a]", "{a,b}" * 12])
def test_an_invalid_glob_pattern_is_refused(harness: Harness, pattern: str) -> None:
    harness.make("a")
    assert harness.glob(pattern).code == "INVALID_PATTERN"


def test_glob_output_above_max_bytes_is_cut_at_a_line(harness: Harness) -> None:
    for number in range(10):
        harness.make(f"file{number}")
    reply = harness.glob("*", max_bytes=20)
    assert (reply.lines, reply["shown"], reply["total"], reply["cut"]) == (["file9", "file8", "file7"], 3, 10, True)


def test_a_slow_walk_returns_a_partial_result(harness: Harness) -> None:
    for number in range(30):
        harness.make(f"d{number}/f")
    reply = harness.glob("**", timeout_s=1e-6)
    assert (reply["partial"], reply.code) == (True, None)


def test_a_backtracking_glob_pattern_is_matched_quickly(harness: Harness) -> None:
    harness.make("a" * 250)
    harness.make("/".join("a" * 100))
    for pattern in ("*a" * 100 + "b", "**/a/" * 100 + "b", "?" * 4000, "[a-z]*" * 80 + "!"):
        assert harness.glob(pattern)["total"] == 0


@pytest.mark.parametrize(
    "rules", ["x" * 50_000 + "*?", "\n".join(f"*{n}?b" for n in range(20_000)), "x" * 9000 + "{a,b}" * 9]
)
def test_a_hostile_gitignore_file_does_not_stop_a_search(harness: Harness, rules: str) -> None:
    harness.make(".gitignore", rules + "\n")
    harness.make("a", "hit\n")
    assert harness.glob("a").lines == ["a"]
    assert harness.grep("hit").lines == ["a:1: hit"]


@given(st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=20))
def test_an_escaped_name_matches_only_itself(name: str) -> None:
    globs = Globs(["".join(f"\\{char}" for char in name)], "the pattern") if name not in (".", "..") else None
    assert globs is None or (globs.match(name), globs.match(name + "x")) == (True, False)


@given(st.text(st.sampled_from("ab*?[]{},!\\/-"), max_size=15))
def test_any_text_is_a_valid_pattern_or_refused(text: str) -> None:
    with contextlib.suppress(RequestFailure):
        Globs([text], "the pattern").match("a/b")


def test_braces_are_expanded_and_lists_split_at_top_level_commas() -> None:
    globs = Globs(["a{b,c{d,e}}f{,g}"], "the pattern")
    names = {"abf", "abfg", "acdf", "acdfg", "acef", "acefg"}
    assert set(globs.names) == names
    assert all(globs.match(f"folder/{name}") for name in names)
    assert Globs(["\\{a,b}"], "the pattern").match("{a,b}")
    assert split_list("*.py, *.{js,ts},a\\,b,,") == ["*.py", "*.{js,ts}", "a\\,b"]


@given(st.lists(st.binary(max_size=600), max_size=30))
def test_reported_names_are_bounded_and_on_one_line(names: list[bytes]) -> None:
    result = build_names(names)
    assert len(result) == min(len(names), MAX_NAMES)
    assert all(len(name) <= MAX_NAME_CHARS and "\n" not in name for name in result)


@needs_namespace
def test_glob_starts_in_the_folder_of_the_last_command(shared_guest: Guest) -> None:
    shared_guest.run("mkdir -p a/b; touch a/b/f.py top.py")
    done = shared_guest.request("glob", pattern="*.py", path=".", kind="file", limit=100, max_bytes=1000, timeout_s=10)
    assert set(done.bytes_of("lines").split()) == {b"a/b/f.py", b"top.py"}
    assert shared_guest.request("glob", pattern="*", path=".", timeout_s=10).code == "INVALID_ARGUMENTS"
    shared_guest.run("mkdir -p t/open t/shut; touch t/open/a t/shut/b; chmod 0 t/shut")
    done = shared_guest.request("glob", pattern="**", path="t", kind="file", limit=100, max_bytes=30_000, timeout_s=10)
    shared_guest.run("chmod 700 t/shut; rm -r t")
    assert (done.bytes_of("lines"), done["unreadable"]) == (b"t/open/a\n", 1)
    assert shared_guest.wait_alone()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.ts,*.js", {"src/a.ts", "src/b.js"}),
        ("src/*.ts, src/*.js", {"src/a.ts", "src/b.js"}),
        ("'src/*.ts'", {"src/a.ts"}),
        ('"src/*.ts"', {"src/a.ts"}),
        ("`*.ts`", {"src/a.ts"}),
        (" src/*.ts\n", {"src/a.ts"}),
        ("src/\u00fcber.md", {"src/u\u0308ber.md"}),
        ("*\u00fcber.md", {"src/u\u0308ber.md"}),
        ("cafe\u0301.md", {"caf\u00e9.md"}),
    ],
)
def test_another_reading_of_a_pattern_is_used_if_nothing_matches(
    harness: Harness, pattern: str, expected: set[str]
) -> None:
    for name in ("src/a.ts", "src/b.js", "src/u\u0308ber.md", "caf\u00e9.md"):
        harness.make(name)
    found = harness.glob(pattern)
    assert set(found.lines) == expected
    assert "as it is written" in found["hints"][0]


def test_a_pattern_may_begin_at_the_home(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.make("src/a.ts")
    monkeypatch.setattr("guest.paths.ENVIRONMENT", {"HOME": str(harness.workspace)})
    found = harness.glob("~/src/*.ts")
    assert found.lines == ["src/a.ts"]
    assert "home" in found["hints"][0]


def test_a_file_whose_name_is_a_list_is_found_as_it_is_written(harness: Harness) -> None:
    for name in ("a,b.ts", "a", "b.ts"):
        harness.make(name)
    found = harness.glob("a,b.ts")
    assert (found.lines, found["hints"]) == (["a,b.ts"], [])


@pytest.mark.parametrize("pattern", [".env*", "**/dist/**"])
def test_matches_that_ignore_rules_hide_are_named(harness: Harness, pattern: str) -> None:
    for name in (".env", "dist/a.js", "src/a.ts"):
        harness.make(name)
    harness.make(".gitignore", ".env\ndist\n")
    found = harness.glob(pattern)
    assert found.lines == []
    assert "include_ignored=true" in found["hints"][0]
    assert not any("type=any" in hint for hint in found["hints"])
    assert len(harness.glob(pattern, include_ignored=True).lines) == 1


@pytest.mark.parametrize("pattern", ["!**/*.md", "src/[[:digit:]].ts"])
def test_a_pattern_of_other_programs_is_explained(harness: Harness, pattern: str) -> None:
    harness.make("src/a.ts")
    assert any("A glob is like" in hint for hint in harness.glob(pattern)["hints"])


class RecordingWriter:
    """Keeps the streams and the data of all messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    def send(self, stream: str, data: bytes) -> None:
        self.sent.append((stream, data))


def open_live(monkeypatch: pytest.MonkeyPatch, **fields: int) -> tuple[RecordingWriter, glob_search._LiveMatches]:
    """Return live matches that do not wait between two messages."""
    monkeypatch.setattr(glob_search, "_LIVE_S", 0.0)
    values = {"pattern": "*", "path": ".", "kind": "file", "limit": 100, "max_bytes": 1000, "live_bytes": 10_000}
    writer = RecordingWriter()
    return writer, glob_search._LiveMatches(GlobRequest({**values, "timeout_s": 10, **fields}), writer)


def test_a_match_is_sent_before_the_search_goes_on(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirement S4-29: fails if all matches are sent at the end."""
    for name in ("a.py", "b.py", "c.py"):
        harness.make(name)
    writer, live = open_live(monkeypatch)
    monkeypatch.chdir(harness.workspace)
    request = GlobRequest({"pattern": "*", "path": ".", "kind": "file", "limit": 9, "max_bytes": 99, "timeout_s": 10})
    finder = glob_search._Finder(request, None, harness.paths(), live)
    sent_before: list[bytes] = []

    def find() -> Iterator[bytes]:
        for name in (b"a.py", b"b.py", b"c.py"):
            sent_before.append(b"".join(data for _, data in writer.sent))
            yield name

    start = type("Start", (), {"shown": b""})()
    finder._take(start, Globs(["*"], "the pattern"), find())
    assert sent_before == [b"", b"a.py\n", b"a.py\nb.py\n"]
    assert {stream for stream, _ in writer.sent} == {"found"}


def test_live_matches_are_limited_and_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, live = open_live(monkeypatch, limit=3)
    for name in (b"a", b"a", b"b", b"c", b"d"):
        live.add(name)
    assert writer.sent == [("found", b"a\n"), ("found", b"b\n"), ("found", b"c\n")]
    writer, live = open_live(monkeypatch, live_bytes=200)
    for number in range(100):
        live.add(b"%d" % number)
    assert sum(len(data) + glob_search._MESSAGE_BYTES for _, data in writer.sent) <= 200
    assert len(writer.sent) == 3


def test_live_matches_do_not_change_the_result(harness: Harness) -> None:
    for name in ("c.py", "d/e.py", "a.py"):
        harness.make(name)
    quiet, watched = harness.glob("*.py"), harness.glob("*.py", live_bytes=10_000)
    assert (watched.lines, watched.fields) == (quiet.lines, quiet.fields)
