"""Relays one connection of a sandbox between its guest and the egress proxy.

Each direction has a window: the sender may have WINDOW bytes on their way that the receiver has not read. So a slow
side delays only its own connection and can never fill the memory of sandboxd. docs/guest-protocol.md defines the
windows and how each direction ends.
"""

import asyncio
import contextlib
import json
import select
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from toolcrew.workers.unix_listening import find_peer_uid

log = structlog.get_logger(__name__)

CONNECT_S = 5.0
_READ_BYTES = 8_192
"""asyncio buffers up to twice as many unread bytes per connection, and those of one receive."""
_RECEIVE_BYTES = 16_384
"""Size of one receive from the proxy. asyncio's own is 256 KiB, which each connection could then hold."""

ProxyStreams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
WINDOW = 65_536
"""Maximum number of bytes in one direction that were sent and not yet read at the other end."""
GRANT = WINDOW // 2
"""Minimum number of freed bytes of a window that are reported to the sender at once."""
PIECE = 32_768
"""Maximum bytes of one frame, and so the longest delay of a call's frame."""
LINGER_S = 1.0
"""Interval of the check whether a proxy that has ended its data has closed the connection."""
_UNREACHABLE = (
    "The egress proxy of this host does not answer, so nothing outside of the sandbox can be reached now. "
    "The operator of the host can start it. Do without the network, or try again later.\n"
)
_ANSWER = (
    "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(_UNREACHABLE)}\r\nConnection: close\r\n\r\n{_UNREACHABLE}"
).encode("ascii")


async def open_proxy(path: Path | None, preamble: Mapping[str, Any], uids: frozenset[int]) -> ProxyStreams:
    """Connect to the proxy at `path` and send the opening: one line of JSON before the program's bytes.

    Raises OSError with a text for the operator when there is no proxy (`path` is None). Also raises the errors of
    `connect_proxy`.
    """
    if path is None:
        raise OSError(
            "a session of an earlier sandboxd has network egress, but TOOLCREW_EGRESS_SOCKET is not set: set it again"
        )
    reader, writer = await connect_proxy(path, uids)
    # Bytes that wait for the proxy are already counted in the guest's window.
    writer.transport.set_write_buffer_limits(high=0)
    writer.write(json.dumps(dict(preamble), separators=(",", ":")).encode("ascii") + b"\n")
    return reader, writer


async def connect_proxy(path: Path, uids: frozenset[int]) -> ProxyStreams:
    """Open a connection without sending anything.

    Raises OSError with a text for the operator when no process listens or answers in time, or when the listener's uid
    is not one of `uids`.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_READ_BYTES)
    except TimeoutError:
        raise OSError(f"no process accepted the connection to {path} within {CONNECT_S:g} s") from None
    # The public attribute of the transports of asyncio's event loop.
    writer.transport.max_size = _RECEIVE_BYTES  # type: ignore[attr-defined]
    uid = find_peer_uid(writer.get_extra_info("socket"))
    if uid not in uids:
        writer.transport.abort()
        raise OSError(
            f"{path} is served by uid {uid}, which may not be the egress proxy: add it to TOOLCREW_EGRESS_UIDS if it is"
        )
    return reader, writer


class RelayContext:
    """Shared by all connections of a sandbox: the channel to the guest, which one connection uses at a time, and the
    function that connects to the proxy.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any], bytes], None],
        drain: Callable[[], Awaitable[None]],
        connect: Callable[[], Awaitable[ProxyStreams]],
    ) -> None:
        self.connect = connect
        self.proxy_answers = True
        self._send = send
        self._drain = drain
        self._turn = asyncio.Lock()

    def send_event(self, number: int, op: str, **fields: int) -> None:
        self._send({"op": op, "conn": number, **fields}, b"")

    async def send_data(self, number: int, data: bytes) -> None:
        """Send one piece at a time, and none while the guest reads slowly, so that a frame of a call waits only
        briefly.
        """
        async with self._turn:
            await self._drain()
            self._send({"op": "net_data", "conn": number}, data)


