"""What a client may ask of a proxy: a tunnel to a host, or a request for an absolute http URL."""

import re
from dataclasses import dataclass

from contract.errors import ToolFailure
from workers.egress.headers import Framing, Header, HeadError, drop_hop_by_hop, find_values, parse_framing, split_head
from workers.egress.verdicts import bad_request
from workers.web.urls import Target, parse_url

_FIRST_LINE = re.compile(rb"([A-Z][A-Z-]{0,19}) ([\x21-\x7e]+) HTTP/1\.([01])")
_ABSOLUTE = re.compile(r"http://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"[^/?#]*")
_TUNNEL = re.compile(r"(?:\[[0-9a-f:.]+\]|[^\[\]:/?#@]+):[0-9]+", re.IGNORECASE)


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
    match = _FIRST_LINE.fullmatch(first)
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
