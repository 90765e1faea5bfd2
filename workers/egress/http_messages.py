"""Requests to the proxy: their heads are checked and rewritten.

A message that two parsers could read differently is refused. The proxy writes its own head from parsed parts and never
forwards a head unchanged.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolcrew.contract.errors import ToolFailure
from toolcrew.workers.egress.outcomes import refuse_bad_request
from toolcrew.workers.web.urls import Target, parse_url

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
# Visible characters, spaces, tabs and bytes above ASCII. No control characters, so no line end of any kind.
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
# Headers that frame or route a message. A client must not declare them hop-by-hop, which would remove them.
_END_TO_END = frozenset({b"host", b"content-length", b"transfer-encoding"})
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]{0,19}) ([\x21-\x7e]+) HTTP/1\.([01])")
_ABSOLUTE = re.compile(r"http://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"[^/?#]*")
_TUNNEL = re.compile(r"(?:\[[0-9a-f:.]+\]|[^\[\]:/?#@]+):[0-9]+", re.IGNORECASE)


class HeadError(ValueError):
    """The bytes are not the head of a message. The exception's text is a part of a sentence that gives the reason."""


@dataclass(frozen=True)
class Header:
    """A header line: its name in lower case, and its bytes without spaces around the value."""

    key: bytes
    name: bytes
    value: bytes

    @property
    def line(self) -> bytes:
        return self.name + b": " + self.value + b"\r\n"


@dataclass(frozen=True)
class Framing:
    """The way in which a body ends: after `length` bytes, after the last chunk, or or, if neither is set, as HTTP
    defines for the kind of message.
    """

    length: int | None = None
    is_chunked: bool = False


def split_head(head: bytes, max_lines: int) -> tuple[bytes, tuple[Header, ...]]:
    """Return the first line and the headers of a complete head, which includes its empty line. Raises HeadError."""
    if not head.endswith(b"\r\n\r\n"):
        raise HeadError("its head is not complete")
    first, *lines = head[:-4].split(b"\r\n")
    if len(lines) > max_lines:
        raise HeadError(f"it has more than {max_lines} header lines")
    if not _VALUE.fullmatch(first):
        raise HeadError("its first line contains a control character")
    return first, tuple(_parse_header(line) for line in lines)


def _parse_header(line: bytes) -> Header:
    if line[:1] in (b" ", b"\t"):
        raise HeadError("a header continues on a second line")
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name):
        raise HeadError("a header line has no valid name")
    if not _VALUE.fullmatch(value):
        raise HeadError(f"the header {name.decode('ascii')} contains a control character")
    return Header(name.lower(), name, value.strip(b" \t"))


def find_values(headers: Iterable[Header], key: bytes) -> list[bytes]:
    return [header.value for header in headers if header.key == key]


def parse_framing(headers: Sequence[Header]) -> Framing:
    """Return the framing of the body. Raises HeadError where two parsers might disagree on its end."""
    lengths, encodings = find_values(headers, b"content-length"), find_values(headers, b"transfer-encoding")
    if encodings:
        if lengths:
            raise HeadError("it has both Content-Length and Transfer-Encoding")
        if len(encodings) > 1 or encodings[0].lower() != b"chunked":
            raise HeadError("its Transfer-Encoding is not 'chunked' alone")
        return Framing(is_chunked=True)
    if not lengths:
        return Framing()
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise HeadError("its Content-Length is not a single number")
    return Framing(length=int(lengths[0]))


def drop_hop_by_hop(headers: Sequence[Header]) -> list[Header]:
    """Return the headers except hop-by-hop ones. Raises HeadError when Connection lists a header that frames or
    routes the message.
    """
    listed = {name.strip(b" \t").lower() for value in find_values(headers, b"connection") for name in value.split(b",")}
    if listed & _END_TO_END:
        raise HeadError("its Connection header names a header that must be forwarded")
    return [header for header in headers if header.key not in _HOP_BY_HOP and header.key not in listed]


@dataclass(frozen=True)
class ProxyRequest:
    """A request to the proxy. `head`: the bytes for the host, up to and including the empty line; empty for a tunnel.
    `target.path` is unused.
    """

    method: str
    target: Target
    is_tunnel: bool
    is_http_1_0: bool
    """True for HTTP/1.0, which has no chunked answers."""
    framing: Framing
    head: bytes


def parse_request(head: bytes, max_lines: int) -> ProxyRequest:
    """Return the request of a head. Raises Refusal (400) for anything that could be read in two ways."""
    try:
        return _parse(head, max_lines)
    except HeadError as error:
        raise refuse_bad_request(str(error)) from None


def _parse(head: bytes, max_lines: int) -> ProxyRequest:
    first, headers = split_head(head, max_lines)
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise HeadError("its first line is not METHOD, URL and HTTP/1.1, with one space between them")
    method, url, is_http_1_0 = match[1].decode("ascii"), match[2].decode("ascii"), match[3] == b"0"
    framing = parse_framing(headers)
    if framing.is_chunked and is_http_1_0:
        raise HeadError("HTTP/1.0 has no Transfer-Encoding")
    if method == "CONNECT":
        return _parse_tunnel(url, headers, framing, is_http_1_0=is_http_1_0)
    target, path = _parse_absolute(url)
    _check_host(headers, target, is_needed=not is_http_1_0)
    _check_expectation(headers)
    forwarded_head = _build_head(method, path, target, headers, framing, version=match[3])
    return ProxyRequest(method, target, False, is_http_1_0, framing, forwarded_head)


def _parse_tunnel(authority: str, headers: tuple[Header, ...], framing: Framing, *, is_http_1_0: bool) -> ProxyRequest:
    if not _TUNNEL.fullmatch(authority):
        raise HeadError("CONNECT needs host:port")
    if framing.is_chunked or framing.length:
        raise HeadError("CONNECT with a body")
    target = _parse_authority("https", authority)
    _check_host(headers, target, is_needed=False)
    return ProxyRequest("CONNECT", target, True, is_http_1_0, Framing(), b"")


def _parse_absolute(url: str) -> tuple[Target, str]:
    match = _ABSOLUTE.fullmatch(url)
    if match is None:
        raise HeadError("a proxy needs an absolute http:// URL without a fragment; for https use CONNECT host:443")
    path = match[2]
    return _parse_authority("http", match[1]), path if path.startswith("/") else f"/{path}"


def _parse_authority(scheme: str, authority: str) -> Target:
    if not _AUTHORITY.fullmatch(authority):
        raise HeadError("its Host header is not a host name")
    try:
        return parse_url(f"{scheme}://{authority}/")
    except ToolFailure as failure:
        raise HeadError(failure.message) from None


def _check_host(headers: tuple[Header, ...], target: Target, *, is_needed: bool) -> None:
    """Check that the Host header and the URL name the same host: a server may use either."""
    values = find_values(headers, b"host")
    if len(values) > 1 or (is_needed and not values):
        raise HeadError("it needs one Host header")
    if not values:
        return
    host_header = _parse_authority(target.scheme, values[0].decode("latin-1"))
    # In a request for a tunnel, the Host header may lack the port.
    is_bare = target.scheme == "https" and host_header.authority == host_header.host
    if host_header.host != target.host or (host_header.port != target.port and not is_bare):
        raise HeadError("its Host header names another host than its URL")


def _check_expectation(headers: tuple[Header, ...]) -> None:
    if any(value.lower() != b"100-continue" for value in find_values(headers, b"expect")):
        raise HeadError("its Expect header is not 100-continue")


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
