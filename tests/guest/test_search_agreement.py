"""The two engines of ripgrep agree: over random trees, rules and patterns."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.guest.guest_harness import HAS_RIPGREP_14
from tests.support.guest.search_harness import Found, Harness

pytestmark = pytest.mark.skipif(shutil.which("rg") is None, reason="needs ripgrep")
QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

NAMES = st.sampled_from(
    ["a", "b", "ab", "a.py", "b.py", "a.log", "b.tar.gz", ".hid", "x y", "é.py", "build", "[a]", "Makefile"]
)
FOLDERS = st.sampled_from(["", "src/", "build/", "src/deep/", ".cfg/", "build/src/", "a b/"])
LINES = st.text(st.sampled_from("ab01_ .(é文\t-"), max_size=8)
FILES = st.dictionaries(st.tuples(FOLDERS, NAMES).map("".join), st.lists(LINES, max_size=6), max_size=10)
GLOB_PARTS = st.sampled_from(
    ["*", "a*", "*.py", "*.log", "?", "[ab]", "[!a]*", "a", "b", "build", "src", "**", "{a,b}.py", "*.tar.*", "deep"]
)
RULES = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(GLOB_PARTS, min_size=1, max_size=3).map("/".join),
    st.sampled_from(["", "", "/"]),
)
RULE_FILES = st.dictionaries(
    st.tuples(st.sampled_from(["", "src/", "build/"]), st.sampled_from([".gitignore", ".ignore", ".rgignore"])).map(
        "".join
    ),
    st.lists(st.one_of(RULES, st.sampled_from(["# note", "", "  ", "a.log  ", "\\!a", "[a"])), max_size=4),
    max_size=3,
)


def _patterns() -> st.SearchStrategy[str]:
    classes = ["\\.", "\\(", "\\d", "\\w", "\\s", "\\S", "[ab]", "[^a]", "[a-b0-9_]", "\\b", "\\t"]
    atoms = st.sampled_from([*"ab01_ é文.", *classes])
    repeated = st.tuples(
        atoms.filter(lambda atom: atom != "\\b"), st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "*?", "+?"])
    ).map("".join)
    one = st.one_of(repeated, st.just("\\b"))
    row = st.lists(one, min_size=1, max_size=4).map("".join)
    alternatives = st.one_of(row, st.tuples(row, row).map("({0[0]}|{0[1]})".format))
    return st.tuples(st.sampled_from(["", "", "^"]), alternatives, st.sampled_from(["", "", "$"])).map("".join)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with tempfile.TemporaryDirectory() as base:
        yield Harness(Path(base))


def create_files(
    harness: Harness, files: dict[str, list[str]], rules: dict[str, list[str]], repositories: list[str]
) -> None:
    harness.clear()
    for name, lines in {**files, **rules}.items():
        # A name may be a folder already, or lie below a file.
        try:
            harness.make(name, "\n".join(lines) + ("\n" if len(lines) % 2 else ""))
        except OSError:
            continue
    for folder in repositories:
        (harness.workspace / folder / ".git").mkdir(parents=True, exist_ok=True)


def all_of(found: Found) -> tuple[str, dict[str, object], str | None]:
    return found.text, found.fields, found.code


ENDS_BEFORE_CR = pytest.mark.xfail(
    HAS_RIPGREP_14, reason="PCRE2 in ripgrep 14 does not see that a line ends before \\r", strict=True
)


def with_pcre(pattern: str) -> str:
    """Return a pattern with the same meaning that only PCRE2 accepts."""
    return f"(?:{pattern})(?=)"


@QUICK
@given(
    FILES,
    RULE_FILES,
    _patterns(),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([None, "*.py", "src/**", "*.{py,log},Makefile"]),
    st.sampled_from(["content", "content", "files", "count"]),
    st.sampled_from([1, 2, 100]),
)
def test_engines_agree_on_files_lines_counts_and_order(
    harness: Harness,
    files: dict[str, list[str]],
    rules: dict[str, list[str]],
    pattern: str,
    ignore_case: bool,
    before: int,
    after: int,
    include: str | None,
    mode: str,
    limit: int,
) -> None:
    create_files(harness, files, rules, [])
    options = {
        "ignore_case": ignore_case,
        "before": before,
        "after": after,
        "include": include,
        "mode": mode,
        "limit": limit,
    }
    assert all_of(harness.grep(with_pcre(pattern), **options)) == all_of(harness.grep(pattern, **options))


@QUICK
@given(
    FILES,
    st.sampled_from(["a\\n", "a.*b", "a\\s+b", "[^b]+b", "^a$", "(a|b)\\n\\n?", "文\\n.", "b$\\na"]),
    st.integers(0, 1),
    st.sampled_from([1, 100]),
)
def test_engines_agree_on_multiline_matches(
    harness: Harness, files: dict[str, list[str]], pattern: str, context: int, limit: int
) -> None:
    create_files(harness, files, {}, [])
    options = {"multiline": True, "before": context, "after": context, "limit": limit}
    assert all_of(harness.grep(with_pcre(pattern), **options)) == all_of(harness.grep(pattern, **options))


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        pytest.param(b"foo\r\nbar foo\r\n\r\n", "foo$", marks=ENDS_BEFORE_CR),
        pytest.param(b"foo\r\nbar\r\n\r\n", "^$", marks=ENDS_BEFORE_CR),
        (b"\xef\xbb\xbffoo\n", "^foo"),
        ("foo é\nbar".encode("utf-16"), "é"),
        ("foo é\nbar".encode("utf-16-be"), "foo"),
        ("\ufefffoo é\nbar\n".encode("utf-16-be"), "^foo"),
        (b"caf\xe9 foo\n\xff\xfe\xfd foo\n", "."),
        (b"no newline", "e$"),
        (b"\n\n\n", "^"),
        (b"", "^"),
        (b"foo\0bar\n", "foo"),
        (b"x" * 20_000 + b"needle" + b"y" * 20_000 + b"\n", "needle"),
        ("文" * 3000 + "needle" + "文" * 3000, "needle"),
        ("é\na\n文a\n", "\\b"),
        ("é\nb\n", "a*"),
        ("文é\n", "(a|(b|))"),
        (b"a\x0bb\x0cc\x85d\n", "c"),
    ],
)
def test_engines_agree_on_unusual_files(harness: Harness, content: bytes | str, pattern: str) -> None:
    harness.clear()
    harness.make("odd", content)
    assert all_of(harness.grep(with_pcre(pattern))) == all_of(harness.grep(pattern))
