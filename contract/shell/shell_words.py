"""One bash word: quotes removed, expansions found, escapes decoded, as far as the text alone tells."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_LEVEL = 40
"""Substitutions, groups and quotes inside one another."""

_PLAIN = re.compile(r"""[^ \t\n;&|()<>\\'"$`*?\[{~\x00]+""")
_QUOTED_PLAIN = re.compile(r'[^"\\$`\x00]+')
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)")
_NAME = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_BRACED_NAME = re.compile(r"\$\{[!#]?([A-Za-z_][A-Za-z0-9_]*)")
_POSITIONAL = re.compile(r"\$(?:[@*1-9]|\{(?:[@*]|[1-9][0-9]*)\})")
_SPECIAL = re.compile(r"\$[?$!#0-]")
_ANSI_C = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|c(.)|(.))", re.DOTALL)
_ANSI_C_LETTERS = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_CUT_IFS = re.compile(r"\$\{IFS[^A-Za-z0-9_]")
_UNKNOWN = "$(...)"


class Unreadable(Exception):
    """The text nests or goes on beyond reason. Says so in words that fit after a colon."""


@dataclass(frozen=True)
class Word:
    """`text`: without quotes; a leading unquoted `~` is written `$HOME`.

    `is_expanded`: part of it is known only at run time (`$x`, `$(...)`). `is_pattern`: an unquoted glob or brace list, which may become
    other words. `is_quoted`: it held a quote or a backslash, so it is no keyword.
    """

    text: str
    is_expanded: bool = False
    is_pattern: bool = False
    is_quoted: bool = False


