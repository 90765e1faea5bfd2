"""Build a unified diff of two versions of a text, with bounded length, time and memory."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # (is an insertion, line of the old text, line of the new text). Both line numbers start at 0 and locate the
    # change.
    Change = tuple[bool, int, int]

MAX_LINES = 60
_CONTEXT = 3
_LINE_CHARS = 300
_BLOCK = 65_536
# Maximum number of bytes that are compared, from the first difference on.
_MAX_BYTES = 1_048_576
# Maximum number of removed and added lines. Time and memory of the search grow with the square of this number.
_MAX_CHANGES = 400


class Diff:
    """Difference of two texts.

    `text`: hunks with three lines of context, empty if nothing differs. `is_whole`: whether `text` shows every
    difference.
    """

    __slots__ = ("is_whole", "text")

    def __init__(self, text: str, is_whole: bool) -> None:
        self.text = text
        self.is_whole = is_whole


def build_diff(
    old: bytes, new: bytes, decode: Callable[[bytes], str], max_lines: int = MAX_LINES, max_chars: int = 32_768
) -> Diff:
    """Compare two texts by line and return the diff.

    Lines end at LF. A CR before the LF is not a difference. `decode` converts a line to text and must not raise.
    """
    window = _Window(old, new)
    changes, reaches_end = find_changes(*window.core, window.cut)
    shown: list[str] = []
    remaining_chars = max_chars
    is_whole = reaches_end and not any(window.cut)
    for hunk in _group(
        [(is_insertion, at + window.offset, other + window.offset) for is_insertion, at, other in changes]
    ):
        for line in _render(hunk, window, decode):
            remaining_chars -= len(line) + 1
            if len(shown) == max_lines or remaining_chars < 0:
                return Diff("\n".join(shown), False)
            shown.append(line)
    return Diff("\n".join(shown), is_whole)


def find_changes(
    old: Sequence[bytes], new: Sequence[bytes], cut: tuple[bool, bool] = (False, False)
) -> tuple[list[Change], bool]:
    """Return the shortest list of removed and added lines that lead from `old` to `new`, in order, and whether the list
    reaches the end of the texts.

    The list has at most 400 changes, so it may stop before the end of the texts. The algorithm is from Myers, "An O(ND)
    Difference Algorithm and Its Variations". `cut` says for each text whether only its beginning was passed. The search
    ends at the end of such a text.
    """
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    for distance in range(_MAX_CHANGES + 1):
        trace.append(dict(furthest))
        for diagonal in range(-distance, distance + 1, 2):
            at = _step(furthest, diagonal, distance)
            other = at - diagonal
            if at > len(old) or other > len(new):
                # Skip positions after the end of a text.
                furthest[diagonal] = at
                continue
            while at < len(old) and other < len(new) and old[at] == new[other]:
                at += 1
                other += 1
            furthest[diagonal] = at
            at_end = (at == len(old), other == len(new))
            if all(at_end) or (cut[0] and at_end[0]) or (cut[1] and at_end[1]):
                return _walk_back(trace, diagonal), True
    valid = [
        (2 * at - diagonal, diagonal)
        for diagonal, at in furthest.items()
        if at <= len(old) and 0 <= at - diagonal <= len(new) and (diagonal + _MAX_CHANGES) % 2 == 0
    ]
    best = max(valid)[1]
    return _walk_back(trace, best), False


def _step(furthest: dict[int, int], diagonal: int, distance: int) -> int:
    """Return the position in the old text after the step to this diagonal (of Myers' algorithm) that gets farthest."""
    if diagonal == -distance or (diagonal != distance and furthest[diagonal - 1] < furthest[diagonal + 1]):
        return furthest[diagonal + 1]
    return furthest[diagonal - 1] + 1


def _walk_back(trace: list[dict[int, int]], diagonal: int) -> list[Change]:
    """Return the changes of the path that ends on the diagonal, from first to last."""
    changes: list[Change] = []
    for distance in range(len(trace) - 1, 0, -1):
        furthest = trace[distance]
        start = _step(furthest, diagonal, distance)
        is_insertion = diagonal == -distance or (
            diagonal != distance and furthest[diagonal - 1] < furthest[diagonal + 1]
        )
        other = start - diagonal
        changes.append((True, start, other - 1) if is_insertion else (False, start - 1, other))
        diagonal += 1 if is_insertion else -1
    changes.reverse()
    return changes


class _Window:
    """Lines of both texts from the first difference to the last (`core`), with three lines of context on each side."""

    def __init__(self, old: bytes, new: bytes) -> None:
        start = _line_start(old, _common_prefix(old, new), 0)
        first = _line_start(old, start, _CONTEXT)
        self.first_line = old.count(b"\n", 0, first)
        before = _split(old[first:start], False)
        tail = _common_suffix(old, new, start)
        self.cut = (len(old) - tail - start > _MAX_BYTES, len(new) - tail - start > _MAX_BYTES)
        after = [] if any(self.cut) else _split(*_after(old, len(old) - tail))
        self.core = (_split(*_part(old, start, len(old) - tail)), _split(*_part(new, start, len(new) - tail)))
        self.offset = len(before)
        self.old, self.new = ([*before, *core, *after] for core in self.core)


def _part(text: bytes, start: int, end: int) -> tuple[bytes, bool]:
    """Return the lines of a part of a text, and whether the part ends with the text's last line and this line has no
    newline.
    """
    core = text[start : min(end, start + _MAX_BYTES)]
    return core, start + len(core) == len(text) and not text.endswith(b"\n")


def _after(text: bytes, start: int) -> tuple[bytes, bool]:
    """Return the three lines from `start` on, as `_part` returns lines."""
    end = start
    for _ in range(_CONTEXT):
        end = text.find(b"\n", end) + 1 or len(text)
    return _part(text, start, end)


def _common_prefix(old: bytes, new: bytes) -> int:
    size = min(len(old), len(new))
    at = 0
    while at < size and old[at : at + _BLOCK] == new[at : at + _BLOCK]:
        at += _BLOCK
    low, high = min(at, size), min(at + _BLOCK, size)
    while low < high:
        middle = (low + high + 1) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix(old: bytes, new: bytes, start: int) -> int:
    """Return the size in bytes of the whole lines that end both texts. Bytes before `start` are not considered."""
    size = min(len(old), len(new)) - start
    at = 0
    while (
        at + _BLOCK <= size
        and old[len(old) - at - _BLOCK : len(old) - at] == new[len(new) - at - _BLOCK : len(new) - at]
    ):
        at += _BLOCK
    while at < size and old[-at - 1] == new[-at - 1]:
        at += 1
    line = old.find(b"\n", len(old) - at) + 1
    return len(old) - line if line else 0


def _line_start(text: bytes, at: int, lines: int) -> int:
    """Return the start of the line that contains byte `at`, or of the line a number of lines before it."""
    for _ in range(lines + 1):
        at = text.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


_NO_NEWLINE = b"\n\\ no newline at the end of the file"


def _split(data: bytes, lacks_newline: bool) -> list[bytes]:
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    if not lines[-1]:
        lines.pop()
    elif lacks_newline:
        lines[-1] += _NO_NEWLINE
    return lines


def _group(changes: list[Change]) -> list[list[Change]]:
    """Group changes whose context lines would overlap or touch, so that one hunk shows them."""
    groups: list[list[Change]] = []
    for change in changes:
        if groups and change[1] - groups[-1][-1][1] <= 2 * _CONTEXT:
            groups[-1].append(change)
        else:
            groups.append([change])
    return groups


def _render(hunk: list[Change], window: _Window, decode: Callable[[bytes], str]) -> list[str]:
    around = min(_CONTEXT, hunk[0][1], hunk[0][2])
    at, other = hunk[0][1] - around, hunk[0][2] - around
    old_start, new_start = at, other
    body: list[str] = []
    block: tuple[list[str], list[str]] = ([], [])
    for is_insertion, change_at, _ in hunk:
        if change_at > at:
            body += [*block[0], *block[1]]
            block = ([], [])
            body += [" " + _show(line, decode) for line in window.old[at:change_at]]
            other += change_at - at
            at = change_at
        if is_insertion:
            block[1].append("+" + _show(window.new[other], decode))
            other += 1
        else:
            block[0].append("-" + _show(window.old[at], decode))
            at += 1
    body += [*block[0], *block[1]]
    after = window.old[at : at + min(_CONTEXT, len(window.new) - other)]
    body += [" " + _show(line, decode) for line in after]
    spans = [(old_start, at + len(after) - old_start), (new_start, other + len(after) - new_start)]
    old_span, new_span = (f"{window.first_line + start + (count > 0)},{count}" for start, count in spans)
    return [f"@@ -{old_span} +{new_span} @@", *"\n".join(body).split("\n")]


def _show(line: bytes, decode: Callable[[bytes], str]) -> str:
    text, mark, note = line.partition(b"\n")
    shown = decode(text).replace("\0", "\ufffd").replace("\r", "\\r")
    if len(shown) > _LINE_CHARS:
        shown = f"{shown[:_LINE_CHARS]} [... {len(shown) - _LINE_CHARS} more characters]"
    return shown + (mark + note).decode()
