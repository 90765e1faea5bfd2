"""Figures and untrusted text of a batch as people read them: short, on one line, and harmless to a terminal."""

import math
from datetime import UTC, datetime

from orchestrator.terminal.text import escape_controls

MAX_NOTE_CHARS = 600
"""Of a notice about the whole batch: its end says what to do."""
_STEPS = (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")
_LINE_ENDS = str.maketrans({"\n": "\\n", "\t": "\\t", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def format_count(count: int) -> str:
    """Return the whole number up to 99,999, then three digits and a letter."""
    if count < 100_000:
        return f"{count:,}"
    size, letter = next((size, letter) for size, letter in _STEPS if count >= size)
    # Cut, not rounded: 999,999 is not yet 1M.
    digits = 0 if count >= 100 * size else 1 if count >= 10 * size else 2
    return (
        f"{math.floor(count / size * 10**digits) / 10**digits:.{digits}f}{letter}" if count < 1e15 else f"{count:.3g}"
    )


def format_seconds(seconds: float) -> str:
    """Return the two largest units: 12 ms, 4.2 s, 3 min 05 s, 2 h 10 min, 5 d 3 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 or seconds == 0 else f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{math.floor(seconds * 10) / 10:.1f} s"
    if seconds >= 1e9:
        return "over 30 years"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_cost(cost: float | None, unknown: int = 0) -> str:
    """`cost`: in the currency of the prices. `unknown`: the number of costs that it lacks."""
    if cost is None:
        return "unknown"
    return f"{'at least ' if unknown else ''}{cost:.{2 if cost >= 1 or cost == 0 else 4}f}"


def format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 0.1 or rate == 0 else f"{rate:.2g}"


def format_time(at: float) -> str:
    """Return the time in ISO 8601, UTC, whole seconds."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s (no date)"


def one_line(text: str, most: int = 200) -> str:
    """Escape control and direction characters and the ends of lines. A text that is cut says its length."""
    cut = text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
    return escape_controls(cut.translate(_LINE_ENDS))
