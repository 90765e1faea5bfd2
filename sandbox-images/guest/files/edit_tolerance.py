"""The one looser match that may be configured: the same lines but for the blanks around each, and only where there is one such place."""

from __future__ import annotations

from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.files.edit_matching import Span

_BLANKS = b" \t\r"


def find_unindented(body: bytes, old: bytes) -> Span | None:
    """The whole lines that equal those of `old` once each is stripped; None when there are none, or more than one such place.

    The span leaves out the line end of the last line unless `old` has it.
    """
    wanted = [line.strip(_BLANKS) for line in old.split(b"\n")]
    has_end = not wanted[-1] and len(wanted) > 1
    if has_end:
        wanted.pop()
    if not any(wanted):
        return None
    lines = body.split(b"\n")
    stripped = [line.strip(_BLANKS) for line in lines]
    at = _find_only(stripped, wanted)
    if at is None or (has_end and at + len(wanted) == len(lines)):
        return None
    start = sum(map(len, lines[:at])) + at
    end = start + sum(map(len, lines[at : at + len(wanted)])) + len(wanted)
    if has_end:
        return start, end
    # CR belongs to the line end.
    return start, end - 1 - lines[at + len(wanted) - 1].endswith(b"\r")


def _find_only(lines: list[bytes], wanted: list[bytes]) -> int | None:
    """Where the run of lines stands that is the only one like `wanted`. The rarest line is looked for, as blank ones are many."""
    counts = Counter(lines)
    anchor = min(range(len(wanted)), key=lambda number: counts[wanted[number]] if wanted[number] else len(lines) + 1)
    found = None
    at = -1
    while True:
        try:
            at = lines.index(wanted[anchor], at + 1)
        except ValueError:
            return found
        start = at - anchor
        if start >= 0 and lines[start : start + len(wanted)] == wanted:
            if found is not None:
                return None
            found = start
