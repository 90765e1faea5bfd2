"""Reads the server name in a TLS ClientHello without taking part in the handshake.

A client may open a tunnel to an allowed host and then name another host in TLS that has the same address. So HelloGate
forwards nothing until the ClientHello is complete and names the host of the tunnel.
"""

from dataclasses import dataclass

from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal, refuse
from toolcrew.workers.web.urls import Target

UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
"""A TLS alert: fatal, unrecognized_name."""
TLS_ONLY_PORTS = frozenset({80, 443})
"""Ports where a tunnel carries only TLS. For plain HTTP, a program sends the proxy a request with the whole
URL, and the proxy checks its Host header.
"""
_CLIENT_HELLO = 1
_EXTENSION_NAME = 0
_MAX_RECORD_BYTES = 16_384
_MAX_HELLO_BYTES = 64 * 1024
_MAX_RECORDS = 8
"""Maximum TLS records of one ClientHello. Thousands of small records would be expensive to parse repeatedly."""


class HelloError(ValueError):
    """The bytes are not a ClientHello."""


@dataclass
class _Cursor:
    data: bytes
    at: int = 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.remaining:
            raise HelloError("the ClientHello is shorter than its length field")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Cursor":
        """Read a length of `size` bytes, and return the bytes of that length."""
        return _Cursor(self.take(self.number(size)))


def parse_hello(data: bytes) -> str | None:
    """Return the server name of the ClientHello at the start of `data`: empty when it has none, None when more bytes
    are needed.

    Raises HelloError when the bytes are not a ClientHello.
    """
    message = _join_records(data)
    return None if message is None else _find_name(_Cursor(message))


def _join_records(data: bytes) -> bytes | None:
    """Return the first handshake message without its type and length, or None when it is incomplete."""
    records, message = _Cursor(data), b""
    for _ in range(_MAX_RECORDS):
        if records.remaining < 5:
            _check_start(records.data[records.at :])
            return None
        _check_start(records.take(3))
        length = records.number(2)
        if not 0 < length <= _MAX_RECORD_BYTES:
            raise HelloError("a record with an invalid size")
        message += records.take(min(length, records.remaining))
        if message[:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise HelloError("the first message is not a ClientHello")
        if len(message) >= 4:
            size = int.from_bytes(message[1:4], "big")
            if size > _MAX_HELLO_BYTES:
                raise HelloError("a ClientHello with an invalid size")
            if len(message) - 4 >= size:
                return message[4 : 4 + size]
        if not records.remaining:
            return None
    raise HelloError("a ClientHello in too many records")


def _check_start(start: bytes) -> None:
    if (start[:1] or b"\x16") != b"\x16" or (start[1:2] or b"\x03") != b"\x03":
        raise HelloError("not a TLS record")


def _find_name(hello: _Cursor) -> str:
    hello.take(2 + 32)
    for size in (1, 2, 1):  # session id, cipher suites, compression methods
        hello.vector(size)
    if not hello.remaining:
        return ""
    extensions = hello.vector(2)
    names: list[str] = []
    while extensions.remaining:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind == _EXTENSION_NAME:
            names.append(_read_name(content.vector(2)))
    if len(names) > 1:
        raise HelloError("more than one server name")
    return names[0] if names else ""


def _read_name(entries: _Cursor) -> str:
    if entries.number(1) != 0:
        raise HelloError("a server name of an unknown kind")
    name = entries.vector(2)
    if entries.remaining or not name.remaining:
        raise HelloError("not exactly one server name")
    try:
        return name.data.decode("ascii").lower()
    except UnicodeDecodeError:
        raise HelloError("a server name that is not ASCII") from None


class HelloGate:
    """Holds back the bytes of a client until its ClientHello names the host of the tunnel."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._buffered = b""
        self._is_open = False

    def pass_on(self, data: bytes) -> bytes:
        """Add bytes of the client. Return the bytes that may be forwarded now. Raises Refusal."""
        if self._is_open:
            return data
        self._buffered += data
        try:
            name = parse_hello(self._buffered)
        except HelloError:
            return self._pass_non_tls()
        if name is None:
            return b""
        self._check_name(name)
        return self._release()

    def finish(self) -> None:
        """Note the end of the client's data. Raises Refusal when the data ends in the middle of the ClientHello."""
        if self._buffered:
            raise self._build_refusal("ended in the middle of its TLS ClientHello")

    def _check_name(self, name: str) -> None:
        host = self._target.host
        if name == host or (not name and self._target.literal is not None):
            return
        if not name:
            raise self._build_refusal("names no server in its TLS ClientHello (SNI): use a client that does")
        raise self._build_refusal(
            f"names another server in its TLS ClientHello (SNI) than {host}: request a tunnel to that server"
        )

    def _pass_non_tls(self) -> bytes:
        if self._buffered[:1] == b"\x16" or self._target.port in TLS_ONLY_PORTS:
            raise self._build_refusal(
                f"does not speak TLS, and a tunnel to port {self._target.port} must use TLS: for http, send the proxy "
                f"the whole http:// URL instead of CONNECT"
            )
        return self._release()

    def _release(self) -> bytes:
        self._is_open, buffered, self._buffered = True, self._buffered, b""
        return buffered

    def _build_refusal(self, problem: str) -> Refusal:
        return refuse(EgressOutcome.TLS_REFUSED, f"the client in the tunnel to {self._target.host} {problem}")

    @property
    def answers_in_tls(self) -> bool:
        """Return whether the client's bytes look like TLS. A refusal must then be a TLS alert and not an HTTP
        answer.
        """
        return self._buffered[:1] == b"\x16"
