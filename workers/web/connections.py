"""Network connections for httpcore, only to checked addresses, with limits on time and size."""

import ssl
from collections.abc import Iterable, Sequence
from typing import Any

import httpcore2

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.addresses import MAX_TRIED, check_peer, one_of_each_first
from toolcrew.workers.web.bodies import too_large
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.urls import Address, Target


def build_tls() -> ssl.SSLContext:
    """Return a TLS context with the certificate authorities of the system. The context verifies names and
    certificates.
    """
    return ssl.create_default_context()


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Network backend that connects only to the checked addresses of a target. It ignores the host that the caller
    passes.
    """

    def __init__(self, target: Target, addresses: Sequence[Address], limits: FetchLimits, deadline: Deadline) -> None:
        self._target = target
        self._addresses = one_of_each_first(addresses)[:MAX_TRIED]
        self._limits = limits
        self._deadline = deadline
        self._sockets = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> "BoundedStream":
        """Connect to the target. Raises ToolFailure: NETWORK_ERROR, TIMEOUT, SECURITY_REFUSED."""
        # `host` is not resolved again: a second DNS answer could contain an address that was not checked (DNS
        # rebinding).
        target, failure = self._target, None
        until = self._deadline.now() + self._limits.connect_s
        for at, address in enumerate(self._addresses):
            # Every address gets an equal share of the remaining time, so that a silent address does not use up the time
            # of the others.
            share_s = max(0.05, (until - self._deadline.now()) / (len(self._addresses) - at))
            limit_s = self._deadline.remaining_s(f"connecting to {target.host}", share_s)
            try:
                stream = await self._sockets.connect_tcp(str(address), target.port, limit_s)
            except httpcore2.ConnectTimeout:
                failure = _slow(target.host, f"accepted no connection within {self._limits.connect_s:g} s")
            except httpcore2.ConnectError:
                failure = _build_failure("refused", f"{target.host} port {target.port} refused the connection")
            else:
                return await self._check_stream(stream, address)
        raise failure or _build_failure("dns", f"no address for {target.host}")

    async def _check_stream(self, stream: httpcore2.AsyncNetworkStream, address: Address) -> "BoundedStream":
        try:
            check_peer(stream.get_extra_info("socket"), address, self._target)
        except BaseException:
            await stream.aclose()
            raise
        return BoundedStream(stream, self._target.host, self._limits, self._deadline)


class BoundedStream(httpcore2.AsyncNetworkStream):
    """A connection with limits. `read` enforces the first-byte limit, then the minimum rate, and counts the bytes.

    `has_head`: the reader of the response sets this flag when it has the headers. Until then all bytes count towards
    the limit of headers: httpcore limits one header block, but not the number of informational (1xx) responses.
    """

    def __init__(
        self, stream: httpcore2.AsyncNetworkStream, host: str, limits: FetchLimits, deadline: Deadline
    ) -> None:
        self._stream = stream
        self._host = host
        self._limits = limits
        self._deadline = deadline
        self._window_from: float | None = None
        self._window_bytes = 0
        self._received = 0
        self.has_head = False

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send `buffer`. Raises ToolFailure: NETWORK_ERROR, TIMEOUT."""
        limit_s = self._deadline.remaining_s(f"sending to {self._host}", self._limits.first_byte_s)
        try:
            await self._stream.write(buffer, limit_s)
        except httpcore2.WriteTimeout:
            raise _slow(self._host, "did not accept the request") from None
        except httpcore2.WriteError:
            raise _build_failure("reset", f"{self._host} closed the connection while the request was sent") from None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes; empty at the end. Raises ToolFailure: NETWORK_ERROR, TIMEOUT, FILE_TOO_LARGE."""
        if not self.has_head and self._received > self._limits.header_bytes:
            raise header_flood(self._host, self._limits)
        while (data := await self._read_once(max_bytes)) is None:
            self._next_window()
        self._received += len(data)
        if self._received > self._limits.wire_bytes + self._limits.header_bytes:
            raise too_large(f"more than {self._limits.wire_bytes} bytes arrived")
        self._window_bytes += len(data)
        if self._window_from is None:
            self._window_from = self._deadline.now()
        elif data and self._deadline.now() - self._window_from >= self._limits.rate_window_s:
            self._next_window()
        return data

    async def _read_once(self, max_bytes: int) -> bytes | None:
        """Return the next bytes; None if the present rate window ended before any byte arrived."""
        step = f"waiting for {self._host}" if self._window_from is None else f"reading from {self._host}"
        try:
            return await self._stream.read(max_bytes, self._deadline.remaining_s(step, self._wait_s()))
        except httpcore2.ReadTimeout:
            self._deadline.remaining_s(step)
            return None
        except httpcore2.ReadError:
            raise _build_failure("reset", f"{self._host} closed the connection") from None

    def _wait_s(self) -> float:
        if self._window_from is None:
            return self._limits.first_byte_s
        return max(0.001, self._window_from + self._limits.rate_window_s - self._deadline.now())

    def _next_window(self) -> None:
        """Start the next window for the minimum rate. Raises ToolFailure(TIMEOUT) when too few bytes arrived in the
        last one.
        """
        if self._window_from is None:
            raise _slow(self._host, f"sent nothing within {self._limits.first_byte_s:g} s")
        if self._window_bytes < self._limits.min_rate * self._limits.rate_window_s:
            raise _slow(self._host, f"sends less than {self._limits.min_rate:g} bytes/s")
        self._window_from, self._window_bytes = self._deadline.now(), 0

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> "BoundedStream":
        """Start TLS on the connection. Raises ToolFailure: NETWORK_ERROR with the cause `tls` or `reset`, TIMEOUT."""
        limit_s = self._deadline.remaining_s(f"starting TLS with {self._host}", self._limits.tls_s)
        try:
            self._stream = await self._stream.start_tls(ssl_context, server_hostname, limit_s)
        except httpcore2.ConnectTimeout:
            raise _slow(self._host, f"did not finish the TLS handshake within {self._limits.tls_s:g} s") from None
        except (httpcore2.ConnectError, ValueError) as error:
            raise self._tls_failure(error.__cause__ or error) from None
        return self

    def _tls_failure(self, cause: BaseException) -> ToolFailure:
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = f"the certificate of {self._host} is not accepted ({cause.verify_message})"
        elif isinstance(cause, ssl.SSLError | ValueError):
            reason = f"no secure connection to {self._host} ({getattr(cause, 'reason', None) or 'no TLS'})"
        else:
            return _build_failure("reset", f"{self._host} closed the connection during the TLS handshake")
        return _build_failure("tls", f"TLS: {reason}")

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        """Return information about the underlying connection."""
        return self._stream.get_extra_info(info)


def header_flood(host: str, limits: FetchLimits) -> ToolFailure:
    """Return the failure for a response whose headers are too large."""
    return _build_failure(
        "protocol", f"{host} sends more headers than {limits.header_lines} lines or {limits.header_bytes // 1024} KiB"
    )


def _slow(host: str, problem: str) -> ToolFailure:
    return ToolFailure(ErrorCode.TIMEOUT, f"{host} {problem}: try again later, or another source")


def _build_failure(cause: str, sentence: str) -> ToolFailure:
    return ToolFailure(ErrorCode.NETWORK_ERROR, sentence, cause=cause)
