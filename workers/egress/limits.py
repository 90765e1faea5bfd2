"""Limits of one connection: sizes in bytes, durations in seconds."""

from dataclasses import dataclass

KIB = 1024
CHUNK_BYTES = 64 * KIB
"""Number of bytes that one read takes from a socket. The proxy holds at most this many bytes per direction."""


@dataclass(frozen=True)
class ProxyLimits:
    """Limits in addition to the quotas of the session's rules."""

    opening_s: float = 5.0
    """Time for sandboxd's opening line."""
    opening_bytes: int = 1024 * KIB
    """Limit of the opening line. It is larger than a line with the longest rules."""
    request_s: float = 60.0
    """Time for the first byte of a request: clients open connections before they need them."""
    header_s: float = 10.0
    """Time from the first byte of a request to the end of its headers."""
    header_bytes: int = 64 * KIB
    header_lines: int = 100
    resolve_s: float = 3.0
    connect_s: float = 5.0
    idle_s: float = 60.0
    total_s: float = 3600.0
    watch_s: float = 1.0
    """Interval of the check whether a connection is idle, too old, or closed by its client."""
    linger_s: float = 2.0
    """Limit for a client to read a refusal before the connection is closed."""
