"""Parses ripgrep's messages about paths that it left out, and the reasons."""

from __future__ import annotations

import re

# Maximum size of the stored errors and names: enough for tens of thousands of names.
_MAX_BYTES = 4 << 20
_MAX_LINE_BYTES = 16_384
_GAVE_UP = b"PCRE2: error matching"
# An error about a file. The name may contain line ends. With one thread, ripgrep repeats the name of a folder.
_OS_ERROR = re.compile(
    rb"^(?:rg: )?\./(.*?): (?:IO error for operation on \./\1: )?[^:\n]*\(os error \d+\)$", re.MULTILINE | re.DOTALL
)
# ripgrep does not say which file has the faulty rules, and then applies no rule of this file.
_RULES_ERROR = re.compile(rb"^(?:rg: )?[Cc]ompiled regex exceeds size limit[^\n]*$", re.MULTILINE)
# Messages that ripgrep 13 and 14 write with --debug.
_LEFT_OUT = re.compile(
    rb"^(?:rg: )?DEBUG\|[^\n]*?: ignoring \./([^\n]*): "
    rb"(?:(Ignore\(IgnoreMatch\(Gitignore\()|\d+ bytes$|(failed to pass))"
)


class LeftOut:
    """Paths below the start that a search process has left out. Beyond a size limit, names are dropped.

    `ignored`: hidden by ignore rules. `large`: larger than the limit. `special`: links to files, pipes and sockets.
    """

    def __init__(self) -> None:
        self.ignored: list[bytes] = []
        self.large: list[bytes] = []
        self.special: list[bytes] = []
        self._errors = bytearray()
        self._rest = b""
        self._remaining_bytes = _MAX_BYTES

    def feed(self, data: bytes) -> None:
        # Keep only the start of a line, up to the longest possible path: a message also has the ignore rule, which may
        # be megabytes long.
        *lines, self._rest = (self._rest[:_MAX_LINE_BYTES] + data).split(b"\n")
        for line in lines:
            if not line.startswith((b"DEBUG|", b"rg: DEBUG|")):
                self._errors += line[: max(0, _MAX_BYTES - len(self._errors))] + b"\n"
            elif (match := _LEFT_OUT.match(line)) is not None and len(match[1]) <= self._remaining_bytes:
                self._remaining_bytes -= len(match[1]) + 64
                (self.ignored if match[2] else self.special if match[3] else self.large).append(match[1])

    @property
    def has_given_up(self) -> bool:
        """Return whether PCRE2 has given up a text that takes too many steps."""
        return _GAVE_UP in self._errors

    @property
    def unreadable(self) -> list[bytes]:
        """The files and folders that could not be read."""
        return [match[1] for match in _OS_ERROR.finditer(bytes(self._errors))]

    @property
    def text(self) -> str:
        """Error messages that are not about files or ignore rules."""
        text = _RULES_ERROR.sub(b"", _OS_ERROR.sub(b"", bytes(self._errors)))
        return text.decode("utf-8", "replace").strip()
