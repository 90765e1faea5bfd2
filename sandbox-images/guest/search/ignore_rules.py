"""The rules of gitignore files: .gitignore, .ignore and .rgignore, in the way git and ripgrep read them.

Names are bytes here, because so they are to git: a `?` is one byte.
"""

from __future__ import annotations

import os
import re
import stat

from guest.search.glob_patterns import MAX_PATTERN_CHARS, MAX_REGEX_CHARS, BadGlob, Glob, TooLarge, expand_braces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

RULE_FILES = (".rgignore", ".ignore", ".gitignore")
"""The first that has a rule for a path decides, and of each kind the file that is nearest to it."""
_GIT = len(RULE_FILES) - 1
_MAX_FILE_BYTES = 1 << 20
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_EXTENSION = re.compile(r"\*(\.[^.*?\[\\{}/]+)")


class Complaint(Exception):
    """What is wrong with a rule file. `is_odd`: nobody should apply its rules, so that all who look for files find the
    same.
    """

    def __init__(self, words: str, is_odd: bool = False) -> None:
        super().__init__(words)
        self.words = words
        self.is_odd = is_odd


class RuleSet:
    """The rules of one file. The last one that matches decides."""

    def __init__(self, text: bytes) -> None:
        """`complaint` says which part of the text was not understood; empty when all was. Raises Complaint for one that
        takes too long.
        """
        self.complaint = ""
        self._regex_chars = 0
        self._for_files = _Matcher()
        self._for_directories = _Matcher()
        for number, line in enumerate(_rule_lines(text), start=1):
            try:
                self._add(number, line.decode("utf-8"))
            except UnicodeDecodeError:
                self.complaint = f"line {number} is not UTF-8, the rules from it on are not applied"
                break
            except TooLarge as error:
                raise Complaint(f"line {number} has {error.reason}, its rules are not applied", is_odd=True) from None
            except BadGlob as error:
                self.complaint = self.complaint or f"line {number} is not applied: {error.reason}"

    def decide(self, path: bytes, name: bytes, is_directory: bool) -> bool | None:
        """Whether a path, relative to the file's folder, is ignored; None when no rule is about it."""
        return (self._for_directories if is_directory else self._for_files).decide(path, name)

    def _add(self, number: int, line: str) -> None:
        rule = _parse_rule(line)
        if rule is None:
            return
        globs, is_ignored, only_directories = rule
        for glob in globs:
            self._regex_chars += len(glob.regex)
            if self._regex_chars > MAX_REGEX_CHARS:
                raise Complaint("its patterns are too many or too long, its rules are not applied", is_odd=True)
            self._for_directories.add(number, glob, is_ignored)
            if not only_directories:
                self._for_files.add(number, glob, is_ignored)


# The number of a line, and what its rule says.
_Verdict = tuple[int, "bool | None"]
_NO_VERDICT: _Verdict = (0, None)


class _Matcher:
    """Rules by what is cheapest to ask: plain names, extensions, and only then regular expressions."""

    def __init__(self) -> None:
        self._names: dict[bytes, _Verdict] = {}
        self._extensions: dict[bytes, _Verdict] = {}
        self._by_name = _Alternatives()
        self._by_path = _Alternatives()

    def add(self, number: int, glob: Glob, is_ignored: bool) -> None:
        verdict = (number, is_ignored)
        if not glob.name_only:
            self._by_path.add(glob.regex, verdict)
        elif not set(glob.parts[-1]) & set("*?[\\"):
            self._names[glob.parts[-1].encode("latin-1")] = verdict
        elif (extension := _EXTENSION.fullmatch(glob.parts[-1])) is not None:
            self._extensions[extension[1].encode("latin-1")] = verdict
        else:
            self._by_name.add(glob.regex, verdict)

    def decide(self, path: bytes, name: bytes) -> bool | None:
        best = self._names.get(name, _NO_VERDICT)
        if self._extensions:
            other = self._extensions.get(name[name.rfind(b".") :], _NO_VERDICT)
            best = other if other[0] > best[0] else best
        if self._by_name.has_any:
            best = max(best, self._by_name.find(name))
        if self._by_path.has_any:
            best = max(best, self._by_path.find(path))
        return best[1]


