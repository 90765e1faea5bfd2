"""Unix sockets of toolcrew's daemons: the permissions of a socket's folder, and the user at the other end of a
connection. Invariant: at a socket's path only its daemon listens. A second daemon never replaces the socket of a
running one, and no other user can put a socket in its place.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path

BACKLOG = 1024


def open_listener(path: Path, mode: int, *, owner: str, variable: str) -> socket.socket:
    """Return a listening, non-blocking socket at `path`. The socket has the mode `mode` from its first moment.

    `owner` and `variable` appear in error messages. Raises OSError: another process listens there, the path is no
    socket, or the folder belongs to another user.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid not in (os.geteuid(), 0):
        # The owner of the folder could replace our socket with another one.
        raise OSError(f"{path.parent} belongs to another user: set {variable} to a path in a folder of your own")
    refuse_second(path, owner=owner)
    _remove_stale_socket(path, variable)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # `bind` creates the file with the umask. With a `chmod` afterwards, more users could connect for a moment.
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def socket_mode(uids: Collection[int]) -> int:
    """Return the file mode of a socket to which these users may connect. The mode may allow more users, because the
    daemon checks the uid of every peer.
    """
    return 0o600 if set(uids) <= {os.geteuid()} else 0o666


def refuse_second(path: Path, *, owner: str) -> None:
    """Raise OSError when another process listens at `path`, even if it is busy. Never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            pass  # The backlog is full: a process listens there.
    raise OSError(f"another {owner} already listens on {path}: stop it, or set another path")


def _remove_stale_socket(path: Path, variable: str) -> None:
    """Remove a socket file at which no process listens."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} exists and is not a socket: move the file, or set {variable} to another path")
        path.unlink()


def unlink_own(path: Path, inode: int) -> None:
    """Remove the socket file at `path` if it has this inode. A newer daemon's socket at the same path stays."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


def find_peer_uid(sock: socket.socket) -> int:
    """Return the uid of the process at the other end, as the kernel reports it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
