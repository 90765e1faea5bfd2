"""The session's working directory, kept from one command to the next, and how files of the session's state are read and written."""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.places import Places

_MAX_PATH = 4096


def read_folder(places: Places) -> bytes:
    """Where relative paths start: what the last command left as its directory, at first the workspace."""
    folder = read_state_file(places, b"folder", _MAX_PATH)
    return folder if folder is not None and folder.startswith(b"/") and b"\0" not in folder else places.workspace


def write_state_file(places: Places, name: bytes, content: bytes) -> None:
    """Write a file of the state, whole or not at all. Raises OSError."""
    temporary = places.state + b"/." + name
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    os.rename(temporary, places.state + b"/" + name)


def read_state_file(places: Places, name: bytes, most: int) -> bytes | None:
    """At most that many bytes of a file of the state; None when it is missing or is no regular file: a pipe would never end."""
    try:
        fd = os.open(places.state + b"/" + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        parts, left = [], min(status.st_size, most)
        while left > 0 and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(fd)
