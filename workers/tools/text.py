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
    first, last = _on_line_edges(decode(data[:head]), decode(data[head:]))
    return (
        f"{first}\n[... {dropped} bytes omitted of {total}: narrow the command, or send its output to a file and read parts ...]\n{last}",
        True,
    )


def cut_lines(text: str) -> tuple[str, bool]:
    """At most MAX_LINES lines: the first quarter and the last three quarters, and whether something was dropped."""
    lines = text.split("\n")
    if len(lines) <= MAX_LINES:
        return text, False
    dropped = len(lines) - MAX_LINES
    head, tail = lines[:HEAD_LINES], lines[-(MAX_LINES - HEAD_LINES) :]
    return "\n".join([*head, f"[... {dropped} lines omitted of {len(lines)} ...]", *tail]), True


def _on_line_edges(first: str, last: str) -> tuple[str, str]:
    """Drop the broken code point at the inner edges; a half line stays, it may be all there is."""
    return first.rstrip("\ufffd"), last.lstrip("\ufffd")
