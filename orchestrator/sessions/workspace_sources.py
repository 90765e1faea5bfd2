"""Sources of a session's first files: a folder, an archive, or a git bundle. This module only checks them; the
sandbox unpacks them.
"""

import bz2
import lzma
import stat
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolcrew.archives.folders import pack_folder
from toolcrew.contract.archive_kinds import SUPPORTED_KINDS, find_kind, is_tar
from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.errors import ConfigError

_XZ_MEMORY_BYTES = 128 * 1024 * 1024
_OPENERS: Mapping[str, Callable[[bytes], bytes]] = {
    "tar.gz": lambda content: zlib.decompressobj(wbits=31).decompress(content, tarfile.BLOCKSIZE),
    "tar.bz2": lambda content: bz2.BZ2Decompressor().decompress(content, tarfile.BLOCKSIZE),
    "tar.xz": lambda content: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES).decompress(content, tarfile.BLOCKSIZE),
}
_SOURCES = f"a folder, {SUPPORTED_KINDS}"
_BUNDLE_HINT = "make it with `git bundle create FILE HEAD --branches`"


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