class TunnelRelay:
    """Relays one connection, from its creation on. `on_over` is called when both sides have closed. The caller must
    have checked the guest's frames.
    """

    def __init__(self, number: int, context: RelayContext, on_over: Callable[["TunnelRelay"], None]) -> None:
        self.number = number
        self.room = WINDOW
        self.guest_room = WINDOW
        self.guest_ended = False
        self.guest_closed = False
        self._context = context
        self._on_over = on_over
        self._ended = False
        self._closed = False
        self._upward = bytearray()
        self._unreported_room = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._arrived = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())
        # A callback, not a `finally` of the task: a task that is cancelled before its first step never enters its
        # `try`.
        self._task.add_done_callback(self._close)

    def take_data(self, data: bytes) -> None:
        """Accept bytes for the proxy: at most `guest_room` bytes."""
        self.guest_room -= len(data)
        if not self._closed:
            self._upward += data
            self._arrived.set()

    def take_room(self, count: int) -> None:
        """Add window space: the guest can receive `count` more bytes."""
        self.room += count
        self._has_room.set()

    def take_end(self) -> None:
        """Accept the end of the program's data."""
        self.guest_ended = True
        self._arrived.set()

    def take_close(self) -> None:
        """Accept that the guest has closed the connection. If the program ended its data before, the remaining data
        is still relayed; otherwise both directions are cut.
        """
        self.guest_closed = True
        if self._closed:
            self._on_over(self)
        elif not (self.guest_ended and self._ended):
            self._task.cancel()

    def cut(self) -> None:
        """End both directions at once. The guest gets a close event."""
        self._task.cancel()

    def abort(self) -> None:
        """End the relay because the sandbox has ended."""
        self._closed = True
        self._task.cancel()

    async def _run(self) -> None:
        try:
            reader, writer = await self._context.connect()
        except OSError as error:
            self._report_proxy(error)
            await self._answer_unreachable()
            return
        self._report_proxy(None)
        try:
            # An error of the proxy's connection ends the relay, and the guest then closes the program's connection.
            with contextlib.suppress(OSError):
                await self._relay(reader, writer)
        finally:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upward = asyncio.get_running_loop().create_task(self._send_up(writer))
        try:
            await self._send_down(reader)
            # The program may never close its connection, so also check whether the proxy has closed.
            while not upward.done():
                await asyncio.wait({upward}, timeout=LINGER_S)
                if _has_left(writer):
                    break
        finally:
            upward.cancel()

    async def _send_down(self, reader: asyncio.StreamReader) -> None:
        """Relay to the guest until the proxy ends its data. Raises OSError when the connection to the proxy breaks."""
        while True:
            await self._has_room.wait()
            data = await reader.read(min(self.room, PIECE))
            if not data:
                break
            self._take_up_room(len(data))
            await self._context.send_data(self.number, data)
        self._end()

    async def _send_up(self, writer: asyncio.StreamWriter) -> None:
        """Relay to the proxy until the program ends its data. If the proxy stops reading, drop the rest, because the
        proxy may still answer.
        """
        try:
            while data := await self._next_upward():
                writer.write(data)
                await writer.drain()
                self._give_room(len(data))
            writer.write_eof()
            await writer.drain()
        except OSError:
            await self._drop_upward()

    async def _next_upward(self) -> bytes:
        """Return the next bytes for the proxy; empty at the end of the program's data."""
        if not self._upward and not self.guest_ended:
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._upward)
        self._upward.clear()
        return data

    async def _drop_upward(self) -> None:
        while data := await self._next_upward():
            self._give_room(len(data))

    async def _answer_unreachable(self) -> None:
        self._take_up_room(len(_ANSWER))
        await self._context.send_data(self.number, _ANSWER)
        self._end()
        # Read and drop the rest of the request: a program reads the answer only after it has sent its request.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._drop_upward()

    def _report_proxy(self, error: OSError | None) -> None:
        """Log when the proxy becomes unreachable, and when it answers again."""
        was_there, self._context.proxy_answers = self._context.proxy_answers, error is None
        if error is not None and was_there:
            log.error("egress_proxy_unreachable", error=str(error))
        elif error is None and not was_there:
            log.info("egress_proxy_answers")

    def _take_up_room(self, count: int) -> None:
        self.room -= count
        if self.room == 0:
            self._has_room.clear()

    def _give_room(self, count: int) -> None:
        self._unreported_room += count
        if self._unreported_room >= GRANT and not self.guest_ended:
            self.guest_room += self._unreported_room
            self._context.send_event(self.number, "net_room", bytes=self._unreported_room)
            self._unreported_room = 0

    def _end(self) -> None:
        self._ended = True
        self._context.send_event(self.number, "net_end")

    def _close(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("relay_bug", exc_info=error)
        if self._closed:
            return
        self._closed = True
        self._upward.clear()
        self._context.send_event(self.number, "net_close")
        if self.guest_closed:
            self._on_over(self)


def _has_left(writer: asyncio.StreamWriter) -> bool:
    """Return whether the proxy has closed the connection, not only ended its data."""
    if writer.is_closing():
        return True
    poller = select.poll()
    poller.register(writer.get_extra_info("socket").fileno(), 0)
    return bool(poller.poll(0))
