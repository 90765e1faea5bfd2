"""Selects the files to copy from an item's sandbox, and the local folder that receives the files.

Security: the workspace comes from untrusted code. A copied path never leads out of the exported workspace or out of
the item's folder.
"""

import errno
import fnmatch
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure

ROOT = "/workspace"
MAX_PATTERN_CHARS = 1024
MAX_PATTERNS = 100
MATCH_S = 0.5
"""Limit of the CPU seconds of one search. A tenant controls the patterns and the paths."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_MAX_NAME_CHARS = 200
_MAX_PREFIX_CHARS = 140


class ArtifactsNotWritten(OperatorError):
    """Files could not be copied. Existing files do not change, and the copy can be retried."""

    code = ErrorCode.NO_SPACE


class Pattern:
    """Pattern for paths below /workspace. `*`, `?` and `[...]` match within a name; `**` matches any number of
    folders.

    A pattern that matches a folder also selects everything below the folder.
    """

    def __init__(self, text: str) -> None:
        """Parse the pattern. Raises ValueError with a sentence: the text is not a pattern or leads out of
        /workspace.
        """
        if not text or len(text) > MAX_PATTERN_CHARS or "\0" in text:
            raise ValueError(f"the pattern is invalid: use 1 to {MAX_PATTERN_CHARS} characters without NUL")
        inner = text.removeprefix(ROOT) if text == ROOT or text.startswith(ROOT + "/") else text
        if inner == text and text.startswith("/"):
            raise ValueError(f"the path is not below {ROOT}: name a file of the workspace")
        parts = [part for part in inner.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ValueError("the pattern contains '..': write the path from the top of the workspace")
        self.text = text
        # Several `**` in a row have the same meaning as a single `**`.
        unique = [
            part for number, part in enumerate(parts) if part != "**" or number == 0 or parts[number - 1] != "**"
        ] or ["**"]
        self.steps = unique


class PatternSet:
    """Patterns that are matched together, in time linear in the length of the paths.

    All steps of all patterns are the states of one automaton. An integer holds a set of states: bit N says that the
    next name of the path must match step N. After its last step, a pattern has a state of its own that never ends.
    """

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._literals = dict[str, int]()
        self._stars = 0
        self._ends = list[int]()
        self._wildcard_bits = self._any_name = self._start = 0
        # A tenant may repeat a step as often as it likes. Each distinct step is compared once with each distinct name.
        self._steps_by_text = dict[str, int]()
        self._known = dict[str, tuple[int, int]]()
        self._compiled = dict[str, re.Pattern[str]]()
        self._until = 0.0
        bit = 1
        for pattern in patterns:
            self._start |= bit
            for step in pattern.steps:
                self._add_step(step, bit)
                bit <<= 1
            self._ends.append(bit)
            bit <<= 1
        self._all_ends = sum(self._ends)
        self._start = self._spread(self._start)

    def _add_step(self, step: str, bit: int) -> None:
        if step == "**":
            self._stars |= bit
        elif step == "*":
            self._any_name |= bit
        elif not set(step) & set("*?["):
            self._literals[step] = self._literals.get(step, 0) | bit
        else:
            self._steps_by_text[step] = self._steps_by_text.get(step, 0) | bit
            self._wildcard_bits |= bit

    def match(self, paths: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """Yield each path, sorted by its parts, with the numbers of the patterns that match the path or a folder that
        contains it. Raises TimeoutError after MATCH_S seconds of CPU.
        """
        self._until, parts, states = time.thread_time() + MATCH_S, list[str](), [self._start]
        for names in sorted(path.split("/") for path in paths):
            self._check_time()
            # Neighbours in the order share their upper folders, whose states are known.
            shared = _count_shared(parts, names)
            del states[shared + 1 :]
            for name in names[shared:]:
                states.append(self._step(states[-1], name))
            parts = names
            found = states[-1] & self._all_ends
            yield "/".join(names), [at for at, end in enumerate(self._ends) if found & end] if found else []

    def _step(self, states: int, name: str) -> int:
        advancing = states & (self._any_name | self._literals.get(name, 0))
        if waiting := states & self._wildcard_bits:
            advancing |= waiting & self._match_wildcards(waiting, name)
        return self._spread((advancing << 1) | (states & (self._stars | self._all_ends)))

    def _match_wildcards(self, waiting: int, name: str) -> int:
        """Return the steps with wildcards that match the name, as far as `waiting` needs them."""
        compared, matching = self._known.get(name, (0, 0))
        if waiting & ~compared:
            for text, bits in self._steps_by_text.items():
                if bits & waiting & ~compared:
                    self._check_time()
                    compared |= bits
                    matching |= bits if self._compile(text).match(name) else 0
            self._known[name] = compared, matching
        return matching

    def _compile(self, step: str) -> "re.Pattern[str]":
        if step not in self._compiled:
            self._compiled[step] = re.compile(fnmatch.translate(step))
        return self._compiled[step]

    def _check_time(self) -> None:
        if time.thread_time() > self._until:
            raise TimeoutError

    def _spread(self, states: int) -> int:
        """Add the states that follow because `**` can also match no folder. No pattern has two `**` in a row."""
        return states | ((states & self._stars) << 1)


def _count_shared(first: list[str], second: list[str]) -> int:
    """Return how many parts at the beginning are equal."""
    limit = min(len(first), len(second))
    for at in range(limit):
        if first[at] != second[at]:
            return at
    return limit


NO_FILE = {
    "l": "the link does not lead to a file of the workspace",
    "p": "it is a named pipe (FIFO)",
    "s": "it is a socket",
    "b": "it is a device",
    "c": "it is a device",
}
"""Letter of `find` for a type -> why an entry of that type is not copied."""


@dataclass(frozen=True)
class CopiedFiles:
    """Copied files, as sorted paths relative to the item's folder.

    `unmatched`: patterns that matched nothing. `skipped`: pairs of a path and the reason why it was not copied.
    """

    paths: tuple[str, ...] = ()
    bytes: int = 0
    unmatched: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def missing(self) -> list[str]:
        """Return a sentence for each requested file or pattern that was not copied."""
        unmatched = [f"no file of the workspace matches '{pattern}'" for pattern in self.unmatched]
        return unmatched + [f"'{path}' was not copied: {reason}" for path, reason in self.skipped]


def choose_paths(paths: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths that match a pattern, sorted, and the patterns without a match. Call it in a thread.

    Raises ValueError: a pattern is invalid. Raises ToolFailure(INVALID_PATTERN): the search takes more than MATCH_S.
    """
    unmatched, selected = set(range(len(patterns))), list[str]()
    try:
        for path, hits in PatternSet(Pattern(text) for text in patterns).match(paths):
            if hits:
                selected.append(path)
                unmatched.difference_update(hits)
    except TimeoutError:
        raise ToolFailure(
            ErrorCode.INVALID_PATTERN,
            f"the search for artifacts took more than {MATCH_S:g} s: use fewer patterns with wildcards, or leave fewer "
            "files in the workspace",
        ) from None
    return sorted(selected), [patterns[number] for number in sorted(unmatched)]


