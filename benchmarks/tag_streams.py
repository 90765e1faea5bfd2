"""Streams for the benchmark of the tag parser, its baseline, and a state machine that reads every character."""

import re
from collections.abc import Sequence

_CALL = '<tool_action name="bash_tool"><command value="ls -la /workspace" /></tool_action>'
_PROSE = (
    "The file is there, and it has four sections; I will read the second one first, since the others refer to it. "
    "If a < b the loop ends early, so the list needs <b>no</b> sentinel. "
    "读取文件以后再继续。"
)
_ATTRIBUTE = re.compile(r'<(\w+) \w+="([^"]*)"').findall
_EVERY = 2000
"""Number of characters between two calls in the mixed stream."""


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def mixed(size: int) -> str:
    """Return prose with a call every 2 kB."""
    prose = _PROSE * (_EVERY // len(_PROSE) + 1)
    return repeated("", prose[: _EVERY - len(_CALL)] + _CALL, size)


def repeated(head: str, unit: str, size: int) -> str:
    return head + (unit * (size // len(unit) + 1))[: size - len(head)]


def streams(size: int) -> dict[str, str]:
    """Return streams of `size` characters by name. Some of them are the worst cases of the parser."""
    return {
        "mixed": mixed(size),
        "open value": repeated('<tool_action name="t"><v value="', "line of a file, ", size),
        "open code value": repeated('<tool_action name="t"><v value="', "if (a->b > 0) { x = <i>; }\n", size),
        "lone <": repeated("", "<", size),
        "broken markers": repeated("", "<tool_actio <tool_action tag ", size),
        "tiny calls": repeated("", '<tool_action name="t"><v value="1" /></tool_action>', size),
    }


def run_floor(chunks: Sequence[str]) -> None:
    """Do the least work that stores a stream: append each chunk, join once."""
    pieces = []
    for chunk in chunks:
        pieces.append(chunk)
    "".join(pieces)


class CharacterMachine:
    """Simple parser: one step for every character, in a single loop. Supports canonical calls only."""

    _MARKER = "<tool_action"
    _END = "</tool_action>"

    def __init__(self) -> None:
        self._tag: list[str] = []
        self._matched = 0
        self._inside = self._quoted = False

    def feed(self, chunk: str) -> list[tuple[str, object]]:  # noqa: C901
        # One long loop on purpose: function calls would make it slower.
        events: list[tuple[str, object]] = []
        text: list[str] = []
        inside, quoted, matched, tag = self._inside, self._quoted, self._matched, self._tag
        for character in chunk:
            if inside:
                tag.append(character)
                if character == '"':
                    quoted = not quoted
                elif quoted:
                    continue
                elif character == self._END[matched]:
                    matched += 1
                    if matched == len(self._END):
                        events.append(("call", _ATTRIBUTE("".join(tag))))
                        inside, matched = False, 0
                elif matched:
                    matched = 1 if character == "<" else 0
            elif not matched and character != "<":
                text.append(character)
            elif character == self._MARKER[matched]:
                matched += 1
                if matched == len(self._MARKER):
                    events.append(("text", "".join(text)))
                    inside, quoted, matched, tag, text = True, False, 0, [self._MARKER], []
            else:
                text.append(self._MARKER[:matched])
                matched = 1 if character == "<" else 0
                if not matched:
                    text.append(character)
        self._inside, self._quoted, self._matched, self._tag = inside, quoted, matched, tag
        if text:
            events.append(("text", "".join(text)))
        return events
