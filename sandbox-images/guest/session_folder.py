"""The session's working directory, kept from one command to the next."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.places import Places

_MAX_PATH = 4096


def read_folder(places: Places) -> bytes:
    """Where relative paths start: what the last command left as its directory, at first the workspace."""
    try:
        fd = os.open(places.state + b"/folder", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return places.workspace
    try:
        folder = os.read(fd, _MAX_PATH)
    finally:
        os.close(fd)
    return folder if folder.startswith(b"/") and b"\0" not in folder else places.workspace