class _Alternatives:
    """Regular expressions tried as one, the last added first."""

    def __init__(self) -> None:
        self._regexes: list[str] = []
        self._verdicts: list[_Verdict] = []
        self._compiled: re.Pattern[bytes] | None = None
        self.has_any = False

    def add(self, regex: str, verdict: _Verdict) -> None:
        self.has_any = True
        self._regexes.append(regex)
        self._verdicts.append(verdict)

    def find(self, text: bytes) -> _Verdict:
        if self._compiled is None:
            self._verdicts.reverse()
            joined = "|".join(f"({regex})\\Z" for regex in reversed(self._regexes))
            self._compiled = re.compile(joined.encode("latin-1"), re.DOTALL)
        found = self._compiled.match(text)
        return self._verdicts[(found.lastindex or 1) - 1] if found else _NO_VERDICT


class RuleChain:
    """The rules that hold in a folder: its own files' and those of the folders above. Never changed: `enter` makes the
    next.
    """

    __slots__ = ("_levels", "_ordered", "is_empty")

    def __init__(self, levels: tuple[tuple[tuple[int, RuleSet], ...], ...] = ((), (), ())) -> None:
        # For each kind of file, nearest first: how long the path of its folder is, and the rules.
        self._levels = levels
        self._ordered = [level for kind in levels for level in kind]
        self.is_empty = not self._ordered

    def enter(self, fd: int, prefix: bytes, names: Collection[str]) -> tuple[RuleChain, list[Complaint]]:
        """The chain in a folder open as `fd` that has these names, and what was wrong with its rule files.

        `prefix`: the folder's path, with a slash at its end unless it is empty. Paths of `hides` count from the same
        place.
        """
        found = [name for name in RULE_FILES if name in names]
        if not found and ".git" not in names:
            return self, []
        levels = list(self._levels)
        complaints: list[Complaint] = []
        if ".git" in names:
            # Rules of git end at the border of a repository.
            levels[_GIT] = ()
        for name in found:
            try:
                rules = RuleSet(_read_rules(fd, name))
            except Complaint as complaint:
                complaints.append(Complaint(f"{name}: {complaint.words}", complaint.is_odd))
                continue
            if rules.complaint:
                complaints.append(Complaint(f"{name}: {rules.complaint}"))
            kind = RULE_FILES.index(name)
            levels[kind] = ((len(prefix), rules), *levels[kind])
        return RuleChain(tuple(levels)), complaints

    def hides(self, path: bytes, name: bytes, is_directory: bool) -> bool:
        """Whether the rules hide a path; `name` is its last part."""
        for skip, rules in self._ordered:
            verdict = rules.decide(path[skip:] if skip else path, name, is_directory)
            if verdict is not None:
                return verdict
        return False


def _read_rules(fd: int, name: str) -> bytes:
    """The text of a rule file: a regular one and no link, nothing else is opened for reading. Raises Complaint."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise Complaint("not a regular file, its rules are not applied", is_odd=True)
        file = os.open(name, _OPEN, dir_fd=fd)
    except OSError as error:
        raise Complaint(f"not applied, {os.strerror(error.errno or 0).lower()}") from None
    try:
        if os.fstat(file).st_size > _MAX_FILE_BYTES:
            raise Complaint("larger than 1 MiB, its rules are not applied", is_odd=True)
        return os.read(file, _MAX_FILE_BYTES)
    finally:
        os.close(file)


def _rule_lines(text: bytes) -> list[bytes]:
    return [line.removesuffix(b"\r") for line in text.split(b"\n")]


def _parse_rule(line: str) -> tuple[list[Glob], bool, bool] | None:
    """Globs, whether what they match is ignored, and whether it must be a directory; None for a line that is no rule.
    Raises BadGlob.
    """
    if line.startswith("#"):
        return None
    if not line.endswith("\\ "):
        line = line.rstrip()
    if not line:
        return None
    is_ignored = not line.startswith("!")
    line = line[1:] if line.startswith(("!", "\\!", "\\#")) else line
    only_directories = line.endswith("/")
    line = line.removesuffix("/")
    any_depth = "/" not in line
    # So that a regular expression over bytes comes out of it.
    line = line.encode("utf-8").decode("latin-1").removeprefix("/")
    if not line:
        return None
    line = "*" if line == "**" else line
    if len(line) > MAX_PATTERN_CHARS:
        raise TooLarge(f"more than {MAX_PATTERN_CHARS} characters", 1)
    return [Glob(text, any_depth) for text in expand_braces(line)], is_ignored, only_directories
