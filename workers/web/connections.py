"""One connection to one of the addresses that were judged: no pool, no proxy, every wait bounded."""

import ipaddress
import socket
import ssl
from collections.abc import Sequence
from types import TracebackType

from contract.errors import ErrorCode, ToolFailure
from workers.web.limits import Deadline, FetchLimits
from workers.web.urls import Address, Target

CHUNK_BYTES = 64 * 1024
MAX_TRIED = 4


def build_tls() -> ssl.SSLContext:
    """The system's authorities; names and certificates are checked."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Connection:
    """An open connection. `receive` holds the first-byte limit, then the minimum rate."""

    def __init__(self, sock: socket.socket, target: Target, limits: FetchLimits, deadline: Deadline) -> None:
        self._socket = sock
        self._host = target.host
        self._limits = limits
        self._deadline = deadline
        self._window_from: float | None = None
        self._window_bytes = 0
        self.received = 0

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Raises ToolFailure: NETWORK_ERROR, TIMEOUT."""
        try:
            self._socket.settimeout(self._deadline.left(f"sending to {self._host}", self._limits.first_byte_s))
            self._socket.sendall(data)
        except TimeoutError:
            raise _slow(self._host, "did not take the request") from None
        except OSError as error:
            raise _failed(
                "reset", f"{self._host} broke the connection off while the request was sent ({_words(error)})"
            ) from None

    def receive(self) -> bytes:
        """What came next; empty at the end. Raises ToolFailure: NETWORK_ERROR, TIMEOUT."""
        while (data := self._receive_once()) is None:
            self._next_window()
        self.received += len(data)
        self._window_bytes += len(data)
        if self._window_from is None:
            self._window_from = self._deadline.now()
        elif data and self._deadline.now() - self._window_from >= self._limits.rate_window_s:
            self._next_window()
        return data

    def _receive_once(self) -> bytes | None:
        """None when the window ended first."""
        doing = f"waiting for {self._host}" if self._window_from is None else f"reading from {self._host}"
        try:
            self._socket.settimeout(self._deadline.left(doing, self._wait_s()))
            return self._socket.recv(CHUNK_BYTES)
        except TimeoutError:
            self._deadline.left(doing)
            return None
        except OSError as error:
            raise _failed("reset", f"{self._host} broke the connection off ({_words(error)})") from None

    def _wait_s(self) -> float:
        if self._window_from is None:
            return self._limits.first_byte_s
        return max(0.001, self._window_from + self._limits.rate_window_s - self._deadline.now())

    def _next_window(self) -> None:
        """Raises ToolFailure(TIMEOUT) when too little came in the one that ends."""
        if self._window_from is None:
            raise _slow(self._host, f"sent nothing within {self._limits.first_byte_s:g} s")
        if self._window_bytes < self._limits.min_rate * self._limits.rate_window_s:
            raise _slow(self._host, f"sends less than {self._limits.min_rate:g} bytes/s")
        self._window_from, self._window_bytes = self._deadline.now(), 0


def open_connection(
    target: Target, addresses: Sequence[Address], limits: FetchLimits, deadline: Deadline, tls: ssl.SSLContext
) -> Connection:
    """Connect to one of `addresses` and to nothing else; over TLS the certificate is checked for the target's name.

    Raises ToolFailure: NETWORK_ERROR with the cause refused, tls or reset; TIMEOUT.
    """
    sock = _connect(target, one_of_each_first(addresses)[:MAX_TRIED], limits, deadline)
    try:
        if target.scheme == "https":
            sock = _wrap(sock, target, limits, deadline, tls)
    except BaseException:
        sock.close()
        raise
    return Connection(sock, target, limits, deadline)


def one_of_each_first(addresses: Sequence[Address]) -> list[Address]:
    """In order, but with an address of the other version second: one version may lead nowhere here."""
    other = next((address for address in addresses if address.version != addresses[0].version), None)
    if other is None:
        return list(addresses)
    return [addresses[0], other, *(address for address in addresses[1:] if address is not other)]


def _connect(target: Target, addresses: Sequence[Address], limits: FetchLimits, deadline: Deadline) -> socket.socket:
    failure: ToolFailure | None = None
    until = deadline.now() + limits.connect_s
    for at, address in enumerate(addresses):
        share_s = max(0.05, (until - deadline.now()) / (len(addresses) - at))
        try:
            return _connect_to(address, target, deadline.left(f"connecting to {target.host}", share_s))
        except TimeoutError:
            failure = _slow(target.host, f"does not take connections within {limits.connect_s:g} s")
        except OSError as error:
            failure = _failed("refused", f"{target.host} port {target.port} refused the connection ({_words(error)})")
    raise failure or _failed("dns", f"no address for {target.host}")


def _connect_to(address: Address, target: Target, limit_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.settimeout(limit_s)
        sock.connect((str(address), target.port))
        check_peer(sock, address, target)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket, address: Address, target: Target) -> None:
    """What is connected must be what was judged, whatever a redirecting kernel or library made of it."""
    peer = ipaddress.ip_address(str(sock.getpeername()[0]))
    if int(peer) != int(address) or peer.version != address.version:
        raise ToolFailure(
            ErrorCode.SECURITY_REFUSED, f"the connection to {target.host} led to another address than the judged one"
        )


def _wrap(
    sock: socket.socket, target: Target, limits: FetchLimits, deadline: Deadline, tls: ssl.SSLContext
) -> socket.socket:
    try:
        sock.settimeout(deadline.left(f"greeting {target.host}", limits.tls_s))
        return tls.wrap_socket(sock, server_hostname=target.host)
    except TimeoutError:
        raise _slow(target.host, f"did not finish the TLS greeting within {limits.tls_s:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise _failed(
            "tls", f"TLS: the certificate of {target.host} is not accepted ({error.verify_message})"
        ) from None
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "no TLS"
        raise _failed("tls", f"TLS: no secure connection to {target.host} ({reason})") from None
    except OSError as error:
        raise _failed(
            "reset", f"{target.host} broke the connection off in the TLS greeting ({_words(error)})"
        ) from None


def _words(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _slow(host: str, what: str) -> ToolFailure:
    return ToolFailure(ErrorCode.TIMEOUT, f"{host} {what}: try again later, or another source")


def _failed(cause: str, sentence: str) -> ToolFailure:
    return ToolFailure(ErrorCode.NETWORK_ERROR, sentence, cause=cause)
