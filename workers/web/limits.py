"""What one fetch may cost: sizes in bytes, durations in seconds."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class FetchLimits:
    """The caps of one exchange. The total is the call's own limit, see Deadline."""

    resolve_s: float = 3.0
    connect_s: float = 5.0
    tls_s: float = 5.0
    first_byte_s: float = 10.0
    rate_window_s: float = 10.0
    min_rate: float = 1024.0
    """Bytes a second that must come, on the average of every window after the first byte."""
    header_bytes: int = 64 * KIB
    header_lines: int = 100
    wire_bytes: int = 5_000_000
    """Of a body as it comes, its framing included."""
    decoded_bytes: int = 10_000_000
    ratio: int = 100
    """How many times its size a body may unpack to."""
    ratio_floor_bytes: int = 64 * KIB
    """Below this much unpacked text the ratio does not count: an empty table packs well."""
    error_body_bytes: int = 64 * KIB
    """Of the body of an answer that is an error, as much is read."""
    redirects: int = 5
