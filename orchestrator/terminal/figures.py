"""Formats numbers and untrusted text of a batch for people. The results are short, have one line, and cannot control
a terminal.
"""

import math
from datetime import UTC, datetime

from toolcrew.orchestrator.terminal.text import escape_controls

MAX_NOTE_CHARS = 600
"""Limit of the characters of a notice about the whole batch. The limit is high because the end of a notice says what to
do.
"""
_STEPS = (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")
_LINE_ENDS = str.maketrans({"\n": "\\n", "\t": "\\t", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def format_count(count: int) -> str:
    """Return a number up to 99,999 in full, and a larger one with three digits and a letter."""
    if count < 100_000:
        return f"{count:,}"
    size, suffix = next((size, suffix) for size, suffix in _STEPS if count >= size)
    # Round down: 999,999 must not become 1M.
    digits = 0 if count >= 100 * size else 1 if count >= 10 * size else 2
    return (
        f"{math.floor(count / size * 10**digits) / 10**digits:.{digits}f}{suffix}" if count < 1e15 else f"{count:.3g}"
    )


def format_seconds(seconds: float) -> str:
    """Return the two largest units: 12 ms, 4.2 s, 3 min 05 s, 2 h 10 min, 5 d 3 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{math.floor(seconds * 10) / 10:.1f} s"
    if seconds >= 1e9:
        return "over 30 years"
    whole_seconds = int(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02} s"
    if whole_seconds < 86400:
        return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02} min"
    return f"{whole_seconds // 86400} d {whole_seconds % 86400 // 3600} h"


def format_cost(cost: float | None, unknown: int = 0) -> str:
    """Format a cost for display. `cost`: in the currency of the prices; None: unknown. `unknown`: number of attempts
    whose cost is not part of `cost`.
    """
    if cost is None:
        return "unknown"
    return f"{'at least ' if unknown else ''}{cost:.{2 if cost >= 1 or cost == 0 else 4}f}"


def format_rate(rate: float) -> str:
    """Format a rate with two or three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 0.1 or rate == 0 else f"{rate:.2g}"


def format_time(at: float) -> str:
    """Return the time in ISO 8601, UTC, in whole seconds."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s (no date)"


def one_line(text: str, max_chars: int = 200) -> str:
    """Return the text in one line, with control characters, direction characters and line ends escaped.

    `max_chars`: maximum length. A text that is cut ends with its original length.
    """
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"
    return escape_controls(cut.translate(_LINE_ENDS))
