"""HTTP transport for the MCP SDK. The SDK receives only responses that were read within limits and rebuilt here."""

import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from re import compile as pattern
from typing import Any, NoReturn

import anyio
import httpx2

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.mcp.messages import ServerReply, build_protocol_error, parse_json, parse_reply
from toolcrew.workers.web.exchange import ConnectionOptions, Head, HttpRequest, ResponseStream, open_response, read_body
from toolcrew.workers.web.limits import KIB, MIB, Deadline, FetchLimits
from toolcrew.workers.web.urls import Address, Target

ANSWER_BYTES = 4 * MIB
MAX_EVENTS = 10_000
"""Maximum number of events in one response, including progress and log messages."""
END_S = 2.0
"""Limit of the request that ends a session, in seconds."""
_SESSION_ID = pattern(r"[\x21-\x7e]{1,512}")
SESSION_HEADER = "mcp-session-id"
_OWN_HEADERS = frozenset({"accept-encoding", "connection", "content-length", "host", "user-agent"})


class CheckedTransport(httpx2.AsyncBaseTransport):
    """Transport that sends every request of one conversation to `target`, at checked addresses.

    `failure`: the reason why the conversation ended. The transport then calls `end`, which cancels the conversation.
    `refusal`: the failure for the last response with an error status.

    `session`: the id of the session for all requests; None: the id that the SDK knows. `opened`: the id that the server
    gave in this conversation. `keeps_session`: the end of the conversation does not end the session.
    `has_lost_session`: the server does not know the session, so the refused request has had no effect.
    """

    def __init__(
        self, server: str, target: Target, addresses: Sequence[Address], tls: ssl.SSLContext, deadline: Deadline
    ) -> None:
        self._server = server
        self._target = target
        self._route = ConnectionOptions(addresses, _limits(deadline.total_s), deadline, tls)
        self._end_route = ConnectionOptions(addresses, _limits(END_S), Deadline(END_S), tls)
        self.end: Callable[[], None] = lambda: None
        self.failure: ToolFailure | None = None
        self.refusal: ToolFailure | None = None
        self.session: str | None = None
        self.opened: str | None = None
        self.keeps_session = False
        self.has_lost_session = False

    async def end_session(self, url: str, headers: Mapping[str, str]) -> None:
        """Order the server to end the session. Raises ToolFailure."""
        await self._send(httpx2.Request("DELETE", url, headers=headers))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the response. Failures are not raised, because the SDK would retry after some of them."""
        if request.method == "GET":
            # The SDK wants to open a stream for messages that no request asked for. The transport refuses this.
            return httpx2.Response(HTTPStatus.METHOD_NOT_ALLOWED)
        if request.method == "DELETE" and self.keeps_session:
            return httpx2.Response(HTTPStatus.NO_CONTENT)
        try:
            return await self._send(request)
        except ToolFailure as failure:
            if request.method != "DELETE":
                await self._fail(failure)
            # A failure to end the session is harmless, because a server deletes an abandoned session by itself.
            return httpx2.Response(HTTPStatus.NO_CONTENT)

    async def _fail(self, failure: ToolFailure) -> NoReturn:
        self.failure = self.failure or failure
        self.end()
        await anyio.sleep_forever()
        raise failure

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        number = json.loads(request.content).get("id") if request.method == "POST" else None
        headers = {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}
        if self.session is not None and request.method == "POST":
            headers[SESSION_HEADER] = self.session
        route = self._end_route if request.method == "DELETE" else self._route
        checked_request = HttpRequest(self._target, request.method, headers, request.content)
        async with open_response(checked_request, route) as response:
            head = response.head
            if not 200 <= head.status < 300:
                return await self._refused(response, number)
            if not isinstance(number, int):
                return httpx2.Response(HTTPStatus.NO_CONTENT if request.method == "DELETE" else HTTPStatus.ACCEPTED)
            if head.status != HTTPStatus.OK:
                raise build_protocol_error(self._server, f"it answered {head.phrase} without a body")
            if _is_stream(head):
                reply = await find_reply(self._server, number, response)
            else:
                message = parse_json((await read_body(response, None)).body, self._server)
                reply = parse_reply(message, number)
            if reply is None:
                raise build_protocol_error(self._server, "its response does not match the request")
            return self._rebuild(reply, number, head)

    async def _refused(self, response: ResponseStream, number: Any) -> httpx2.Response:
        """Return the response for an error status that the SDK may interpret. Raises ToolFailure for any other
        status. The body is not shown, because it may repeat a key.
        """
        head = response.head
        if head.status < HTTPStatus.BAD_REQUEST:
            reason = "redirects, which is not followed: ask the operator to set the final address"
        elif head.status in (401, 403):
            reason = f"answered {head.phrase}: ask the operator to check its headers in TOOLCREW_MCP_SERVERS"
        else:
            reason = f"answered {head.phrase}: try again later, or use another tool"
            # The specification (transports, session management): a server answers 404 to an id that it does not know.
            self.has_lost_session = self.session is not None and head.status == HTTPStatus.NOT_FOUND
            # An error of the MCP protocol can also arrive with an error status.
            reply = None if self.has_lost_session else self._find_error(await self._read_error(response), number)
            if reply is not None:
                return self._rebuild(reply, number, head)
        self.refusal = ToolFailure(ErrorCode.HTTP_ERROR, f"the MCP server {self._server} {reason}", status=head.status)
        if not 400 <= head.status < 500 or head.status in (401, 403, 407, 408, 429):
            raise self.refusal
        return httpx2.Response(head.status)

    async def _read_error(self, response: ResponseStream) -> bytes:
        """Return the body; b"" if it is not readable within the limits."""
        try:
            return (await read_body(response, 64 * KIB)).body
        except ToolFailure:
            return b""

    def _find_error(self, body: bytes, number: Any) -> ServerReply | None:
        """Return the protocol error in the body; None if there is none. A server that could not read the request
        sends no id.
        """
        try:
            message = parse_json(body, self._server)
        except ToolFailure:
            return None
        if isinstance(message, dict) and message.get("id") is None:
            message = {**message, "id": number}
        reply = parse_reply(message, number) if isinstance(number, int) else None
        return reply if reply is not None and reply.result is None else None

    def _rebuild(self, reply: ServerReply, number: int, head: Head) -> httpx2.Response:
        """Return a new response for the SDK that contains only the checked parts of the server's response."""
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": number}
        if reply.result is not None:
            message["result"] = reply.result
        else:
            message["error"] = {"code": reply.code, "message": reply.error}
        headers = {"content-type": "application/json"}
        if (session := head.headers.get(SESSION_HEADER)) is not None:
            if not _SESSION_ID.fullmatch(session):
                raise build_protocol_error(self._server, "the id of its session is invalid")
            headers[SESSION_HEADER] = self.opened = session
        # JSON can contain a lone surrogate, which UTF-8 cannot encode.
        data = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
        return httpx2.Response(HTTPStatus.OK, headers=headers, content=data)


