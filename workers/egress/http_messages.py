"""HTTP/1.1 requests and answers on their way through the proxy: heads checked and rewritten, bodies followed to their
end.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.errors import ToolFailure
from workers.egress.verdicts import bad_request
from workers.web.urls import Target, parse_url

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
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]{0,19}) ([\x21-\x7e]+) HTTP/1\.([01])")
_ABSOLUTE = re.compile(r"http://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"[^/?#]*")
_TUNNEL = re.compile(r"(?:\[[0-9a-f:.]+\]|[^\[\]:/?#@]+):[0-9]+", re.IGNORECASE)
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}:[\t\x20-\x7e\x80-\xff]*")
_MAX_LINE_BYTES = 4096
_MAX_TRAILER_BYTES = 16 * 1024
LAST_CHUNK = b"0\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_SWITCHING = 101


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


@dataclass(frozen=True)
class ProxyRequest:
    """`head`: what the host is sent, up to the empty line; empty for a tunnel. `target.path` means nothing here."""

    method: str
    target: Target
    is_tunnel: bool
    is_old: bool
    """HTTP/1.0: it cannot be answered in chunks."""
    framing: Framing
    head: bytes


def parse_request(head: bytes, max_lines: int) -> ProxyRequest:
    """The request whose head this is. Raises Refusal (400) for whatever could be read in two ways."""
    try:
        return _parse(head, max_lines)
    except HeadError as error:
        raise bad_request(str(error)) from None


def _parse(head: bytes, max_lines: int) -> ProxyRequest:
    first, headers = split_head(head, max_lines)
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise HeadError("its first line is not METHOD, URL and HTTP/1.1, with one space between them")
    method, place, is_old = match[1].decode("ascii"), match[2].decode("ascii"), match[3] == b"0"
    framing = parse_framing(headers)
    if framing.is_chunked and is_old:
        raise HeadError("HTTP/1.0 has no Transfer-Encoding")
    if method == "CONNECT":
        return _parse_tunnel(place, headers, framing, is_old=is_old)
    target, path = _parse_absolute(place)
    _check_host(headers, target, is_needed=not is_old)
    _check_expectation(headers)
    sent = _build_head(method, path, target, headers, framing, version=match[3])
    return ProxyRequest(method, target, False, is_old, framing, sent)


def _parse_tunnel(place: str, headers: tuple[Header, ...], framing: Framing, *, is_old: bool) -> ProxyRequest:
    if not _TUNNEL.fullmatch(place):
        raise HeadError("CONNECT needs host:port")
    if framing.is_chunked or framing.length:
        raise HeadError("CONNECT with a body")
    target = _parse_authority("https", place)
    _check_host(headers, target, is_needed=False)
    return ProxyRequest("CONNECT", target, True, is_old, Framing(), b"")


def _parse_absolute(place: str) -> tuple[Target, str]:
    match = _ABSOLUTE.fullmatch(place)
    if match is None:
        raise HeadError("a proxy needs an absolute http:// URL without a fragment; for https use CONNECT host:443")
    path = match[2]
    return _parse_authority("http", match[1]), path if path.startswith("/") else f"/{path}"


def _parse_authority(scheme: str, authority: str) -> Target:
    if not _AUTHORITY.fullmatch(authority):
        raise HeadError("its Host header is no host")
    try:
        return parse_url(f"{scheme}://{authority}/")
    except ToolFailure as failure:
        raise HeadError(failure.message) from None


def _check_host(headers: tuple[Header, ...], target: Target, *, is_needed: bool) -> None:
    """A Host header has to say what the URL says: whoever reads the other one would be asked for another host."""
    values = find_values(headers, b"host")
    if len(values) > 1 or (is_needed and not values):
        raise HeadError("it needs one Host header")
    if not values:
        return
    said = _parse_authority(target.scheme, values[0].decode("latin-1"))
    # Clients that ask for a tunnel may leave the port out.
    is_bare = target.scheme == "https" and said.authority == said.host
    if said.host != target.host or (said.port != target.port and not is_bare):
        raise HeadError("its Host header names another host than its URL")


def _check_expectation(headers: tuple[Header, ...]) -> None:
    if any(value.lower() != b"100-continue" for value in find_values(headers, b"expect")):
        raise HeadError("it expects something else than 100-continue")


def _build_head(
    method: str, path: str, target: Target, headers: tuple[Header, ...], framing: Framing, *, version: bytes
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.".encode("ascii") + version + b"\r\n",
        f"Host: {target.authority}\r\n".encode("ascii"),
    ]
    lines += [header.line for header in drop_hop_by_hop(headers) if header.key != b"host"]
    if framing.is_chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    return b"".join([*lines, b"Connection: close\r\n\r\n"])


class Body(Protocol):
    """A body as it comes. `is_done`: its end was seen; what came behind it is dropped."""

    is_done: bool

    def take(self, data: bytes) -> bytes:
        """The content in `data`. Raises HeadError when it is not framed as it must be."""
        ...

    def finish(self) -> None:
        """The connection ended. Raises HeadError when that is in the middle."""
        ...


class ExactBody:
    """`length` bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_done = length == 0

    def take(self, data: bytes) -> bytes:
        content = data[: self._left]
        self._left -= len(content)
        self.is_done = self._left == 0
        return content

    def finish(self) -> None:
        if not self.is_done:
            raise HeadError(f"its body ended {self._left} bytes before its end")


