"""WebSocket connections of the HTTP server: what a client can make the server hold, and when a connection ends."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from tests.support.stack.waiting import SOON_S
from toolcrew.orchestrator.http import server
from toolcrew.orchestrator.http.server import UvicornServer
from toolcrew.orchestrator.http.web_sockets import LOST, MAX_MESSAGE_BYTES

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
MIB = 1024 * 1024


async def echo(_scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] == "websocket.receive":
        content = {key: value for key, value in message.items() if key in ("text", "bytes")}
        await send({"type": "websocket.send", **content})


@contextlib.asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[tuple[str, int]]:
    """Serve WebSockets that `handle` answers after their handshake."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for answer in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
                await receive()
                await send({"type": answer})
            return
        await receive()
        await send({"type": "websocket.accept"})
        await handle(scope, receive, send)

    addresses: asyncio.Queue[str] = asyncio.Queue()
    service = UvicornServer(app, "127.0.0.1", 0, addresses.put_nowait, has_sockets=True)
    running = asyncio.create_task(service.run())
    try:
        host, port = (await addresses.get()).removeprefix("http://").split(":")
        yield host, int(port)
    finally:
        service.stop()
        await running


@contextlib.asynccontextmanager
async def connected(handle: Handler, **options: Any) -> AsyncIterator[ClientConnection]:
    async with serving(handle) as (host, port), connect(f"ws://{host}:{port}/", **options) as client:
        yield client


@contextlib.asynccontextmanager
async def raw_connection(handle: Handler) -> AsyncIterator[socket.socket]:
    """Yield a socket after the handshake, with small buffers and a limit of time."""
    async with serving(handle) as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(client.connect, address)
            client.settimeout(SOON_S)
            await asyncio.to_thread(shake_hands, client)
            yield client


def shake_hands(client: socket.socket) -> None:
    client.sendall(
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n"
    )
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += client.recv(1)
    assert answer.startswith(b"HTTP/1.1 101")


def frame(first: int, data: bytes = b"") -> bytes:
    """Return a frame of a client, with a mask of zeros. `first`: the first byte, with its FIN bit and kind."""
    assert len(data) < 126
    return struct.pack(">BB", first, 0x80 | len(data)) + bytes(4) + data


def send_until_blocked(client: socket.socket, block: bytes, most: int) -> int:
    """Send the block repeatedly. Return the bytes that the system took before it took no more for a second."""
    client.settimeout(1.0)
    count = 0
    with contextlib.suppress(TimeoutError):
        while count < most:
            count += client.send(block)
    return count


def read_close_code(client: socket.socket) -> int:
    """Return the code of the close frame, which is the last frame before the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    at = data.rindex(b"\x88")
    return int(struct.unpack(">H", data[at + 2 : at + 4])[0])


async def test_messages_up_to_the_limit_arrive_and_a_larger_one_ends_the_connection() -> None:
    async with connected(echo, max_size=None) as client:
        for content in (os.urandom(MAX_MESSAGE_BYTES), "é" * (MAX_MESSAGE_BYTES // 2), b"", ""):
            await client.send(content)
            assert await client.recv() == content
        await client.send(bytes(MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionClosedError):
            await client.recv()
        assert client.close_code == 1009


async def test_a_message_of_many_empty_frames_ends_the_connection() -> None:
    async with raw_connection(echo) as client:
        await asyncio.to_thread(client.sendall, frame(0x02) + frame(0x00) * 100_000)
        assert await asyncio.to_thread(read_close_code, client) == 1009


async def test_many_small_messages_arrive_in_order() -> None:
    async with connected(echo) as client:
        numbers = [str(number) for number in range(5000)]

        async def send_all() -> None:
            for number in numbers:
                await client.send(number)

        sending = asyncio.create_task(send_all())
        assert [await client.recv() for _ in numbers] == numbers
        await sending


@pytest.mark.parametrize("block", [frame(0x89, bytes(100)) * 100, frame(0x82, bytes(100)) * 100], ids=["ping", "echo"])
async def test_a_client_that_reads_nothing_can_send_only_a_bounded_amount(block: bytes) -> None:
    async with raw_connection(echo) as client:
        # The system's own buffers take some MiB.
        assert await asyncio.to_thread(send_until_blocked, client, block, 64 * MIB) < 32 * MIB


@contextlib.asynccontextmanager
async def paused_application() -> AsyncIterator[tuple[Handler, asyncio.Event, asyncio.Event]]:
    """Yield an application that reads nothing until the first event is set, and sets the second one when the
    connection is lost.
    """
    go_on, lost = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        losing = asyncio.create_task(scope["state"][LOST].wait())
        going = asyncio.create_task(go_on.wait())
        await asyncio.wait((losing, going), return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if losing.done():
            lost.set()
        else:
            losing.cancel()
            await echo(scope, receive, send)

    yield wait, go_on, lost


async def test_a_client_is_not_cut_off_while_the_application_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(server, "PONG_WITHIN_S", 0.05)
    async with paused_application() as (wait, go_on, _), connected(wait) as client:
        sent = [os.urandom(MAX_MESSAGE_BYTES) for _ in range(32)]
        sending = asyncio.create_task(send_all(client, sent))
        for _ in range(5):
            # The server sends pings, and cannot read the pongs.
            await client.ping()
            await asyncio.wait_for(wait_for_ping(client), SOON_S)
        go_on.set()
        assert [await client.recv() for _ in sent] == sent
        await sending


async def send_all(client: ClientConnection, messages: list[bytes]) -> None:
    for message in messages:
        await client.send(message)


async def wait_for_ping(client: ClientConnection) -> None:
    """Return after a ping of the server."""
    arrived = asyncio.Event()
    process = client.protocol.recv_frame

    def notice(frame: Any) -> None:
        if frame.opcode == 9:
            arrived.set()
        process(frame)

    client.protocol.recv_frame = notice  # type: ignore[method-assign]
    await arrived.wait()
    client.protocol.recv_frame = process  # type: ignore[method-assign]


async def test_the_application_learns_that_the_connection_is_lost_while_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(server, "PONG_WITHIN_S", 0.05)
    async with paused_application() as (wait, _, lost), connected(wait) as client:
        await send_all(client, [bytes(1000)] * 10)
        client.transport.abort()
        await asyncio.wait_for(lost.wait(), SOON_S)


async def test_a_client_that_answers_no_ping_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(server, "PONG_WITHIN_S", 0.05)
    async with raw_connection(echo) as client:
        assert await asyncio.to_thread(read_close_code, client) == 1011


async def test_a_client_with_text_that_is_not_utf8_is_disconnected() -> None:
    async with raw_connection(echo) as client:
        await asyncio.to_thread(client.sendall, frame(0x81, b"\xff\xff"))
        assert await asyncio.to_thread(read_close_code, client) == 1007


async def test_the_stop_of_the_service_ends_its_connections() -> None:
    async with contextlib.AsyncExitStack() as stack:
        host, port = await stack.enter_async_context(serving(echo))
        client = await connect(f"ws://{host}:{port}/")
        await stack.aclose()
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1012