async def find_reply(server: str, number: int, response: ResponseStream) -> ServerReply | None:
    """Return the reply to request `number` in a stream of events, without waiting for later events. Raises
    ToolFailure.
    """
    async with aclosing(response.pieces()) as pieces:
        stream = _Pieces(pieces)
        request = httpx2.Request("POST", "http://server")
        headers = {"content-type": "text/event-stream"}
        events = httpx2.EventSource(httpx2.Response(200, headers=headers, stream=stream, request=request), None)
        count = 0
        async for event in events:
            count += 1
            if count > MAX_EVENTS:
                raise build_protocol_error(server, f"more than {MAX_EVENTS} events came before its response")
            if event.data.strip():
                reply = parse_reply(parse_json(event.data, server), number)
                if reply is not None:
                    return reply
    return None


class _Pieces(httpx2.AsyncByteStream):
    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces

    def __aiter__(self) -> Any:
        return self._pieces


def _limits(total_s: float) -> FetchLimits:
    """Return the limits of a conversation. A tool may send nothing until the deadline, so there is no minimum rate."""
    return FetchLimits(
        first_byte_s=total_s + 1,
        rate_window_s=total_s + 1,
        min_rate=0.0,
        wire_bytes=ANSWER_BYTES,
        decoded_bytes=ANSWER_BYTES,
    )


def _is_stream(head: Head) -> bool:
    return head.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"
