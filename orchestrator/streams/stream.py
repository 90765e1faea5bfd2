"""One open stream of this process, and one request."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from toolcrew.contract.errors import OperatorError, SandboxUnavailable, StreamLost, ToolFailure
from toolcrew.contract.stream_protocol import (
    LAST,
    MAX_DATA_BYTES,
    STDERR,
    WINDOW_BYTES,
    FrameKind,
    StreamFrame,
)
from toolcrew.orchestrator.streams.answers import parse_answer
from toolcrew.orchestrator.streams.connection import GatewayConnection

_SMALL_BYTES = 4096
_MAX_PIECES = 16_384


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """Bytes of a stream. `offset`: the position of the first byte. `is_last`: no bytes follow."""

    data: bytes
    offset: int
    is_stderr: bool
    is_last: bool


class StreamReply:
    """The answer of one request, which arrives later."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def take(self, frame: StreamFrame) -> None:
        """Receive REPLY."""
        if not self.answer.done():
            try:
                self.answer.set_result(parse_answer(frame))
            except (ToolFailure, OperatorError) as error:
                self.answer.set_exception(error)

    def lose(self, error: StreamLost) -> None:
        """Fail, because the connection was lost."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Stream:
    """A stream. One task may read and one may write at the same time. As a context manager it is closed at the end.

    `opened`: the payload of OPENED. `end`: the payload of END, once it has arrived. `sent`, `received`: bytes.
    """

    def __init__(self, connection: GatewayConnection, payload: bytes, window: int = WINDOW_BYTES) -> None:
        self.opened: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.sent = self.received = 0
        self._window = window
        self._granted = window
        self._position = self._credit = 0
        self._pieces: deque[StreamPiece] = deque()
        self._error: ToolFailure | OperatorError | None = None
        self._readable, self._writable = asyncio.Event(), asyncio.Event()
        self._write_turn = asyncio.Lock()
        self._is_open = asyncio.get_running_loop().create_future()
        self.on_end: Callable[[], None] | None = None
        """Called once when the stream has ended or was left."""
        self._connection = connection
        self.number = connection.begin(self, FrameKind.OPEN, payload)
        connection.send(StreamFrame(FrameKind.CREDIT, self.number, self._granted))

    async def wait_opened(self) -> None:
        """Wait until the stream is open. Raises ToolFailure, OperatorError."""
        await self._is_open

    @property
    def has_ended(self) -> bool:
        """Return whether the stream has its end, or was lost."""
        return self.end is not None or self._error is not None

    async def read(self) -> StreamPiece | None:
        """Return the next bytes; None at the end. Raises the error with which the stream has ended: ToolFailure,
        OperatorError, and StreamLost when the connection was lost.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.end is not None:
                return None
            self._readable.clear()
            await self._readable.wait()
        piece = self._pieces.popleft()
        self.received += len(piece.data)
        if self._granted - self.received <= self._window // 2 and not piece.is_last:
            self._granted = self.received + self._window
            self._connection.send(StreamFrame(FrameKind.CREDIT, self.number, self._granted))
        return piece

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes as soon as the sandbox takes them. `is_last`: no bytes follow. After the end of the stream the
        bytes are dropped. Raises the errors of `read`.
        """
        async with self._write_turn:
            view = memoryview(data)
            while view or is_last:
                room = await self._wait_for_room(1 if view else 0)
                if room is None:
                    return
                piece, view = view[: min(room, MAX_DATA_BYTES)], view[min(room, MAX_DATA_BYTES) :]
                flags = LAST if is_last and not view else 0
                frame = StreamFrame(FrameKind.DATA, self.number, self._position, bytes(piece), flags)
                self._position += len(piece)
                self.sent += len(piece)
                self._connection.send(frame)
                if flags:
                    return

    def fail(self, error: ToolFailure | OperatorError) -> None:
        """End the stream with an error, which `read` raises."""
        self._connection.leave(self.number)
        self._finish(error)

    def close(self) -> None:
        """Leave the stream. A process goes on."""
        self._connection.leave(self.number)
        self._finish(StreamLost("the stream was closed"))

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- Methods that the connection calls

    def take(self, frame: StreamFrame) -> None:
        """Receive a frame. The gateway has checked its position and its kind."""
        if frame.kind is FrameKind.DATA:
            self._add_piece(frame)
        elif frame.kind is FrameKind.CREDIT:
            self._credit = max(self._credit, frame.offset)
            self._writable.set()
        else:
            self._take_answer(frame)

    def lose(self, error: StreamLost) -> None:
        """End, because the connection was lost."""
        self._finish(error)

    def _add_piece(self, frame: StreamFrame) -> None:
        data, at, is_stderr = frame.payload, frame.offset, bool(frame.flags & STDERR)
        last = self._pieces[-1] if self._pieces else None
        # Many tiny pieces would need many times the memory of their bytes.
        if last is not None and last.is_stderr == is_stderr and len(last.data) + len(data) <= _SMALL_BYTES:
            self._pieces.pop()
            data, at = last.data + data, last.offset
        self._pieces.append(StreamPiece(data, at, is_stderr, bool(frame.flags & LAST)))
        self._readable.set()
        if len(self._pieces) > _MAX_PIECES:
            self.fail(SandboxUnavailable("the stream has too many tiny pieces for its slow reader: attach again"))

    def _take_answer(self, frame: StreamFrame) -> None:
        try:
            fields = parse_answer(frame)
        except (ToolFailure, OperatorError) as error:
            self.fail(error)
            return
        if frame.kind is FrameKind.OPENED:
            self.opened = fields
        else:
            self.end = fields
            self._wake()
        if not self._is_open.done():
            self._is_open.set_result(None)

    def _finish(self, error: ToolFailure | OperatorError) -> None:
        if not self.has_ended:
            self._error = error
        if not self._is_open.done():
            self._is_open.set_exception(error)
            self._is_open.exception()  # the opener may have been cancelled
        self._wake()

    def _wake(self) -> None:
        self._readable.set()
        self._writable.set()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    async def _wait_for_room(self, needed: int) -> int | None:
        """Return the bytes that may be sent, at least `needed`; None after the end of the stream."""
        while self._credit - self._position < needed:
            if self._error is not None:
                raise self._error
            if self.end is not None:
                return None
            self._writable.clear()
            await self._writable.wait()
        return self._credit - self._position if not self.has_ended else None
