"""Apply the rules of .gitignore, .ignore and .rgignore files in the same way as git and ripgrep.

Names are bytes here, as in git: a `?` matches one byte.
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
"""Names of rule files in order of priority. The first kind with a rule for a path decides.

Among files of one kind, the file nearest to the path decides.
"""
_GIT = len(RULE_FILES) - 1
_MAX_FILE_BYTES = 1 << 20
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_EXTENSION = re.compile(r"\*(\.[^.*?\[\\{}/]+)")


class RuleFileError(Exception):
    """Problem with a rule file."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RuleSet:
    """Rules of one file. The last rule that matches decides."""

    def __init__(self, text: bytes) -> None:
        """Parse the rules.

        `error` names the part of the text that is invalid; it is empty if all rules are valid. Raises
        RuleFileError if the rules would take too long.
        """
        self.problem = ""
        self._regex_chars = 0
        self._for_files = _Matcher()
        self._for_directories = _Matcher()
        for number, line in enumerate(_rule_lines(text), start=1):
            try:
                self._add(number, line.decode("utf-8"))
            except UnicodeDecodeError:
                self.problem = f"line {number} is not UTF-8, the rules from it on are not applied"
                break
            except TooLarge as error:
                raise RuleFileError(f"line {number} has {error.reason}, its rules are not applied") from None
            except BadGlob as error:
                self.problem = self.problem or f"line {number} is not applied: {error.reason}"

    def decide(self, path: bytes, name: bytes, is_directory: bool) -> bool | None:
        """Return whether a path, relative to the folder of the file, is ignored. Returns None if no rule applies."""
        return (self._for_directories if is_directory else self._for_files).decide(path, name)

    def _add(self, number: int, line: str) -> None:
        rule = _parse_rule(line)
        if rule is None:
            return
        globs, is_ignored, only_directories = rule
        for glob in globs:
            self._regex_chars += len(glob.regex)
            if self._regex_chars > MAX_REGEX_CHARS:
                raise RuleFileError("its patterns are too many or too long, its rules are not applied")
            self._for_directories.add(number, glob, is_ignored)
            if not only_directories:
                self._for_files.add(number, glob, is_ignored)


# (line number of a rule, whether the rule ignores the path).
_RuleDecision = tuple[int, "bool | None"]
_NO_DECISION: _RuleDecision = (0, None)


class _Matcher:
    """Rules sorted by cost: plain names first, then extensions, and regular expressions last."""

    def __init__(self) -> None:
        self._names: dict[bytes, _RuleDecision] = {}
        self._extensions: dict[bytes, _RuleDecision] = {}
        self._by_name = _Alternatives()
        self._by_path = _Alternatives()

    def add(self, number: int, glob: Glob, is_ignored: bool) -> None:
        decision = (number, is_ignored)
        if not glob.name_only:
            self._by_path.add(glob.regex, decision)
        elif not set(glob.parts[-1]) & set("*?[\\"):
            self._names[glob.parts[-1].encode("latin-1")] = decision
        elif (extension := _EXTENSION.fullmatch(glob.parts[-1])) is not None:
            self._extensions[extension[1].encode("latin-1")] = decision
        else:
            self._by_name.add(glob.regex, decision)

    def decide(self, path: bytes, name: bytes) -> bool | None:
        best = self._names.get(name, _NO_DECISION)
        if self._extensions:
            other = self._extensions.get(name[name.rfind(b".") :], _NO_DECISION)
            best = other if other[0] > best[0] else best
        if self._by_name.has_any:
            best = max(best, self._by_name.find(name))
        if self._by_path.has_any:
            best = max(best, self._by_path.find(path))
        return best[1]


