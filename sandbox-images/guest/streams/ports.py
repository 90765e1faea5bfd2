"""Streams to a port: connections to programs that listen at 127.0.0.1 in the sandbox."""

from __future__ import annotations

# Import `_socket`: the module `socket` imports more code than the whole guest has.
import _socket
import errno
import os
import select
import time

from guest.failures import INVALID_ARGUMENTS, NETWORK_ERROR, RATE_LIMITED, RequestFailure
from guest.fields import read_fields, whole
from guest.streams.client_bytes import ClientBytes
from guest.streams.frames import LAST
from guest.streams.handlers import StreamHandler, StreamService

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from guest.streams.handlers import Poller, StreamContext

PROXY_PORT = 3128
"""Port of the proxy. A client has its own network, and must not use that of the sandbox."""
_MAX_CONNECTIONS = 64
_MAX_UNANSWERED = 16
_CONNECT_S = 10.0
_IN_PROGRESS = (0, errno.EINPROGRESS)


class PortService(StreamService):
    """Serves streams to ports."""

    def __init__(self) -> None:
        super().__init__()
        self.openers = {"port": self._open}
        self._streams: set[PortStream] = set()

    def leave(self) -> None:
        """Close every connection."""
        for stream in list(self._streams):
            stream.leave()

    def _open(self, context: StreamContext, header: dict[str, Any]) -> PortStream:
        port = read_fields(header, "what", {"port": whole(1, 65_535)})["port"]
        if port == PROXY_PORT:
            raise RequestFailure(INVALID_ARGUMENTS, f"port {port} is the sandbox's proxy; use another port")
        unanswered = sum(not stream.is_connected for stream in self._streams)
        if len(self._streams) >= _MAX_CONNECTIONS or unanswered >= _MAX_UNANSWERED:
            limits = f"{_MAX_CONNECTIONS}, and {_MAX_UNANSWERED} that wait for an answer"
            raise RequestFailure(RATE_LIMITED, f"too many connections to ports (limits: {limits}); close one first")
        stream = PortStream(context, port, self._streams.discard)
        self._streams.add(stream)
        return stream


class PortStream(StreamHandler):
    """A connection, from its start to its end. Each direction ends by itself."""

    def __init__(self, context: StreamContext, port: int, on_close: Callable[[PortStream], None]) -> None:
        """Start to connect. Raises RequestFailure."""
        self.is_connected = False
        self.wake_at = time.monotonic() + _CONNECT_S
        self._context = context
        self._port = port
        self._on_close = on_close
        self._incoming = ClientBytes(context.grant)
        self._client_ended = False
        self._program_ended = False
        self._socket = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        number = self._socket.connect_ex(("127.0.0.1", port))
        if number not in _IN_PROGRESS:
            self._socket.close()
            raise self._describe(number)

    def register(self, poller: Poller) -> None:
        """Wait for the connection, for bytes of the program while there is room, and for room for the client's."""
        reads = self.is_connected and not self._program_ended and self._context.room > 0
        writes = self._incoming or not self.is_connected
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)
        if events:
            poller.register(self._socket.fileno(), events)

    def serve(self, fd: int, events: int) -> None:
        """Serve an event of the connection. Raises RequestFailure when it is lost."""
        if not self.is_connected:
            self._finish_connect()
            return
        if self._incoming:
            self._write()
        if events & ~select.POLLOUT and not self._program_ended and self._context.room > 0:
            self._read()

    def wake(self) -> None:
        """Give up a connect without an answer. Raises RequestFailure."""
        raise self._describe(errno.ETIMEDOUT)

    def take(self, data: bytes, is_last: bool) -> None:
        """Send bytes of the client to the program."""
        self._incoming.add(data)
        self._client_ended = is_last
        self._write()

    def leave(self) -> None:
        """Close the connection."""
        self._socket.close()
        self._on_close(self)

    def _finish_connect(self) -> None:
        number = self._socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if number:
            raise self._describe(number)
        self.is_connected = True
        self.wake_at = None
        self._context.opened({})
        self._incoming.grant()

    def _read(self) -> None:
        try:
            data = self._socket.recv(self._context.room)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._describe(error.errno or 0) from None
        self._program_ended = not data
        self._context.send(data, 0 if data else LAST)
        self._end_when_done()

    def _write(self) -> None:
        try:
            self._incoming.write(self._socket.send)
            if self._client_ended and not self._incoming:
                self._socket.shutdown(_socket.SHUT_WR)
        except OSError as error:
            raise self._describe(error.errno or 0) from None
        self._end_when_done()

    def _end_when_done(self) -> None:
        if self._program_ended and self._client_ended and not self._incoming:
            self._context.end({})
            self.leave()

    def _describe(self, number: int) -> RequestFailure:
        if number == errno.ECONNREFUSED:
            sentence = f"nothing listens on port {self._port}; start the program first, then connect again"
        elif number == errno.ETIMEDOUT:
            sentence = f"the program on port {self._port} accepts no connection; check it, then connect again"
        else:
            sentence = f"the connection to port {self._port} is lost: {os.strerror(number).lower()}"
        return RequestFailure(NETWORK_ERROR, sentence)
