"""Unix sockets that a daemon of ours listens at: where one may lie, and who is at its other end."""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path

BACKLOG = 1024


def open_listener(path: Path, mode: int, *, owner: str, variable: str) -> socket.socket:
    """A listening, non-blocking socket at `path`, of that mode from its first moment. `owner` and `variable`: for the
    errors' sentences.

    Raises OSError when another owner answers there, when something else lies there, and in a folder of another user.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_uid not in (os.geteuid(), 0):
        # Who owns the folder could put a socket of his own in our place.
        raise OSError(f"{path.parent} belongs to another user: set {variable} to a path in a folder of your own")
    refuse_second(path, owner=owner)
    _make_way(path, variable)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
    """Return the mode of a socket that these users may connect to. The daemon checks the uid of every peer."""
    return 0o600 if set(uids) <= {os.geteuid()} else 0o666


def refuse_second(path: Path, *, owner: str) -> None:
    """Raises OSError when another owner already listens at `path`, however busy it is. Never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except BlockingIOError:
            pass  # as many wait to be let in as may
    raise OSError(f"another {owner} already listens on {path}")


def _make_way(path: Path, variable: str) -> None:
    """Remove a socket that nobody listens at."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} exists and is no socket: move it away, or set {variable} to another path")
        path.unlink()


def unlink_own(path: Path, inode: int) -> None:
    """A successor may listen at the same path by then: its socket stays."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


def find_peer_uid(sock: socket.socket) -> int:
    """Under which uid the other end connected or listens, as the kernel says."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
