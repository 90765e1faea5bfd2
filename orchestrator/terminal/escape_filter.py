"""Filters the output of a sandbox's program for the user's own terminal.

A terminal obeys escape sequences. Some make it type an answer into the program's input; others set the clipboard or
change settings that outlive the program. The filter passes only sequences that are known to draw, and drops the rest.
"""

import codecs
import re
from collections.abc import Callable
from typing import Final

MAX_CHARS: Final = 4096
"""Limit of one sequence. A longer one is dropped; the longest useful ones are hyperlinks."""
_PLAIN_CONTROLS: Final = frozenset("\a\b\t\n\v\f\r\x0e\x0f")
_ABORTS: Final = frozenset("\x18\x1a")
_SPECIAL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
# No two parts match the same text, so that a match takes linear time.
_PARAMETERS: Final = "(?:[0-9]{0,5}[:;])*[0-9]{0,5}"
_CSI: Final = re.compile(
    rf"{_PARAMETERS}[@-MPSXZ`abdefgmrsu]|[0-9]{{0,5}}T|"
    # Columns, the shape of the cursor, a soft reset, and selective erasure.
    rf"{_PARAMETERS}(?: [@q]|'[}}~])|!p|\?[0-9]?[JK]"
)
"""Sequences after `ESC [` that only draw: no terminal answers one of them."""
_MODES: Final = re.compile(r"(\??)([0-9]{1,5}(?:;[0-9]{1,5}){0,15})([hl])")
_DEFAULTS: Final = {
    "4": "l", "?1": "l", "?5": "l", "?6": "l", "?7": "h", "?12": "l", "?25": "h", "?45": "l", "?47": "l", "?66": "l",
    "?1000": "l", "?1002": "l", "?1003": "l", "?1004": "l", "?1005": "l", "?1006": "l", "?1007": "l", "?1015": "l",
    "?1047": "l", "?1048": "l", "?1049": "l", "?2004": "l", "?2026": "l",
}  # fmt: skip
"""Modes that a program may set -> the letter that restores the default. Left out: modes that resize the window, lock
the keyboard, or report something by themselves.
"""
_SHORT: Final = re.compile(r"[78DEHMc=>]|[()*+][0-9A-Z]|#[34568]")
"""Sequences after ESC: cursor, tabs, scrolling, keypad, character sets. Left out: `ESC Z`, which answers, and
`ESC % @`, after which bytes above 127 are controls.
"""
_OSC: Final = re.compile(r"[012];[^\x00-\x1f\x7f-\x9f]{0,1024}|8;[!-:<-~]{0,256};((?:https?://|mailto:)[!-~]+)?")
"""Operating system commands: the title of the window, and hyperlinks to the web."""


class EscapeFilter:
    """Filters bytes in UTF-8, which may be cut anywhere. It holds at most one sequence of MAX_CHARS."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._step: Callable[[str], str] | None = None
        self._sequence = ""
        self._undo = {"": "\x1b[0m\x1b(B\x0f\x1b>"}

    def feed(self, data: bytes) -> bytes:
        """Return the part of the next bytes that the terminal may get."""
        text, position, passed = self._decoder.decode(data), 0, list[str]()
        while position < len(text):
            if self._step is not None:
                passed.append(self._step(text[position]))
                position += 1
                continue
            found = _SPECIAL.search(text, position)
            end = found.start() if found is not None else len(text)
            passed.append(text[position:end])
            if found is not None:
                passed.append(self._begin(found[0]))
            position = end + 1
        return "".join(passed).encode()

    def reset(self) -> bytes:
        """Return the sequences that undo what the program changed: modes, colors, character set and margins."""
        return "".join(reversed(self._undo.values())).encode()

    def _begin(self, control: str) -> str:
        """Pass a control of the text, or begin a sequence. C1 controls and ENQ, which answers, are dropped."""
        if control == "\x1b":
            self._step, self._sequence = self._read_escape, ""
        return control if control in _PLAIN_CONTROLS else ""

    def _leave(self, character: str) -> str:
        """End a sequence at a character that no sequence has: the sequence is dropped, the character is text."""
        self._step = None
        return self._begin(character) if _SPECIAL.match(character) else character

    def _control(self, character: str) -> str:
        """Handle a control inside a sequence: ESC begins a new one, CAN and SUB end this one, others do not belong."""
        if character in _ABORTS:
            self._step = None
        return self._begin(character)

    def _collect(self, character: str) -> str:
        if len(self._sequence) <= MAX_CHARS:
            self._sequence += character
        return ""

    def _read_escape(self, character: str) -> str:
        if character < " ":
            return self._control(character)
        if not self._sequence and character in "[]PX^_k":
            self._step = {"[": self._read_csi, "]": self._read_osc}.get(character, self._read_string)
            return ""
        if character <= "/":
            return self._collect(character)
        if character > "~":
            return self._leave(character)
        self._step = None
        sequence = self._sequence + character
        return f"\x1b{sequence}" if _SHORT.fullmatch(sequence) else ""

    def _read_csi(self, character: str) -> str:
        if character < " ":
            return self._control(character)
        if character < "@":
            return self._collect(character)
        if character > "~":
            return self._leave(character)
        self._step = None
        sequence = self._sequence + character
        if (modes := _MODES.fullmatch(sequence)) is not None:
            return self._pass_modes(*modes.groups())
        if _CSI.fullmatch(sequence) is None:
            return ""
        if sequence.endswith(("r", " q")):
            # Margins move the cursor when they are set.
            self._undo[sequence[-1]] = "\x1b7\x1b[r\x1b8" if sequence[-1] == "r" else "\x1b[0 q"
        return f"\x1b[{sequence}"

    def _pass_modes(self, prefix: str, numbers: str, letter: str) -> str:
        passed = [number for number in numbers.split(";") if prefix + number in _DEFAULTS]
        for name in (prefix + number for number in passed):
            self._undo.pop(name, None)
            if letter != _DEFAULTS[name]:
                self._undo[name] = f"\x1b[{name}{_DEFAULTS[name]}"
        return f"\x1b[{prefix}{';'.join(passed)}{letter}" if passed else ""

    def _read_osc(self, character: str) -> str:
        if character not in "\a\x9c":
            return self._read_string(character) if character in "\x1b\x18\x1a" else self._collect(character)
        return self._end_osc()

    def _end_osc(self) -> str:
        self._step = None
        found = _OSC.fullmatch(self._sequence) if len(self._sequence) <= MAX_CHARS else None
        if found is None:
            return ""
        if self._sequence[0] == "8":
            self._undo["link"] = "\x1b]8;;\x1b\\"
        return f"\x1b]{self._sequence}\x1b\\"

    def _read_string(self, character: str) -> str:
        """Skip a string that no terminal should get, up to its end: `ESC \\`, or any other sequence."""
        if character == "\x1b":
            is_osc = self._step == self._read_osc
            self._step = self._read_osc_end if is_osc else self._read_string_end
        elif character in "\a\x18\x1a\x9c":
            self._step = None
        return ""

    def _read_osc_end(self, character: str) -> str:
        return self._end_osc() if character == "\\" else self._read_string_end(character)

    def _read_string_end(self, character: str) -> str:
        self._step, self._sequence = self._read_escape, ""
        if character == "\\":
            self._step = None
            return ""
        return self._read_escape(character)