class _Alternatives:
    """Regular expressions joined to one. The last added expression is tried first."""

    def __init__(self) -> None:
        self._regexes: list[str] = []
        self._decisions: list[_RuleDecision] = []
        self._compiled: re.Pattern[bytes] | None = None
        self.has_any = False

    def add(self, regex: str, decision: _RuleDecision) -> None:
        self.has_any = True
        self._regexes.append(regex)
        self._decisions.append(decision)

    def find(self, text: bytes) -> _RuleDecision:
        if self._compiled is None:
            self._decisions.reverse()
            joined = "|".join(f"({regex})\\Z" for regex in reversed(self._regexes))
            self._compiled = re.compile(joined.encode("latin-1"), re.DOTALL)
        match = self._compiled.match(text)
        return self._decisions[(match.lastindex or 1) - 1] if match else _NO_DECISION


class RuleChain:
    """Rules that apply in a folder, from its own files and the folders above.

    A chain never changes; `enter` returns a new one.
    """

    __slots__ = ("_levels", "_ordered", "is_empty")

    def __init__(self, levels: tuple[tuple[tuple[int, RuleSet], ...], ...] = ((), (), ())) -> None:
        # For each kind of file, nearest first: (length of the path of its folder, rules).
        self._levels = levels
        self._ordered = [level for kind in levels for level in kind]
        self.is_empty = not self._ordered

    def enter(self, fd: int, prefix: bytes, names: Collection[str]) -> tuple[RuleChain, list[RuleFileError]]:
        """Return the chain for a folder and the problems of its rule files.

        The folder is open as `fd` and contains `names`. `prefix` is its path, with a slash at the end unless it is
        empty. Paths of `hides` are relative to the same folder as `prefix`.
        """
        rule_files = [name for name in RULE_FILES if name in names]
        if not rule_files and ".git" not in names:
            return self, []
        levels = list(self._levels)
        errors: list[RuleFileError] = []
        if ".git" in names:
            # Rules of git end at the border of a repository.
            levels[_GIT] = ()
        for name in rule_files:
            try:
                rules = RuleSet(_read_rules(fd, name))
            except RuleFileError as error:
                errors.append(RuleFileError(f"{name}: {error.message}"))
                continue
            if rules.problem:
                errors.append(RuleFileError(f"{name}: {rules.problem}"))
            kind = RULE_FILES.index(name)
            levels[kind] = ((len(prefix), rules), *levels[kind])
        return RuleChain(tuple(levels)), errors

    def hides(self, path: bytes, name: bytes, is_directory: bool) -> bool:
        """Return whether the rules hide a path. `name` is the last part of the path."""
        for skip, rules in self._ordered:
            decision = rules.decide(path[skip:] if skip else path, name, is_directory)
            if decision is not None:
                return decision
        return False


def _read_rules(fd: int, name: str) -> bytes:
    """Return the text of a rule file. Raises RuleFileError. Only a regular file is opened; links are not followed."""
    try:
        # The type is checked before the open: opening a FIFO or a device could block or have side effects. `_OPEN`
        # covers a name that is swapped after the check.
        if not stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise RuleFileError("not a regular file, its rules are not applied")
        file = os.open(name, _OPEN, dir_fd=fd)
    except OSError as error:
        raise RuleFileError(f"not applied, {os.strerror(error.errno or 0).lower()}") from None
    try:
        if os.fstat(file).st_size > _MAX_FILE_BYTES:
            raise RuleFileError("larger than 1 MiB, its rules are not applied")
        return os.read(file, _MAX_FILE_BYTES)
    finally:
        os.close(file)


def _rule_lines(text: bytes) -> list[bytes]:
    return [line.removesuffix(b"\r") for line in text.split(b"\n")]


def _parse_rule(line: str) -> tuple[list[Glob], bool, bool] | None:
    """Parse one line of a rule file. Raises BadGlob.

    Returns (globs, whether matches are ignored, whether matches must be directories), or None if the line has no
    rule.
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
    # As Latin-1, each byte is one character. The resulting regular expression can then be compiled for bytes.
    line = line.encode("utf-8").decode("latin-1").removeprefix("/")
    if not line:
        return None
    line = "*" if line == "**" else line
    if len(line) > MAX_PATTERN_CHARS:
        raise TooLarge(f"more than {MAX_PATTERN_CHARS} characters", 1)
    return [Glob(text, any_depth) for text in expand_braces(line)], is_ignored, only_directories
