"""JSON laid out in lines without a change to any of its tokens: numbers, escapes and repeated names stay as they
were.
"""

import json
import re

MAX_INPUT_CHARS = 1024 * 1024
MAX_OUTPUT_CHARS = 8 * 1024 * 1024
INDENT = "  "

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def lay_out_json(text: str) -> str | None:
    """`text` with a line a value. None when it is not JSON, or too large or too deep to lay out."""
    if len(text) > MAX_INPUT_CHARS or not _is_json(text):
        return None
    pieces: list[str] = []
    size = depth = 0
    previous = ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth -= token in ("}", "]")
        piece = _gap(previous, token, depth) + token
        depth += token in ("{", "[")
        size += len(piece)
        if size > MAX_OUTPUT_CHARS:
            return None
        pieces.append(piece)
        previous = token
    return "".join(pieces)


def _gap(previous: str, token: str, depth: int) -> str:
    """What stands before `token`."""
    if token in ("}", "]"):
        return "" if previous in ("{", "[") else "\n" + INDENT * depth
    if previous == ":":
        return " "
    return "\n" + INDENT * depth if previous in ("{", "[", ",") else ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
