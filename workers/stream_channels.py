"""Client of sandboxd for the stream channels of sandboxes, for asyncio (docs/stream-protocol.md).

A channel needs a connection to sandboxd of its own, and lasts as long as this connection or the sandbox.
"""

import asyncio
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import OPEN_TIMEOUT_S, SandboxdUnreachable, check_answer
from toolcrew.workers.sandboxd.frames import MAX_DOWN, FrameDecoder, FrameError, encode_frame

_READ_BYTES = 4096
_DESCRIPTOR = struct.Struct("i")
_PART_BYTES = socket.CMSG_LEN(_DESCRIPTOR.size)


class SandboxChannel:
    """The stream channel of a sandbox. `sock`: the socket to its stream server, which does not block. Its end means
    that the sandbox was lost, that its session was closed, or that its stream server has ended. `sandbox`,
    `generation`: the sandbox's id, and its number in the session.
    """

    def __init__(self, connection: "_Connection", sock: socket.socket, answer: Mapping[str, Any]) -> None:
        self.sock = sock
        self.sandbox = str(answer["sandbox"])
        self.generation = int(answer["generation"])
        self._connection = connection

    async def use(self, *, bytes_in: int, bytes_out: int, open_streams: int) -> None:
        """Report bytes since the last report, and the number of open streams. On return a frozen sandbox runs again.

        Call this before the first byte after a second of silence, and every second while bytes flow. Raises
        SandboxUnavailable and ToolFailure: the sandbox no longer has the channel.
        """
        report = {"bytes_in": bytes_in, "bytes_out": bytes_out, "open": open_streams}
        await self._connection.request({"verb": "use_streams", **report})

    def close(self) -> None:
        """Leave the channel. The sandbox and its processes continue."""
        self.sock.close()
        self._connection.close()


async def open_channel(path: Path | str, session: str, fence: int) -> SandboxChannel:
    """Return the stream channel of a session (`<tenant>:<session>`). A session without a sandbox gets one.

    `fence`: the number of the session's opening. Raises ToolFailure (SESSION_NOT_FOUND, SESSION_BUSY), and
    SandboxUnavailable, which may report a loss of files: show it to the client. The next attempt gets a new sandbox.
    """
    connection = _Connection(path)
    try:
        answer = await connection.request({"verb": "open_streams", "sandbox": session, "fence": fence})
        return SandboxChannel(connection, connection.take_descriptor(), answer)
    except BaseException:
        connection.close()
        raise


class _Connection:
    """A connection to sandboxd that can receive a descriptor with an answer. One request at a time."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._decoder = FrameDecoder(MAX_DOWN)
        self._received: list[socket.socket] = []
        self._is_connected = False
        self._turn = asyncio.Lock()

    async def request(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. After an error of the connection, every request fails."""
        try:
            async with self._turn, asyncio.timeout(OPEN_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                if not self._is_connected:
                    await loop.sock_connect(self._sock, self._path)
                    self._is_connected = True
                await loop.sock_sendall(self._sock, encode_frame(header, b"", max_total=MAX_DOWN))
                return check_answer(await self._read())
        except (OSError, FrameError) as error:
            self.close()
            raise SandboxdUnreachable(
                f"sandboxd does not answer at {self._path} ({error or 'no answer in time'}): start it, or read its log",
                was_sent=self._is_connected,
            ) from error
        except asyncio.CancelledError:
            # The answer would arrive later, and the next request would take it for its own.
            self.close()
            raise

    def take_descriptor(self) -> socket.socket:
        """Return the socket that came with the last answer. Raises SandboxUnavailable without one."""
        if not self._received:
            raise SandboxUnavailable("sandboxd sent no channel: use the same version of toolcrew for both programs")
        sock = self._received.pop()
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        self._sock.close()
        for sock in self._received:
            sock.close()
        self._received.clear()

    async def _read(self) -> Mapping[str, Any]:
        while True:
            try:
                # `socket.recv_fds` of Python 3.11 drops the flag, so that programs would inherit the descriptor.
                data, parts, _, _ = self._sock.recvmsg(_READ_BYTES, _PART_BYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await _wait_readable(self._sock)
                continue
            for level, kind, content in parts:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._received.append(socket.socket(fileno=_DESCRIPTOR.unpack(content)[0]))
            if not data:
                raise ConnectionError("it closed the connection")
            for frame in self._decoder.feed(data):
                return frame.header


async def _wait_readable(sock: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
