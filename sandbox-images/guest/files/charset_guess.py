"""The likeliest encoding of bytes that are neither UTF-8 nor UTF-16: by how common the characters are that each would
make of them.
"""

from __future__ import annotations

import codecs
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKED_AT = 2000
"""Characters beyond ASCII that are judged."""
# Short texts are ambiguous: below so many characters only GB18030 is taken for an encoding of East Asia.
_ENOUGH = 4
_ENOUGH_HANGUL = 8
_LAST = ("cp1252", "latin-1")


def guess_codec(sample: bytes) -> str | None:
    """A codec's name; None for what looks like no text. The sample may end within a character, and a few bytes of it
    may be wrong.
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
    """Whether more than a twentieth are control characters that no text has."""
    allowed = b"\t\n\r\f\b\x1b"
    controls = sum(sample.count(byte) for byte in range(32) if byte not in allowed)
    return controls * 20 > len(sample)


def _is_damaged_utf8(sample: bytes) -> bool:
    """Whether characters of several bytes are there, and far more of them than wrong bytes."""
    signs = _beyond_ascii("utf-8", sample)
    wrong = signs.count("\ufffd")
    return len(signs) - wrong > 3 * wrong


def _beyond_ascii(codec: str, sample: bytes) -> str:
    text = codecs.getincrementaldecoder(codec)("replace").decode(sample)
    return "".join(islice((sign for sign in text if sign > "\x7f"), _LOOKED_AT))


def _share(codec: str, sample: bytes, is_common: Callable[[bytes], bool]) -> float:
    """How many of the characters beyond ASCII are common ones, from 0 to 1."""
    signs = _beyond_ascii(codec, sample)
    common = sum(1 for sign in signs if sign != "\ufffd" and is_common(sign.encode(codec)))
    return common / len(signs) if signs else 0.0


def _is_common_gb(pair: bytes) -> bool:
    """Punctuation, full-width forms, and the first level of Han characters, which is nearly all that modern Chinese
    uses.
    """
    return len(pair) == 2 and pair[1] >= 0xA1 and (0xA1 <= pair[0] <= 0xA3 or 0xB0 <= pair[0] <= 0xD7)


def _is_common_big5(pair: bytes) -> bool:
    return len(pair) == 2 and 0xA1 <= pair[0] <= 0xC6


def _is_japanese(signs: str) -> bool:
    """Whether kana are among the characters as in any Japanese text, and hardly any is wrong or a half-width form."""
    kana = sum(1 for sign in signs if "\u3041" <= sign <= "\u30ff")
    odd = sum(1 for sign in signs if sign == "\ufffd" or "\uff61" <= sign <= "\uff9f" or "\ue000" <= sign <= "\uf8ff")
    return len(signs) >= _ENOUGH and kana >= 0.2 * len(signs) and odd <= 0.05 * len(signs)


def _is_korean(signs: str) -> bool:
    """Whether nearly all is Hangul: half of a Chinese text would be, read so."""
    hangul = sum(1 for sign in signs if "\uac00" <= sign <= "\ud7a3")
    return len(signs) >= _ENOUGH_HANGUL and hangul >= 0.95 * len(signs)


def _western(sample: bytes) -> str:
    """Windows' own characters where such bytes are used; where they are not, both codecs read alike."""
    if any(0x80 <= byte < 0xA0 for byte in set(sample)):
        try:
            sample.decode(_LAST[0])
        except UnicodeDecodeError:
            return _LAST[1]
        return _LAST[0]
    return _LAST[1]
