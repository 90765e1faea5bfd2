"""What one connection may cost the proxy: sizes in bytes, durations in seconds."""

from dataclasses import dataclass

KIB = 1024
CHUNK_BYTES = 64 * KIB
"""Read from a socket at a time, and all that is held of a direction."""


@dataclass(frozen=True)
class ProxyLimits:
    """Beside the caps of the session's own rules."""

    opening_s: float = 5.0
    """For sandboxd's line."""
    opening_bytes: int = 1024 * KIB
    """More than the longest rules have."""
    request_s: float = 60.0
    """For the first byte of a request: clients open connections ahead of their need."""
    header_s: float = 10.0
    """From a request's first byte to the end of its headers."""
    header_bytes: int = 64 * KIB
    header_lines: int = 100
    resolve_s: float = 3.0
    connect_s: float = 5.0
    idle_s: float = 60.0
    total_s: float = 3600.0
    watch_s: float = 1.0
    """How often a connection is looked at: idle, too old, or left by its client."""
    linger_s: float = 2.0
    """How long a client may take to read a refusal before the connection is closed under it."""
