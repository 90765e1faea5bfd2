"""Chance by a seed: the same draw for the same request, in whatever order requests come."""

import hashlib
import struct

from tests.model_server.script import Span


def draw(seed: int, *about: str | int) -> float:
    """From 0 up to 1, without it."""
    told = "\0".join([str(seed), *map(str, about)]).encode(errors="replace")
    (number,) = struct.unpack(">Q", hashlib.blake2b(told, digest_size=8).digest())
    # 53 bits: more would be rounded, and to 1 at times.
    return float((number >> 11) / (1 << 53))


def draw_span(span: Span, seed: int, *about: str | int) -> float:
    """The seconds of a span."""
    if not isinstance(span, tuple):
        return span
    return span[0] + (span[1] - span[0]) * draw(seed, *about)
