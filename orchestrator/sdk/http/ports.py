"""Ports of a session, with the synchronous client."""

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from toolcrew.orchestrator.sdk.http.handshakes import SocketLost, read_event
from toolcrew.orchestrator.sdk.http.sockets import Socket, build_lost_socket, open_stream

if TYPE_CHECKING:
    from toolcrew.orchestrator.sdk.http.client import Client

_MAX_BYTES: Final = 32 * 1024
_CLOSE_INPUT: Final = '{"close_input":true}'


class Ports:
    """The ports on which programs of a session listen."""

    def __init__(self, client: "Client", path: str) -> None:
        self._client = client
        self._path = f"{path}/ports"

    def connect(self, port: int) -> "PortConnection":
        """Connect to a program that listens on a port of the sandbox. Raises ToolFailure if none does."""
        return PortConnection(self._client, open_stream(self._client, f"{self._path}/{int(port)}", {}))


class PortConnection:
    """A TCP connection to a program of a session. A connection that is lost raises ApiUnavailable."""

    def __init__(self, client: "Client", socket: Socket) -> None:
        self._client = client
        self._socket = socket
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> bytes:
        """Return the next bytes; b"" after the last one."""
        while not self._is_over:
            try:
                message = self._socket.receive()
            except SocketLost as lost:
                raise build_lost_socket(self._client) from lost
            if isinstance(message, bytes):
                return message
            self._is_over = self._is_end(message)
        return b""

    def write(self, data: bytes) -> None:
        """Send bytes. Waits while the program reads slowly."""
        try:
            for at in range(0, len(data), _MAX_BYTES):
                self._socket.send(data[at : at + _MAX_BYTES])
        except SocketLost as lost:
            raise build_lost_socket(self._client) from lost

    def close_input(self) -> None:
        """Send no more bytes. The program can still send."""
        try:
            self._socket.send(_CLOSE_INPUT)
        except SocketLost as lost:
            raise build_lost_socket(self._client) from lost

    def close(self) -> None:
        """Close the connection. Repeatable."""
        self._socket.close()

    def _is_end(self, message: str) -> bool:
        try:
            return read_event(message).get("event") in ("output_closed", "end")
        except SocketLost as lost:
            raise lost.error or build_lost_socket(self._client) from lost
