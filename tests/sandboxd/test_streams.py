"""Stream channels: given to one gateway at a time, kept for the next one, and ended with the sandbox."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.sandboxd.fake_engine import pack_output
from tests.support.sandboxd.fake_sandboxd import Sandboxd, running_sandboxd, sandbox_of
from tests.support.sandboxd.sandboxd_calls import call
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.workers.sandboxd import streams as streams_module
from toolcrew.workers.sandboxd.monitor import IdleTimes
from toolcrew.workers.stream_channels import SandboxChannel, open_channel

NAME = "acme:s1"


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Sandboxd]:
    async with running_sandboxd(tmp_path) as opened:
        await opened.open()
        yield opened


@asynccontextmanager
async def opened(daemon: Sandboxd, name: str = NAME, fence: int = 1) -> AsyncIterator[SandboxChannel]:
    channel = await open_channel(daemon.path, name, fence)
    try:
        yield channel
    finally:
        channel.close()


async def use(channel: SandboxChannel, bytes_in: int = 1, open_streams: int = 1) -> None:
    await channel.use(bytes_in=bytes_in, bytes_out=0, open_streams=open_streams)


def server(daemon: Sandboxd, name: str = NAME) -> socket.socket:
    """Return the stream server's end of the channel."""
    return daemon.engine.stream_servers[sandbox_of(daemon.session(name)).container]


async def read(sock: socket.socket, size: int) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, size), SOON_S)


async def has_ended(channel: SandboxChannel) -> bool:
    return await read(channel.sock, 1) == b""


async def left(daemon: Sandboxd) -> None:
    """Wait until sandboxd has noticed that the holder has left."""
    await wait_until_async(lambda: _is_free(daemon), SOON_S, "sandboxd notices the end of the connection")


async def _is_free(daemon: Sandboxd) -> bool:
    streams = sandbox_of(daemon.session()).streams
    return streams is None or not streams.is_active


# The holder of a channel


async def test_bytes_pass_in_both_directions(daemon: Sandboxd) -> None:
    loop = asyncio.get_running_loop()
    async with opened(daemon) as channel:
        assert (channel.sandbox, channel.generation) == (sandbox_of(daemon.session()).container[:12], 1)
        await loop.sock_sendall(channel.sock, b"to the sandbox")
        assert await read(server(daemon), 100) == b"to the sandbox"
        await loop.sock_sendall(server(daemon), pack_output(b"from the sandbox"))
        assert await read(channel.sock, 100) == b"from the sandbox"


async def test_the_relay_passes_output_of_any_size_on_and_drops_the_rest(daemon: Sandboxd) -> None:
    loop = asyncio.get_running_loop()
    async with opened(daemon) as channel:
        await loop.sock_sendall(server(daemon), pack_output(b"standard error", 2))
        await loop.sock_sendall(server(daemon), pack_output(b"first"))
        # A message of 4 GiB, of which some bytes have arrived.
        await loop.sock_sendall(server(daemon), b"\1\0\0\0\xff\xff\xff\xff" + b"second")
        received = b""
        while len(received) < len(b"firstsecond"):
            received += await read(channel.sock, 100)
        assert received == b"firstsecond"
        server(daemon).shutdown(socket.SHUT_RDWR)
        assert await has_ended(channel)


async def test_the_next_holder_continues_the_same_channel(daemon: Sandboxd) -> None:
    loop = asyncio.get_running_loop()
    async with opened(daemon):
        first = server(daemon)
    await left(daemon)
    async with opened(daemon) as channel:
        assert server(daemon) is first
        await loop.sock_sendall(channel.sock, b"second holder")
        assert await read(first, 100) == b"second holder"


