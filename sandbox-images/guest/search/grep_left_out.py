"""Read from the messages of ripgrep which files it left out, and why."""

from __future__ import annotations

import re

# Maximum size of the stored errors and names: enough for tens of thousands of names.
_MAX_BYTES = 4 << 20
_GAVE_UP = b"PCRE2: error matching"
# An error about a file. The name may contain line ends.
_OS_ERROR = re.compile(rb"^(?:rg: )?\./(.*?): [^:\n]*\(os error \d+\)$", re.MULTILINE | re.DOTALL)
_RULE_ERROR = re.compile(rb"^(?:rg: )?(?:\./)?([^\n]*\.(?:git|rg)?ignore): (line \d+: [^\n]+)$", re.MULTILINE)
# ripgrep does not say which file has these rules, and applies no rule of the file.
_TOO_LARGE = re.compile(rb"^(?:rg: )?Compiled regex exceeds size limit", re.MULTILINE)
# ripgrep 13 and 14 write these with --debug.
_IGNORED = re.compile(rb"^DEBUG\|[^\n]*?: ignoring \./([^\n]*): Ignore\(IgnoreMatch\(Gitignore\(")
_LARGE = re.compile(rb"^DEBUG\|[^\n]*?: ignoring \./([^\n]*): \d+ bytes$")


class LeftOut:
    """Names that a search process reported, as paths below the start. What does not fit is dropped."""

    def __init__(self) -> None:
        self.ignored: list[bytes] = []
        self.large: list[bytes] = []
        self._errors = bytearray()
        self._rest = b""
        self._remaining_bytes = _MAX_BYTES

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"DEBUG|"):
                self._errors += line[: max(0, _MAX_BYTES - len(self._errors))] + b"\n"
            elif (ignored := _IGNORED.match(line)) is not None:
                self._keep(self.ignored, ignored[1])
            elif (large := _LARGE.match(line)) is not None:
                self._keep(self.large, large[1])

    def _keep(self, names: list[bytes], name: bytes) -> None:
        if len(name) <= self._remaining_bytes:
            self._remaining_bytes -= len(name) + 64
            names.append(name)

    @property
    def has_given_up(self) -> bool:
        """Return whether PCRE2 has given up a text that takes too many steps."""
        return _GAVE_UP in self._errors

    @property
    def unreadable(self) -> list[bytes]:
        """The files and folders that could not be read."""
        return [match[1] for match in _OS_ERROR.finditer(bytes(self._errors))]

    @property
    def bad_rules(self) -> list[str]:
        """The invalid lines of rule files."""
        errors = bytes(self._errors)
        found = [
            b": ".join(match.groups()).decode("utf-8", "surrogateescape") for match in _RULE_ERROR.finditer(errors)
        ]
        return found + ["a file with too many rules, its rules are not applied"] * bool(_TOO_LARGE.search(errors))

    @property
    def text(self) -> str:
        """The errors that are not about files or rules."""
        text = _RULE_ERROR.sub(b"", _OS_ERROR.sub(b"", bytes(self._errors)))
        return text.decode("utf-8", "replace").strip()
