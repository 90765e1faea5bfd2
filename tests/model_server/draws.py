"""Random numbers from a seed. The same request gets the same number, in any order of requests."""

import hashlib
import struct

from tests.model_server.script import Span


def draw(seed: int, *about: str | int) -> float:
    """Return a number of at least 0 and less than 1."""
    text = "\0".join([str(seed), *map(str, about)]).encode(errors="replace")
    (number,) = struct.unpack(">Q", hashlib.blake2b(text, digest_size=8).digest())
    # 53 bits, because more bits would be rounded, sometimes up to 1.
    return float((number >> 11) / (1 << 53))


def draw_span(span: Span, seed: int, *about: str | int) -> float:
    """Return a duration within a span, in seconds."""
    if not isinstance(span, tuple):
        return span
    return span[0] + (span[1] - span[0]) * draw(seed, *about)
