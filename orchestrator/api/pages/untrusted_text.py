"""Display of untrusted text.

Text is escaped for HTML. Invariant: characters that are invisible, change the text direction, or imitate other
characters become visible, so that a person sees what a tool would run.
"""

import json
import re
import unicodedata
from functools import lru_cache
from typing import Any

from markupsafe import Markup, escape

MAX_SHOWN_CHARS = 100_000
_INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffd\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_UNPRINTABLE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}\ud800-\udfff\ufdd0-\ufdef\ue000-\uf8ff]")
"""Control characters, characters that change the text direction, and invisible characters."""
_LOOKALIKES = (
    # Letters of other scripts with the shape of a Latin one.
    "аеорсхуіјѕһԁԛԝкмтнвгпАВЕКМНОРСТХУІЈЅԌԚԜ"
    "αοινρτυχγκΑΒΕΖΗΙΚΜΝΟΡΤΥΧϲϳᎪᏴᏟᎬᎻᎫᏦᏞᎷᏢᏒᏚᎢᏙᎳ"
    # Punctuation and spaces that look like ASCII but that a shell does not treat like ASCII.
    "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
    "\u2010-\u2015\u2018-\u201f\u2032-\u2037\u2043\u2044\u2212\u2215\u2216\u2223\u2236\u223c\u02b9-\u02bc\u02c8\u00b4\u037e\u0387\u29f5\u29f8\ua4fd\ua789"
    "\u0334-\u0338\u3014\u3015"
)
_WORD = re.compile(r"[^\W_]+")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_UNPRINTABLE_RUN = re.compile(f"{_UNPRINTABLE.pattern}+")
_MARK_CANDIDATE = re.compile(f"{_UNPRINTABLE.pattern[:-1]}\t]|[^\x00-\x7f]")
_TAB = '<span class="mark" title="tab">\u2192</span>\t'
_SPACE = '<span class="mark" title="space at the end of the line">\u00b7</span>'
_LINE_END = '<span class="mark" title="end of line">\u21b5</span>\n'


def reveal(text: str) -> Markup:
    """Return escaped text in which control and invisible characters are replaced with marked escapes."""
    # Escaping for HTML neither adds nor removes such characters.
    return Markup(_UNPRINTABLE_RUN.sub(_marked, str(escape(text))))


def reveal_exactly(text: str) -> Markup:
    """Return escaped text for a person who decides about a call from this text.

    Marks what `reveal` marks, and also line ends, tabs, spaces at line ends, and characters that imitate others.
    """
    return Markup("".join(_exact_line(line) for line in re.findall(r"[^\n]*\n|[^\n]+", text)))


def count_suspicious(text: str) -> tuple[int, int]:
    """Return how many characters of a text are invisible, and how many imitate other characters."""
    return len(_UNPRINTABLE.findall(text)), len(_imitations(text))


def shorten(text: str, limit: int = MAX_SHOWN_CHARS) -> tuple[str, str, int]:
    """Return the beginning and the end of a text, and the number of hidden characters between them.

    The number is 0 when the text is complete.
    """
    if len(text) <= limit:
        return text, "", 0
    half = limit // 2
    return text[:half], text[-half:], len(text) - 2 * half


def build_json(value: Any) -> str:
    """Format a value as indented JSON. Characters are not escaped, and keys keep their order."""
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def _exact_line(line: str) -> str:
    body = line.removesuffix("\n")
    visible = body.rstrip(" \t")
    imitating = _imitations(visible)
    pieces: list[str] = []
    at = 0
    for match in _MARK_CANDIDATE.finditer(visible):
        character, position = match[0], match.start()
        if character == "\t":
            mark = _TAB
        elif _UNPRINTABLE.fullmatch(character):
            mark = _mark_unprintable(character)
        elif position in imitating:
            mark = _imitation(character)
        else:
            continue
        pieces += [str(escape(visible[at:position])), mark]
        at = match.end()
    pieces.append(str(escape(visible[at:])))
    pieces += [_TAB if character == "\t" else _SPACE for character in body[len(visible) :]]
    return "".join([*pieces, _LINE_END if len(body) < len(line) else ""])


def _imitations(text: str) -> set[int]:
    """Return the positions of imitating characters.

    These are characters that look like ASCII, and letters of another script next to Latin letters.
    """
    positions: set[int] = set()
    if text.isascii():
        return positions
    for match in _NOT_ASCII.finditer(text):
        character = match[0]
        plain = unicodedata.normalize("NFKC", character)
        if _IS_LOOKALIKE.fullmatch(character) or (plain != character and plain.isascii()):
            positions.add(match.start())
    for match in _WORD.finditer(text):
        if not match[0].isascii() and re.search("[A-Za-z]", match[0]):
            positions |= {
                match.start() + at
                for at, character in enumerate(match[0])
                if not character.isascii() and not _is_latin(character)
            }
    return positions


_IS_LOOKALIKE = re.compile(f"[{_LOOKALIKES}]")


def _is_latin(character: str) -> bool:
    return unicodedata.name(character, "").startswith("LATIN") or bool(unicodedata.category(character).startswith("M"))


def _marked(match: re.Match[str]) -> str:
    """Return HTML that marks adjacent suspicious characters.

    Adjacent characters share one element, so that a page full of such characters does not become slow.
    """
    run = match[0]
    return _mark_unprintable(run) if len(run) == 1 else f'<span class="odd">{"".join(map(_escape, run))}</span>'


@lru_cache(maxsize=4096)
def _mark_unprintable(character: str) -> str:
    return f'<span class="odd" title="{_name(character)}">{_escape(character)}</span>'


@lru_cache(maxsize=4096)
def _imitation(character: str) -> str:
    shown = character if character.strip() else "\u2423"
    return f'<span class="odd" title="{_name(character)}">{shown}<small>{_escape(character)}</small></span>'


@lru_cache(maxsize=4096)
def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _name(character: str) -> str:
    return f"U+{ord(character):04X} {unicodedata.name(character, 'without a name')}"
