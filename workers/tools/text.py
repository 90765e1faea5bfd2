"""Turns a program's bytes into text for a model: decoded, folded as by a terminal, cut to head and tail, with a note
for every cut.
"""

import re
from collections.abc import Mapping
from typing import Any

from contract.errors import ErrorCode, ToolFailure

MAX_OUTPUT_BYTES = 32 * 1024
MAX_LINES = 2000
HEAD_LINES = MAX_LINES // 4
NARROWER = "narrow the command, or send its output to a file and read parts"
"""Advice for an output whose rest was not kept."""
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS and its like
    r"|[ -/]*[0-Z\\^-~])"  # all others
)


def encode(text: str, name: str) -> bytes:
    """Return the UTF-8 of an argument. Raises ToolFailure(INVALID_ARGUMENTS) for half a surrogate pair, which a model's
    JSON may hold.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"{name} holds half of a surrogate pair at character {error.start}; send whole characters",
        ) from error


def decode(data: bytes) -> str:
    """Decode UTF-8 with replacement. NUL, which JSON readers and terminals do not accept, becomes U+FFFD."""
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def fold(text: str) -> str:
    """Return what a terminal would still show: no escape sequences, and the last version of a line that was written
    over.
    """
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\b" in text:
        text = "\n".join(map(_fold_backspaces, text.split("\n")))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return text


def show_name(text: str) -> str:
    """Return a guest's name or path for a line of ours: characters that could end or fake the line are replaced."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text.encode("utf-8", "replace").decode())


def show_output(data: bytes, counts: Mapping[str, Any], rest: str = NARROWER) -> tuple[str, bool]:
    """Return a captured stream as text of at most MAX_LINES lines, and whether something was left out. A note stands in
    its place.

    `counts`: total, head and tail bytes, as the guest reports. `rest`: how to read what is left out; `{offset}` in it
    is the number of the first line that is not shown.
    """
    total, head = int(counts.get("total", len(data))), int(counts.get("head", len(data)))
    if total <= len(data):
        first, last = data, b""
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if lines <= MAX_LINES:
            return fold(decode(data)), False
        first, last = _first_lines(data, HEAD_LINES), _last_lines(data, MAX_LINES - HEAD_LINES)
    else:
        first = _first_lines(_to_edge(data[:head]), HEAD_LINES)
        last = _last_lines(_from_edge(data[head:]), MAX_LINES - HEAD_LINES)
    how = rest.replace("{offset}", str(first.count(b"\n") + 1))
    note = f"[... {total - len(first) - len(last)} bytes omitted of {total}: {how} ...]"
    above = fold(decode(first)).removesuffix("\n")
    return "\n".join(part for part in (above, note, fold(decode(last))) if part), True


def _fold_backspaces(line: str) -> str:
    """Remove characters that were written over, as manual pages and progress signs do."""
    if "\b" not in line:
        return line
    kept: list[str] = []
    for sign in line:
        if sign != "\b":
            kept.append(sign)
        elif kept:
            kept.pop()
    return "".join(kept)


def _first_lines(data: bytes, most: int) -> bytes:
    at = 0
    for _ in range(most):
        at = data.find(b"\n", at) + 1
        if at == 0:
            return data
    return data[:at]


def _last_lines(data: bytes, most: int) -> bytes:
    at = len(data) - data.endswith(b"\n")
    for _ in range(most):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return data
    return data[at + 1 :]


def _to_edge(data: bytes) -> bytes:
    """Remove the part of a line that the cut left, unless it is most of the text; always remove half a code point."""
    whole = data.rfind(b"\n") + 1
    return data[:whole] if whole * 2 > len(data) else _without_broken_end(data)


def _from_edge(data: bytes) -> bytes:
    whole = data.find(b"\n") + 1
    return data[whole:] if 0 < whole * 2 < len(data) else _without_broken_start(data)


def _without_broken_end(data: bytes) -> bytes:
    """Remove the beginning of a code point that the cut left. Bytes that are no UTF-8 stay."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if not _continues(byte):
            return data[:-length] if _size_of(byte) > length else data
    return data


def _without_broken_start(data: bytes) -> bytes:
    """Remove the rest of a code point whose beginning was cut off. Bytes that are no UTF-8 stay."""
    rest = next((at for at, byte in enumerate(data[:4]) if not _continues(byte)), len(data))
    return data[rest:] if rest <= 3 else data


def _continues(byte: int) -> bool:
    return 0x80 <= byte < 0xC0


def _size_of(first: int) -> int:
    """Return the number of bytes of the code point that begins with `first`; 1 when none does."""
    if 0xC2 <= first < 0xE0:
        return 2
    if 0xE0 <= first < 0xF0:
        return 3
    return 4 if 0xF0 <= first < 0xF5 else 1
