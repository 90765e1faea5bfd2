"""Other readings of a pattern that has found nothing, and hints on how to write what was probably meant."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_HINT_CHARS = 380
_CLASS = r"\[\^?\]?(?:\[:\w+:\]|\\.|[^\]\\])*\]"
# A class in brackets, an escaped character, or an operator that basic regular expressions write with a backslash.
_TOKEN = re.compile(rf"(?P<of_class>{_CLASS})|\\(?P<escaped>.)|(?P<operator>[(){{}}|+?])", re.DOTALL)
_BRACE = re.compile(
    rf"{_CLASS}|\\[pPxuU]\{{[^}}]*\}}|\\.|(?P<brace>\{{(?![0-9]+(?:,[0-9]*)?\}}|,[0-9]+\}}))", re.DOTALL
)
# A pattern in quotes, or between slashes as in JavaScript and Perl.
_WRAPPED = re.compile(r"(?P<mark>['\"`/])(?P<text>.+)(?P=mark)[gimsuy]{0,6}", re.DOTALL)
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")
# What ripgrep 13 accepts after a backslash besides letters and digits. It refuses any other character there.
_ESCAPABLE = r"\.+*?()|[]{}^$#&-~"
_LINE_END = re.compile(rf"{_CLASS}|\\r\??(?:\\n|\n)|\r\n|(?P<end>\\n|\n)|\\.", re.DOTALL)
_ANY_LINE_END = r"(?:\r?\n)"
# Comments may end at a line end, and a look-behind must have one length.
_KEEPS_LINE_ENDS = re.compile(r"\(\?(?:[a-zA-Z]*x|<[=!])")


class Reading:
    """Another reading of a pattern. `hint` says how to write it; `is_shown`: its matches are shown."""

    def __init__(self, text: str, hint: str, *, fixed: bool = False, ignore_case: bool = False) -> None:
        self.text = text
        self.fixed = fixed
        self.ignore_case = ignore_case
        self.hint = hint
        self.is_shown = not ignore_case

    def as_regex(self) -> str:
        text = re.escape(self.text) if self.fixed else self.text
        return f"(?{'i' if self.ignore_case else ''}:{text})"


def build_readings(text: str, *, fixed: bool, ignore_case: bool) -> list[Reading]:
    """Return the other readings of a pattern, the most probable first."""
    if fixed:
        readings = [Reading(text, f"read as a regular expression: {text}")] if _SPECIAL.search(text) else []
    else:
        basic, single = read_basic(text), text.replace("\\\\", "\\")
        readings = [Reading(basic, f"read as GNU grep's basic writing. Here it is written {basic}")]
        readings += [Reading(single, f"read with single backslashes: {single}")]
        readings += [Reading(text, "read as plain text: set fixed_strings=true", fixed=True)]
        readings = [reading for reading in readings if reading.text != text or reading.fixed]
        readings = readings if _SPECIAL.search(text) else []
        bare = _WRAPPED.fullmatch(text)
        if bare is not None:
            readings.append(Reading(bare["text"], f"without the {bare['mark']} around it: {bare['text']}"))
    if not ignore_case and text.swapcase() != text:
        readings.append(Reading(text, "match with ignore_case=true", fixed=fixed, ignore_case=True))
    return readings


def read_basic(text: str) -> str:
    r"""Return the pattern for ripgrep that means what `text` means to GNU grep without -E: `foo\|bar` is `foo|bar`, and
    `f(x)` is `f\(x\)`.
    """

    def swap(token: re.Match[str]) -> str:
        if token["operator"] is not None:
            return "\\" + token["operator"]
        if token["escaped"] is not None and token["escaped"] in "(){}|+?":
            return token["escaped"]
        return token[0]

    swapped = _TOKEN.sub(swap, text)
    return "\\" + swapped if swapped.startswith("*") else swapped


def accept_escapes(text: str) -> str:
    r"""Return the pattern without the writing that only other programs know: `\/` is `/`, `\<` and `\>` are word
    boundaries, and a brace that begins no repetition, as in `interface{}`, is text.
    """
    text = _BRACE.sub(lambda token: r"\{" if token["brace"] else token[0], text)

    def accept(token: re.Match[str]) -> str:
        if token["of_class"] is not None:
            return re.sub(r"\\(.)", lambda escape: _unescape(escape[1]), token["of_class"], flags=re.DOTALL)
        if token["escaped"] is None:
            return token[0]
        return r"\b" if token["escaped"] in "<>" else _unescape(token["escaped"])

    return _TOKEN.sub(accept, text)


def accept_line_ends(text: str) -> str:
    r"""Return the pattern in which a line end also matches `\r\n`, as files of Windows have it. Classes stay as they
    are, and so do patterns with comments or look-behind.
    """
    if _KEEPS_LINE_ENDS.search(text):
        return text
    return _LINE_END.sub(lambda token: _ANY_LINE_END if token["end"] else token[0], text)


def escape_lines(text: str) -> str:
    """Return the pattern that finds these lines, with either line end."""
    return _ANY_LINE_END.join(_SPECIAL.sub(r"\\\g<0>", line) for line in re.split(r"\r?\n", text))


def _unescape(char: str) -> str:
    if char.isalnum() or char in _ESCAPABLE:
        return "\\" + char
    return r"\x20" if char == " " else char


def shorten_hints(hints: Iterable[str]) -> list[str]:
    """Return the hints, each as one short line."""
    lines = (" ".join(hint.encode("utf-8", "replace").decode().split()) for hint in hints)
    return [line if len(line) <= MAX_HINT_CHARS else line[:MAX_HINT_CHARS] + "..." for line in lines][:10]
