"""A WebSocket of the synchronous client."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolcrew.contract.errors import ApiUnavailable
from toolcrew.orchestrator.sdk.http.handshakes import (
    Attempts,
    SocketLost,
    read_event,
    read_refusal,
    socket_options,
    socket_url,
    watch_connection,
)

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

    from toolcrew.orchestrator.sdk.http.client import Client


class Socket:
    """An open WebSocket. A connection that is lost raises SocketLost."""

    def __init__(self, connection: "ClientConnection") -> None:
        self._connection = connection

    def receive(self) -> str | bytes:
        """Return the next message."""
        from websockets.exceptions import ConnectionClosed

        try:
            return self._connection.recv()
        except ConnectionClosed as error:
            raise SocketLost(str(error)) from error

    def send(self, message: str | bytes) -> None:
        """Send a message. Waits while the service reads slowly."""
        from websockets.exceptions import ConnectionClosed

        try:
            self._connection.send(message)
        except ConnectionClosed as error:
            raise SocketLost(str(error)) from error

    def close(self) -> None:
        """Close the connection. Repeatable."""
        self._connection.close()


def open_socket(client: "Client", path: str, params: Mapping[str, Any]) -> Socket:
    """Open a WebSocket with one attempt. Raises SocketLost when another attempt may succeed, and ToolcrewError."""
    from websockets.exceptions import InvalidHandshake, InvalidStatus
    from websockets.sync.client import connect

    url = socket_url(client.url, path, params)
    try:
        connection = connect(url, **socket_options(client.url, client.headers))
        watch_connection(connection.socket)
    except InvalidStatus as error:
        raise read_refusal(error.response, url) from error
    except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
        raise SocketLost(str(error) or type(error).__name__) from error
    return Socket(connection)


def open_stream(client: "Client", path: str, params: Mapping[str, Any]) -> Socket:
    """Open a WebSocket, in several attempts, and wait until its stream is open. Raises ToolcrewError."""
    attempts = Attempts()
    while True:
        try:
            socket = open_socket(client, path, params)
            try:
                read_event(socket.receive())
            except BaseException:
                socket.close()
                raise
            return socket
        except SocketLost as lost:
            time.sleep(attempts.pause(lost.error or build_lost_socket(client)))


def build_lost_socket(client: "Client") -> ApiUnavailable:
    """Return the error for a service that cannot be reached again."""
    return ApiUnavailable(
        f"the connection to the API at {client.url} was lost and could not be opened again: check TOOLCREW_URL and "
        "that the service runs"
    )