def artifact_folder(artifacts: Path, custom_id: str) -> Path:
    """Return the folder of an item: a direct child of `artifacts` that no other item uses."""
    return artifacts / build_folder_name(custom_id)


def build_folder_name(custom_id: str) -> str:
    """Return a file name for any id.

    The name is readable and has at most 255 bytes. Two different ids never have the same name, even on a disk that
    ignores case.

    Bytes other than ASCII letters, digits, `-`, `_` and inner dots are written as `%XX`. If the id has upper-case
    letters, `%~` and a hexadecimal number follow. Each bit of the number marks an upper-case letter. A name that
    would be too long is cut, and `%+` and a hash of the whole id follow.
    """
    pieces = [
        character if character in _PLAIN else "".join(f"%{byte:02X}" for byte in character.encode())
        for character in custom_id
    ]
    for position in (0, -1):
        if pieces[position] == ".":
            pieces[position] = "%2E"
    letters = [piece for piece in pieces if len(piece) == 1 and piece.isalpha()]
    cases = sum(1 << position for position, character in enumerate(letters) if character.isupper())
    name = "".join(pieces) + (f"%~{cases:x}" if cases else "")
    if len(name) <= _MAX_NAME_CHARS:
        return name
    prefix = ""
    for piece in pieces:
        if len(prefix) + len(piece) > _MAX_PREFIX_CHARS:
            break
        prefix += piece
    return f"{prefix}%+{hashlib.sha256(custom_id.encode()).hexdigest()[:40]}"


def copy_artifacts(
    exported: Path, patterns: Sequence[str], target: Path, others: Mapping[str, str] = MappingProxyType({})
) -> CopiedFiles:
    """Copy the files that match `patterns` from `exported` to `target`. `exported`: a workspace that `Session.export`
    wrote. `others`: path -> reason for entries of the workspace that cannot be copied.

    Each file is replaced atomically. Other files in `target` do not change. `target` is created if a file matches. A
    link to a file of the workspace becomes a copy of the file. Raises ArtifactsNotWritten.
    """
    selected, unmatched = choose_paths({*_walk(exported), *others}, patterns)
    copied, skipped, size = [], [], 0
    for path in selected:
        source = _real_file(exported, path)
        if source is None:
            skipped.append((path, others.get(path, NO_FILE["l"])))
            continue
        try:
            size += _copy(source, target, path)
        except OSError as error:
            advice = "free space on the disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix the problem"
            raise ArtifactsNotWritten(
                f"'{path}' cannot be copied to {target} ({error.strerror or error}). Nothing is lost; {advice}, then "
                "resume"
            ) from error
        copied.append(path)
    return CopiedFiles(tuple(copied), size, tuple(unmatched), tuple(skipped))


def _walk(folder: Path) -> Iterator[str]:
    """Yield the files and links, as paths relative to `folder`."""
    for above, folders, files in os.walk(folder):
        inner = Path(above).relative_to(folder)
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(above, name)))]:
            yield (inner / name).as_posix()


def _real_file(exported: Path, path: str) -> Path | None:
    """Return the file that a path leads to; None if the path leads to no file or out of the workspace."""
    try:
        real = (exported / path).resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return real if real.is_relative_to(exported.resolve()) and real.is_file() else None


def _copy(source: Path, target: Path, path: str) -> int:
    """Copy one file atomically and return its size in bytes. Raises OSError."""
    destination = target / path
    destination.parent.mkdir(parents=True, exist_ok=True)
    # A link in the target folder may lead to another folder.
    if not destination.parent.resolve().is_relative_to(target.resolve()):
        raise OSError(errno.ELOOP, "a link in the path leads out of the folder", str(destination.parent))
    # The temporary name has a fixed length: a name derived from a 255-byte name would be too long for the disk.
    unfinished = destination.parent / f".{secrets.token_hex(8)}.partial"
    try:
        shutil.copyfile(source, unfinished)
        unfinished.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
        os.replace(unfinished, destination)
    finally:
        unfinished.unlink(missing_ok=True)
    return destination.stat().st_size
