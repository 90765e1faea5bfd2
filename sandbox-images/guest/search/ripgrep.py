"""Runs ripgrep: its options to select and search files, and the parsing of its output."""

from __future__ import annotations

import os
import re

from guest.failures import INVALID_PATTERN, PATH_NOT_ALLOWED, RequestFailure
from guest.paths import KERNEL_FOLDERS
from guest.search.child import Child, start_program
from guest.search.glob_patterns import MAX_PATTERN_CHARS, Globs, split_list
from guest.search.grep_records import SEPARATOR, count_marks, read_counts, read_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from guest.paths import GuestPaths
    from guest.search.grep_patterns import GrepPattern
    from guest.search.start import Start

_VCS_NAMES = (b".git", b".hg", b".svn")
"""Directories that a search never enters, unless it starts inside."""
# The options of every search: ignore configuration files; treat all files as text; accept \r\n as a line end; use no
# memory mapping, so that a file that is truncated during the search does not crash the process.
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

# Print the position of each line and at most one byte of its text, which cannot contain a separator of the output.
_MARKING = [
    b"--line-number",
    b"--column",
    b"--byte-offset",
    b"--max-columns=1",
    b"--field-match-separator=" + SEPARATOR,
]


# A pattern with options at its start or comments must not be put into a group, which would change its meaning.
_NOT_IN_GROUP = re.compile(r"\(\*|\(\?[a-zA-Z^]*x")

# Glob patterns for names that ripgrep and the class Globs interpret in the same way.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.*-]+")
# Names of types that models use and ripgrep 13 does not know.
_OTHER_TYPES = {
    "python": "py",
    "javascript": "js",
    "jsx": "js",
    "typescript": "ts",
    "tsx": "ts",
    "golang": "go",
    "rs": "rust",
    "rb": "ruby",
    "bash": "sh",
    "shell": "sh",
    "c++": "cpp",
    "cc": "cpp",
    "kt": "kotlin",
    "yml": "yaml",
}


class NameFilter:
    """The files that the filters `include`, `exclude` and `type` of a request select."""

    def __init__(self, include: str | None, exclude: str | None, type_name: str | None, start: Start) -> None:
        """Compile the globs. Raises RequestFailure for an invalid glob."""
        self._start = start
        globs = _read_globs(include, "include")
        self.excluded = [glob.removeprefix("!") for glob in globs if glob.startswith("!")]
        self.excluded += _read_globs(exclude, "exclude")
        included = [glob for glob in globs if not glob.startswith("!")]
        self.included = Globs(included, "include") if included else None
        self.type_name = type_name.strip().removeprefix(".").lower() if type_name is not None else None

    def takes(self, path: bytes) -> bool:
        """Return whether a path below the start is selected. A glob with folders may begin at the start of the search,
        at the working folder or at the root.
        """
        if self.included is None or self.included.match(os.fsdecode(path)):
            return True
        bases = (self._start.shown, self._start.real[1:] + b"/") if self.included.has_folders else ()
        return any(self.included.match(os.fsdecode(base + path)) for base in bases)

    @property
    def is_empty(self) -> bool:
        return self.included is None and not self.excluded and self.type_name is None


class FileSelection:
    """Selects which files below the start of a search ripgrep reads."""

    def __init__(self, start: Start, paths: GuestPaths, use_rules: bool) -> None:
        self._use_rules = use_rules
        # Names in the start folder that a search leaves out: the kernel's files, and what the guest stores.
        self._excluded_paths: tuple[bytes, ...] = ()
        if start.real == b"/":
            self._excluded_paths = tuple(name[1:] for name in (*KERNEL_FOLDERS, paths.output))
        elif start.real == os.path.realpath(paths.output):
            self._excluded_paths = (os.path.relpath(paths.state, paths.output),)

    def leaves_out(self, path: bytes, name: bytes) -> bool:
        return name in _VCS_NAMES or path in self._excluded_paths

    def options(
        self, included: Globs | None = None, excluded: Sequence[str] = (), type_name: str | None = None
    ) -> list[bytes]:
        """Return the options that select files. They may select more than `included`.

        `included` is passed as a file type, because a glob option of ripgrep would override the ignore rules. With two
        types, ripgrep selects the files of both.
        """
        options = [b"--debug", b"--hidden", b"--no-require-git", b"--no-ignore-global", b"--no-ignore-exclude"]
        options += [b"--no-ignore-messages"] if self._use_rules else [b"--no-ignore"]
        options += [b"--glob=!" + glob.encode("utf-8", "surrogateescape") for glob in excluded]
        options += [b"--glob=!" + name for name in _VCS_NAMES]
        options += [b"--glob=!/" + name for name in self._excluded_paths]
        if type_name is not None:
            return [*options, b"--type=" + _OTHER_TYPES.get(type_name, type_name).encode("utf-8", "replace")]
        names = included.names if included is not None else []
        if not names or not all(_PLAIN_NAME.fullmatch(name) and name != "**" for name in names):
            return options
        return [*options, *(f"--type-add=wanted:{name}".encode() for name in names), b"--type=wanted"]


