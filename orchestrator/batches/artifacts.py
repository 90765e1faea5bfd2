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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.errors import ErrorCode, OperatorError

ROOT = "/workspace"
MAX_PATTERN_CHARS = 1024
MAX_PATTERNS = 100
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_MAX_NAME_CHARS = 200
_KEPT_CHARS = 140


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
            raise ValueError(f"a pattern has 1 to {MAX_PATTERN_CHARS} characters, and no NUL among them")
        inner = text.removeprefix(ROOT) if text == ROOT or text.startswith(ROOT + "/") else text
        if inner == text and text.startswith("/"):
            raise ValueError(f"it is not below {ROOT}: only files of the workspace are copied out, named from there")
        parts = [part for part in inner.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ValueError("it holds '..': name files of the workspace from its top")
        self.text = text
        # Several `**` in a row have the same meaning as a single `**`.
        kept = [part for place, part in enumerate(parts) if part != "**" or place == 0 or parts[place - 1] != "**"] or [
            "**"
        ]
        self._steps = [None if part == "**" else re.compile(fnmatch.translate(part)) for part in kept]

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches a path below /workspace, or a folder that contains the path."""
        states = self._spread({0})
        for name in path.split("/"):
            steps = [(at, self._steps[at]) for at in states if at < len(self._steps)]
            states = self._spread(
                {at if step is None else at + 1 for at, step in steps if step is None or step.match(name)}
            )
            if len(self._steps) in states:
                return True
        return False

    def _spread(self, states: set[int]) -> set[int]:
        """Return the states and the states that are reachable because `**` also matches no folder."""
        return states | {at + 1 for at in states if at < len(self._steps) and self._steps[at] is None}


@dataclass(frozen=True)
class Copied:
    """Copied files, as sorted paths relative to the item's folder.

    `unmatched`: patterns that matched nothing. `skipped`: links that lead to no file.
    """

    paths: tuple[str, ...] = ()
    bytes: int = 0
    unmatched: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return a sentence for each requested file or pattern that was not copied."""
        return [f"no file of the workspace is named by '{pattern}'" for pattern in self.unmatched] + [
            f"'{path}' was not copied: it is a link that leads to no file of the workspace" for path in self.skipped
        ]


def choose_paths(paths: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths that match a pattern, sorted, and the patterns without a match. Raises ValueError: a pattern
    is invalid.
    """
    parsed = [Pattern(text) for text in patterns]
    idle = set(range(len(parsed)))
    chosen = []
    for path in paths:
        hits = {place for place, pattern in enumerate(parsed) if pattern.matches(path)}
        if hits:
            chosen.append(path)
            idle -= hits
    return sorted(chosen), [patterns[place] for place in sorted(idle)]


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
        letter if letter in _PLAIN else "".join(f"%{byte:02X}" for byte in letter.encode()) for letter in custom_id
    ]
    for place in (0, -1):
        if pieces[place] == ".":
            pieces[place] = "%2E"
    letters = [piece for piece in pieces if len(piece) == 1 and piece.isalpha()]
    cases = sum(1 << place for place, letter in enumerate(letters) if letter.isupper())
    name = "".join(pieces) + (f"%~{cases:x}" if cases else "")
    if len(name) <= _MAX_NAME_CHARS:
        return name
    kept = ""
    for piece in pieces:
        if len(kept) + len(piece) > _KEPT_CHARS:
            break
        kept += piece
    return f"{kept}%+{hashlib.sha256(custom_id.encode()).hexdigest()[:40]}"


def copy_artifacts(exported: Path, patterns: Sequence[str], target: Path) -> Copied:
    """Copy the files that match `patterns` from `exported` to `target`. `exported`: a workspace that `Session.export`
    wrote.

    Each file is replaced atomically. Other files in `target` do not change. `target` is created if a file matches. A
    link to a file of the workspace becomes a copy of the file. Raises ArtifactsNotWritten.
    """
    chosen, idle = choose_paths(_walk(exported), patterns)
    done, skipped, size = [], [], 0
    for path in chosen:
        source = _real_file(exported, path)
        if source is None:
            skipped.append(path)
            continue
        try:
            size += _copy(source, target, path)
        except OSError as error:
            what = "make room on it" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
            raise ArtifactsNotWritten(
                f"'{path}' cannot be copied to {target} ({error.strerror or error}): {what}, then resume; nothing is "
                "lost until then"
            ) from error
        done.append(path)
    return Copied(tuple(done), size, tuple(idle), tuple(skipped))


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
    place = target / path
    place.parent.mkdir(parents=True, exist_ok=True)
    # A link in the target folder may lead to another folder.
    if not place.parent.resolve().is_relative_to(target.resolve()):
        raise OSError(errno.ELOOP, "a link on the way leads out of the folder", str(place.parent))
    # The temporary name has a fixed length: a name derived from a 255-byte name would be too long for the disk.
    unfinished = place.parent / f".{secrets.token_hex(8)}.partial"
    try:
        shutil.copyfile(source, unfinished)
        unfinished.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
        os.replace(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)
    return place.stat().st_size
