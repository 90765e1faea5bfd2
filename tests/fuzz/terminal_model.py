"""A model of a terminal that obeys: what a terminal of any make could do with the bytes that it gets."""

from dataclasses import dataclass, field

ANSWERING_CONTROLS = frozenset("\x05")
SAFE_FINALS = frozenset("@ABCDEFGHIJKLMPSTXZ`abdefgmrsu")
SAFE_MODES = frozenset(
    {"4", *(f"?{number}" for number in (1, 5, 6, 7, 12, 25, 45, 47, 66, 1047, 1048, 1049, 2004, 2026))}
) | frozenset(f"?{number}" for number in (1000, 1002, 1003, 1004, 1005, 1006, 1007, 1015))


@dataclass
class ModelTerminal:
    """Reads text as Paul Williams' state machine of the VT500 does, with C1 controls. `harms`: what must not arrive.
    `drawn`: the printed text. `modes`: those that are set.
    """

    drawn: str = ""
    harms: list[str] = field(default_factory=list)
    modes: set[str] = field(default_factory=set)
    links: int = 0
    _state: str = "ground"
    _held: str = ""

    def feed(self, text: str) -> None:
        for character in text:
            getattr(self, f"_{self._state}")(self._expand(character))

    def is_idle(self) -> bool:
        return self._state == "ground"

    def _expand(self, character: str) -> str:
        return f"\x1b{chr(ord(character) - 64)}" if "\x80" <= character <= "\x9f" else character

    def _ground(self, character: str) -> None:
        if len(character) == 2:
            self.harms.append(f"C1 {character!r}")
        elif character == "\x1b":
            self._state, self._held = "escape", ""
        elif character in ANSWERING_CONTROLS:
            self.harms.append("ENQ")
        elif character >= " " or character in "\n\t":
            self.drawn += character

    def _is_interrupted(self, character: str) -> bool:
        if character == "\x1b":
            self._state, self._held = "escape", ""
        elif character in "\x18\x1a":
            self._state = "ground"
        elif character in ANSWERING_CONTROLS:
            self.harms.append("ENQ")
        return len(character) == 1 and character < " "

    def _escape(self, character: str) -> None:
        if self._is_interrupted(character):
            return
        if not self._held and character in "[]PX^_k":
            self._state = {"[": "csi", "]": "osc"}.get(character, "string")
            if self._state == "string":
                self.harms.append(f"ESC {character}")
        elif " " <= character <= "/":
            self._held += character
        else:
            self._state = "ground"
            if (not self._held and character == "Z") or self._held[:1] in ("%", " "):
                self.harms.append(f"ESC {self._held}{character}")

    def _csi(self, character: str) -> None:
        if self._is_interrupted(character):
            return
        self._held += character
        if "@" <= character <= "~":
            self._state = "ground"
            self._run(self._held)

    def _run(self, sequence: str) -> None:
        final, inner = sequence[-1], sequence[:-1]
        prefix = inner[:1] if inner[:1] in "<=>?" else ""
        intermediates = inner.lstrip("<=>?0123456789:;")
        if final in "hl" and not intermediates:
            for number in inner.removeprefix(prefix).split(";"):
                if prefix + number not in SAFE_MODES:
                    self.harms.append(f"mode {sequence}")
                (self.modes.add if final == "h" else self.modes.discard)(prefix + number)
        elif intermediates:
            if intermediates + final not in (" @", " q", "'}", "'~", "!p"):
                self.harms.append(f"CSI {sequence}")
        elif not (final in SAFE_FINALS and not prefix) and not (prefix == "?" and final in "JK"):
            self.harms.append(f"CSI {sequence}")

    def _osc(self, character: str) -> None:
        if character == "\a" or character == "\x1b":
            self._state = "ground" if character == "\a" else "escape"
            command, _, rest = self._held.partition(";")
            if command == "8":
                target = rest.partition(";")[2]
                self.links += bool(target)
                if target and not target.startswith(("http://", "https://", "mailto:")):
                    self.harms.append(f"link {target}")
            elif command not in ("0", "1", "2"):
                self.harms.append(f"OSC {self._held}")
            self._held = ""
        elif not self._is_interrupted(character):
            self._held += character

    def _string(self, character: str) -> None:
        self._is_interrupted(character)
