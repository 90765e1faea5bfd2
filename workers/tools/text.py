"""Bytes of a program as text for a model: decoded, cut at the head and tail, every cut said."""

from collections.abc import Mapping
from typing import Any

MAX_OUTPUT_BYTES = 32 * 1024
MAX_LINES = 2000
HEAD_LINES = MAX_LINES // 4


def decode(data: bytes) -> str:
    """UTF-8 with replacement; NUL, which neither JSON readers nor terminals like, becomes U+FFFD."""
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def join_capture(data: bytes, counts: Mapping[str, Any]) -> tuple[str, bool]:
    """A captured stream as text, and whether something was dropped. `counts`: total, head and tail bytes, as the guest tells."""
    total, head = int(counts.get("total", len(data))), int(counts.get("head", len(data)))
    dropped = total - len(data)
    if dropped <= 0:
        return decode(data), False
    first, last = _without_broken_end(data[:head]), _without_broken_start(data[head:])
    dropped = total - len(first) - len(last)
    note = f"[... {dropped} bytes omitted of {total}: narrow the command, or send its output to a file and read parts ...]"
    return f"{decode(first)}\n{note}\n{decode(last)}", True


def cut_lines(text: str) -> tuple[str, bool]:
    """At most MAX_LINES lines: the first quarter and the last three quarters, and whether something was dropped."""
    end = "\n" if text.endswith("\n") else ""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) <= MAX_LINES:
        return text, False
    dropped = len(lines) - MAX_LINES
    head, tail = lines[:HEAD_LINES], lines[-(MAX_LINES - HEAD_LINES) :]
    return "\n".join([*head, f"[... {dropped} lines omitted of {len(lines)} ...]", *tail]) + end, True


def _without_broken_end(data: bytes) -> bytes:
    """Without the beginning of a code point that the cut left there; bytes that are no UTF-8 at all stay."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if not _continues(byte):
            return data[:-length] if _size_of(byte) > length else data
    return data


def _without_broken_start(data: bytes) -> bytes:
    """Without the rest of a code point whose beginning the cut took; bytes that are no UTF-8 at all stay."""
    rest = next((at for at, byte in enumerate(data[:4]) if not _continues(byte)), len(data))
    return data[rest:] if rest <= 3 else data


def _continues(byte: int) -> bool:
    return 0x80 <= byte < 0xC0


def _size_of(first: int) -> int:
    """Bytes of the code point that begins with `first`; 1 when none does."""
    if 0xC2 <= first < 0xE0:
        return 2
    if 0xE0 <= first < 0xF0:
        return 3
    return 4 if 0xF0 <= first < 0xF5 else 1
