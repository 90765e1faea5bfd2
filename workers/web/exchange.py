"""One request and its answer over an open connection, in HTTP/1.1, within limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import h11

from contract.errors import ErrorCode, ToolFailure
from workers.web.bodies import ACCEPTED, BodyDecoder, too_large
from workers.web.connections import Connection
from workers.web.limits import Deadline, FetchLimits
from workers.web.urls import Target

USER_AGENT = "toolcrew (a tool of a language model)"


@dataclass(frozen=True)
class Request:
    """`headers`: beside those that every request has; a key may be among them, so they are not shown."""

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


TakePiece = Callable[[Head, bytes], bool]
"""Gets a body's pieces as they come, unpacked; True: that was enough, the rest is not waited for."""
BodyBytes = Callable[[Head], int | None]
"""How much of a body to read: None all of it, where more than the caps is an error; a number: so many bytes are enough,
and none will do.
"""


def exchange(
    connection: Connection,
    request: Request,
    limits: FetchLimits,
    deadline: Deadline,
    body_bytes: BodyBytes,
    take_piece: TakePiece | None = None,
) -> Answer:
    """Send and read. Raises ToolFailure: NETWORK_ERROR, TIMEOUT, FILE_TOO_LARGE."""
    try:
        return _Exchange(connection, request, limits, deadline, take_piece).run(body_bytes)
    except h11.RemoteProtocolError as error:
        raise _translate(error, request.target.host, connection) from None
    except (h11.LocalProtocolError, UnicodeError):
        # Its words would repeat the header's value, which may be a key.
        raise ToolFailure(
            ErrorCode.INTERNAL, f"the request to {request.target.host} has a header that HTTP does not allow"
        ) from None


class _Exchange:
    def __init__(
        self,
        connection: Connection,
        request: Request,
        limits: FetchLimits,
        deadline: Deadline,
        take_piece: TakePiece | None,
    ) -> None:
        self._connection = connection
        self._request = request
        self._limits = limits
        self._deadline = deadline
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.header_bytes)
        self._host = request.target.host
        self._take_piece = take_piece

    def run(self, body_bytes: BodyBytes) -> Answer:
        self._send()
        head = self._read_head()
        wanted = body_bytes(head)
        if wanted == 0:
            return Answer(head, b"", is_whole=False)
        try:
            body, is_whole = self._read_body(head, wanted)
        except (ToolFailure, h11.RemoteProtocolError):
            if wanted is None:
                raise
            # The status is the answer; what is wrong with the words beside it would only hide it.
            return Answer(head, b"", is_whole=False)
        return Answer(head, body, is_whole)

    def _send(self) -> None:
        request = self._request
        headers = {
            "Host": request.target.authority,
            "User-Agent": USER_AGENT,
            "Accept-Encoding": ACCEPTED,
            "Connection": "close",
            **request.headers,
        }
        if request.body:
            headers["Content-Length"] = str(len(request.body))
        event = h11.Request(method=request.method, target=request.target.path, headers=list(headers.items()))
        data = self._parser.send(event) or b""
        if request.body:
            data += self._parser.send(h11.Data(data=request.body)) or b""
        self._connection.send(data + (self._parser.send(h11.EndOfMessage()) or b""))

    def _read_head(self) -> Head:
        while True:
            event = self._next_event()
            if isinstance(event, h11.Response):
                return self._parse_head(event)
            if isinstance(event, h11.InformationalResponse) and event.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                # Any number of them may come: together they are headers as well.
                if self._connection.received > self._limits.header_bytes:
                    raise self._header_flood()
                continue
            if isinstance(event, h11.ConnectionClosed):
                raise self._failed("reset", "closed the connection without an answer")
            raise self._failed("protocol", "did not answer the request")

    def _parse_head(self, event: h11.Response) -> Head:
        size = sum(len(name) + len(value) for name, value in event.headers)
        if len(event.headers) > self._limits.header_lines or size > self._limits.header_bytes:
            raise self._header_flood()
        headers: dict[str, str] = {}
        for name, value in event.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        return Head(event.status_code, headers)

    def _read_body(self, head: Head, wanted: int | None) -> tuple[bytes, bool]:
        told = head.headers.get("content-length", "")
        if wanted is None and told.isdecimal() and int(told[:20]) > self._limits.wire_bytes:
            raise too_large(f"{told[:20]} bytes, more than {self._limits.wire_bytes}")
        decoder = BodyDecoder(head.headers.get("content-encoding", ""), self._limits)
        body = bytearray()
        while True:
            event = self._next_event()
            if isinstance(event, h11.Data):
                for piece in decoder.feed(bytes(event.data)):
                    body += piece
                    if self._take_piece is not None and self._take_piece(head, piece):
                        return bytes(body), False
                    if wanted is not None and len(body) >= wanted:
                        return bytes(body[:wanted]), False
            elif isinstance(event, h11.EndOfMessage):
                decoder.finish()
                return bytes(body), True
            else:
                raise self._failed("reset", "broke the connection off in the body")

    def _next_event(self) -> object:
        while True:
            self._deadline.left(f"reading from {self._host}")
            event = self._parser.next_event()
            if event is not h11.NEED_DATA:
                return event
            data = self._connection.receive()
            if self._connection.received > self._limits.wire_bytes + self._limits.header_bytes:
                raise too_large(f"more than {self._limits.wire_bytes} bytes came")
            self._parser.receive_data(data)

    def _header_flood(self) -> ToolFailure:
        return self._failed(
            "protocol",
            f"sends more headers than {self._limits.header_lines} lines or {self._limits.header_bytes // 1024} KiB",
        )

    def _failed(self, cause: str, what: str) -> ToolFailure:
        return ToolFailure(ErrorCode.NETWORK_ERROR, f"{self._host} {what}", cause=cause)


def _translate(error: h11.RemoteProtocolError, host: str, connection: Connection) -> ToolFailure:
    """The parser's complaint in words of ours: its own may repeat what the server sent."""
    words = str(error)
    if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        cause, what = "protocol", "sends headers without an end"
    elif connection.received == 0 or "closed connection" in words or "without sending complete" in words:
        cause, what = (
            "reset",
            f"closed the connection before its answer was complete, after {connection.received} bytes",
        )
    else:
        cause, what = "protocol", "does not answer in HTTP/1.1"
    return ToolFailure(ErrorCode.NETWORK_ERROR, f"{host} {what}: try again, or another source", cause=cause)
