"""Ports of a session, with the asynchronous client."""

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from toolcrew.orchestrator.sdk.http.async_sockets import AsyncSocket, build_lost_socket, open_stream
from toolcrew.orchestrator.sdk.http.handshakes import SocketLost, read_event

if TYPE_CHECKING:
    from toolcrew.orchestrator.sdk.http.async_client import AsyncClient

_MAX_BYTES: Final = 32 * 1024
_CLOSE_INPUT: Final = '{"close_input":true}'


class AsyncPorts:
    """The ports on which programs of a session listen."""

    def __init__(self, client: "AsyncClient", path: str) -> None:
        self._client = client
        self._path = f"{path}/ports"

    async def connect(self, port: int) -> "AsyncPortConnection":
        """Connect to a program that listens on a port of the sandbox. Raises ToolFailure if none does."""
        return AsyncPortConnection(self._client, await open_stream(self._client, f"{self._path}/{int(port)}", {}))


class AsyncPortConnection:
    """A TCP connection to a program of a session. A connection that is lost raises ApiUnavailable."""

    def __init__(self, client: "AsyncClient", socket: AsyncSocket) -> None:
        self._client = client
        self._socket = socket
        self._is_over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def read(self) -> bytes:
        """Return the next bytes; b"" after the last one."""
        while not self._is_over:
            try:
                message = await self._socket.receive()
            except SocketLost as lost:
                raise build_lost_socket(self._client) from lost
            if isinstance(message, bytes):
                return message
            self._is_over = self._is_end(message)
        return b""

    async def write(self, data: bytes) -> None:
        """Send bytes. Waits while the program reads slowly."""
        try:
            for at in range(0, len(data), _MAX_BYTES):
                await self._socket.send(data[at : at + _MAX_BYTES])
        except SocketLost as lost:
            raise build_lost_socket(self._client) from lost

    async def close_input(self) -> None:
        """Send no more bytes. The program can still send."""
        try:
            await self._socket.send(_CLOSE_INPUT)
        except SocketLost as lost:
            raise build_lost_socket(self._client) from lost

    async def close(self) -> None:
        """Close the connection. Repeatable."""
        await self._socket.close()

    def _is_end(self, message: str) -> bool:
        try:
            return read_event(message).get("event") in ("output_closed", "end")
        except SocketLost as lost:
            raise lost.error or build_lost_socket(self._client) from lost
