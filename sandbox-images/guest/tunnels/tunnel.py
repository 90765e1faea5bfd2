"""A connection of a program to the proxy port.

The program's bytes go to the host as frames. The host's bytes wait in memory until the program reads them. Invariant:
at most WINDOW bytes wait in each direction, so that a slow program or a slow host cannot fill PID 1's memory.
"""

from __future__ import annotations

# Import `_socket`: the module `socket` imports more code than the whole guest has.
import _socket
import select
import struct

from guest.frames import FrameError, Outbox, encode_frame, join_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.tunnels.orphans import EndpointPair

WINDOW = 65_536
"""Limit of the bytes that are sent in one direction and not yet read at the other end."""
PIECE = 32_768
"""Largest body of one frame, in bytes. A frame of a call may have to wait for one such frame."""
_GRANT = WINDOW // 2
_RESET = struct.pack("ii", 1, 0)
_LOST = select.POLLERR | select.POLLHUP


class Tunnel:
    """A connection, from its accept to its close. Methods never block. They raise HostDisconnected when the host has
    closed the channel.
    """

    __slots__ = (
        "_data_header",
        "_has_shut_down",
        "_host_room",
        "_outbox",
        "_pending",
        "_socket",
        "_unreported_bytes",
        "ends",
        "fd",
        "host_closed",
        "host_ended",
        "is_closed",
        "number",
        "program_ended",
    )

    def __init__(self, number: int, connection: _socket.socket, ends: EndpointPair, outbox: Outbox) -> None:
        self.number = number
        self.ends = ends
        self.fd = connection.fileno()
        self.program_ended = False
        self.host_ended = False
        self.host_closed = False
        # True when the guest has sent its close event. Later bytes of the host are dropped.
        self.is_closed = False
        self._socket = connection
        self._outbox = outbox
        self._host_room = WINDOW
        self._pending = bytearray()
        self._unreported_bytes = 0
        self._has_shut_down = False
        self._data_header = b'{"ev":"net_data","conn":%d}' % number
        self._send_event("net_open")

    def interest(self, may_read: bool) -> int | None:
        """Return the events to wait for.

        0: wait only for the end of the connection. None: do not register the connection, because poll would report its
        known end again without pause.
        """
        events = select.POLLIN if may_read and self.can_send else 0
        if self._pending:
            events |= select.POLLOUT
        return events if events or not self._has_shut_down else None

    @property
    def can_send(self) -> bool:
        """Return whether bytes of the program may be read and sent now."""
        return self._host_room > 0 and not self.program_ended and not self.host_closed

    def serve(self, events: int, may_read: bool) -> bool:
        """Process the events of the poller. Return whether a data frame was sent to the host."""
        if events & select.POLLOUT and not self.is_closed:
            self._flush()
        if self.is_closed or not events & (select.POLLIN | _LOST):
            return False
        if may_read and self.can_send:
            return self._read()
        if events & _LOST and not self._has_shut_down:
            self.abort()
        return False

    def _read(self) -> bool:
        """Read from the program and send one frame to the host. Return whether it was a data frame."""
        try:
            data = self._socket.recv(min(self._host_room, PIECE))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.abort()
            return False
        if data:
            self._host_room -= len(data)
            self._outbox.put(join_frame(self._data_header, data))
            return True
        self.program_ended = True
        self._send_event("net_end")
        self._close_when_done()
        return False

    def take_data(self, data: bytes) -> None:
        """Accept bytes for the program. Raises FrameError when the host sends more bytes than it may."""
        if self.host_ended or self.host_closed or len(self._pending) + self._unreported_bytes + len(data) > WINDOW:
            raise FrameError("data exceeds the window, or belongs to an ended connection")
        if not self.is_closed:
            self._pending += data
            self._flush()

    def take_room(self, count: int) -> None:
        """Record that the host can receive `count` more bytes. Raises FrameError when the window would become too
        large.
        """
        self._host_room += count
        if self._host_room > WINDOW:
            raise FrameError("a window update is larger than the window")

    def take_end(self) -> None:
        """Record that the host sends no more bytes."""
        self.host_ended = True
        if not self.is_closed:
            self._shut_down_when_sent()

    def take_close(self) -> None:
        """Record that the host has closed the connection.

        If the host had ended its output before, the program still gets the pending bytes. Otherwise the connection is
        aborted.
        """
        self.host_closed = True
        if self.is_closed:
            return
        if self.host_ended:
            self._close_when_done()
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection with a reset. The program gets an error, and cannot mistake the close for a normal
        end.
        """
        self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, _RESET)
        self._close()

    def _flush(self) -> None:
        """Send pending bytes to the program. Allow the host to send more (grant room) when enough bytes were sent."""
        sent = 0
        try:
            if self._pending:
                sent = self._socket.send(self._pending)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        del self._pending[:sent]
        self._unreported_bytes += sent
        # Grant room in large steps, so that small writes do not cause one frame each.
        if self._unreported_bytes >= _GRANT and not self.host_ended:
            self._outbox.put(encode_frame({"ev": "net_room", "conn": self.number, "bytes": self._unreported_bytes}))
            self._unreported_bytes = 0
        self._shut_down_when_sent()

    def _shut_down_when_sent(self) -> None:
        """When the host has ended its output and no bytes are pending, end the output to the program."""
        if self._pending or not self.host_ended or self._has_shut_down:
            return
        self._has_shut_down = True
        try:
            self._socket.shutdown(_socket.SHUT_WR)
        except OSError:
            self.abort()
            return
        self._close_when_done()

    def _close_when_done(self) -> None:
        """Close the connection when both directions have ended."""
        if self._has_shut_down and (self.program_ended or self.host_closed):
            self._close()

    def _close(self) -> None:
        self.is_closed = True
        self._pending = bytearray()
        self._socket.close()
        self._send_event("net_close")

    def _send_event(self, event: str) -> None:
        """Send an event about this connection to the host."""
        self._outbox.put(encode_frame({"ev": event, "conn": self.number}))