class WordReader:
    """Reads words at `at`. `texts`: backquoted scripts met on the way. `opaque`: the first thing that could not be told, "" for none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.level = 0
        self.texts: list[str] = []
        self.opaque = ""
        self._parts: list[str] = []
        self._is_expanded = False

    def doubt(self, reason: str) -> None:
        """Note why not everything can be told; the first reason is kept."""
        self.opaque = self.opaque or reason

    @contextlib.contextmanager
    def descend(self) -> Iterator[None]:
        """One level of nesting. The word being read is kept aside. Raises Unreadable."""
        if self.level >= MAX_LEVEL:
            raise Unreadable("it is nested too deep")
        kept = self._parts, self._is_expanded
        self.level += 1
        try:
            yield
        finally:
            self.level -= 1
            self._parts, self._is_expanded = kept

    def read_substitution(self) -> None:
        """Commands up to the `)` that closes a substitution."""
        raise NotImplementedError

    def read_word(self) -> Word | None:
        """The word that begins here; None when only an expansion to blanks (`$IFS`) or nothing does. Always moves on in the text."""
        self._parts, self._is_expanded = [], False
        start = self.at
        is_pattern = is_quoted = has_brace = False
        while self.at < len(self.text):
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                self._parts.append(plain.group())
                self.at = plain.end()
                continue
            character = self.text[self.at]
            if character in " \t\n;&|()" or (character in "<>" and not self.text.startswith("(", self.at + 1)):
                break
            if character == "$" and self._skip_blank_variable():
                if self._parts or is_quoted:
                    break
                return None
            is_pattern = is_pattern or character in "*?["
            has_brace = has_brace or character == "{"
            is_quoted = is_quoted or character in "\\'\"" or self.text.startswith("$'", self.at)
            self._read_special(character, is_first=self.at == start)
        if has_brace and _BRACES.search(self.text[start : self.at]):
            is_pattern = True
        if self.at == start:
            return None
        return Word("".join(self._parts), self._is_expanded, is_pattern, is_quoted)

    def read_quoted(self, closer: str = '"') -> None:
        """Text inside double quotes up to `closer`, which is taken too; "" reads a here-document's body to the end of the text."""
        while self.at < len(self.text):
            plain = _QUOTED_PLAIN.match(self.text, self.at)
            if plain:
                self._parts.append(plain.group())
                self.at = plain.end()
                continue
            character = self.text[self.at]
            if character == "\\":
                self._read_quoted_escape()
            elif character == "$":
                self._read_dollar(is_quoted=True)
            elif character == "`":
                self._read_backquote()
            elif character == closer:
                self.at += 1
                return
            else:
                self._read_odd(character)
        if closer:
            self.doubt("a quote is not closed")

    def read_arithmetic(self) -> None:
        """After `((`, up to its `))`. What runs inside is only what is substituted; a text that is no arithmetic after all is a doubt."""
        depth = 0
        with self.descend():
            while self.at < len(self.text):
                character = self.text[self.at]
                if character == ")":
                    self.at += 1
                    if depth == 0:
                        break
                    depth -= 1
                elif character in "$`\"'\\":
                    self._read_special(character, is_first=False)
                else:
                    depth += character == "("
                    self.at += 1
            if self.text.startswith(")", self.at):
                self.at += 1
            else:
                self.doubt("parentheses may count or group")

    def _read_special(self, character: str, *, is_first: bool) -> None:
        if character == "\\":
            self._parts.append("" if self.text.startswith("\n", self.at + 1) else self.text[self.at + 1 : self.at + 2] or "\\")
            self.at += 2
        elif character == "'":
            self._read_single()
        elif character == '"':
            self.at += 1
            self.read_quoted()
        elif character == "$":
            self._read_dollar(is_quoted=False)
        elif character == "`":
            self._read_backquote()
        elif character in "<>":
            self.at += 2
            self._substitute(self.read_substitution)
        elif (
            character == "~"
            and is_first
            and self.text[self.at + 1 : self.at + 2] in ("", "/", " ", "\t", "\n", ";", "&", "|", ")", '"', "'")
        ):
            self._parts.append("$HOME")
            self.at += 1
        else:
            self._read_odd(character)

    def _read_odd(self, character: str) -> None:
        if character == "\x00":
            # bash leaves NULs out: they must not hide a name.
            self.doubt("it holds NUL characters")
        else:
            self._parts.append(character)
        self.at += 1

    def _read_single(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            self.doubt("a quote is not closed")
            end = len(self.text)
        self._parts.append(self.text[self.at + 1 : end])
        self.at = end + 1

    def _read_quoted_escape(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following != "\n":
            self._parts.append(following if following and following in '$`"\\' else "\\" + following)
        self.at += 2

    def _skip_blank_variable(self) -> bool:
        """`$IFS` outside quotes parts words as a blank does."""
        if not self.text.startswith(("$IFS", "${IFS"), self.at):
            return False
        name = _NAME.match(self.text, self.at)
        if name and (name.group(1) or name.group(2)) == "IFS":
            self.at = name.end()
            return True
        if not _CUT_IFS.match(self.text, self.at):
            return False
        with self.descend():
            self.at += 2
            self._read_braces()
        return True

    def _read_dollar(self, *, is_quoted: bool) -> None:
        text, at = self.text, self.at
        if not is_quoted and text.startswith("$'", at):
            self._read_ansi_c()
        elif not is_quoted and text.startswith('$"', at):
            self.at += 1
        elif text.startswith("$((", at):
            self.at += 3
            self._substitute(self.read_arithmetic)
        elif text.startswith("$(", at):
            self.at += 2
            self._substitute(self.read_substitution)
        elif positional := _POSITIONAL.match(text, at):
            # A script given as text has no arguments: they expand to nothing, and must not hide a name.
            self.at, self._is_expanded = positional.end(), True
        elif name := _NAME.match(text, at):
            called = name.group(1) or name.group(2)
            self._parts.append(" " if called == "IFS" else f"${called}")
            self.at, self._is_expanded = name.end(), True
        elif text.startswith("${", at):
            self._read_parameter()
        elif special := _SPECIAL.match(text, at):
            self._parts.append(special.group())
            self.at, self._is_expanded = special.end(), True
        else:
            if text.startswith("$[", at):
                self.doubt("it counts in an old way")
            self._parts.append("$")
            self.at += 1

    def _substitute(self, read: Callable[[], None]) -> None:
        with self.descend():
            read()
        self._parts.append(_UNKNOWN)
        self._is_expanded = True

    def _read_parameter(self) -> None:
        """`${name...}`: what is substituted inside is read, the value is unknown."""
        if self.text[self.at + 2 : self.at + 3] in (" ", "\t", "\n", "|"):
            self.doubt("braces run commands")
        name = _BRACED_NAME.match(self.text, self.at)
        with self.descend():
            self.at += 2
            self._read_braces()
        self._parts.append("$HOME" if name and name.group(1) == "HOME" else "${...}")
        self._is_expanded = True

    def _read_braces(self) -> None:
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "}":
                self.at += 1
                return
            if character in "\\'\"$`" or self.text.startswith(("<(", ">("), self.at):
                self._read_special(character, is_first=False)
            else:
                self.at += 1
        self.doubt("a brace is not closed")

    def _read_backquote(self) -> None:
        end = self.at + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.doubt("a backquote is not closed")
        self.texts.append(re.sub(r"\\([\\$`])", r"\1", self.text[self.at + 1 : end]))
        self.at = end + 1
        self._parts.append(_UNKNOWN)
        self._is_expanded = True

    def _read_ansi_c(self) -> None:
        end = self.at + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.doubt("a quote is not closed")
        decoded = _ANSI_C.sub(_decode_ansi_c, self.text[self.at + 2 : end])
        # A NUL ends such a string.
        self._parts.append(decoded.partition("\x00")[0])
        self.at = end + 1


def _decode_ansi_c(match: "re.Match[str]") -> str:
    hexadecimal = match.group(1) or match.group(2) or match.group(3)
    if hexadecimal or match.group(4):
        code = int(hexadecimal, 16) if hexadecimal else int(match.group(4), 8) & 0xFF
        return chr(code) if code <= 0x10FFFF else ""
    if match.group(5):
        return chr(ord(match.group(5)) & 0x1F)
    letter: str = match.group(6)
    return _ANSI_C_LETTERS.get(letter, letter if letter in "\\'\"?" else "\\" + letter)
