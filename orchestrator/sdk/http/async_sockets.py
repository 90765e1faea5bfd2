"""A WebSocket of the asynchronous client."""

import asyncio
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
    from websockets.asyncio.client import ClientConnection

    from toolcrew.orchestrator.sdk.http.async_client import AsyncClient


class AsyncSocket:
    """An open WebSocket. A connection that is lost raises SocketLost."""

    def __init__(self, connection: "ClientConnection") -> None:
        self._connection = connection

    async def receive(self) -> str | bytes:
        """Return the next message."""
        from websockets.exceptions import ConnectionClosed

        try:
            return await self._connection.recv()
        except ConnectionClosed as error:
            raise SocketLost(str(error)) from error

    async def send(self, message: str | bytes) -> None:
        """Send a message. Waits while the service reads slowly."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise SocketLost(str(error)) from error

    async def close(self) -> None:
        """Close the connection. Repeatable."""
        await self._connection.close()


async def open_socket(client: "AsyncClient", path: str, params: Mapping[str, Any]) -> AsyncSocket:
    """Open a WebSocket with one attempt. Raises SocketLost when another attempt may succeed, and ToolcrewError."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    url = socket_url(client.url, path, params)
    try:
        connection = await connect(url, **socket_options(client.url, client.headers))
        watch_connection(connection.transport.get_extra_info("socket"))
    except InvalidStatus as error:
        raise read_refusal(error.response, url) from error
    except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
        raise SocketLost(str(error) or type(error).__name__) from error
    return AsyncSocket(connection)


async def open_stream(client: "AsyncClient", path: str, params: Mapping[str, Any]) -> AsyncSocket:
    """Open a WebSocket, in several attempts, and wait until its stream is open. Raises ToolcrewError."""
    attempts = Attempts()
    while True:
        try:
            socket = await open_socket(client, path, params)
            try:
                read_event(await socket.receive())
            except BaseException:
                await socket.close()
                raise
            return socket
        except SocketLost as lost:
            await asyncio.sleep(attempts.pause(lost.error or build_lost_socket(client)))


def build_lost_socket(client: "AsyncClient") -> ApiUnavailable:
    """Return the error for a service that cannot be reached again."""
    return ApiUnavailable(
        f"the connection to the API at {client.url} was lost and could not be opened again: check TOOLCREW_URL and "
        "that the service runs"
    )
