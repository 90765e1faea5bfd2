"""Ports of loopback for servers that start later, and again after a crash."""

import random
import socket
from collections.abc import Sequence
from pathlib import Path

_RANGE = range(20_000, 32_768)
_LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: list[socket.socket] = []
"""Sockets that mark the reserved ports of this process. The kernel closes them when the process ends."""


def reserve_port() -> int:
    """Return a free TCP port that belongs to this process until the process ends. Raises OSError if none is left.

    The kernel gives ports of its local range to any connection and to any server without a fixed port. Such a port can
    be taken between its choice and the start of its server, so this port is outside of that range. Other processes that
    call this function skip the port.
    """
    candidates = _find_candidates()
    for port in random.sample(candidates, len(candidates)):
        if (mark := _mark(port)) is not None:
            _held.append(mark)
            return port
    raise OSError(f"no port from {candidates[0]} to {candidates[-1]} is free: stop the programs that use them")


def _find_candidates() -> Sequence[int]:
    first, last = (int(number) for number in _LOCAL_RANGE.read_text().split())
    outside = [port for port in _RANGE if not first <= port <= last]
    return outside or _RANGE


def _mark(port: int) -> socket.socket | None:
    """Return the socket that marks the port as reserved; None if the port is reserved or in use.

    The name of the socket is abstract: it exists in the network namespace, as the port does, and not in a folder.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0toolcrew-port-{port}")
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError:
        mark.close()
        return None
    return mark
