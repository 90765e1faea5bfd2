"""Frames of hostile sandboxes and of broken clients: only their own connection ends."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable

import pytest

from tests.support.streams.fake_sandboxes import FakeStreamServer, pattern_at
from tests.support.streams.gateway_harness import GatewayHarness, open_gateway, read_all
from toolcrew.contract.errors import ErrorCode, OperatorError, SandboxUnavailable, StreamLost, ToolFailure
from toolcrew.contract.stream_protocol import (
    BULK_WINDOW_BYTES,
    EPOCH_HEADER,
    HEADER,
    WINDOW_BYTES,
    FrameKind,
    StreamFrame,
)
from toolcrew.orchestrator.streams.connection import GatewayConnection
from toolcrew.workers.stream_gateway import channels
from toolcrew.workers.stream_gateway.limits import StreamLimits, StreamUsage

Attack = Callable[[FakeStreamServer, int], None]

# `number`: of the only stream, which is open. The client has granted WINDOW_BYTES.
FROM_SANDBOX: dict[str, Attack] = {
    "bytes that are no frame": lambda server, number: server.connection.write(b"\xff" * 40),
    "a frame that is too large": lambda server, number: server.connection.write(
        HEADER.pack(1 << 30, 3, 0, 0, number, 0)
    ),
    "DATA above the credit": lambda server, number: server.connection.write(
        b"".join(StreamFrame(FrameKind.DATA, number, at, bytes(32_768)).encode() for at in (0, 32_768, 65_536))
    ),
    "DATA with a gap": lambda server, number: server.send(FrameKind.DATA, number, b"x", offset=1),
    "empty DATA": lambda server, number: server.send(FrameKind.DATA, number),
    "DATA of a stream that was never opened": lambda server, number: server.send(FrameKind.DATA, 1000, b"x"),
    "DATA of stream 0": lambda server, number: server.send(FrameKind.DATA, 0, b"x"),
    "a second OPENED": lambda server, number: server.send(FrameKind.OPENED, number, {}),
    "a reply to a stream": lambda server, number: server.send(FrameKind.REPLY, number, {}),
    "OPEN": lambda server, number: server.send(FrameKind.OPEN, number + 1, {}),
    "CALL": lambda server, number: server.send(FrameKind.CALL, number + 1, {}),
    "CLOSE": lambda server, number: server.send(FrameKind.CLOSE, number),
    "an endless credit": lambda server, number: server.send(FrameKind.CREDIT, number, offset=2**64 - 1),
    "another EPOCH": lambda server, number: server.send(FrameKind.EPOCH, 0, bytes(20)),
    "the end of the channel": lambda server, number: server.connection.end("it ends"),
}


async def check_other_session(harness: GatewayHarness, connection: GatewayConnection) -> None:
    """Check that streams of another session go on, on the same connection."""
    stream = await harness.open(connection, "flood", "300000", ticket=harness.ticket(session="other", nonce="n" * 20))
    assert await read_all(stream) == pattern_at(0, 300_000)


@pytest.mark.parametrize("attack", FROM_SANDBOX.values(), ids=FROM_SANDBOX.keys())
async def test_a_hostile_sandbox_ends_only_its_own_channel(attack: Attack) -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        victim = await harness.open(connection, "echo")
        attack(harness.sandboxd.server("t:s"), 1)
        with pytest.raises(SandboxUnavailable):
            await read_all(victim)
        assert not connection.is_lost
        await check_other_session(harness, connection)
        again = await harness.open(connection, "echo")
        await again.write(b"again")
        assert await read_all(again, 5) == b"again"


async def test_random_frames_of_a_sandbox_end_only_its_own_channel() -> None:
    random_numbers = random.Random(7)
    async with open_gateway() as harness:
        connection = await harness.connect()
        for _ in range(60):
            stream = await harness.open(connection, "echo")
            server = harness.sandboxd.server("t:s")
            for _ in range(random_numbers.randrange(1, 30)):
                kind = random_numbers.choice([*FrameKind])
                size = {FrameKind.EPOCH: 20}.get(kind, random_numbers.choice([0, 1, 60]))
                size = 0 if kind in (FrameKind.CREDIT, FrameKind.CLOSE) else size
                server.send(
                    kind,
                    random_numbers.choice([0, 1, 2, 3, 2**32 - 1]),
                    random_numbers.randbytes(size),
                    offset=random_numbers.choice([0, 1, 65_536, 2**64 - 1]),
                )
            server.connection.write(random_numbers.randbytes(random_numbers.choice([0, 7, 50])))
            server.connection.close("the attack is over")
            with contextlib.suppress(OperatorError, ToolFailure):  # or the random frames contain a valid END
                await read_all(stream)
            assert stream.has_ended
        assert not connection.is_lost
        assert (harness.server.usage.total, harness.server.memory) == (0, 0)
        await check_other_session(harness, connection)


FROM_CLIENT: dict[str, StreamFrame | bytes] = {
    "bytes that are no frame": b"\xff" * 40,
    "a request that is no JSON": StreamFrame(FrameKind.OPEN, 9, payload=b"{"),
    "a request without a ticket": StreamFrame(FrameKind.OPEN, 9, payload=b'{"open": {}}'),
    "a request that is a list": StreamFrame(FrameKind.CALL, 9, payload=b"[]"),
    "a number that was used before": StreamFrame(FrameKind.OPEN, 1, payload=b"{}"),
    "DATA above the credit": StreamFrame(FrameKind.DATA, 1, WINDOW_BYTES + 1, b"x"),
    "DATA of a stream that was never opened": StreamFrame(FrameKind.DATA, 77, 0, b"x"),
    "an endless credit": StreamFrame(FrameKind.CREDIT, 1, 2**64 - 1),
    "OPENED": StreamFrame(FrameKind.OPENED, 1, payload=b"{}"),
    "END": StreamFrame(FrameKind.END, 1, payload=b"{}"),
    "REPLY": StreamFrame(FrameKind.REPLY, 1, payload=b"{}"),
    "EPOCH": StreamFrame(FrameKind.EPOCH, payload=bytes(20)),
    "PONG": StreamFrame(FrameKind.PONG),
}


@pytest.mark.parametrize("attack", FROM_CLIENT.values(), ids=FROM_CLIENT.keys())
async def test_a_broken_client_ends_only_its_own_connection(attack: StreamFrame | bytes) -> None:
    async with open_gateway() as harness:
        bad, good = await harness.connect(), await harness.connect()
        lost, kept = await harness.open(bad, "echo"), await harness.open(good, "echo")
        bad.connection.write(attack if isinstance(attack, bytes) else attack.encode())
        with pytest.raises(StreamLost):
            await read_all(lost)
        await kept.write(b"kept")
        assert await read_all(kept, 4) == b"kept"
        await harness.sandboxd.server("t:s").wait_for(FrameKind.CLOSE)
        assert harness.server.usage.total == 1


INVALID = {
    "too many values": {"what": "process", "argv": ["x"] * 1001},
    "too deep": {"what": "process", "argv": json.loads("[" * 20 + "]" * 20)},
    "half of a surrogate pair": {"what": "process", "argv": ["\ud800"]},
    "unknown": {"what": "everything"},
    "no name": {},
    "a port of the sandbox itself": {"what": "port", "port": 3128},
    "a port that is no number": {"what": "port", "port": True},
    "a port that is too large": {"what": "port", "port": 65_536},
}


@pytest.mark.parametrize("opening", INVALID.values(), ids=INVALID.keys())
async def test_an_invalid_request_ends_only_its_stream(opening: dict[str, object]) -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        with pytest.raises(ToolFailure) as refused:
            await harness.open(connection, opening={"x": 1, **opening})
        assert refused.value.code in (ErrorCode.INVALID_ARGUMENTS, ErrorCode.PERMISSION_DENIED)
        await harness.open(connection, "echo")


async def test_tiny_frames_of_a_sandbox_are_read_at_a_limited_rate() -> None:
    async with open_gateway(StreamLimits(frames_per_s=2000)) as harness:
        connection = await harness.connect()
        stream = await harness.open(connection, "hold")
        server = harness.sandboxd.server("t:s")
        began = asyncio.get_running_loop().time()
        for at in range(8000):
            server.connection.write(StreamFrame(FrameKind.DATA, 1, at, b"x").encode())
        assert await read_all(stream, 8000) == b"x" * 8000
        # 4000 at once, and as many as one read returns; then 2000 a second.
        assert asyncio.get_running_loop().time() - began > 0.4


async def test_a_sandbox_that_does_not_read_loses_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "USE_S", 0.0)
    async with open_gateway(StreamLimits(channel_memory=100_000)) as harness:
        connection = await harness.connect()
        streams = [await harness.open(connection, "echo") for _ in range(2)]
        await harness.wait_for_gateway(connection)
        harness.sandboxd.thawed.clear()
        for stream in streams:
            await stream.write(bytes(WINDOW_BYTES))
        for stream in streams:
            with pytest.raises(SandboxUnavailable):
                await read_all(stream)
        harness.sandboxd.thawed.set()
        await check_other_session(harness, connection)


async def test_the_memory_of_all_channels_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "USE_S", 0.0)
    async with open_gateway(StreamLimits(channels_memory=300_000)) as harness:
        connection = await harness.connect()
        streams = [
            await harness.open(connection, "echo", ticket=harness.ticket(session=f"s{number}")) for number in range(8)
        ]
        await harness.wait_for_gateway(connection)
        harness.sandboxd.thawed.clear()
        for stream in streams:
            await stream.write(bytes(WINDOW_BYTES))
            await harness.wait_for_gateway(connection)
            assert harness.server.memory <= 300_000
        assert 4 <= sum(stream.has_ended for stream in streams) < 8


async def test_a_client_that_does_not_read_loses_its_largest_streams_at_a_limit_of_memory() -> None:
    async with open_gateway(StreamLimits(client_memory=1_000_000)) as harness:
        stuck, other = await harness.connect(), await harness.connect()
        quiet = await harness.open(stuck, "echo", ticket=harness.ticket(tenant="victim"))
        assert stuck.connection.transport is not None
        stuck.connection.transport.pause_reading()
        for number in range(60):  # 15 MB, more than the buffers of the sockets
            ticket = harness.ticket(session=f"s{number}")
            harness.begin(stuck, "flood", str(1 << 30), ticket=ticket, window=BULK_WINDOW_BYTES)
        await check_other_session(harness, other)
        closed = 0
        while closed < 40:
            closed = sum(
                any(frame.kind is FrameKind.CLOSE for frame in harness.sandboxd.server(f"t:s{number}").frames)
                for number in range(60)
            )
            await asyncio.sleep(0)
        stuck.connection.transport.resume_reading()
        await quiet.write(b"still open")
        assert await read_all(quiet, 10) == b"still open"


async def test_data_like_the_header_of_epoch_counts_as_many_frames() -> None:
    async with open_gateway(StreamLimits(frames_per_s=1000)) as harness:
        stream = await harness.open(await harness.connect(), "echo")
        server = harness.sandboxd.server("t:s")
        server.on_frame = lambda frame: None
        began = asyncio.get_running_loop().time()
        await stream.write(EPOCH_HEADER * (WINDOW_BYTES // len(EPOCH_HEADER)))
        await server.wait_for(FrameKind.DATA, 3000)
        await stream.write(b"end", is_last=True)
        while not any(frame.payload == b"end" for frame in server.frames):
            server.arrived.clear()
            await server.arrived.wait()
        # 2000 at once; then 1000 a second.
        assert asyncio.get_running_loop().time() - began > 0.8


LIMITS = StreamLimits(session_streams=3, tenant_streams=4, host_streams=5, opens_per_s=0.001, opens_burst=6)


async def test_the_numbers_of_open_streams_are_limited() -> None:
    async with open_gateway(LIMITS) as harness:
        connection = await harness.connect()

        async def open_one(tenant: str, session: str) -> str:
            try:
                await harness.open(connection, "echo", ticket=harness.ticket(tenant=tenant, session=session))
            except ToolFailure as failure:
                return failure.code.value
            return "open"

        assert [await open_one("t", "s") for _ in range(4)] == ["open"] * 3 + ["QUOTA_EXCEEDED"]
        assert [await open_one("t", "s2") for _ in range(2)] == ["open", "QUOTA_EXCEEDED"]
        assert [await open_one("u", "s") for _ in range(2)] == ["open", "RATE_LIMITED"]


async def test_a_refused_stream_opens_no_channel() -> None:
    async with open_gateway(LIMITS) as harness:
        connection = await harness.connect()
        for number in range(4):
            await harness.open(connection, "echo", ticket=harness.ticket(session=f"s{number}"))
        with pytest.raises(ToolFailure):
            await harness.open(connection, "echo", ticket=harness.ticket(session="another"))
        await harness.wait_for_gateway(connection)
        assert "t:another" not in harness.sandboxd.opens


def test_the_rates_of_a_tenant_last_as_long_as_a_channel_has_them() -> None:
    usage = StreamUsage()
    held = usage.tenant_rates("t")
    usage.open("t", "s")
    usage.close("t", "s")
    assert usage.tenant_rates("t") is held


async def test_openings_per_second_are_limited() -> None:
    async with open_gateway(LIMITS) as harness:
        connection = await harness.connect()
        for _ in range(6):
            await harness.call(connection, {"op": "processes"})
        with pytest.raises(ToolFailure) as refused:
            await harness.call(connection, {"op": "processes"})
        assert refused.value.code is ErrorCode.RATE_LIMITED
        await harness.call(connection, {"op": "processes"}, session="other")


async def test_bytes_per_second_are_limited_without_loss() -> None:
    async with open_gateway(StreamLimits(session_bytes_per_s=1_000_000)) as harness:
        stream = await harness.open(await harness.connect(), "flood", "1500000")
        began = asyncio.get_running_loop().time()
        assert await read_all(stream) == pattern_at(0, 1_500_000)
        assert asyncio.get_running_loop().time() - began > 0.8  # after a burst of a quarter of a second


async def test_a_stopped_stream_server_that_owes_an_answer_ends_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CHECK_S", 0.02)
    async with open_gateway() as harness:
        connection = await harness.connect()
        await harness.open(connection, "echo")
        server = harness.sandboxd.server("t:s")
        server.on_frame = lambda _: None
        with pytest.raises(SandboxUnavailable):
            await harness.open(connection, "echo", ticket=harness.ticket(nonce="k" * 20))
        assert len([frame for frame in server.frames if frame.kind is FrameKind.PING]) == channels.MAX_UNANSWERED
        await check_other_session(harness, connection)


async def test_a_slow_answer_of_a_living_stream_server_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CHECK_S", 0.02)
    async with open_gateway() as harness:
        connection = await harness.connect()
        await harness.open(connection, "echo")
        server = harness.sandboxd.server("t:s")

        def answer_pings(frame: StreamFrame) -> None:
            if frame.kind is FrameKind.PING:
                server.send(FrameKind.PONG, 0, frame.payload)

        server.on_frame = answer_pings
        opening = asyncio.ensure_future(harness.open(connection, "echo", ticket=harness.ticket(nonce="m" * 20)))
        await server.wait_for(FrameKind.PING, 3 * channels.MAX_UNANSWERED)
        (first, second) = [frame.stream for frame in await server.wait_for(FrameKind.OPEN, 2)]
        server.send(FrameKind.OPENED, second, {"process": 1, "pid": 2, "from": 0, "input_offset": 0})
        assert (await asyncio.wait_for(opening, 30)).opened["pid"] == 2
        assert first < second


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "BROKER_UNAVAILABLE", "SESSION_NOT_FOUND", "HOST_LOST", "none"])
async def test_a_sandbox_cannot_name_failures_of_the_service(code: str) -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        await harness.open(connection, "echo")
        server = harness.sandboxd.server("t:s")
        error = {"error": {"code": code, "message": "from a sandbox"}}

        def refuse(frame: StreamFrame) -> None:
            if frame.kind is FrameKind.OPEN:
                server.send(FrameKind.END, frame.stream, error, offset=1)

        server.on_frame = refuse
        with pytest.raises(OperatorError) as refused:
            await harness.open(connection, "echo", ticket=harness.ticket(nonce="k" * 20))
        assert refused.value.code is ErrorCode.INTERNAL
