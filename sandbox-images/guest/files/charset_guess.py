"""Guess the encoding of bytes that are neither UTF-8 nor UTF-16.

Each candidate codec decodes the bytes. The guess depends on how common the resulting characters are in real text.
"""

from __future__ import annotations

import codecs
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKED_AT = 2000
"""Maximum number of characters beyond ASCII that the guess examines."""
# Short texts are ambiguous: with fewer characters than this, the guess accepts no East Asian encoding except GB18030.
_ENOUGH = 4
_ENOUGH_HANGUL = 8
_LAST = ("cp1252", "latin-1")


def guess_codec(sample: bytes) -> str | None:
    """Return the name of the most likely codec, or None if the sample does not look like text.

    The sample may end in the middle of a character, and a few of its bytes may be wrong.
    """
    if _is_noise(sample):
        return None
    if _is_damaged_utf8(sample):
        return "utf-8"
    chinese = _share("gb18030", sample, _is_common_gb)
    for codec, is_clearly in (("cp932", _is_japanese), ("euc_jp", _is_japanese), ("cp949", _is_korean)):
        if is_clearly(_beyond_ascii(codec, sample)):
            return codec
    big5 = _share("cp950", sample, _is_common_big5) if len(_beyond_ascii("cp950", sample)) >= _ENOUGH else 0.0
    if big5 >= 0.7 and big5 > chinese + 0.15:
        return "cp950"
    if chinese >= 0.5:
        return "gb18030"
    return _western(sample)


def _is_noise(sample: bytes) -> bool:
    """Return whether more than one byte in twenty is a control character that text files do not contain."""
    allowed = b"\t\n\r\f\b\x1b"
    controls = sum(sample.count(byte) for byte in range(32) if byte not in allowed)
    return controls * 20 > len(sample)


def _is_damaged_utf8(sample: bytes) -> bool:
    """Return whether the sample is UTF-8 with a few wrong bytes: more than three multi-byte characters for each wrong
    byte.
    """
    signs = _beyond_ascii("utf-8", sample)
    wrong = signs.count("\ufffd")
    return len(signs) - wrong > 3 * wrong


def _beyond_ascii(codec: str, sample: bytes) -> str:
    text = codecs.getincrementaldecoder(codec)("replace").decode(sample)
    return "".join(islice((sign for sign in text if sign > "\x7f"), _LOOKED_AT))


def _share(codec: str, sample: bytes, is_common: Callable[[bytes], bool]) -> float:
    """Return the share of common characters among the characters beyond ASCII, from 0 to 1."""
    signs = _beyond_ascii(codec, sample)
    common = sum(1 for sign in signs if sign != "\ufffd" and is_common(sign.encode(codec)))
    return common / len(signs) if signs else 0.0


def _is_common_gb(pair: bytes) -> bool:
    """Return whether the byte pair is a common GB18030 character.

    Common characters are punctuation, full-width forms and the first level of Han characters. Modern Chinese uses
    little else.
    """
    return len(pair) == 2 and pair[1] >= 0xA1 and (0xA1 <= pair[0] <= 0xA3 or 0xB0 <= pair[0] <= 0xD7)


def _is_common_big5(pair: bytes) -> bool:
    return len(pair) == 2 and 0xA1 <= pair[0] <= 0xC6


def _is_japanese(signs: str) -> bool:
    """Return whether the text has as many kana as any Japanese text, and almost no wrong or half-width characters."""
    kana = sum(1 for sign in signs if "\u3041" <= sign <= "\u30ff")
    wrong = sum(1 for sign in signs if sign == "\ufffd" or "\uff61" <= sign <= "\uff9f" or "\ue000" <= sign <= "\uf8ff")
    return len(signs) >= _ENOUGH and kana >= 0.2 * len(signs) and wrong <= 0.05 * len(signs)


def _is_korean(signs: str) -> bool:
    """Return whether almost every character is Hangul.

    The threshold is high because about half of a Chinese text also decodes to Hangul.
    """
    hangul = sum(1 for sign in signs if "\uac00" <= sign <= "\ud7a3")
    return len(signs) >= _ENOUGH_HANGUL and hangul >= 0.95 * len(signs)


def _western(sample: bytes) -> str:
    """Return cp1252 if the sample uses bytes that only cp1252 assigns to printable characters, else latin-1.

    Both codecs decode all other bytes to the same characters.
    """
    if any(0x80 <= byte < 0xA0 for byte in set(sample)):
        try:
            sample.decode(_LAST[0])
        except UnicodeDecodeError:
            return _LAST[1]
        return _LAST[0]
    return _LAST[1]
