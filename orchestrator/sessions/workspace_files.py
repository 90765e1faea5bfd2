"""The files of a workspace: the sources of its first files, and the list of its files, which is hostile input.

A source is a folder, an archive, or a git bundle. This module only checks it; the sandbox unpacks it.
"""

import bz2
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolcrew.archives.folders import pack_folder
from toolcrew.contract.archive_kinds import SUPPORTED_KINDS, find_kind, is_tar
from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.own_programs import OPEN_CLOSED, own_program

_XZ_MEMORY_BYTES = 128 * 1024 * 1024
_OPENERS: Mapping[str, Callable[[bytes], bytes]] = {
    "tar.gz": lambda content: zlib.decompressobj(wbits=31).decompress(content, tarfile.BLOCKSIZE),
    "tar.bz2": lambda content: bz2.BZ2Decompressor().decompress(content, tarfile.BLOCKSIZE),
    "tar.xz": lambda content: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES).decompress(content, tarfile.BLOCKSIZE),
}
_SOURCES = f"a folder, {SUPPORTED_KINDS}"
_BUNDLE_HINT = "make it with `git bundle create FILE HEAD --branches`"
# The names are hostile and may contain line ends, so each part ends with a NUL. `printf x` protects line ends at the
# end of a target from the shell, which removes them. Prints pairs; each part ends with a NUL. A pair is `f` and a file,
# the target of a link and the link, or the letter of a type and a pipe, socket or device.
_LIST_FILES = """
find . -ignore_readdir_race -xdev -type f -printf 'f\\0%P\\0'
"""
_LIST_OTHERS = """
set -o pipefail
find . -ignore_readdir_race -xdev \\( -type p -o -type s -o -type b -o -type c \\) -printf '%y\\0%P\\0'
find . -ignore_readdir_race -xdev -type l -printf '%P\\0' | while IFS= read -r -d '' link; do
    if [ -f "$link" ]; then target=$(readlink -f -- "$link"; printf x); else target=xx; fi
    printf '%s\\0%s\\0' "${target%?x}" "$link"
done
"""


@dataclass(frozen=True)
class WorkspaceSource:
    """Bytes for the call `session.import`, and their `kind`."""

    kind: str
    content: bytes


def load_source(path: Path) -> WorkspaceSource:
    """Return a folder as an archive, and any other file unchanged. The content decides the kind of a file, not its
    name.

    Raises ConfigError for a path that is missing, unreadable, of no supported kind or larger than a blob, and for a git
    bundle that needs commits of another repository.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return WorkspaceSource("tar", pack_folder(path))
        if not stat.S_ISREG(mode):
            raise ConfigError(f"the workspace {path} is not a regular file: give {_SOURCES}")
        content = _read(path)
    except FileNotFoundError:
        raise ConfigError(f"the workspace {path} does not exist: give {_SOURCES}") from None
    except OSError as error:
        raise ConfigError(
            f"the workspace {path} cannot be read ({error}): fix its permissions or give another path"
        ) from error
    kind = find_source_kind(content)
    if kind is None:
        raise ConfigError(f"the workspace {path} is of no supported kind: give {_SOURCES}")
    if kind == "bundle":
        _check_bundle(path, content)
    return WorkspaceSource(kind, content)


def find_source_kind(content: bytes) -> str | None:
    """Return the kind of an archive or a bundle. Return None for all other content, such as compressed content that is
    not a tar. The sandbox checks the rest of the content.
    """
    kind = find_kind(content)
    if kind is not None and kind in _OPENERS and not _holds_tar(kind, content):
        return None
    return kind


def _holds_tar(kind: str, content: bytes) -> bool:
    """Return whether the first block is that of a tar. Only the sandbox reads more, because compressed content may be
    very large.
    """
    try:
        block = _OPENERS[kind](content)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError):
        return False
    return is_tar(block) or block == bytes(tarfile.BLOCKSIZE)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_BLOB_BYTES + 1)
    if len(content) > MAX_BLOB_BYTES:
        raise ConfigError(f"the workspace {path} is larger than {MAX_BLOB_BYTES} bytes: give a smaller workspace")
    return content


def _check_bundle(path: Path, content: bytes) -> None:
    """Raise ConfigError for a bundle without HEAD, which has no branch to check out, and for a bundle with only a
    part of a history.
    """
    end = content.find(b"\n\n")
    if end < 0:
        raise ConfigError(f"the git bundle {path} is truncated or damaged: {_BUNDLE_HINT}")
    # Search instead of splitting: a list of the short lines of 64 MiB would take gigabytes.
    if content.find(b"\n-", 0, end) >= 0:
        raise ConfigError(
            f"the git bundle {path} holds only a part of a history, which needs the rest to be cloned: {_BUNDLE_HINT}"
        )
    if content.find(b" HEAD\n", 0, end + 1) < 0:
        raise ConfigError(f"the git bundle {path} has no HEAD: {_BUNDLE_HINT}")


def name_path(path: Path | str) -> str:
    """Return the absolute path of a workspace, which is never the id of a file in the store."""
    return str(Path(path).absolute())


@dataclass(frozen=True)
class WorkspaceListing:
    """Paths below /workspace. `files`: files, and links to files of the workspace. `others`: path -> letter of the type
    of `find`, for all other links (`l`), named pipes, sockets and devices.
    """

    files: tuple[str, ...]
    others: Mapping[str, str]


def build_list_command(folder: str, only_others: bool) -> list[str]:
    """Return the program that lists a folder for parse_listing. Also lists what is in folders without read mode."""
    script = OPEN_CLOSED + 'open_closed "$1"; cd -- "$1" || exit'
    script += ("" if only_others else _LIST_FILES) + _LIST_OTHERS
    return own_program("bash", "-c", script, "list", folder)


def parse_listing(output: bytes) -> WorkspaceListing:
    """Parse the output of `build_list_command`. Raises ToolFailure."""
    parts = [os.fsdecode(part) for part in output.split(b"\0")]
    if len(parts) % 2 == 0:
        raise ToolFailure(
            ErrorCode.INTERNAL,
            "the sandbox returned an invalid file list: check that its image belongs to this release",
        )
    # A link counts as a file only if its target is inside: a reader on another machine has no other target.
    pairs = list(zip(parts[:-1:2], parts[1::2], strict=True))
    files = [path for target, path in pairs if target == "f" or target.startswith("/workspace/")]
    others = {
        path: target if target in ("p", "s", "b", "c") else "l"
        for target, path in pairs
        if target != "f" and not target.startswith("/workspace/")
    }
    return WorkspaceListing(tuple(files), others)