async def test_a_channel_has_one_holder_at_a_time(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        with pytest.raises(ToolFailure) as refused:
            await open_channel(daemon.path, NAME, 1)
        assert refused.value.code == ErrorCode.SESSION_BUSY
        await use(channel)


async def test_a_stream_server_that_ended_is_started_again(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        first = server(daemon)
        first.shutdown(socket.SHUT_RDWR)
        assert await has_ended(channel)
    await left(daemon)
    async with opened(daemon) as channel:
        assert server(daemon) is not first
        await asyncio.get_running_loop().sock_sendall(server(daemon), pack_output(b"new"))
        assert await read(channel.sock, 100) == b"new"


async def test_no_descriptor_remains_after_many_holders(daemon: Sandboxd) -> None:
    async with opened(daemon):
        pass
    await left(daemon)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        async with opened(daemon) as channel:
            await use(channel)
        await left(daemon)
    await wait_until_async(lambda: _has_descriptors(before), SOON_S, "the last connection of sandboxd closes")


async def _has_descriptors(most: int) -> bool:
    return len(os.listdir("/proc/self/fd")) <= most


# Refusals


@pytest.mark.parametrize(("name", "fence"), [(NAME, 2), ("acme:s2", 3), ("other:s1", 3)])
async def test_a_session_that_is_not_open_or_was_opened_again_has_no_streams(
    daemon: Sandboxd, name: str, fence: int
) -> None:
    daemon.session(NAME).fence = 3
    with pytest.raises(ToolFailure) as refused:
        await open_channel(daemon.path, name, fence)
    assert refused.value.code == ErrorCode.SESSION_NOT_FOUND
    assert daemon.engine.stream_servers == {}


async def test_a_session_that_another_worker_has_taken_over_keeps_its_streams(daemon: Sandboxd) -> None:
    async with opened(daemon, fence=2) as channel:
        await use(channel)


async def test_a_holder_can_only_report_uses(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        with pytest.raises(ToolFailure) as refused:
            await channel._connection.request({"verb": "status"})
        assert refused.value.code == ErrorCode.INVALID_ARGUMENTS
        with pytest.raises(ToolFailure):
            await use(channel)
    await left(daemon)


# The end of a sandbox


async def test_the_end_of_the_session_ends_the_channel(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        await daemon.sessions.close(NAME)
        assert await has_ended(channel)
        with pytest.raises(SandboxUnavailable):
            await use(channel)


async def test_a_lost_sandbox_ends_the_channel_and_the_loss_is_reported_once(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        sandbox_of(daemon.session()).end("test")
        assert await has_ended(channel)
    with pytest.raises(SandboxUnavailable):
        await open_channel(daemon.path, NAME, 1)
    async with opened(daemon) as channel:
        assert channel.generation == 2


async def test_an_evicted_session_gets_another_sandbox(daemon: Sandboxd) -> None:
    entry = daemon.session()
    assert await daemon.sessions.suspender.give_up(entry, must_be_idle=False)
    async with opened(daemon) as channel:
        assert channel.generation == 2


async def test_a_sandbox_that_is_lost_while_its_channel_opens_gives_none(daemon: Sandboxd) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    open_program = daemon.engine.open_program

    async def open_slowly(container: str, command: list[str]) -> socket.socket:
        begun.set()
        await gate.wait()
        return await open_program(container, command)

    daemon.engine.open_program = open_slowly  # type: ignore[method-assign, assignment]
    opening = asyncio.create_task(open_channel(daemon.path, NAME, 1))
    await begun.wait()
    sandbox_of(daemon.session()).end("test")
    gate.set()
    with pytest.raises(SandboxUnavailable):
        await opening


# Use


async def test_a_frozen_sandbox_runs_before_a_use_is_answered(
    daemon: Sandboxd, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = daemon.session()
    async with opened(daemon) as channel:
        await use(channel)
        assert await daemon.sessions.suspender.pause(entry)
        assert daemon.engine.paused
        await use(channel)
        assert not daemon.engine.paused
        assert not entry.is_paused


async def test_a_session_is_in_use_only_while_bytes_of_a_stream_flow(daemon: Sandboxd) -> None:
    entry = daemon.session()
    async with opened(daemon) as channel:
        await use(channel)
        entry.used_at -= 100
        assert entry.idle_s() == 0
        assert not await daemon.sessions.suspender.give_up(entry)
        await use(channel, open_streams=0)
        entry.used_at -= 100
        assert entry.idle_s() >= 100
        assert await daemon.sessions.suspender.give_up(entry)
        assert await has_ended(channel)
        with pytest.raises(SandboxUnavailable):
            await use(channel)


async def test_a_stopped_sandboxd_packs_a_session_whose_streams_flow(daemon: Sandboxd) -> None:
    entry = daemon.session()
    async with opened(daemon) as channel:
        await use(channel)
        daemon.engine.guests[0].attests = {"jobs": 1}
        await daemon.sessions.suspender.suspend(entry)
        assert entry.archive in daemon.host.suspension_store.archives
        assert await has_ended(channel)
    assert entry.news is not None


@pytest.mark.parametrize(
    ("open_streams", "open_s", "is_kept"), [(1, 7200.0, True), (0, 7200.0, False), (1, 0.0, False)]
)
async def test_an_open_stream_keeps_its_sandbox_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_streams: int, open_s: float, is_kept: bool
) -> None:
    monkeypatch.setattr(streams_module, "BUSY_S", 0.0)
    monkeypatch.setattr(streams_module, "OPEN_S", open_s)
    async with running_sandboxd(tmp_path, idle=IdleTimes(0.0, 0.0)) as daemon:
        await daemon.open()
        async with opened(daemon) as channel:
            await use(channel, open_streams=open_streams)
            entry = daemon.session()
            entry.used_at = time.monotonic() - 100
            await daemon.host.monitor.evict_idle()
            assert (entry.sandbox is not None) is is_kept


async def test_a_process_of_a_stream_keeps_the_sandbox_as_a_job_does(
    daemon: Sandboxd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "BUSY_S", 0.0)
    entry = daemon.session()
    async with opened(daemon) as channel:
        await use(channel)
    entry.used_at -= 100
    daemon.engine.guests[0].attests = {"jobs": 1}
    assert not await daemon.sessions.suspender.give_up(entry)
    assert not await daemon.sessions.suspender.pause(entry)
    client = daemon.client()
    with pytest.raises(ToolFailure) as refused:
        await asyncio.to_thread(client.fork, NAME, ["acme:child"])
    assert refused.value.code == ErrorCode.SESSION_BUSY
    assert entry.activity.changed
    daemon.engine.guests[0].attests = {"jobs": 0}
    entry.used_at -= 100
    assert await daemon.sessions.suspender.give_up(entry)


async def test_a_call_of_the_session_runs_next_to_its_streams(daemon: Sandboxd) -> None:
    client = daemon.client()
    async with opened(daemon) as channel:
        await use(channel)
        await call(client, NAME)
        await use(channel)


async def test_bytes_of_streams_are_counted_for_the_session(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        await channel.use(bytes_in=70, bytes_out=7, open_streams=1)
        await channel.use(bytes_in=0, bytes_out=23, open_streams=1)
        assert daemon.session().describe_usage()["stream_bytes"] == 100


async def test_a_gateway_of_another_user_may_only_use_stream_channels(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, uids=frozenset(), gateway_uids=frozenset({os.geteuid()})) as daemon:
        with pytest.raises(ToolFailure) as refused:
            await daemon.open()
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
        with pytest.raises(ToolFailure) as missing:
            await open_channel(daemon.path, NAME, 1)
        assert missing.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_a_fork_waits_for_the_report_that_a_stream_has_ended(daemon: Sandboxd) -> None:
    async with opened(daemon) as channel:
        await use(channel)
        waiting = asyncio.ensure_future(daemon.session().sandbox.streams.wait_quiet())  # type: ignore[union-attr]
        await asyncio.sleep(0)
        assert not waiting.done()
        await use(channel, open_streams=0)
        await asyncio.wait_for(waiting, SOON_S)
        assert not daemon.session().is_streaming
