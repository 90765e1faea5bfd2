"""One request and its answer over httpcore, within limits: one connection for each, no pool, no proxy, no cookie."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import httpcore2
from anyio.from_thread import start_blocking_portal

from contract.errors import ErrorCode, ToolFailure
from workers.web.bodies import ACCEPTED, BodyDecoder, too_large
from workers.web.connections import JudgedBackend, header_flood
from workers.web.limits import Deadline, FetchLimits
from workers.web.urls import Address, Target

USER_AGENT = "toolcrew (a tool of a language model)"


@dataclass(frozen=True)
class Request:
    """`headers`: added to those that every request has. One may be a key, so they are not shown."""

    target: Target
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Head:
    """An answer's status and headers, names in lower case; of a repeated header the values are joined by commas."""

    status: int
    headers: Mapping[str, str]

    @property
    def phrase(self) -> str:
        """The status with our own words for it, never the server's."""
        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return str(self.status)


@dataclass(frozen=True)
class Answer:
    """`body`: unpacked; as much of it as was asked for. `is_whole`: whether that is all of it."""

    head: Head
    body: bytes
    is_whole: bool = True


BodyBytes = Callable[[Head], int | None]
"""How much of a body to read: None all of it, where more than the caps is an error; a number: so many bytes are enough,
and none will do.
"""


@dataclass(frozen=True)
class Route:
    """How a request travels: to which judged addresses of its target, and what that may cost."""

    addresses: Sequence[Address]
    limits: FetchLimits
    deadline: Deadline
    tls: ssl.SSLContext


def exchange(request: Request, route: Route, body_bytes: BodyBytes) -> Answer:
    """Connect, send and read. Raises ToolFailure: NETWORK_ERROR, TIMEOUT, FILE_TOO_LARGE, SECURITY_REFUSED."""
    # In a thread of its own: a call is interrupted by an exception in the main thread, which an event loop could lose.
    with start_blocking_portal(name="http") as portal:
        return portal.call(_exchange, request, route, body_bytes)


async def _exchange(request: Request, route: Route, body_bytes: BodyBytes) -> Answer:
    async with open_response(request, route) as response:
        wanted = body_bytes(response.head)
        if wanted == 0:
            return Answer(response.head, b"", is_whole=False)
        try:
            return await read_body(response, wanted)
        except (ToolFailure, httpcore2.RemoteProtocolError):
            if wanted is None:
                raise
            # The status is the answer. A failure of its body would only hide it.
            return Answer(response.head, b"", is_whole=False)


@dataclass(frozen=True)
class Response:
    """An answer whose body has yet to be read."""

    head: Head
    stream: AsyncIterable[bytes]
    limits: FetchLimits

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body, unpacked and bounded. Raises ToolFailure, and httpcore2.RemoteProtocolError for `open_response`."""
        # Not by httpx's decoders: they take half of a gzip body for the whole, and do not compare sizes.
        decoder = BodyDecoder(self.head.headers.get("content-encoding", ""), self.limits)
        async for data in self.stream:
            for piece in decoder.feed(data):
                yield piece
        decoder.finish()


@asynccontextmanager
async def open_response(request: Request, route: Route) -> AsyncIterator[Response]:
    """Connect, send and read the head. Raises ToolFailure as `exchange` does, also for what goes wrong within."""
    target, limits = request.target, route.limits
    headers = {
        "Host": target.authority,
        "User-Agent": USER_AGENT,
        "Accept-Encoding": ACCEPTED,
        "Connection": "close",
        **request.headers,
    }
    if request.body:
        headers["Content-Length"] = str(len(request.body))
    # In parts: no second parser reads the URL.
    url = httpcore2.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    backend = JudgedBackend(target, route.addresses, limits, route.deadline)
    try:
        async with httpcore2.AsyncHTTPConnection(url.origin, route.tls, network_backend=backend) as connection:
            response = await connection.handle_async_request(
                httpcore2.Request(request.method, url, headers=list(headers.items()), content=request.body)
            )
            response.extensions["network_stream"].has_head = True
            head = _parse_head(response, target.host, limits)
            assert isinstance(response.stream, AsyncIterable)
            yield Response(head, response.stream, limits)
    except httpcore2.RemoteProtocolError as error:
        raise _translate(error, target.host, limits) from None
    except (httpcore2.LocalProtocolError, UnicodeError):
        # Its words would repeat the header's value, which may be a key.
        raise ToolFailure(
            ErrorCode.INTERNAL, f"the request to {target.host} has a header that HTTP does not allow"
        ) from None


def _parse_head(response: httpcore2.Response, host: str, limits: FetchLimits) -> Head:
    if response.status == HTTPStatus.SWITCHING_PROTOCOLS:
        raise ToolFailure(ErrorCode.NETWORK_ERROR, f"{host} did not answer the request", cause="protocol")
    size = sum(len(name) + len(value) for name, value in response.headers)
    if len(response.headers) > limits.header_lines or size > limits.header_bytes:
        raise header_flood(host, limits)
    headers: dict[str, str] = {}
    for name, value in response.headers:
        key, text = name.decode("ascii").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return Head(response.status, headers)


async def read_body(response: Response, wanted: int | None) -> Answer:
    """As much of the body as is `wanted`, by the meaning of BodyBytes. Raises ToolFailure."""
    head, limits = response.head, response.limits
    length = head.headers.get("content-length", "")
    if wanted is None and length.isdecimal() and int(length[:20]) > limits.wire_bytes:
        raise too_large(f"{length[:20]} bytes, more than {limits.wire_bytes}")
    body = bytearray()
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            body += piece
            if wanted is not None and len(body) >= wanted:
                return Answer(head, bytes(body[:wanted]), is_whole=False)
    return Answer(head, bytes(body))


def _translate(error: httpcore2.RemoteProtocolError, host: str, limits: FetchLimits) -> ToolFailure:
    """The parser's complaint in words of ours: its own may repeat what the server sent."""
    words = str(error)
    if "Receive buffer too long" in words:
        return header_flood(host, limits)
    if "disconnected" in words or "closed connection" in words:
        cause, what = "reset", "closed the connection before its answer was complete"
    else:
        cause, what = "protocol", "does not answer in HTTP/1.1"
    return ToolFailure(ErrorCode.NETWORK_ERROR, f"{host} {what}: try again, or another source", cause=cause)
