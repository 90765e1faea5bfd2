"""A strict URL parser. Text that two parsers could read differently is refused.

Invariant: the host that is checked is the host that is contacted. Attackers use URLs that a checking parser and a
connecting parser read differently, so only one parser exists, and only one spelling of an address is accepted.
"""

import ipaddress
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urljoin

import idna

from toolcrew.contract.errors import ErrorCode, ToolFailure

MAX_URL_CHARS = 2048
DEFAULT_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_LABEL = re.compile(r"(?!-)[a-z0-9_\-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_DOTS = str.maketrans({"\u3002": ".", "\uff0e": ".", "\uff61": "."})
# Separators, control characters, invisible and unassigned characters, and lone surrogates.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zs", "Zl", "Zp"})
_UNQUOTED = "!#$%&'()*+,-./:;=?@[]_~"


@dataclass(frozen=True)
class Target:
    """Destination of a request. `host`: lower-case ASCII without a final dot. `literal`: the parsed address, if the
    host is an IP address.

    `path`: path and query in ASCII; starts with a slash.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str
    literal: Address | None = None

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        host = f"[{self.host}]" if isinstance(self.literal, ipaddress.IPv6Address) else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def url(self) -> str:
        return self.origin + self.path


def parse_url(text: str) -> Target:
    """Parse an absolute URL and drop its fragment.

    Raises ToolFailure: INVALID_ARGUMENTS for text that is not a URL, SECURITY_REFUSED for a URL that is not allowed.
    """
    _check_characters(text)
    match = _SCHEME.match(text)
    # A "scheme" with a dot is really a host that is followed by a port.
    if match is None or "." in match[1]:
        raise _invalid("it must begin with http:// or https://")
    scheme = match[1].lower()
    if scheme not in DEFAULT_PORTS:
        raise refused(f"only http and https are fetched, not {scheme[:20]}")
    rest = text[match.end() :]
    if not rest.startswith("//"):
        raise _invalid("two slashes must follow the scheme")
    authority, path = _split(rest[2:])
    host, port, literal = _parse_authority(authority, scheme)
    target = Target("https" if scheme == "https" else "http", host, port, path, literal)
    if len(target.url) > MAX_URL_CHARS:
        raise _invalid(f"more than {MAX_URL_CHARS} characters")
    return target


def parse_location(base: Target, location: str) -> Target:
    """Return the target of a redirect from `base`. Raises the ToolFailures of parse_url."""
    # This check comes before urljoin, because the standard library silently drops tabs and line ends.
    _check_characters(location)
    return parse_url(location if _SCHEME.match(location) else urljoin(base.url, location))


def _check_characters(text: str) -> None:
    if len(text) > MAX_URL_CHARS:
        raise _invalid(f"more than {MAX_URL_CHARS} characters")
    for at, character in enumerate(text):
        if character == "\\" or unicodedata.category(character) in _UNSAFE_CATEGORIES:
            raise _invalid(f"character {at} (U+{ord(character):04X}) is not allowed in a URL; write it percent-encoded")


def _split(rest: str) -> tuple[str, str]:
    end = re.search(r"[/?#]", rest)
    authority = rest if end is None else rest[: end.start()]
    path = rest[len(authority) :].partition("#")[0]
    # Non-ASCII characters are percent-encoded as UTF-8. Existing percent-encoding is unchanged.
    return authority, quote(path if path.startswith("/") else "/" + path, safe=_UNQUOTED)


def _parse_authority(authority: str, scheme: str) -> tuple[str, int, Address | None]:
    if "@" in authority:
        raise refused("a user name or password in a URL is not sent")
    if authority.startswith("["):
        inner, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _invalid("its host is not an address in brackets")
        return inner, _parse_port(rest, scheme), _parse_ipv6(inner)
    host, colon, port = authority.partition(":")
    name = _parse_name(host)
    return name, _parse_port(colon + port, scheme), _parse_ipv4(name, is_plain=name == host)


def _parse_port(text: str, scheme: str) -> int:
    if not text:
        return DEFAULT_PORTS[scheme]
    if not _PORT.fullmatch(text[1:]) or int(text[1:]) > 65535:
        raise _invalid("its port is not a number from 1 to 65535")
    return int(text[1:])


def _parse_ipv6(text: str) -> Address:
    """Parse an IPv6 address in the spelling of RFC 5952. Another parser might read any other spelling differently."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise refused("its host is not an IPv6 address") from None
    if str(address) != text or "%" in text:
        raise refused("its IPv6 address is not in the standard form; a zone is not allowed")
    return address


def _parse_ipv4(host: str, *, is_plain: bool) -> Address | None:
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise refused("its host is a number, but not an IPv4 address of four decimal parts") from None
    if str(address) != host or not is_plain:
        raise refused("its IPv4 address is not in the standard form")
    return address


def _parse_name(host: str) -> str:
    name = (host if host.isascii() else _to_ascii(host)).lower().removesuffix(".")
    if not name:
        raise _invalid("it has no host")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise _invalid("its host is not a valid name")
    return name


def _to_ascii(host: str) -> str:
    try:
        return idna.encode(unicodedata.normalize("NFKC", host).translate(_DOTS), uts46=True, std3_rules=True).decode(
            "ascii"
        )
    except (idna.IDNAError, UnicodeError):
        raise _invalid("its host is not a valid international name") from None


def _invalid(reason: str) -> ToolFailure:
    return ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the url is not accepted: {reason}")


def refused(reason: str) -> ToolFailure:
    """Return the failure for a URL with a forbidden destination."""
    return ToolFailure(ErrorCode.SECURITY_REFUSED, f"the url is refused: {reason}")
