"""A sandboxd and stream servers without sandboxes, for tests of the gateway in one process."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from toolcrew.concurrency.stream_connection import StreamConnection
from toolcrew.concurrency.stream_outbox import StreamOutbox
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.stream_protocol import LAST, MAX_DATA_BYTES, WINDOW_BYTES, FrameKind, StreamFrame

PATTERN = bytes(range(251)) * 400


def pattern_at(offset: int, size: int) -> bytes:
    """Return the bytes that a flooding stream has at a position."""
    start = offset % 251
    return (PATTERN * (1 + (start + size) // len(PATTERN)))[start : start + size]


class FakeStreamServer:
    """The stream server of one sandbox. `process` with argv ["echo"] returns its input, ["flood", bytes] sends bytes,
    ["silent"] does nothing. `on_frame` None: it answers as the protocol says; else it receives the frames.
    """

    def __init__(self) -> None:
        self.frames: list[StreamFrame] = []
        self.on_frame: Callable[[StreamFrame], None] | None = None
        self.before_epoch = b""
        self.epochs = 0
        self.arrived = asyncio.Event()
        self.connection = StreamConnection(StreamOutbox())
        self._floods: dict[int, tuple[int, int, int]] = {}

    async def start(self) -> socket.socket:
        """Return the socket of the gateway."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self.connection, sock=ours)
        self.connection.begin_frames(self._take_frames)
        return theirs

    def send(self, kind: FrameKind, stream: int = 0, payload: object = b"", *, offset: int = 0, flags: int = 0) -> None:
        """Send a frame, valid or not."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.connection.send(StreamFrame(kind, stream, offset, data, flags))

    async def wait_for(self, kind: FrameKind, count: int = 1) -> list[StreamFrame]:
        """Wait for frames of a kind, and return all of them."""
        async with asyncio.timeout(30):
            while len(found := [frame for frame in self.frames if frame.kind is kind]) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return found

    def _take_frames(self, frames: Sequence[StreamFrame]) -> None:
        for frame in frames:
            self.frames.append(frame)
            self.arrived.set()
            if frame.kind is FrameKind.EPOCH:
                self.epochs += 1
                self._floods.clear()
                self.connection.write(self.before_epoch + frame.encode())
            elif self.on_frame is not None:
                self.on_frame(frame)
            else:
                self._answer(frame)

    def _answer(self, frame: StreamFrame) -> None:
        number = frame.stream
        if frame.kind is FrameKind.CALL:
            self.send(FrameKind.REPLY, number, {"asked": json.loads(frame.payload)})
        elif frame.kind is FrameKind.OPEN:
            self._open(number, json.loads(frame.payload))
        elif frame.kind is FrameKind.CREDIT and number in self._floods:
            sent, _, size = self._floods[number]
            self._floods[number] = (sent, frame.offset, size)
            self._flood(number)
        elif frame.kind is FrameKind.DATA:
            self.send(FrameKind.DATA, number, frame.payload, offset=frame.offset, flags=frame.flags)
            self.send(FrameKind.CREDIT, number, offset=frame.offset + len(frame.payload) + WINDOW_BYTES)
            if frame.flags & LAST:
                self.send(FrameKind.END, number, {"exit_code": 0})
        elif frame.kind is FrameKind.CLOSE:
            self._floods.pop(number, None)

    def _open(self, number: int, opening: dict[str, Any]) -> None:
        argv = opening.get("argv", ["echo"])
        if argv[0] == "silent":
            return
        self.send(FrameKind.OPENED, number, {"process": number, "from": 0})
        self.send(FrameKind.CREDIT, number, offset=WINDOW_BYTES)
        if argv[0] == "flood":
            self._floods[number] = (0, 0, int(argv[1]))

    def _flood(self, number: int) -> None:
        sent, credit, size = self._floods[number]
        while sent < min(credit, size):
            count = min(MAX_DATA_BYTES, credit - sent, size - sent)
            self.send(FrameKind.DATA, number, pattern_at(sent, count), offset=sent)
            sent += count
        self._floods[number] = (sent, credit, size)
        if sent == size:
            del self._floods[number]
            self.send(FrameKind.END, number, {"exit_code": 0})


class FakeChannel:
    """A channel that a gateway has borrowed."""

    def __init__(self, sandboxd: "FakeSandboxd", session: str, sock: socket.socket) -> None:
        self.sock = sock
        self._sandboxd = sandboxd
        self._session = session
        self._is_closed = False

    async def use(self, *, bytes_in: int, bytes_out: int, open_streams: int) -> None:
        if not self._sandboxd.thawed.is_set():
            self._sandboxd.waiting.set()
            await self._sandboxd.thawed.wait()
        if self._session in self._sandboxd.lost:
            raise SandboxUnavailable("the sandbox was lost")
        self._sandboxd.uses[self._session] += 1
        self._sandboxd.used_bytes[self._session] += bytes_in + bytes_out

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.sock.close()
            self._sandboxd.held.discard(self._session)


class FakeSandboxd:
    """Lends the channels of sessions, which need not be opened. `fences`: session -> number of its opening. While
    `thawed` is clear, reports of uses wait, and `waiting` is set.
    """

    def __init__(self) -> None:
        self.servers: dict[str, FakeStreamServer] = {}
        self.fences: dict[str, int] = {}
        self.held: set[str] = set()
        self.lost: set[str] = set()
        self.opens: Counter[str] = Counter()
        self.uses: Counter[str] = Counter()
        self.used_bytes: Counter[str] = Counter()
        self.thawed, self.waiting = asyncio.Event(), asyncio.Event()
        self.thawed.set()

    async def open(self, session: str, fence: int) -> FakeChannel:
        """Lend the channel of a session."""
        self.opens[session] += 1
        if fence < self.fences.get(session, 1):
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, "the session was opened again meanwhile")
        if session in self.held:
            raise ToolFailure(ErrorCode.SESSION_BUSY, "another gateway has the channel")
        self.held.add(session)
        server = self.server(session)
        if server.connection.transport is not None:
            # A later gateway continues the channel of the earlier one.
            replacement = FakeStreamServer()
            replacement.on_frame, replacement.before_epoch = server.on_frame, server.before_epoch
            self.servers[session] = server = replacement
        return FakeChannel(self, session, await server.start())

    def server(self, session: str) -> FakeStreamServer:
        """Return the stream server of a session."""
        return self.servers.setdefault(session, FakeStreamServer())
