"""Holds the content of a text file as bytes that can be searched and edited.

The bytes are in the encoding of the file if a line end is one byte there. UTF-16 and UTF-32 are converted to UTF-8.
"""

from __future__ import annotations

from guest.failures import BINARY_FILE, INVALID_ARGUMENTS, RequestFailure
from guest.files.encodings import TextForm, find_form

_WIDE = ("utf-16", "utf-32")
_BOM = "\ufeff"


class FileText:
    """Text of a file.

    `body`: the text without its BOM, as bytes of `codec`. `join` returns unchanged parts byte for byte.
    """

    __slots__ = ("_is_wide", "body", "codec", "form")

    def __init__(self, data: bytes, shown: str, form: TextForm | None = None) -> None:
        """Find the form of `data`, unless `form` is given. Raises RequestFailure(BINARY_FILE) for binary data."""
        self.form = form or _find_form(data, shown)
        self._is_wide = self.form.codec.startswith(_WIDE)
        self.codec = "utf-8" if self._is_wide else self.form.codec
        body = data[len(self.form.bom) :] if self.form.bom else data
        if self._is_wide:
            try:
                body = body.decode(self.form.codec, "surrogatepass").encode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise RequestFailure(
                    BINARY_FILE, f"{shown}: not valid {self.form.codec}: change it with bash_tool", size=len(data)
                ) from None
        self.body = body

    def encode(self, text: str, subject: str) -> bytes:
        """Return a text as bytes that can be searched in the body or inserted into the body.

        Raises RequestFailure(INVALID_ARGUMENTS) if the encoding of the file has no such character.
        """
        try:
            return text.encode(self.codec)
        except UnicodeEncodeError as error:
            sign = text[error.start]
            raise RequestFailure(
                INVALID_ARGUMENTS,
                f"{subject} has {sign!a} (character {error.start}), which the file's encoding, {self.form.codec}, "
                f"cannot "
                "hold; leave it out, or write the whole file with write_tool and encoding=utf-8",
            ) from None

    def decode(self, part: bytes) -> str:
        """Return a part of the body as text. Invalid bytes become U+FFFD."""
        return part.decode(self.codec, "replace")

    def join(self, parts: tuple[bytes | memoryview, ...]) -> tuple[bytes | memoryview, ...]:
        """Return the new content of the file in pieces, from the parts of its new body."""
        if self._is_wide:
            parts = (b"".join(parts).decode("utf-8", "surrogatepass").encode(self.form.codec, "surrogatepass"),)
        return (self.form.bom, *parts)


def _find_form(data: bytes, shown: str) -> TextForm:
    try:
        return find_form(data)
    except RequestFailure as failure:
        raise RequestFailure(
            failure.code, f"{shown}: {failure.message}: change it with bash_tool", **failure.details
        ) from None


def strip_mark(text: str) -> str:
    """Return the text without a byte order mark at its start."""
    return text.removeprefix(_BOM)
