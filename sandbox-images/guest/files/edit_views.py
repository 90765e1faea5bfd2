"""Show the changed places of an edited file as numbered lines with three lines of context, within a size limit."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.files.edit_matching import Span
    from guest.files.edited_text import EditedText

_AROUND = 3
_SHOWN_PLACES = 5
_PLACE_LINES = 46
_LINE_CHARS = 500


def show_places(edited: EditedText, decode: Callable[[bytes], str], max_chars: int) -> str:
    """Return the present text of the changed places of `edited`.

    Notes below the text list the places that did not fit and say how to see them.
    """
    body, offset, first_line = edited.window()
    regions = _merge([_widen(body, (start - offset, end - offset)) for start, end in sorted(edited.places)])
    firsts = [first_line + body.count(b"\n", 0, start) for start, _ in regions]
    shown: list[str] = []
    remaining_chars = max_chars
    for number, (start, end) in enumerate(regions):
        lines = _numbered(body[start:end], firsts[number], decode)
        size = sum(len(line) + 1 for line in lines)
        if number == _SHOWN_PLACES or size > remaining_chars:
            rest = ", ".join(map(str, firsts[number:]))
            shown.append(f"[also changed, from line {rest}; see it with read_tool]")
            break
        remaining_chars -= size
        shown += ["..."] * bool(shown) + lines
    if edited.count > len(edited.places):
        shown.append(f"[{edited.count - len(edited.places)} more replacements; see them with grep_tool]")
    return "\n".join(shown)


def _widen(body: bytes, place: Span) -> Span:
    """Extend a place to whole lines, with three lines of context on each side."""
    start, end = place
    for _ in range(_AROUND + 1):
        start = body.rfind(b"\n", 0, start)
        if start < 0:
            break
    # If the new text ends with a newline, the line after it has not changed.
    end = max(place[0], end - 1) if body[place[0] : end].endswith(b"\n") else end
    for _ in range(_AROUND + 1):
        end = body.find(b"\n", end) + 1 or len(body)
    return start + 1, end


def _merge(regions: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in regions:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _numbered(part: bytes, first: int, decode: Callable[[bytes], str]) -> list[str]:
    raw = part.split(b"\n")
    if not raw[-1]:
        raw.pop()
    half = _PLACE_LINES // 2
    lines = [(first + at, line) for at, line in enumerate(raw)]
    if len(lines) <= _PLACE_LINES:
        return [_show(number, line, decode) for number, line in lines]
    hidden = lines[half:-half]
    note = (
        f"[lines {hidden[0][0]}-{hidden[-1][0]} not shown; see them with read_tool offset={hidden[0][0]} "
        f"limit={len(hidden)}]"
    )
    head, tail = lines[:half], lines[-half:]
    return [*(_show(*line, decode) for line in head), note, *(_show(*line, decode) for line in tail)]


def _show(number: int, line: bytes, decode: Callable[[bytes], str]) -> str:
    text = decode(line.removesuffix(b"\r")).replace("\0", "\ufffd")
    if len(text) > _LINE_CHARS:
        text = f"{text[:_LINE_CHARS]} [... {len(text) - _LINE_CHARS} more characters]"
    return f"{number}\t{text}"
