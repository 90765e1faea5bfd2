"""HTTP/1.1 on one connection: read requests, and write answers with the delays and the ends of a plan."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, Protocol

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Request:
    """A request. `headers`: names in lower case. For a repeated header the last value is kept."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Plan:
    """An answer. `pieces`: of its body. `is_stream`: sent in chunks; otherwise with its length.

    `cut_after`: the connection breaks after this many bytes of the body. `then`: the action after the last piece;
    `go_on` sends `more` without limit. `on_whole`: called after everything was sent. Delays are in seconds.
    """

    status: int = 200
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    pieces: Sequence[bytes] | AsyncIterator[bytes] = ()
    is_stream: bool = False
    first_byte_s: float = 0.0
    piece_s: float = 0.0
    cut_after: int | None = None
    then: Literal["end", "hold", "go_on"] = "end"
    more: bytes = b""
    on_whole: Callable[[], None] | None = None


class BrokenOff(Exception):
    """The pieces of a plan have ended before the body is complete. The client's connection is then broken too."""


class Service(Protocol):
    """A service that answers requests. `left`: called when a client disconnects before its answer is complete."""

    def opened(self) -> None: ...
    def closed(self) -> None: ...
    def left(self) -> None: ...
    def answer(self, request: Request) -> "Plan | Awaitable[Plan]": ...


@dataclass
class _Head:
    method: str
    path: str
    headers: dict[str, str]
    length: int
    keeps_alive: bool


