"""The stream channels of sandboxes, and the requests of the stream gateway about them (docs/stream-protocol.md).

The gateway gets a descriptor of the socket between a sandbox's stream server and this host. So sandboxd neither reads
the bytes of streams nor keeps any of them. It keeps a descriptor of its own, to give the channel to the next gateway.

Invariant: at most one connection of a gateway holds a channel, and no channel outlives its sandbox: a shutdown of the
socket ends it for every process that has a descriptor.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd.connection import parse_count, parse_policy
from toolcrew.workers.sandboxd.frames import MAX_DOWN, WorkerLink, encode_frame
from toolcrew.workers.sandboxd.request_fields import parse_session
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import Sessions

BUSY_S = 5.0
"""Seconds after the last use of a channel in which its session is in use. The gateway reports a use every second."""
OPEN_S = 7200.0
"""Seconds without a use for which an open stream prevents the eviction of its sandbox."""
_LOST = "the sandbox of these streams was lost: open the streams again, and the session gets another sandbox"


class SandboxStreams:
    """The stream channel of one sandbox. `open_channel` returns a new descriptor of it."""

    def __init__(self, open_channel: Callable[[], Awaitable[socket.socket]]) -> None:
        self._open_channel = open_channel
        self._channel: socket.socket | None = None
        self._holder: object | None = None
        self._open = 0
        self._used_at = time.monotonic()
        self._quiet = asyncio.Event()
        self._is_closed = False

    @property
    def is_active(self) -> bool:
        """Return whether bytes flow, or flowed a moment ago in a stream that is open."""
        return self._holder is not None and not self._quiet.is_set() and time.monotonic() - self._used_at < BUSY_S

    @property
    def is_open(self) -> bool:
        """Return whether a stream is open whose last bytes are not too old."""
        return self._holder is not None and self._open > 0 and time.monotonic() - self._used_at < OPEN_S

    async def lend(self, holder: object) -> socket.socket:
        """Let `holder` be the only holder of the channel until `release`. Return a descriptor of it, which the caller
        closes. Raises ToolFailure (SESSION_BUSY) and SandboxUnavailable.
        """
        if self._holder is not None:
            raise ToolFailure(
                ErrorCode.SESSION_BUSY, "another stream gateway of this host has the streams of the session: try again"
            )
        self._holder, self._open, self._used_at = holder, 0, time.monotonic()
        self._quiet.clear()
        try:
            if self._channel is None or _has_ended(self._channel):
                self._replace(await self._open_channel())
            assert self._channel is not None
            return self._channel.dup()
        except BaseException:
            self.release(holder)
            raise

    def use(self, streams: int) -> None:
        """Record that the holder sends or receives bytes, and its number of open streams. Without any, none follow."""
        self._open, self._used_at = streams, time.monotonic()
        if streams:
            self._quiet.clear()
        else:
            self._quiet.set()

    async def wait_quiet(self) -> None:
        """Wait until the holder reports that no stream is open."""
        await self._quiet.wait()

    def release(self, holder: object) -> None:
        if self._holder is holder:
            self._holder = None

    def close(self) -> None:
        """End the channel for all processes."""
        self._is_closed = True
        self._replace(None)

    def _replace(self, channel: socket.socket | None) -> None:
        before, self._channel = self._channel, channel
        if before is not None:
            _shut_down(before)
        if self._is_closed and channel is not None:
            # The sandbox was lost while the runtime opened its channel.
            self._channel = None
            _shut_down(channel)
            raise SandboxUnavailable(_LOST)


async def serve_streams(sessions: Sessions, link: WorkerLink, header: Mapping[str, Any]) -> None:
    """Give the stream channel of a session to a gateway, and answer its reports until it leaves. A session without a
    sandbox gets one, as for a call. Raises ToolFailure, SandboxUnavailable and ConnectionError.
    """
    name = parse_session(header)
    # The fence of a location also grows when a new worker of this host takes the session over.
    if parse_count(header, "fence") < sessions.find_open(name).fence:
        raise ToolFailure(
            ErrorCode.SESSION_NOT_FOUND, "the session was opened again meanwhile: read its present host, and try again"
        )
    # With the id of a call, one request reports a loss of files, and the next one gets a new sandbox.
    entry, sandbox = await sessions.use(name, "", parse_policy(header))
    streams = sandbox.streams
    if not isinstance(streams, SandboxStreams):
        streams = SandboxStreams(partial(sandbox.runtime.open_stream_channel, sandbox.container))
        sandbox.streams = streams
    with await streams.lend(link) as channel:
        try:
            _send_descriptor(link, sandbox, channel)
        except BaseException:
            streams.release(link)
            raise
    try:
        while (frame := await link.next()) is not None:
            if frame.header.get("verb") != "use_streams":
                raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "this connection takes only the request use_streams")
            await _record_use(sessions, entry, sandbox, streams, frame.header)
            link.send({"ok": True})
            await link.drain()
    finally:
        streams.release(link)


async def _record_use(
    sessions: Sessions, entry: HostSession, sandbox: Sandbox, streams: SandboxStreams, header: Mapping[str, Any]
) -> None:
    """Record that bytes of streams flow, and let the sandbox run if it was frozen."""
    counted_bytes = parse_count(header, "bytes_in") + parse_count(header, "bytes_out")
    open_streams = parse_count(header, "open")
    if entry.sandbox is sandbox and not entry.is_ready:
        async with entry.lock:
            if entry.sandbox is sandbox and sandbox.lost is None and not entry.is_closing:
                await sessions.make_ready(entry)
    if entry.sandbox is not sandbox or sandbox.lost is not None or entry.is_closing:
        raise SandboxUnavailable(_LOST)
    sandbox.meter.stream_bytes += counted_bytes
    streams.use(open_streams)
    entry.used_at = time.monotonic()
    # The bytes may change files, and may start processes that change files later.
    entry.activity.has_written = entry.activity.has_streams = True


def _send_descriptor(link: WorkerLink, sandbox: Sandbox, channel: socket.socket) -> None:
    """Send the answer with the descriptor. Raises ConnectionError when the gateway does not read."""
    answer = {"ok": True, "sandbox": sandbox.container[:12], "generation": sandbox.generation}
    data = encode_frame(answer, b"", max_total=MAX_DOWN)
    assert link.transport is not None
    # The transport of asyncio sends no descriptors. Bytes that it has not sent yet would arrive after this answer.
    if link.is_disconnected or link.transport.get_write_buffer_size():
        raise ConnectionError("the stream gateway left, or does not read its answers")
    with link.transport.get_extra_info("socket").dup() as connection:
        try:
            sent = socket.send_fds(connection, [data], [channel.fileno()])
        except BlockingIOError as error:
            raise ConnectionError("the stream gateway does not read its answers") from error
    if sent < len(data):
        link.transport.write(data[sent:])


def _has_ended(channel: socket.socket) -> bool:
    """Return whether the other end of the channel is closed. Bytes that wait in the channel stay in it."""
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _shut_down(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other end may have ended already.
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()
