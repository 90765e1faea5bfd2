"""The user database of a sandbox: /etc/passwd and /etc/group of the image, with entries for root and for the user of
the sandbox where the image has none, and with the home of this user. Many programs (ssh, Node, git, Python's getpass)
fail for a user without an entry.

The files of an image are foreign data: only regular files of at most MAX_BYTES are read.
"""

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import docker
import docker.errors

from toolcrew.workers.sandboxd.disks.base import HOME, UID
from toolcrew.workers.sandboxd.disks.mounts import open_below
from toolcrew.workers.sandboxd.runtime.hardening import GUEST_FOLDER, AccountFiles

MAX_BYTES: Final = 64 * 1024
"""Largest file of an image that is completed, in bytes. The kernel's own path limits and tar's headers come on top."""
_TAR_BYTES: Final = 16 * 1024
_NAME: Final = b"sandbox"
_PASSWD_FIELDS: Final = 7
_SHELL: Final = f"{GUEST_FOLDER}/bin/bash"


def read_accounts(api: docker.APIClient, container: str) -> AccountFiles:
    """Return the completed files of a container that was never started. Raises the errors of the SDK."""
    return complete_accounts(partial(_read_file, api, container))


def complete_accounts(read: Callable[[str], bytes | None]) -> AccountFiles:
    """Return the completed files of an image. `read`: returns the content of a file, empty if it does not exist; None
    if it is a link, no file, or too large.
    """
    passwd, group = read("/etc/passwd"), read("/etc/group")
    return AccountFiles(
        passwd=None if passwd is None else complete_passwd(passwd),
        root_passwd=None if passwd is None else _complete(passwd, _build_entries()),
        group=None if group is None else complete_group(group),
    )


def read_file(root: int, path: str) -> bytes | None:
    """Return the content of a file below the folder `root`, as for `complete_accounts`. No link is followed."""
    try:
        fd = open_below(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    except OSError:
        return None
    try:
        content = os.read(fd, MAX_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)
    return None if content is None or len(content) > MAX_BYTES else content


def complete_passwd(text: bytes) -> bytes | None:
    """Return /etc/passwd with an entry for root and for the user of the sandbox, whose home is HOME. None: the text has
    them.
    """
    moved = b"\n".join(map(_move_home, text.split(b"\n")))
    return _complete(moved, _build_entries()) or (moved if moved != text else None)


def _build_entries() -> list[tuple[int, bytes, str]]:
    entries = ((0, b"root", "root:/root"), (UID, _NAME, f"sandbox:{HOME}"))
    return [(uid, name, f":x:{uid}:{uid}:{rest}:{_SHELL}") for uid, name, rest in entries]


def _move_home(line: bytes) -> bytes:
    """Return an entry of the sandbox's user with its home. The home that an image names is read-only without root
    inside, and some programs, such as Java and ssh, read it here and not in $HOME.
    """
    fields = line.split(b":")
    if len(fields) != _PASSWD_FIELDS or fields[2] != b"%d" % UID:
        return line
    return b":".join([*fields[:5], HOME.encode(), fields[6]])


def complete_group(text: bytes) -> bytes | None:
    """Return /etc/group with an entry for the groups of root and of the user. None: the text has both."""
    return _complete(text, [(gid, name, f":x:{gid}:") for gid, name in ((0, b"root"), (UID, _NAME))])


def _complete(text: bytes, entries: Iterable[tuple[int, bytes, str]]) -> bytes | None:
    """Add each entry (id, name, rest of the line) whose id is missing, under a name that no other entry has."""
    known = [line.split(b":") for line in text.split(b"\n")]
    names = {fields[0] for fields in known}
    ids = {fields[2].strip() for fields in known if len(fields) > 2}
    added = [_free(name, names) + rest.encode() + b"\n" for number, name, rest in entries if b"%d" % number not in ids]
    if not added:
        return None
    return b"".join([text, b"\n" if text and not text.endswith(b"\n") else b"", *added])


def _free(name: bytes, names: set[bytes]) -> bytes:
    while name in names:
        name += b"_"
    return name


def _read_file(api: docker.APIClient, container: str, path: str) -> bytes | None:
    """Return the content of a file, empty if it does not exist. None: a link, no file, or too large to complete."""
    try:
        chunks, _ = api.get_archive(container, path)
    except docker.errors.NotFound:
        return b""
    packed = b"".join(_take(chunks, MAX_BYTES + _TAR_BYTES))
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = archive.next()
            if member is None or not member.isfile() or member.size > MAX_BYTES:
                return None
            content = archive.extractfile(member)
            return None if content is None else content.read()
    except tarfile.TarError:
        return None


def _take(chunks: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Yield chunks until they have `most` bytes."""
    taken = 0
    for chunk in chunks:
        yield chunk
        taken += len(chunk)
        if taken >= most:
            return
