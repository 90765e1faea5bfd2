"""Conversion of bytes to text. The charset comes from the header, a byte order mark, a meta tag, or a guess; the
result names the source.
"""

import codecs
import re
from dataclasses import dataclass

from charset_normalizer import from_bytes

SAMPLE_BYTES = 16 * 1024
_META_BYTES = 2048
_META = re.compile(rb"<meta[^>]{0,200}charset\s{0,5}=\s{0,5}[\"']?\s{0,5}([a-z0-9_\-:.]{2,40})", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))

# Allowed charsets. Other codecs of Python are excluded, because some do more than convert text, or need quadratic time.
_SUPPORTED = frozenset(
    {
        *(
            "utf-8",
            "utf-16",
            "utf-16-le",
            "utf-16-be",
            "utf-32",
            "gb18030",
            "big5",
            "big5hkscs",
            "cp932",
            "euc_jp",
            "iso2022_jp",
        ),
        *("cp949", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic", "cp866", "cp874", "tis-620"),
        *(f"cp125{n}" for n in range(9)),
        *(f"iso8859-{n}" for n in (*range(2, 12), 13, 14, 15, 16)),
    }
)
# Charset names that browsers read as a larger charset. Pages rely on this.
_WIDER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "iso8859-9": "cp1254",
    "tis-620": "cp874",
    "utf-8-sig": "utf-8",
}


@dataclass(frozen=True)
class DecodedText:
    """Decoded text. `source`: where the charset came from: header, mark (byte order mark), meta or guess. `replaced`:
    the number of invalid sequences that became U+FFFD.
    """

    text: str
    charset: str
    source: str
    replaced: int = 0


def decode_body(body: bytes, declared: str | None, *, is_html: bool) -> DecodedText:
    """Decode a body. This function never fails. `declared`: the charset in the Content-Type header."""
    charset, source = _choose(body, declared, is_html)
    try:
        return DecodedText(body.decode(charset).removeprefix("\ufeff"), charset, source)
    except UnicodeDecodeError:
        text = body.decode(charset, "replace").removeprefix("\ufeff")
        return DecodedText(text, charset, source, text.count("\ufffd"))


def known_charset(label: str) -> str | None:
    """Return the codec for a charset label of the web; None if the charset is not supported."""
    try:
        name = codecs.lookup(label.strip().strip("\"'")).name
    except (LookupError, ValueError):
        return None
    name = _WIDER.get(name, name)
    return name if name in _SUPPORTED else None


def _choose(body: bytes, declared: str | None, is_html: bool) -> tuple[str, str]:
    if declared and (charset := known_charset(declared)):
        return charset, "header"
    for mark, name in _MARKS:
        if body.startswith(mark):
            return name, "mark"
    meta = _META.search(body, 0, _META_BYTES) if is_html else None
    if meta and (charset := known_charset(meta[1].decode("ascii"))):
        # The meta tag was readable as ASCII, so the page cannot be UTF-16, even if the tag says so.
        return ("utf-8" if charset.startswith("utf-16") else charset), "meta"
    return _guess(body), "guess"


def _guess(body: bytes) -> str:
    try:
        body.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        found = from_bytes(body[:SAMPLE_BYTES]).best()
    return (known_charset(found.encoding) if found is not None else None) or "cp1252"
