"""One HTTP request and its response over httpcore, within limits. Every request uses its own connection, without a
pool, a proxy or cookies.
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import httpcore2
from anyio.from_thread import start_blocking_portal

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.bodies import ACCEPTED, BodyDecoder, too_large
from toolcrew.workers.web.connections import CheckedBackend, header_flood
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.urls import Address, Target

USER_AGENT = "toolcrew (a tool of a language model)"


@dataclass(frozen=True)
class HttpRequest:
    """A request. `headers`: sent in addition to the standard headers. A header may contain a key, so `repr` omits
    them.
    """

    target: Target
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Head:
    """Status and headers of a response. Header names are lower case; repeated values are joined by commas."""

    status: int
    headers: Mapping[str, str]

    @property
    def phrase(self) -> str:
        """Return the status with its standard phrase. The phrase of the server is untrusted and is never used."""
        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return str(self.status)


@dataclass(frozen=True)
class HttpResponse:
    """A response. `body`: decompressed, up to the requested size. `is_whole`: whether `body` is the complete body."""

    head: Head
    body: bytes
    is_whole: bool = True


BodyBytes = Callable[[Head], int | None]
"""Function that returns how many bytes of a body to read. None: the whole body, and a body over the limits is an error.
A number: at most this number of bytes, and an empty body is accepted.
"""


@dataclass(frozen=True)
class ConnectionOptions:
    """The checked addresses of a target, the limits, the deadline, and the TLS context."""

    addresses: Sequence[Address]
    limits: FetchLimits
    deadline: Deadline
    tls: ssl.SSLContext


def exchange(request: HttpRequest, options: ConnectionOptions, body_bytes: BodyBytes) -> HttpResponse:
    """Connect, send the request and read the response. Raises ToolFailure: NETWORK_ERROR, TIMEOUT, FILE_TOO_LARGE,
    SECURITY_REFUSED.
    """
    # The event loop runs in its own thread. An exception in the main thread interrupts a call, and an event loop in
    # the main thread could lose this exception.
    with start_blocking_portal(name="http") as portal:
        return portal.call(_exchange, request, options, body_bytes)


async def _exchange(request: HttpRequest, options: ConnectionOptions, body_bytes: BodyBytes) -> HttpResponse:
    async with open_response(request, options) as response:
        max_bytes = body_bytes(response.head)
        if max_bytes == 0:
            return HttpResponse(response.head, b"", is_whole=False)
        try:
            return await read_body(response, max_bytes)
        except (ToolFailure, httpcore2.RemoteProtocolError):
            if max_bytes is None:
                raise
            # The status is the result. A failure while reading the body would only hide the status.
            return HttpResponse(response.head, b"", is_whole=False)


@dataclass(frozen=True)
class ResponseStream:
    """A response before its body is read."""

    head: Head
    stream: AsyncIterable[bytes]
    limits: FetchLimits

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body, decompressed and bounded. Raises ToolFailure; also httpcore2.RemoteProtocolError, which
        `open_response` translates.
        """
        # The decoders of httpx are not used: they accept a truncated gzip body as complete, and do not limit the
        # decompressed size.
        decoder = BodyDecoder(self.head.headers.get("content-encoding", ""), self.limits)
        async for data in self.stream:
            for piece in decoder.feed(data):
                yield piece
        decoder.finish()


@asynccontextmanager
async def open_response(request: HttpRequest, options: ConnectionOptions) -> AsyncIterator[ResponseStream]:
    """Connect, send the request and read the head. Raises the ToolFailures of `exchange`, also for errors inside the
    `async with` block.
    """
    target, limits = request.target, options.limits
    headers = {
        "Host": target.authority,
        "User-Agent": USER_AGENT,
        "Accept-Encoding": ACCEPTED,
        "Connection": "close",
        **request.headers,
    }
    if request.body:
        headers["Content-Length"] = str(len(request.body))
    # The URL is passed in parts, so no second parser can read it differently.
    url = httpcore2.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    backend = CheckedBackend(target, options.addresses, limits, options.deadline)
    try:
        async with httpcore2.AsyncHTTPConnection(url.origin, options.tls, network_backend=backend) as connection:
            response = await connection.handle_async_request(
                httpcore2.Request(request.method, url, headers=list(headers.items()), content=request.body)
            )
            response.extensions["network_stream"].has_head = True
            head = _parse_head(response, target.host, limits)
            assert isinstance(response.stream, AsyncIterable)
            yield ResponseStream(head, response.stream, limits)
    except httpcore2.RemoteProtocolError as error:
        raise _translate(error, target.host, limits) from None
    except (httpcore2.LocalProtocolError, UnicodeError):
        # Do not use the library's message: it repeats the value of the header, which may be a key.
        raise ToolFailure(
            ErrorCode.INTERNAL,
            f"the request to {target.host} has an invalid header: check the settings of web tools for line "
            f"breaks and control characters",
        ) from None


def _parse_head(response: httpcore2.Response, host: str, limits: FetchLimits) -> Head:
    if response.status == HTTPStatus.SWITCHING_PROTOCOLS:
        raise ToolFailure(
            ErrorCode.NETWORK_ERROR, f"{host} answered with another protocol: use another source", cause="protocol"
        )
    size = sum(len(name) + len(value) for name, value in response.headers)
    if len(response.headers) > limits.header_lines or size > limits.header_bytes:
        raise header_flood(host, limits)
    headers: dict[str, str] = {}
    for name, value in response.headers:
        key, text = name.decode("ascii").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return Head(response.status, headers)


async def read_body(response: ResponseStream, max_bytes: int | None) -> HttpResponse:
    """Read the body. `max_bytes`: how much to read, as defined at BodyBytes. Raises ToolFailure."""
    head, limits = response.head, response.limits
    length = head.headers.get("content-length", "")
    if max_bytes is None and length.isdecimal() and int(length[:20]) > limits.wire_bytes:
        raise too_large(f"{length[:20]} bytes, more than {limits.wire_bytes}")
    body = bytearray()
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            body += piece
            if max_bytes is not None and len(body) >= max_bytes:
                return HttpResponse(head, bytes(body[:max_bytes]), is_whole=False)
    return HttpResponse(head, bytes(body))


def _translate(error: httpcore2.RemoteProtocolError, host: str, limits: FetchLimits) -> ToolFailure:
    """Return the failure for an error of the HTTP parser. The parser's own message is not used: it may repeat text of
    the server.
    """
    text = str(error)
    if "Receive buffer too long" in text:
        return header_flood(host, limits)
    if "disconnected" in text or "closed connection" in text:
        cause, problem = "reset", "closed the connection before its response was complete"
    else:
        cause, problem = "protocol", "does not answer in HTTP/1.1"
    return ToolFailure(ErrorCode.NETWORK_ERROR, f"{host} {problem}: try again, or another source", cause=cause)
