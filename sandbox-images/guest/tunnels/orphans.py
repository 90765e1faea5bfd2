"""Finds connections whose program has died.

On a socket, the end of a program's output and the death of the program look the same. The kernel's table of sockets
shows the difference.
"""

from __future__ import annotations

import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    Endpoint = tuple[str, int]
    EndpointPair = tuple[Endpoint, Endpoint]

_FILES = ("/proc/net/tcp", "/proc/net/tcp6")
_MAX_BYTES = 524_288
_READ_BYTES = 65_536
# Columns of the kernel's table.
_LOCAL, _REMOTE, _INODE = 1, 2, 9
_NO_INODE = "0"


def find_orphans(connections: list[EndpointPair]) -> list[EndpointPair]:
    """Return the connections that no program holds open any more.

    A connection is the pair (our end, the program's end). Return an empty list when the table cannot be read.
    """
    inodes = _read_table()
    if inodes is None:
        return []
    # If the table does not show the owner of our own end, the kernel shows no owners at all: the table proves nothing.
    visible = [(ours, theirs) for ours, theirs in connections if inodes.get((ours, theirs), _NO_INODE) != _NO_INODE]
    return [(ours, theirs) for ours, theirs in visible if inodes.get((theirs, ours), _NO_INODE) == _NO_INODE]


def _read_table() -> dict[EndpointPair, str] | None:
    """Return (local, remote) -> inode of every TCP socket of the sandbox, or None when the table is too large."""
    table = {}
    for path in _FILES:
        text = _read(path)
        if text is None:
            return None
        for row in text.splitlines()[1:]:
            fields = row.split()
            local, remote = _parse_endpoint(fields[_LOCAL]), _parse_endpoint(fields[_REMOTE])
            if local is not None and remote is not None:
                table[local, remote] = fields[_INODE]
    return table


def _read(path: str) -> str | None:
    """Return the text of the file, "" when the file does not exist, or None on an error or beyond _MAX_BYTES."""
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


def _parse_endpoint(text: str) -> Endpoint | None:
    """Parse an address such as `0100007F:0C38`. Return None when the address is invalid.

    The kernel writes the address in 32-bit words in the machine's byte order. The last word of an IPv6 address has the
    embedded IPv4 address.
    """
    address, _, port = text.partition(":")
    try:
        packed = int(address[-8:], 16).to_bytes(4, sys.byteorder)
        return _socket.inet_ntoa(packed), int(port, 16)
    except ValueError:
        return None
