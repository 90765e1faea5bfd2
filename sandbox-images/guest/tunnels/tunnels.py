"""The proxy port of a sandbox: PID 1 listens there and relays each connection to the host, at a limited rate.

Invariant: traffic of connections never delays calls. Frames per second, connections, and bytes in memory are limited,
and connections are read only while few bytes wait for the host.
"""

from __future__ import annotations

import _socket
import select
import struct
import time

from guest.frames import Frame, FrameError, Outbox
from guest.tunnels.orphans import find_orphans
from guest.tunnels.tunnel import WINDOW, Tunnel

NET_OPS = frozenset(("net_data", "net_room", "net_end", "net_close"))
MAX_TUNNELS = 64
# Above this number of bytes that wait for the host, connections are not read. The limit for reports of calls is far
# higher, so connections stop first.
_OUTBOX_BYTES = 65_536
_FRAMES_PER_S = 2000.0
_OPEN_COST = 20.0
_BACKLOG = 64
_SOCKET_BYTES = 131_072
_CHECK_S = 1.0
_RESET = struct.pack("ii", 1, 0)


class FrameRateLimiter:
    """Limits the rate of frames: tokens refill with time, up to the number of one second."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._tokens = per_s
        self._counted_at = time.monotonic()

    def has(self, tokens: float) -> bool:
        """Return whether this number of tokens is available now."""
        now = time.monotonic()
        self._tokens = min(self._per_s, self._tokens + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        return self._tokens >= tokens

    def take(self, tokens: float) -> None:
        """Use tokens. Their number may become negative."""
        self._tokens -= tokens

    def ready_at(self, tokens: float) -> float:
        """Return the time at which this number of tokens is available, on the clock of time.monotonic()."""
        return self._counted_at + max(tokens - self._tokens, 0.0) / self._per_s


class Tunnels:
    """The listening socket at the proxy port, and every connection that is not closed on both sides."""

    def __init__(self, outbox: Outbox, port: int) -> None:
        self._outbox = outbox
        self._listener = _listen(port)
        self._by_number: dict[int, Tunnel] = {}
        # The open connections, the last served ones at the end.
        self._by_fd: dict[int, Tunnel] = {}
        self._last = 0
        self._rate_limiter = FrameRateLimiter(_FRAMES_PER_S)
        self._check_at: float | None = None

    def register(self, poller: select.poll) -> None:
        """Register the listening socket and the connections with the poller."""
        may_read = self._may_read()
        for fd, tunnel in self._by_fd.items():
            events = tunnel.interest(may_read)
            if events is not None:
                poller.register(fd, events)
        # Register the listener last, so that it is served last: a new connection may get the descriptor number of a
        # connection that was closed in the same round.
        if self._rate_limiter.has(_OPEN_COST):
            poller.register(self._listener.fileno(), select.POLLIN)

    def serve(self, fd: int, events: int) -> None:
        """Process one event of the poller. Ignore an event of another descriptor."""
        if fd == self._listener.fileno():
            self._accept()
            return
        tunnel = self._by_fd.get(fd)
        if tunnel is None:
            return
        if tunnel.serve(events, self._may_read()):
            self._rate_limiter.take(1.0)
            self._by_fd[fd] = self._by_fd.pop(fd)
        self._settle(tunnel)

    def process(self, frame: Frame) -> None:
        """Process a host's frame about a connection. Raises FrameError when there is no such connection, or for
        invalid content.
        """
        number, op = frame.header.get("conn"), frame.header["op"]
        tunnel = self._by_number.get(number) if isinstance(number, int) else None
        if tunnel is None:
            raise FrameError("no such connection")
        if op == "net_data":
            tunnel.take_data(frame.body)
        elif op == "net_room":
            tunnel.take_room(_parse_count(frame.header.get("bytes")))
        elif op == "net_end":
            tunnel.take_end()
        else:
            tunnel.take_close()
        self._settle(tunnel)

    def find_wake_at(self) -> float | None:
        """Return the time of the next duty without an event, or None."""
        times = [] if self._check_at is None else [self._check_at]
        if not self._rate_limiter.has(_OPEN_COST):
            times.append(self._rate_limiter.ready_at(_OPEN_COST))
        return min(times) if times else None

    def abort_orphans(self) -> None:
        """Abort the connections of programs that have ended without waiting for the answer."""
        if self._check_at is None or time.monotonic() < self._check_at:
            return
        waiting = [tunnel for tunnel in self._by_fd.values() if _may_be_orphan(tunnel)]
        orphans = find_orphans([tunnel.ends for tunnel in waiting])
        for tunnel in waiting:
            if tunnel.ends in orphans:
                tunnel.abort()
                self._settle(tunnel)
        self._check_at = time.monotonic() + _CHECK_S if any(map(_may_be_orphan, self._by_fd.values())) else None

    def _may_read(self) -> bool:
        """Return whether connections may be read now."""
        return self._outbox.size < _OUTBOX_BYTES and self._rate_limiter.has(1.0)

    def _accept(self) -> None:
        """Accept one connection. Reset the connection when MAX_TUNNELS connections exist."""
        # Use tokens even if the accept fails; otherwise a lack of descriptors would keep PID 1 busy.
        self._rate_limiter.take(_OPEN_COST)
        try:
            fd, program = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        connection = _socket.socket(fileno=fd)
        connection.setblocking(False)
        if len(self._by_number) >= MAX_TUNNELS:
            connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, _RESET)
            connection.close()
            return
        connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._last += 1
        tunnel = Tunnel(self._last, connection, (connection.getsockname(), program), self._outbox)
        self._by_number[tunnel.number] = self._by_fd[fd] = tunnel

    def _settle(self, tunnel: Tunnel) -> None:
        """Remove a closed connection from the tables."""
        if tunnel.is_closed:
            # When the host's close arrives, a newer connection may already use the same descriptor number.
            if self._by_fd.get(tunnel.fd) is tunnel:
                del self._by_fd[tunnel.fd]
            if tunnel.host_closed:
                self._by_number.pop(tunnel.number, None)
        elif self._check_at is None and _may_be_orphan(tunnel):
            self._check_at = time.monotonic() + _CHECK_S


def _may_be_orphan(tunnel: Tunnel) -> bool:
    return tunnel.program_ended and not tunnel.is_closed


def _listen(port: int) -> _socket.socket:
    """Return the listening socket. Raises OSError."""
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setblocking(False)
    # Every connection inherits these limits, so the bytes that wait in the kernel are limited too.
    for option in (_socket.SO_RCVBUF, _socket.SO_SNDBUF):
        listener.setsockopt(_socket.SOL_SOCKET, option, _SOCKET_BYTES)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


def _parse_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= WINDOW:
        raise FrameError(f"`bytes` of net_room must be a whole number from 1 to {WINDOW}")
    return value
