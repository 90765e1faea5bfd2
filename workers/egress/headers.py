"""Heads of HTTP/1.1 messages, read strictly: what two parsers could read differently is refused."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
# Visible characters, spaces and tabs, and what is above ASCII: no other control character, hence no line end of any
# kind.
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# What a message is framed and routed by cannot be declared a matter of one hop.
_END_TO_END = frozenset({b"host", b"content-length", b"transfer-encoding"})


class HeadError(ValueError):
    """Bytes that are not the head of a message; the text says why, in the middle of a sentence."""


@dataclass(frozen=True)
class Header:
    """One line: its name in lower case, and the line as it came but for spaces around the value."""

    key: bytes
    name: bytes
    value: bytes

    @property
    def line(self) -> bytes:
        return self.name + b": " + self.value + b"\r\n"


@dataclass(frozen=True)
class Framing:
    """How long a body is: `length` bytes, or in chunks, or (neither) what the kind of message says."""

    length: int | None = None
    is_chunked: bool = False


def split_head(head: bytes, max_lines: int) -> tuple[bytes, tuple[Header, ...]]:
    """The first line and the headers of a head that ends with its empty line. Raises HeadError."""
    if not head.endswith(b"\r\n\r\n"):
        raise HeadError("its head has no end")
    first, *lines = head[:-4].split(b"\r\n")
    if len(lines) > max_lines:
        raise HeadError(f"it has more than {max_lines} header lines")
    if not _VALUE.fullmatch(first):
        raise HeadError("its first line has a control character in it")
    return first, tuple(_parse_header(line) for line in lines)


def _parse_header(line: bytes) -> Header:
    if line[:1] in (b" ", b"\t"):
        raise HeadError("a header goes on in a second line")
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name):
        raise HeadError("a header line has no valid name")
    if not _VALUE.fullmatch(value):
        raise HeadError(f"the header {name.decode('ascii')} has a control character in it")
    return Header(name.lower(), name, value.strip(b" \t"))


def find_values(headers: Iterable[Header], key: bytes) -> list[bytes]:
    return [header.value for header in headers if header.key == key]


def parse_framing(headers: Sequence[Header]) -> Framing:
    """Raises HeadError where two readers might not agree on where the body ends."""
    lengths, encodings = find_values(headers, b"content-length"), find_values(headers, b"transfer-encoding")
    if encodings:
        if lengths:
            raise HeadError("it has both Content-Length and Transfer-Encoding")
        if len(encodings) > 1 or encodings[0].lower() != b"chunked":
            raise HeadError("its Transfer-Encoding is not just 'chunked'")
        return Framing(is_chunked=True)
    if not lengths:
        return Framing()
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise HeadError("its Content-Length is not one plain number")
    return Framing(length=int(lengths[0]))


def drop_hop_by_hop(headers: Sequence[Header]) -> list[Header]:
    """What is for the next hop's reader. Raises HeadError when Connection lists what a message is framed or routed
    by.
    """
    listed = {word.strip(b" \t").lower() for value in find_values(headers, b"connection") for word in value.split(b",")}
    if listed & _END_TO_END:
        raise HeadError("its Connection header names a header that has to be passed on")
    return [header for header in headers if header.key not in _HOP_BY_HOP and header.key not in listed]