class _Refused(Exception):
    """Data that is not a supported request. The connection ends."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass
class Connection(asyncio.Protocol):
    """A client connection. Requests are answered one after the other."""

    service: Service
    _waiting: bytearray = field(default_factory=bytearray)
    _head: _Head | None = None
    _task: "asyncio.Task[None] | None" = None
    _when_empty: list[Callable[[], None]] = field(default_factory=list)
    _drained: "asyncio.Future[None] | None" = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # With this limit `resume_writing` is called after the last byte was written.
        transport.set_write_buffer_limits(high=0)
        self.service.opened()

    def connection_lost(self, exc: Exception | None) -> None:
        self.service.closed()
        if self._task is not None:
            self._task.cancel()
        # Answers that the kernel has not accepted completely.
        for _ in self._when_empty:
            self.service.left()
        self._when_empty.clear()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if self._task is not None:
            if len(self._waiting) > MAX_BODY_BYTES:
                self._transport.abort()
            return
        self._work()

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        result, self._when_empty = self._when_empty, []
        for tell in result:
            tell()

    def _work(self) -> None:
        """Answer the requests that have arrived completely, until an answer needs a delay."""
        try:
            while self._task is None and not self._transport.is_closing():
                request = self._take()
                if request is None:
                    return
                answer = self.service.answer(request)
                if isinstance(answer, Plan) and self._is_at_once(answer):
                    assert isinstance(answer.pieces, Sequence)
                    self._transport.write(self._build_head(answer) + self._build_body(answer))
                    self._end(answer)
                else:
                    self._task = asyncio.get_running_loop().create_task(self._play(answer))
                    self._task.add_done_callback(self._played)
        except _Refused as error:
            self._transport.write(_refusal(error))
            self._transport.close()

    # --- Reading ------------------------------------------------------------------------------------------------------

    def _take(self) -> Request | None:
        if self._head is None:
            end = self._waiting.find(b"\r\n\r\n")
            if end < 0:
                if len(self._waiting) > MAX_HEAD_BYTES:
                    raise _Refused(431, f"the head is longer than {MAX_HEAD_BYTES} bytes: send fewer headers")
                return None
            self._head = _parse_head(bytes(self._waiting[:end]))
            del self._waiting[: end + 4]
            if self._head.headers.get("expect", "").lower() == "100-continue":
                self._transport.write(_CONTINUE)
        head = self._head
        if len(self._waiting) < head.length:
            return None
        body = bytes(self._waiting[: head.length])
        del self._waiting[: head.length]
        self._head, self._keeps_alive = None, head.keeps_alive
        return Request(head.method, head.path, head.headers, body)

    # --- Writing ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_at_once(plan: Plan) -> bool:
        is_calm = plan.first_byte_s == 0 and plan.piece_s == 0 and plan.cut_after is None and plan.then == "end"
        return is_calm and isinstance(plan.pieces, Sequence)

    def _build_head(self, plan: Plan) -> bytes:
        try:
            reason = HTTPStatus(plan.status).phrase
        except ValueError:
            reason = "Unknown"
        lines = [
            f"HTTP/1.1 {plan.status} {reason}",
            f"content-type: {plan.content_type}",
            *(f"{name}: {value}" for name, value in plan.headers),
        ]
        if plan.is_stream:
            lines.append("transfer-encoding: chunked")
        else:
            assert isinstance(plan.pieces, Sequence)
            # A complete answer that is held: its end is announced but never sent.
            lines.append(f"content-length: {sum(map(len, plan.pieces)) + (plan.then != 'end')}")
        if not self._keeps_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", errors="replace")

    @staticmethod
    def _build_body(plan: Plan) -> bytes:
        assert isinstance(plan.pieces, Sequence)
        body = b"".join(plan.pieces)
        return _chunked(body) + b"0\r\n\r\n" if plan.is_stream else body

    async def _play(self, answer: "Plan | Awaitable[Plan]") -> None:
        is_whole = False
        try:
            plan = answer if isinstance(answer, Plan) else await answer
            is_whole = await self._play_plan(plan)
        finally:
            if not is_whole:
                self.service.left()

    async def _play_plan(self, plan: Plan) -> bool:
        """Play a plan. Returns False if the client has disconnected."""
        if plan.first_byte_s:
            await asyncio.sleep(plan.first_byte_s)
        self._transport.write(self._build_head(plan))
        remaining = plan.cut_after
        number = 0
        async for piece in _each(plan.pieces):
            if number and plan.piece_s:
                await asyncio.sleep(plan.piece_s)
            number += 1
            piece, remaining = (piece, None) if remaining is None else (piece[:remaining], remaining - len(piece))
            if piece:
                self._transport.write(_chunked(piece) if plan.is_stream else piece)
                await self._drain()
            if remaining is not None and remaining <= 0:
                break
        if plan.cut_after is not None:
            # The bytes end in order, but the length in the head is not reached.
            self._transport.close()
            return True
        while plan.then == "go_on" and not self._transport.is_closing():
            self._transport.write(_chunked(plan.more))
            await self._drain()
            await asyncio.sleep(plan.piece_s or 0.01)
        if plan.then != "end":
            # Continue until the client disconnects, which cancels this task.
            await asyncio.get_running_loop().create_future()
        if plan.is_stream:
            self._transport.write(b"0\r\n\r\n")
        self._end(plan)
        return True

    def _played(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, BrokenOff):
            self._transport.abort()
            return
        if error is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "an answer could not be played", "exception": error}
            )
            self._transport.abort()
            return
        self._work()

    def _end(self, plan: Plan) -> None:
        if plan.on_whole is not None:
            if self._drained is None and not self._transport.is_closing():
                plan.on_whole()
            else:
                self._when_empty.append(plan.on_whole)
        if not self._keeps_alive:
            self._transport.close()

    async def _drain(self) -> None:
        # Shielded, because the future belongs to the transport and other tasks may wait for it.
        while self._drained is not None:
            await asyncio.shield(self._drained)


async def _each(pieces: Sequence[bytes] | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(pieces, Sequence):
        for piece in pieces:
            yield piece
        return
    async for piece in pieces:
        yield piece


def _chunked(piece: bytes) -> bytes:
    # An empty chunk would end the stream.
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


def _refusal(error: _Refused) -> bytes:
    body = f"{error}\n".encode()
    head = (
        f"HTTP/1.1 {error.status} Refused\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: "
        "close\r\n\r\n"
    )
    return head.encode() + body


def _parse_head(raw: bytes) -> _Head:
    first, *rest = raw.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _Refused(400, "the first line is no HTTP/1 request: speak HTTP/1.1 to this server")
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if not colon:
            raise _Refused(400, "a header has no colon: speak HTTP/1.1 to this server")
        headers[name.strip().lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise _Refused(411, "a request in chunks is not read here: send its content-length")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise _Refused(400, "the content-length is no number: send how many bytes the body has")
    if int(length[:20]) > MAX_BODY_BYTES:
        raise _Refused(413, f"the body is longer than {MAX_BODY_BYTES} bytes: send a shorter one")
    wants = headers.get("connection", "").lower()
    keeps_alive = "close" not in wants and (parts[2] != "HTTP/1.0" or "keep-alive" in wants)
    return _Head(parts[0], parts[1], headers, int(length), keeps_alive)