class OpenBody:
    """Everything until the connection ends."""

    is_done = False

    def take(self, data: bytes) -> bytes:
        return data

    def finish(self) -> None:
        self.is_done = True


class ChunkedBody:
    """In chunks. Extensions and trailers are checked and dropped."""

    def __init__(self) -> None:
        self._held = b""
        self._at = 0
        self._left = 0
        self._step = self._read_size
        self._trailer_bytes = 0
        self.is_done = False

    def take(self, data: bytes) -> bytes:
        # One copy of what is left over, however small the chunks: a step that copied would make small ones dear.
        self._held, self._at = self._held[self._at :] + data, 0
        pieces: list[bytes] = []
        while not self.is_done and (piece := self._step()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def finish(self) -> None:
        if not self.is_done:
            raise HeadError("its body ended in the middle of its chunks")

    def _read_size(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise HeadError("the size of a chunk is not a number")
        self._left = int(match[1], 16)
        self._step = self._read_content if self._left else self._read_trailer
        return b""

    def _read_content(self) -> bytes | None:
        content = self._held[self._at : self._at + self._left]
        self._at += len(content)
        self._left -= len(content)
        if not self._left:
            self._step = self._read_end
        return content or None

    def _read_end(self) -> bytes | None:
        end = self._held[self._at : self._at + 2]
        if end != b"\r\n"[: len(end)]:
            raise HeadError("a chunk is not as long as it says")
        if len(end) < 2:
            return None
        self._at += 2
        self._step = self._read_size
        return b""

    def _read_trailer(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _MAX_TRAILER_BYTES or (line and not _TRAILER.fullmatch(line)):
            raise HeadError("what follows its last chunk is not made of header lines")
        self.is_done = not line
        return b""

    def _take_line(self) -> bytes | None:
        end = self._held.find(b"\r\n", self._at, self._at + _MAX_LINE_BYTES + 2)
        if end < 0:
            if len(self._held) - self._at > _MAX_LINE_BYTES:
                raise HeadError("a line between its chunks is too long")
            return None
        line = self._held[self._at : end]
        self._at = end + 2
        return line


def build_body(framing: Framing, *, is_open: bool) -> Body:
    """The reader of a body; without a length it has none, or, when `is_open`, ends with the connection."""
    if framing.is_chunked:
        return ChunkedBody()
    if framing.length is None and is_open:
        return OpenBody()
    return ExactBody(framing.length or 0)


def encode_chunk(content: bytes) -> bytes:
    """One chunk; nothing for no content, which would be the last one."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


@dataclass(frozen=True)
class AnswerHead:
    """`head`: what the client is sent. `body`: how to read what follows; None after an interim answer (1xx): another
    head follows.

    `is_chunked`: whether the client is sent the body in chunks.
    """

    status: int
    head: bytes
    body: Body | None
    is_chunked: bool


def parse_answer(head: bytes, request: ProxyRequest, max_lines: int) -> AnswerHead:
    """The head of the answer to `request`. Raises HeadError for what is none of HTTP/1.1."""
    first, headers = split_head(head, max_lines)
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise HeadError("its first line is not that of an HTTP/1.1 answer")
    status = int(match[1])
    if status == _SWITCHING:
        raise HeadError("it switches protocols without having been asked")
    framing, passed = parse_framing(headers), drop_hop_by_hop(headers)
    lines = [b"HTTP/1.1 " + first[9:] + b"\r\n", *(header.line for header in passed)]
    if status < 200:
        return AnswerHead(status, b"".join([*lines, b"\r\n"]), None, False)
    has_body = request.method != "HEAD" and status not in (204, 304)
    body = build_body(framing if has_body else Framing(length=0), is_open=has_body)
    # An end that is only the connection's could not be told from a cut: the client is sent chunks instead.
    is_chunked = has_body and framing.length is None and not request.is_old
    if is_chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    return AnswerHead(status, b"".join([*lines, b"Connection: close\r\n\r\n"]), body, is_chunked)
