"""Streams without containers and gateways: the real stream server of the guest, as a child process of the test."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tests.support.guest.guest_harness import GUEST_PARENT, PYTHON
from toolcrew.concurrency.stream_connection import StreamConnection
from toolcrew.concurrency.stream_outbox import StreamOutbox
from toolcrew.contract.errors import SandboxUnavailable, StreamLost
from toolcrew.contract.stream_protocol import WINDOW_BYTES, FrameKind, StreamFrame
from toolcrew.orchestrator.streams import Stream, StreamTarget
from toolcrew.orchestrator.streams.connection import FrameReceiver, GatewayConnection
from toolcrew.orchestrator.streams.stream import StreamReply

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    "from guest.streams import entry, file_requests; from guest.paths import GuestPaths;"
    "file_requests.TOOLS = b'/bin';"
    "paths = [path.encode() for path in sys.argv[2:5]];"
    "entry.serve_streams(0, 0, GuestPaths(tuple(paths[:-1]), paths[-1]))"
)
_FOLDERS = ("workspace", "tmp", "output")
_EPOCH = b"\0\0\0\x01" + b"e" * 16


class _Channel:
    """The channel of one stream server, in the place of a connection to a gateway."""

    def __init__(self) -> None:
        self.connection = StreamConnection(StreamOutbox())
        self.connection.on_lost = self._lose
        self.connection.begin_frames(self._take_frames)
        self.is_lost = False
        self.has_begun = asyncio.Event()
        self._receivers: dict[int, FrameReceiver] = {}
        self._last_number = 0

    async def open(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self.connection, sock=channel)
        self.connection.send(StreamFrame(FrameKind.EPOCH, payload=_EPOCH))
        await self.has_begun.wait()

    def begin(self, receiver: FrameReceiver, kind: FrameKind, payload: bytes) -> int:
        self._last_number += 1
        self._receivers[self._last_number] = receiver
        self.connection.send(StreamFrame(kind, self._last_number, payload=payload))
        return self._last_number

    def send(self, frame: StreamFrame) -> None:
        if frame.stream in self._receivers:
            self.connection.send(frame)

    def leave(self, number: int) -> None:
        if self._receivers.pop(number, None) is not None:
            self.connection.send(StreamFrame(FrameKind.CLOSE, number))

    def _take_frames(self, frames: Sequence[StreamFrame]) -> None:
        for frame in frames:
            if frame.kind is FrameKind.EPOCH and frame.payload == _EPOCH:
                self.has_begun.set()
            receiver = self._receivers.get(frame.stream)
            if receiver is not None:
                if frame.kind in (FrameKind.END, FrameKind.REPLY):
                    del self._receivers[frame.stream]
                receiver.take(frame)

    def _lose(self, reason: str) -> None:
        self.is_lost = True
        receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            receiver.lose(StreamLost(reason))


class LocalStreams:
    """Offers the interface of Streams. `refusal`: raised by every call and opening.

    It checks no ticket and no policy, and serves each session with the same server.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.workspace = base / "workspace"
        self.targets: list[StreamTarget] = []
        self.refusal: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: _Channel | None = None

    async def call(self, target: StreamTarget, request: Mapping[str, Any]) -> dict[str, Any]:
        channel = await self._find_channel(target)
        reply = StreamReply()
        number = channel.begin(reply, FrameKind.CALL, json.dumps(request).encode())
        try:
            return await reply.answer
        finally:
            channel.leave(number)

    async def open(self, target: StreamTarget, opening: Mapping[str, Any], *, window: int = WINDOW_BYTES) -> Stream:
        channel = cast(GatewayConnection, await self._find_channel(target))
        stream = Stream(channel, json.dumps(opening).encode(), window)
        try:
            await stream.wait_opened()
        except BaseException:
            stream.close()
            raise
        return stream

    async def close(self) -> None:
        """Do nothing: the server outlives the API."""

    async def stop(self) -> None:
        if self._channel is not None:
            self._channel.connection.end("the test has ended")
        if self._process is not None:
            await asyncio.to_thread(self._process.wait, 20)

    async def _find_channel(self, target: StreamTarget) -> _Channel:
        self.targets.append(target)
        if self.refusal is not None:
            raise self.refusal
        if self._channel is None:
            own, servers = socket.socketpair()
            folders = [self.base / name for name in _FOLDERS]
            command = [PYTHON, "-I", "-S", "-c", _BOOT, str(GUEST_PARENT), *map(str, folders)]
            self._process = await asyncio.to_thread(subprocess.Popen, command, stdin=servers.fileno())
            servers.close()
            self._channel = _Channel()
            await self._channel.open(own)
        if self._channel.is_lost:
            raise SandboxUnavailable("the stream server has ended")
        return self._channel


@contextlib.asynccontextmanager
async def open_local_streams() -> AsyncIterator[LocalStreams]:
    """Yield streams of a stream server that starts at the first stream."""
    base = Path(tempfile.mkdtemp(prefix="toolcrew-streams-"))
    for name in _FOLDERS:
        (base / name).mkdir()
    streams = LocalStreams(base)
    try:
        yield streams
    finally:
        await streams.stop()
        shutil.rmtree(base)
