"""Which programs have left their connections: an end that was said by a program's death looks like one that it said
itself.
"""

from __future__ import annotations

import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    End = tuple[str, int]
    Ends = tuple[End, End]

_FILES = ("/proc/net/tcp", "/proc/net/tcp6")
_MAX_BYTES = 524_288
_READ_BYTES = 65_536
# Columns of the kernel's table.
_LOCAL, _REMOTE, _INODE = 1, 2, 9
_NO_INODE = "0"


def find_left(connections: list[Ends]) -> list[Ends]:
    """Of the connections, each (our end, the program's), those whose other end no process has any more; none where that
    cannot be told.
    """
    inodes = _read_table()
    if inodes is None:
        return []
    # A kernel that does not show even our own end's owner shows nobody's.
    shown = [(ours, theirs) for ours, theirs in connections if inodes.get((ours, theirs), _NO_INODE) != _NO_INODE]
    return [(ours, theirs) for ours, theirs in shown if inodes.get((theirs, ours), _NO_INODE) == _NO_INODE]


def _read_table() -> dict[Ends, str] | None:
    """(local, remote) -> inode of every TCP socket of the sandbox; None when they are too many to be looked at."""
    table = {}
    for path in _FILES:
        text = _read(path)
        if text is None:
            return None
        for row in text.splitlines()[1:]:
            fields = row.split()
            local, remote = _parse_end(fields[_LOCAL]), _parse_end(fields[_REMOTE])
            if local is not None and remote is not None:
                table[local, remote] = fields[_INODE]
    return table


def _read(path: str) -> str | None:
    parts: list[bytes] = []
    size = 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    try:
        while True:
            part = os.read(fd, _READ_BYTES)
            if not part:
                return b"".join(parts).decode("ascii", "replace")
            parts.append(part)
            size += len(part)
            if size > _MAX_BYTES:
                return None
    except OSError:
        return None
    finally:
        os.close(fd)


def _parse_end(text: str) -> End | None:
    """`0100007F:0C38`, words in the machine's own order. The last word of an IPv6 address is what it embeds of IPv4."""
    address, _, port = text.partition(":")
    try:
        word = int(address[-8:], 16).to_bytes(4, sys.byteorder)
        return _socket.inet_ntoa(word), int(port, 16)
    except ValueError:
        return None
