"""The proxy's unix socket: where it lies, and who may connect."""

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path

_BACKLOG = 1024


def open_listener(path: Path, mode: int) -> socket.socket:
    """A listening, non-blocking socket at `path`, of that mode from its first moment.

    Raises OSError when another proxy answers there, when something else lies there, and in a folder of another user.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid not in (os.geteuid(), 0):
        # Who owns the folder could put a socket of his own in our place.
        raise OSError(f"{path.parent} belongs to another user: set TOOLCREW_EGRESS_SOCKET to a path in a folder of your own")
    _make_way(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _make_way(path: Path) -> None:
    """Remove the socket of a proxy that is gone."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} exists and is no socket: move it away, or set TOOLCREW_EGRESS_SOCKET to another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
        raise OSError(f"another egress proxy already listens on {path}")


def unlink_own(path: Path, inode: int) -> None:
    """A successor may listen at the same path by then: its socket stays."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


def find_peer_uid(sock: socket.socket) -> int:
    """Who connected, as the kernel says."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
