"""The client of stream channels: answers in parts, connections that break, and answers without a descriptor."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import SandboxdUnreachable
from toolcrew.workers.sandboxd.frames import MAX_DOWN, encode_frame
from toolcrew.workers.stream_channels import open_channel

OPENED = encode_frame({"ok": True, "sandbox": "0123456789ab", "generation": 3}, b"", max_total=MAX_DOWN)


class Peer:
    """A sandboxd that sends what the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)

    @contextlib.asynccontextmanager
    async def accepted(self) -> AsyncIterator[socket.socket]:
        """Accept a connection, and read its first request."""
        loop = asyncio.get_running_loop()
        connection, _ = await asyncio.wait_for(loop.sock_accept(self._listener), SOON_S)
        connection.setblocking(False)
        with connection:
            assert await asyncio.wait_for(loop.sock_recv(connection, 4096), SOON_S)
            yield connection

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    opened = Peer(tmp_path / "sandboxd.sock")
    yield opened
    opened.close()


async def test_an_answer_in_parts_brings_one_descriptor(peer: Peer) -> None:
    ours, theirs = socket.socketpair()
    opening = asyncio.create_task(open_channel(peer.path, "acme:s1", 1))
    async with peer.accepted() as connection:
        socket.send_fds(connection, [OPENED[:3]], [theirs.fileno()])
        theirs.close()
        await asyncio.get_running_loop().sock_sendall(connection, OPENED[3:])
        channel = await asyncio.wait_for(opening, SOON_S)
        assert (channel.sandbox, channel.generation) == ("0123456789ab", 3)
        assert (channel.sock.getblocking(), os.get_inheritable(channel.sock.fileno())) == (False, False)
        ours.sendall(b"streams")
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(channel.sock, 100), SOON_S) == b"streams"
        channel.close()
        assert ours.recv(1) == b""
    ours.close()


async def test_an_answer_without_a_descriptor_gives_no_channel(peer: Peer) -> None:
    opening = asyncio.create_task(open_channel(peer.path, "acme:s1", 1))
    async with peer.accepted() as connection:
        connection.sendall(OPENED)
        with pytest.raises(SandboxUnavailable):
            await asyncio.wait_for(opening, SOON_S)
        assert connection.recv(1) == b""


async def test_a_broken_connection_is_not_used_again(peer: Peer) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        opening = asyncio.create_task(open_channel(peer.path, "acme:s1", 1))
        async with peer.accepted() as connection:
            socket.send_fds(connection, [OPENED], [theirs.fileno()])
            channel = await asyncio.wait_for(opening, SOON_S)
        for _ in range(2):
            with pytest.raises(SandboxdUnreachable):
                await channel.use(bytes_in=1, bytes_out=1, open_streams=1)
        channel.close()


async def test_a_cancelled_report_closes_the_connection(peer: Peer) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        opening = asyncio.create_task(open_channel(peer.path, "acme:s1", 1))
        async with peer.accepted() as connection:
            socket.send_fds(connection, [OPENED], [theirs.fileno()])
            channel = await asyncio.wait_for(opening, SOON_S)
            using = asyncio.create_task(channel.use(bytes_in=1, bytes_out=1, open_streams=1))
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 4096), SOON_S)
            using.cancel()
            with pytest.raises(asyncio.CancelledError):
                await using
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), SOON_S) == b""
        channel.close()


async def test_without_a_sandboxd_the_error_says_that_nothing_was_sent(tmp_path: Path) -> None:
    with pytest.raises(SandboxdUnreachable) as error:
        await open_channel(tmp_path / "none.sock", "acme:s1", 1)
    assert not error.value.was_sent
