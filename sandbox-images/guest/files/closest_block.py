"""Find the block of lines in a file that is most similar to a given block.

Candidate positions come from lines that both texts have; without such lines, from groups of three characters that both
have.
"""

from __future__ import annotations

import difflib
import heapq
import re
import time
from collections import Counter

MIN_RATIO = 0.6
_CANDIDATES = 8
_STRIDE = 512
# Blocks above this length are compared by words and not by characters, and only up to a limit, because the time grows
# with the square of the length.
_MAX_CHARS = 240
_MAX_WORDS = 300
_WORD = re.compile(r"\w+|[^\w\s]")
# Ignore a line that occurs more often than this: it does not help to locate the block.
_MAX_TWINS = 200


def find_closest(lines: list[str], sought: list[str], until: float) -> tuple[int, int, float] | None:
    """Return (first line from 0, line after the last line, ratio) of the block most similar to `sought`.

    Returns None if no block reaches a ratio of 0.6. At `until`, a time on the monotonic clock, the search stops and
    returns the best block so far.
    """
    best: tuple[int, int, float] | None = None
    parts = _parts("\n".join(line.strip() for line in sought))
    for start in _starts(lines, sought, until):
        end = min(len(lines), start + len(sought))
        start = max(0, start)
        if start >= end or (best is not None and time.monotonic() >= until):
            continue
        other = _parts("\n".join(line.strip() for line in lines[start:end]), isinstance(parts, list))
        ratio = difflib.SequenceMatcher(None, parts, other, autojunk=False).ratio()
        if ratio >= MIN_RATIO and (best is None or ratio > best[2]):
            best = (start, end, ratio)
    return best


def _starts(lines: list[str], sought: list[str], until: float) -> list[int]:
    """Return the lines where a block similar to `sought` may begin, the most likely line first."""
    votes: Counter[int] = Counter()
    paths: dict[str, list[int]] = {}
    for offset, line in enumerate(sought):
        if len(line.strip()) > 2:
            paths.setdefault(line.strip(), []).append(offset)
    twins: Counter[str] = Counter()
    for number, line in enumerate(lines):
        key = line.strip()
        if key in paths and twins[key] < _MAX_TWINS:
            twins[key] += 1
            votes.update(number - offset for offset in paths[key][:4])
    found = [start for start, _ in votes.most_common(_CANDIDATES)]
    longest = max((line.strip() for line in sought), key=len)
    # If the file contains the longest line unchanged, the start lines that the shared lines suggest are reliable, and
    # the slower search is not needed.
    return found if twins[longest] else [*_starts_like_longest(lines, sought, until), *found]


def _starts_like_longest(lines: list[str], sought: list[str], until: float) -> list[int]:
    """Return candidate start lines, the most likely first.

    Candidates come from the lines of the file that share the most groups of three characters with the longest line.
    """
    offset = max(range(len(sought)), key=lambda number: len(sought[number].strip()))
    longest = sought[offset].strip()[:_MAX_CHARS]
    groups = _groups(longest)
    likely: list[tuple[float, int]] = []
    for number, line in enumerate(lines):
        if number % _STRIDE == 0 and time.monotonic() >= until:
            break
        if len(line) * 3 < len(longest):
            continue
        text = line.strip()[:_MAX_CHARS]
        others = _groups(text)
        share = 2 * len(groups & others) / (len(groups) + len(others) or 1)
        if share > 0.2:
            heapq.heappush(likely, (share, -number))
            if len(likely) > _CANDIDATES:
                heapq.heappop(likely)
    return [-number - offset for _, number in sorted(likely, reverse=True)]


def _groups(text: str) -> set[str]:
    return {text[at : at + 3] for at in range(max(1, len(text) - 2))}


def _parts(text: str, as_words: bool = False) -> str | list[str]:
    if len(text) <= _MAX_CHARS and not as_words:
        return text
    return _WORD.findall(text[: _MAX_WORDS * 40])[:_MAX_WORDS]
