"""Messages of ripgrep 13 and 14, and a search with every ripgrep of this machine."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT, RIPGREP
from tests.support.guest.search_harness import Harness

assert GUEST_PARENT
from guest.search.grep_patterns import GrepPattern  # noqa: E402
from guest.search.left_out import LeftOut  # noqa: E402

ALL = sorted({os.path.realpath(path) for path in (os.fsdecode(RIPGREP), shutil.which("rg")) if path})
HELP = "\n\nConsider enabling PCRE2 with the --pcre2 flag, which can handle backreferences\nand look-around."
LOOK_AROUND = "error: look-around, including look-ahead and look-behind, is not supported"
TURNS = {
    "13": (f"regex parse error:\n    foo(?=bar)\n       ^^^\n{LOOK_AROUND}{HELP}", "(*ANYCRLF)"),
    "14": (f"rg: regex parse error:\n    (?:foo(?=bar))\n          ^^^\n{LOOK_AROUND}{HELP}", ""),
}
REFUSALS = {
    "13": ("regex parse error:\n    a{2,1}\n     ^^^^^\nerror: invalid repetition", "at character 2: invalid"),
    "14": (
        "rg: regex parse error:\n    (?:a{2,1})\n        ^^^^^\nerror: invalid repetition",
        "at character 2: invalid",
    ),
    "14, group": (
        "rg: regex parse error:\n    (?:a{2,1}()\n    ^\nerror: unclosed group",
        "expression: unclosed group",
    ),
    "13, line end": ("the literal '\"\\n\"' is not allowed in a regex", "multiline=true"),
    "14, line end": ('rg: the literal "\\n" is not allowed in a regex', "multiline=true"),
}
WALK = "ignore::walk|/registry/ignore/src/walk.rs:1799"
LINES = [
    f"DEBUG|{WALK}: ignoring ./a.log: Ignore(IgnoreMatch(Gitignore(Glob",
    f"DEBUG|{WALK}: ignoring ./huge: 5368 bytes",
]


@pytest.mark.parametrize(("text", "start"), TURNS.values(), ids=TURNS.keys())
def test_a_pattern_turns_to_pcre_in_the_form_of_its_ripgrep(text: str, start: str) -> None:
    pattern = GrepPattern("foo(?=bar)", fixed_strings=False, ignore_case=False, multiline=False)
    assert pattern.turn_to_pcre(text)
    assert (pattern.needs_pcre, pattern.pcre_start) == (True, start)
    assert not pattern.turn_to_pcre(text), "it turns once"


def test_a_long_pattern_turns_to_the_form_of_ripgrep_14() -> None:
    pattern = GrepPattern("x" * 9000, fixed_strings=False, ignore_case=False, multiline=False)
    refusal = "rg: PCRE2: error compiling pattern at offset 12: (*VERB) not recognized or malformed"
    assert pattern.turn_to_pcre(refusal)
    assert pattern.pcre_start == ""
    assert not pattern.turn_to_pcre(refusal)


@pytest.mark.parametrize(("text", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_has_the_position_in_the_pattern(text: str, message: str) -> None:
    pattern = GrepPattern("a{2,1}", fixed_strings=False, ignore_case=False, multiline=False)
    assert message in str(pattern.explain(text))


@pytest.mark.parametrize("prefix", ["", "rg: "])
def test_the_reasons_of_left_out_files_are_read(prefix: str) -> None:
    left_out = LeftOut()
    left_out.feed("".join(f"{prefix}{line}\n" for line in LINES).encode())
    assert (left_out.ignored, left_out.large, left_out.text) == ([b"a.log"], [b"huge"], "")


@pytest.mark.parametrize("ripgrep", ALL)
def test_a_search_gives_the_same_result_with_every_ripgrep(tmp_path: Path, ripgrep: str) -> None:
    harness = Harness(tmp_path)
    harness.ripgrep = ripgrep.encode()
    harness.make(".ignore", "*.log\n")
    harness.make("a.log", "foobar\n")
    harness.make("a.txt", "foobar\nfoo\n")
    for pattern in ("foo(?=bar)", "fo+bar", "(o)\\1b"):
        found = harness.grep(pattern)
        assert (found.lines, found["ignored"]) == (["a.txt:1: foobar"], 1)
    assert harness.grep("a{2,1}").code == "INVALID_PATTERN"
    assert harness.glob("a.*").lines == ["a.txt"]
