"""ripgrep as the engine: the arguments it is started with, and where it is."""

from __future__ import annotations

import os

from guest.paths import PROGRAMS
from guest.search.grep_children import Child, start_program
from guest.search.grep_files import MAX_FOUND_BYTES
from guest.search.grep_records import SEPARATOR, count_marks, read_counts, read_names
from guest.search.walk import MAX_DEPTH, VCS_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from guest.failures import Failure
    from guest.search.filter import NameFilter
    from guest.search.grep_patterns import GrepPattern

# No file of the sandbox configures it, all files are text to it, a line ends before its \r\n, too, and a file that is
# cut short while it is searched does not end it.
_ALWAYS = [
    b"--no-config",
    b"--color=never",
    b"--no-heading",
    b"--with-filename",
    b"--null",
    b"--text",
    b"--crlf",
    b"--no-mmap",
    b"--no-ignore-messages",
    b"--case-sensitive",
]

# A line by its number and places, and of its text one byte at most: too short to hold a separator.
_MARKING = [
    b"--line-number",
    b"--column",
    b"--byte-offset",
    b"--max-columns=1",
    b"--field-match-separator=" + SEPARATOR,
]


def find_ripgrep() -> bytes | None:
    return next((program for program in PROGRAMS["ripgrep"] if os.access(program, os.X_OK)), None)


class Ripgrep:
    """One search by ripgrep. It works in the directory that this process is in."""

    name = "ripgrep"

    def __init__(self, program: bytes, pattern: GrepPattern) -> None:
        self._pattern = pattern
        self._argv = [program, *_ALWAYS, *_build_pattern_options(pattern)]

    def start_counting(
        self, names_only: bool, names: NameFilter, rules: bool, rules_above: bool, kept_out: str, has_large: bool
    ) -> Callable[[int, int], int]:
        """Count the matching lines of all files, for `read_counting`."""
        options = [*self._counting(names_only), b"--hidden", b"--max-depth=%d" % MAX_DEPTH]
        # It would look every file's size up.
        options += [b"--max-filesize=%d" % MAX_FOUND_BYTES] if has_large else []
        options += [b"--no-require-git", b"--no-ignore-global", b"--no-ignore-exclude"]
        options += [] if rules else [b"--no-ignore"]
        options += [] if rules_above else [b"--no-ignore-parent"]
        options += [b"--glob=!" + os.fsencode(name) for name in (*sorted(VCS_NAMES), *names.names_left_out())]
        options += [b"--glob=!/" + os.fsencode(kept_out)] if kept_out else []
        only = names.names_at_most()
        options += [f"--type-add=wanted:{glob}".encode() for glob in only] + ([b"--type=wanted"] if only else [])
        return start_program([*self._argv, *options, b"--regexp", self._raw_pattern(), b"--", b"./"])

    def start_counting_one(self, fd: int, names_only: bool) -> Callable[[int, int], int]:
        """As `start_counting`, of one open file."""
        return start_program(
            [
                *self._argv,
                *self._counting(names_only),
                b"--regexp",
                self._raw_pattern(),
                b"--",
                b"/proc/self/fd/%d" % fd,
            ],
            (fd,),
        )

    def start_marking(self, fds: list[int], most: int | None) -> Callable[[int, int], int]:
        """Tell the matching lines of open files, one file after the other: for `group_marks`.

        Columns count from 1, and so do lines; `offset` is the line's. At most `most` lines of each file, or a few more.
        """
        options = [b"--threads=1", b"--line-buffered", *_MARKING]
        options += [f"--max-count={most}".encode()] if most is not None and not self._pattern.multiline else []
        files = [b"/proc/self/fd/%d" % fd for fd in fds]
        return start_program([*self._argv, *options, b"--regexp", self._raw_pattern(), b"--", *files], tuple(fds))

    def read_counting(self, child: Child, names_only: bool, is_late: Callable[[], bool]) -> Iterator[tuple[bytes, int]]:
        """Path and count of each file that matches, from a process of `start_counting`."""
        if names_only:
            return read_names(child.read_records(b"\0", is_late))
        if self._pattern.multiline:
            return count_marks(child.read_records(b"\n", is_late))
        return read_counts(child.read_records(b"\0", is_late))

    def explain(self, complaint: str) -> Failure:
        """The failure that its complaint about the pattern means."""
        return self._pattern.explain(complaint)

    def _counting(self, names_only: bool) -> list[bytes]:
        """In a multiline search ripgrep would count matches, and not the lines they lie in: those are listed
        instead.
        """
        if names_only:
            return [b"--files-with-matches"]
        return _MARKING if self._pattern.multiline else [b"--count"]

    def _raw_pattern(self) -> bytes:
        return self._pattern.text.encode("utf-8")


def _build_pattern_options(pattern: GrepPattern) -> list[bytes]:
    options = [b"--ignore-case"] if pattern.ignore_case else []
    options += [b"--fixed-strings"] if pattern.fixed_strings else []
    return options + ([b"--multiline", b"--multiline-dotall"] if pattern.multiline else [])
