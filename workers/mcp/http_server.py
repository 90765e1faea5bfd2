"""One MCP server over streamable HTTP: a request of its own for each call, through the guard of all that leaves a
worker, within limits.
"""

import base64
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from contract.errors import ErrorCode, ToolFailure
from workers.mcp.messages import (
    HANDSHAKE,
    HANDSHAKE_REVISIONS,
    REVISION,
    UNSUPPORTED_REVISION,
    Reply,
    broken,
    build_hello,
    build_request,
    parse_json,
    parse_reply,
)
from workers.mcp.pages import gather_pages
from workers.mcp.settings import HttpEntry
from workers.web.addresses import AddressRules
from workers.web.connections import build_tls
from workers.web.egress import EgressRules
from workers.web.exchange import Answer, Head, Request, Route, exchange
from workers.web.limits import KIB, MIB, Deadline, FetchLimits
from workers.web.resolver import Resolver, SystemResolver

MAX_EVENTS = 10_000
"""Of one answer: progress and logs beside it."""
T = TypeVar("T")
ANSWER_BYTES = 4 * MIB
END_S = 2.0
"""For telling a server that a session is over."""
_PLAIN_HEADER = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,512}")


class ReplyReader:
    """Finds the reply to request `number`. `take` is given the pieces, `finish` is called at the body's end. Both raise
    ToolFailure(HTTP_ERROR).
    """

    def __init__(self, server: str, number: int, *, is_stream: bool) -> None:
        self._server = server
        self._number = number
        self._is_stream = is_stream
        self._held = bytearray()
        self._data: list[bytes] = []
        self._events = 0
        self.reply: Reply | None = None

    def take(self, piece: bytes) -> bool:
        """True once the reply is there."""
        if not self._is_stream:
            self._held += piece
            return False
        # Of a long line every piece is searched once.
        if b"\n" not in piece:
            self._held += piece
            return False
        *lines, rest = (bytes(self._held) + piece).split(b"\n")
        self._held = bytearray(rest)
        for line in lines:
            self._take_line(line.removesuffix(b"\r"))
            if self.reply is not None:
                return True
        return False

    def finish(self) -> Reply:
        """The reply."""
        if not self._is_stream:
            self.reply = parse_reply(parse_json(bytes(self._held), self._server), self._number)
        elif self.reply is None:
            self._take_line(bytes(self._held))
            self._take_line(b"")
        if self.reply is None:
            raise broken(self._server, "its answer is none to what was asked")
        return self.reply

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            self._end_event()

    def _end_event(self) -> None:
        text, self._data = b"\n".join(self._data), []
        self._events += 1
        if self._events > MAX_EVENTS:
            raise broken(self._server, f"more than {MAX_EVENTS} events came before its answer")
        if text.strip():
            self.reply = parse_reply(parse_json(text, self._server), self._number)


@dataclass(frozen=True)
class _Line:
    """How a peer is spoken to. `revision` REVISION: every request stands alone; else after a handshake, in `session` if
    it gave one.
    """

    revision: str = REVISION
    session: str | None = None