def list_files(command: Sequence[bytes], options: list[bytes]) -> Callable[[int, int], int]:
    """Return a start function (for Child) of a process that lists the files of a search, each followed by NUL."""
    return start_program([*command, *_ALWAYS, b"--files", *options, b"--", b"./"])


def list_all_files(command: Sequence[bytes], folders: list[bytes]) -> Callable[[int, int], int]:
    """Return a start function (for Child) of a process that lists all files below the folders, each followed by NUL."""
    left_out = [b"--glob=!" + name for name in _VCS_NAMES]
    return start_program([*command, *_ALWAYS, b"--files", b"--hidden", *left_out, b"--", *folders])


class Ripgrep:
    """ripgrep for one content search. It runs in the current directory of this process."""

    def __init__(self, command: Sequence[bytes], pattern: GrepPattern) -> None:
        self._pattern = pattern
        self._argv = [*command, *_ALWAYS, *_build_pattern_options(pattern)]

    def start_counting(self, file_options: list[bytes], names_only: bool) -> Callable[[int, int], int]:
        """Return a start function that counts the matching lines of all files, for `read_counting`.

        ripgrep also reports the files that it leaves out, for `Child.left_out`.
        """
        options = [*file_options, *self._counting(names_only)]
        return start_program([*self._argv, *options, b"--regexp", self._raw_pattern(), b"--", b"./"])

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
        """Return a start function that lists the matching lines of open files, for `group_positions`.

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

        In a multiline search ripgrep would count matches and not lines. So it lists the lines, and the caller counts
        them.
        """
        if names_only:
            return [b"--files-with-matches"]
        return _MARKING if self._pattern.multiline else [b"--count"]

    def _marking_pattern(self) -> bytes:
        """Return a pattern that has no empty match in a line.

        For the columns, ripgrep looks for all matches in a line. After an empty match it continues at the next byte,
        where PCRE2 fails if this is the middle of a character. So the pattern also takes one more character; the match
        begins at the same column.
        """
        pattern = self._pattern
        if not pattern.needs_pcre or not pattern.is_regex or pattern.multiline or _NOT_IN_GROUP.search(pattern.text):
            return self._raw_pattern()
        return f"{pattern.pcre_start}(?:{pattern.text}\\E)\\N?+".encode()

    def _raw_pattern(self) -> bytes:
        pattern = self._pattern
        if not pattern.needs_pcre:
            return pattern.text.encode("utf-8")
        text = pattern.text if pattern.is_regex else re.escape(pattern.text)
        return (pattern.pcre_start + text).encode("utf-8")


def _read_globs(text: str | None, subject: str) -> list[str]:
    if text is None:
        return []
    if len(text) > MAX_PATTERN_CHARS:
        raise RequestFailure(
            INVALID_PATTERN, f"{subject} has {len(text)} characters, more than {MAX_PATTERN_CHARS}: shorten it"
        )
    globs = split_list(text)
    if any(".." in glob.split("/") for glob in globs):
        raise RequestFailure(PATH_NOT_ALLOWED, f"{subject} cannot contain '..': give the directory to search as path")
    return globs


def _build_pattern_options(pattern: GrepPattern) -> list[bytes]:
    options = [b"--ignore-case"] if pattern.ignore_case else []
    options += [b"--multiline", b"--multiline-dotall"] if pattern.multiline else []
    if pattern.needs_pcre:
        return [*options, b"--pcre2"]
    return [*options, b"--crlf", *([] if pattern.is_regex else [b"--fixed-strings"])]
