"""Search with ripgrep: build the arguments of the program and read its output."""

from __future__ import annotations

import os
import re

from guest.search.grep_children import Child, start_program
from guest.search.grep_files import MAX_FOUND_BYTES
from guest.search.grep_patterns import PCRE_LINE_ENDS
from guest.search.grep_records import SEPARATOR, count_marks, read_counts, read_names
from guest.search.walk import VCS_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from guest.search.filter import NameFilter
    from guest.search.grep_patterns import GrepPattern
    from guest.search.walk import Walk

# No file of the sandbox configures ripgrep. All files count as text. A line ends before its \r\n. Without memory
# mapping, a file that is truncated during the search does not end the process.
_ALWAYS = [
    b"--no-config",
    b"--color=never",
    b"--no-heading",
    b"--with-filename",
    b"--null",
    b"--text",
    b"--no-mmap",
    b"--case-sensitive",
]

# The output has the positions of each line and at most one byte of its text: too short to contain a separator.
_MARKING = [
    b"--line-number",
    b"--column",
    b"--byte-offset",
    b"--max-columns=1",
    b"--field-match-separator=" + SEPARATOR,
]


# Start options and comments of a pattern would end differently in a group.
_NOT_IN_GROUP = re.compile(r"\(\*|\(\?[a-zA-Z^]*x")


class Ripgrep:
    """ripgrep for one search. It runs in the current directory of this process."""

    def __init__(self, program: bytes, pattern: GrepPattern) -> None:
        self._pattern = pattern
        self._argv = [program, *_ALWAYS, *_build_pattern_options(pattern)]

    def start_counting(
        self, walk: Walk, names: NameFilter, names_only: bool, skips_large: bool
    ) -> Callable[[int, int], int]:
        """Return a start function that counts the matching lines of all files, for `read_counting`.

        It also reports what it leaves out, for `Child.left_out`. `skips_large`: ripgrep reads the size of every file
        and leaves out large ones, which takes a sixth of its time.
        """
        return start_program(
            [
                *self._argv,
                b"--debug",
                *([b"--max-filesize=%d" % MAX_FOUND_BYTES] if skips_large else []),
                *self._counting(names_only),
                *_build_file_options(walk, names),
                b"--regexp",
                self._raw_pattern(),
                b"--",
                b"./",
            ]
        )

    def start_listing(self, walk: Walk, names: NameFilter) -> Callable[[int, int], int]:
        """Return a start function that lists the files that a search looks at, each followed by NUL."""
        return start_program([self._argv[0], *_ALWAYS, b"--files", *_build_file_options(walk, names), b"--", b"./"])

    def start_counting_one(self, fd: int, names_only: bool) -> Callable[[int, int], int]:
        """Return a start function that counts the matching lines of one open file."""
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

    def start_marking(self, fds: list[int], max_matches: int | None) -> Callable[[int, int], int]:
        """Return a start function that lists the matching lines of open files, for `group_marks`.

        The files are processed one after the other. Lines and columns count from 1. `offset` is the start of the
        line. Each file has at most `max_matches` lines, or a few more.
        """
        # One thread keeps the files in order. Line buffering makes each mark available at once.
        options = [b"--threads=1", b"--line-buffered", *_MARKING]
        options += (
            [f"--max-count={max_matches}".encode()] if max_matches is not None and not self._pattern.multiline else []
        )
        files = [b"/proc/self/fd/%d" % fd for fd in fds]
        return start_program([*self._argv, *options, b"--regexp", self._marking_pattern(), b"--", *files], tuple(fds))

    def read_counting(self, child: Child, names_only: bool, is_late: Callable[[], bool]) -> Iterator[tuple[bytes, int]]:
        """Yield (path, count) of each matching file, from a process of `start_counting`."""
        if names_only:
            return read_names(child.read_records(b"\0", is_late))
        if self._pattern.multiline:
            return count_marks(child.read_records(b"\n", is_late))
        return read_counts(child.read_records(b"\0", is_late))

    def _counting(self, names_only: bool) -> list[bytes]:
        """Return the options that count matches.

        In a multiline search ripgrep counts matches instead of lines. The lines are then listed and counted by the
        caller.
        """
        if names_only:
            return [b"--files-with-matches"]
        return _MARKING if self._pattern.multiline else [b"--count"]

    def _marking_pattern(self) -> bytes:
        """Return the pattern, of which no match in a line is empty.

        To find the columns, ripgrep looks for all matches in a line. After an empty match it goes on at the next
        byte, and PCRE2 fails if this is in the middle of a character. A match that takes one more character begins at
        the same column.
        """
        pattern = self._pattern
        if not pattern.needs_pcre or pattern.fixed_strings or pattern.multiline or _NOT_IN_GROUP.search(pattern.text):
            return self._raw_pattern()
        return f"{PCRE_LINE_ENDS}(?:{pattern.text}\\E)\\N?+".encode()

    def _raw_pattern(self) -> bytes:
        pattern = self._pattern
        if not pattern.needs_pcre:
            return pattern.text.encode("utf-8")
        text = re.escape(pattern.text) if pattern.fixed_strings else pattern.text
        return (PCRE_LINE_ENDS + text).encode("utf-8")


def _build_file_options(walk: Walk, names: NameFilter) -> list[bytes]:
    """Return the options that select files. They may select more than `names` takes."""
    options = [b"--hidden", b"--no-require-git", b"--no-ignore-global", b"--no-ignore-exclude"]
    options += [] if walk.use_rules else [b"--no-ignore"]
    options += [b"--no-ignore-parent"] if walk.is_start_ignored else []
    options += [b"--glob=!" + os.fsencode(name) for name in (*sorted(VCS_NAMES), *names.names_left_out())]
    options += [b"--glob=!/" + os.fsencode(name) for name in sorted(walk.kept_out)]
    only = names.names_at_most()
    return options + [f"--type-add=wanted:{glob}".encode() for glob in only] + ([b"--type=wanted"] if only else [])


def _build_pattern_options(pattern: GrepPattern) -> list[bytes]:
    options = [b"--ignore-case"] if pattern.ignore_case else []
    options += [b"--multiline", b"--multiline-dotall"] if pattern.multiline else []
    if pattern.needs_pcre:
        return [*options, b"--pcre2"]
    return [*options, b"--crlf", *([b"--fixed-strings"] if pattern.fixed_strings else [])]