@dataclass
class HttpServer:
    """Calls are made one at a time by a process. `addresses`: the operator's rules beside the tables of private
    networks.
    """

    name: str
    entry: HttpEntry
    addresses: AddressRules = field(default_factory=AddressRules)
    resolver: Resolver = field(default_factory=SystemResolver)
    tls: ssl.SSLContext = field(default_factory=build_tls)
    stands_alone: bool | None = None
    """Whether the peer speaks REVISION; None: it has not been asked."""

    def list_tools(self, deadline: Deadline) -> list[Any]:
        """What it lists, unchecked. Raises ToolFailure."""
        return self._talk(
            lambda line: gather_pages(self.name, lambda params: self._ask(line, "tools/list", params, deadline)),
            deadline,
        )

    def call_tool(self, tool: str, arguments: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The result, unchecked but for being an object. Raises ToolFailure."""

        def call(line: _Line) -> dict[str, Any]:
            try:
                return self._ask(line, "tools/call", {"name": tool, "arguments": dict(arguments)}, deadline)
            except ToolFailure as failure:
                raise _maybe_done(failure) from None

        return self._talk(call, deadline)

    def _talk(self, work: Callable[[_Line], T], deadline: Deadline) -> T:
        if self.stands_alone is None:
            self.stands_alone = self._speaks_revision(deadline)
        if self.stands_alone:
            return work(_Line())
        try:
            line = self._shake_hands(deadline)
        except ToolFailure:
            # Whoever answered first may not have been the server, as a proxy before one that is just being started: the
            # next call asks again.
            self.stands_alone = None
            raise
        try:
            return work(line)
        finally:
            self._end(line)

    def _speaks_revision(self, deadline: Deadline) -> bool:
        """Raises ToolFailure when it cannot be reached, or lets nobody in."""
        try:
            reply = self._reply(_Line(), 1, "server/discover", {}, deadline)
        except ToolFailure as failure:
            if failure.metadata.get("is_foreign") is True:
                return False
            raise
        versions = reply.result.get("supportedVersions") if reply.result is not None else None
        return isinstance(versions, list) and REVISION in versions

    def _shake_hands(self, deadline: Deadline) -> _Line:
        answer, reply = self._post(
            _Line(HANDSHAKE), build_request(1, "initialize", build_hello(), stands_alone=False), 1, deadline
        )
        result = self._result("initialize", reply)
        revision, session = result.get("protocolVersion"), answer.head.headers.get("mcp-session-id")
        if not isinstance(revision, str) or revision not in HANDSHAKE_REVISIONS:
            raise broken(self.name, "it speaks no revision that is known here")
        if session is not None and not _SESSION_ID.fullmatch(session):
            raise broken(self.name, "the id of its session is none")
        line = _Line(revision, session)
        told = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        self._check(self._exchange(line, "POST", told, deadline, None))
        return line

    def _end(self, line: _Line) -> None:
        """It forgets the session by itself where this does not reach it, so nothing of that is told."""
        if line.session is None:
            return
        try:
            self._exchange(line, "DELETE", None, Deadline(END_S), None)
        except ToolFailure:
            return

    def _ask(self, line: _Line, method: str, params: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        return self._result(method, self._reply(line, 2, method, params, deadline))

    def _result(self, method: str, reply: Reply) -> dict[str, Any]:
        if reply.result is not None:
            return reply.result
        if reply.code == UNSUPPORTED_REVISION:
            self.stands_alone = None
        raise ToolFailure(
            ErrorCode.HTTP_ERROR, f"the MCP server {self.name} refused {method}: {reply.error}", mcp_code=reply.code
        )

    def _reply(self, line: _Line, number: int, method: str, params: Mapping[str, Any], deadline: Deadline) -> Reply:
        message = build_request(number, method, params, stands_alone=line.revision == REVISION)
        return self._post(line, message, number, deadline)[1]

    def _post(self, line: _Line, message: Mapping[str, Any], number: int, deadline: Deadline) -> tuple[Answer, Reply]:
        reader: ReplyReader | None = None

        def take(head: Head, piece: bytes) -> bool:
            nonlocal reader
            if reader is None:
                reader = ReplyReader(self.name, number, is_stream=_is_stream(head))
            return head.status == HTTPStatus.OK and reader.take(piece)

        answer = self._exchange(line, "POST", message, deadline, take)
        if answer.head.status == HTTPStatus.OK:
            return answer, (reader or ReplyReader(self.name, number, is_stream=False)).finish()
        # An error of the protocol comes with an error's status as well.
        if (reply := self._told(answer, number)) is not None:
            return answer, reply
        self._check(answer)
        raise broken(self.name, f"it answered {answer.head.phrase} without a body")

    def _told(self, answer: Answer, number: int) -> Reply | None:
        """The error that the body of an error's status tells; a server that could not read the request has no id for
        it.
        """
        try:
            message = parse_json(answer.body, self.name)
        except ToolFailure:
            return None
        reply = parse_reply(
            {**message, "id": number} if isinstance(message, dict) and message.get("id") is None else message, number
        )
        return reply if reply is not None and reply.result is None else None

    def _check(self, answer: Answer) -> None:
        """Raises ToolFailure for a status that is no success. Its body is not told: it may repeat a key."""
        head = answer.head
        if 200 <= head.status < 300:
            return
        if 300 <= head.status < 400:
            told = "redirects, which is not followed: have the operator write the address that is meant"
        elif head.status in (401, 403):
            told = f"answered {head.phrase}: have the operator check its headers in TOOLCREW_MCP_SERVERS"
        else:
            told = f"answered {head.phrase}: try again later, or use another tool"
        is_foreign = 400 <= head.status < 500 and head.status not in (401, 403, 407, 408, 429)
        raise ToolFailure(
            ErrorCode.HTTP_ERROR, f"the MCP server {self.name} {told}", status=head.status, is_foreign=is_foreign
        )

    def _exchange(
        self,
        line: _Line,
        method: str,
        message: Mapping[str, Any] | None,
        deadline: Deadline,
        take: Callable[[Head, bytes], bool] | None,
    ) -> Answer:
        target = self.entry.target()
        rules = EgressRules(
            self.addresses, frozenset({target.port}), frozenset({target.host} if self.entry.private else ())
        )
        rules.check_target(target)
        limits = _limits(deadline.total_s)
        addresses = (
            (target.literal,)
            if target.literal is not None
            else self.resolver.resolve(target.host, deadline, limits.resolve_s)
        )
        rules.check_addresses(target, addresses)
        body = b"" if message is None else json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
        request = Request(target, method, self._headers(line, message), body)
        route = Route(addresses, limits, deadline, self.tls)
        return exchange(request, route, lambda head: _body_bytes(head, limits), take)

    def _headers(self, line: _Line, message: Mapping[str, Any] | None) -> dict[str, str]:
        headers = {name: value.get_secret_value() for name, value in self.entry.headers.items()}
        headers |= {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        if message is None or message["method"] != "initialize":
            headers["MCP-Protocol-Version"] = line.revision
        if line.session is not None:
            headers["Mcp-Session-Id"] = line.session
        if line.revision == REVISION and message is not None:
            headers["Mcp-Method"] = message["method"]
            if message["method"] == "tools/call":
                headers["Mcp-Name"] = _header_value(message["params"]["name"])
        return headers


def _limits(total_s: float) -> FetchLimits:
    """A tool may be silent for all of its time: only the deadline ends that."""
    return FetchLimits(
        first_byte_s=total_s + 1,
        rate_window_s=total_s + 1,
        min_rate=0.0,
        wire_bytes=ANSWER_BYTES,
        decoded_bytes=ANSWER_BYTES,
        error_body_bytes=64 * KIB,
    )


def _body_bytes(head: Head, limits: FetchLimits) -> int | None:
    if head.status == HTTPStatus.OK:
        return None
    return limits.error_body_bytes if head.status >= HTTPStatus.BAD_REQUEST else 0


def _is_stream(head: Head) -> bool:
    return head.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"


def _header_value(text: str) -> str:
    """As the protocol writes what a header cannot hold."""
    if _PLAIN_HEADER.fullmatch(text) and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'replace')).decode()}?="


def _maybe_done(failure: ToolFailure) -> ToolFailure:
    """A call whose answer did not come may have acted."""
    if failure.code not in (ErrorCode.TIMEOUT, ErrorCode.FILE_TOO_LARGE) and failure.metadata.get("cause") not in (
        "reset",
        "protocol",
    ):
        return failure
    return ToolFailure(
        failure.code,
        f"{failure.message}; the call may or may not have acted: look before you repeat it",
        **failure.metadata,
    )
