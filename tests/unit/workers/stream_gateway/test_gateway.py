"""Streams through a gateway, with fake sandboxes."""

import asyncio
import secrets
import ssl
from contextlib import AsyncExitStack

import pytest

from tests.support.streams.fake_sandboxes import pattern_at
from tests.support.streams.gateway_harness import open_gateway, read_all
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, StreamLost, ToolFailure
from toolcrew.contract.signing import SigningKeys
from toolcrew.contract.stream_protocol import BULK_WINDOW_BYTES, EPOCH_HEADER, FrameKind, StreamFrame
from toolcrew.workers.stream_gateway import channels, daemon, gateway


async def test_bytes_of_a_stream_arrive_once_and_in_order() -> None:
    data = secrets.token_bytes(3_000_000) + EPOCH_HEADER * 3 + secrets.token_bytes(1000)
    async with open_gateway() as harness:
        stream = await harness.open(await harness.connect(), "echo")
        writing = asyncio.create_task(stream.write(data, is_last=True))
        assert await read_all(stream) == data
        await writing
        assert stream.end == {"exit_code": 0}
        assert harness.server.usage.total == 0
        assert harness.server.memory == 0


async def test_a_flood_arrives_complete() -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        stream = await harness.open(connection, "flood", "5000000", window=BULK_WINDOW_BYTES)
        assert await read_all(stream) == pattern_at(0, 5_000_000)


async def test_a_request_gets_its_reply() -> None:
    async with open_gateway() as harness:
        answer = await harness.call(await harness.connect(), {"op": "processes"})
        assert answer == {"asked": {"op": "processes"}}


async def test_clients_of_one_session_share_its_channel() -> None:
    async with open_gateway() as harness:
        one, other = await harness.connect(), await harness.connect()
        first, second = await harness.open(one, "echo"), await harness.open(other, "echo")
        await first.write(b"one")
        await second.write(b"other")
        assert (await read_all(first, 3), await read_all(second, 5)) == (b"one", b"other")
        assert harness.sandboxd.opens == {"t:s": 1}


async def test_a_client_that_does_not_read_delays_no_other_client() -> None:
    async with open_gateway() as harness:
        stuck, other = await harness.connect(), await harness.connect()
        stream = await harness.open(stuck, "flood", str(1 << 30), window=BULK_WINDOW_BYTES)
        stuck.connection.transport.pause_reading()  # type: ignore[union-attr]
        fast = await harness.open(other, "flood", "4000000")
        assert await read_all(fast) == pattern_at(0, 4_000_000)
        assert not stream.has_ended


async def test_a_stream_that_is_not_read_delays_no_other_stream_of_its_connection() -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        await harness.open(connection, "flood", str(1 << 30))
        fast = await harness.open(connection, "flood", "4000000")
        assert await read_all(fast) == pattern_at(0, 4_000_000)


async def test_bytes_before_the_answer_to_epoch_are_dropped() -> None:
    async with open_gateway() as harness:
        rest = secrets.token_bytes(30_000) + StreamFrame(FrameKind.DATA, 7, 3, b"old").encode()
        harness.sandboxd.server("t:s").before_epoch = rest + EPOCH_HEADER + b"x" * 20
        stream = await harness.open(await harness.connect(), "echo")
        await stream.write(b"new")
        assert await read_all(stream, 3) == b"new"


async def test_a_new_channel_follows_a_lost_sandbox() -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        stream = await harness.open(connection, "echo")
        harness.sandboxd.server("t:s").connection.end("the sandbox ended")
        with pytest.raises(SandboxUnavailable):
            await stream.read()
        again = await harness.open(connection, "echo")
        await again.write(b"x")
        assert await read_all(again, 1) == b"x"


async def test_the_end_of_the_gateway_reaches_its_streams() -> None:
    async with open_gateway() as harness:
        stream = await harness.open(await harness.connect(), "echo")
        closing = asyncio.create_task(harness.server.close())
        with pytest.raises(StreamLost):
            await stream.read()
        await closing


async def test_a_frozen_sandbox_gets_no_byte_before_sandboxd_has_thawed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "USE_S", 0.0)
    async with open_gateway() as harness:
        connection = await harness.connect()
        stream = await harness.open(connection, "echo")
        server, sandboxd = harness.sandboxd.server("t:s"), harness.sandboxd
        await harness.wait_for_gateway(connection)
        count = len(server.frames)
        sandboxd.thawed.clear()
        await stream.write(b"key")
        await sandboxd.waiting.wait()
        await harness.wait_for_gateway(connection)
        assert len(server.frames) == count
        sandboxd.thawed.set()
        assert await read_all(stream, 3) == b"key"


REFUSED = {
    "foreign secret": {"keys": SigningKeys.of("another secret", deployment="tests")},
    "foreign deployment": {"keys": SigningKeys.of("a secret of the tests", deployment="other")},
    "other host": {"queue": "host.other.boot"},
    "earlier boot": {"queue": "host.tests.before"},
    "other gateway": {"gateway": "0" * 32},
    "expired": {"expires_at": 999_999.0},
    "expires now": {"expires_at": 1_000_000.0},
    "valid for too long": {"expires_at": 1_000_100.0},
    "no permission": {"may": ()},
    "only files": {"may": ("files:read", "files:write")},
    "only a port": {"may": ("port:80",)},
    "a similar permission": {"may": ("processes", "process:1")},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
async def test_a_wrong_ticket_is_refused(changes: dict[str, object]) -> None:
    async with open_gateway() as harness:
        connection = await harness.connect()
        with pytest.raises(ToolFailure) as refused:
            await harness.open(connection, "echo", ticket=harness.ticket(**changes))  # type: ignore[arg-type]
        assert refused.value.code is ErrorCode.UNAUTHENTICATED
        assert not harness.sandboxd.opens
        # The connection and its other streams go on.
        await harness.open(connection, "echo")


OPENINGS = {
    "write with files:read": ({"what": "write", "path": "/x"}, "files:read"),
    "read with files:write": ({"what": "read", "path": "/x"}, "files:write"),
    "watch with process": ({"what": "watch", "path": "/x"}, "process"),
    "other port": ({"what": "port", "port": 81}, "port:80"),
    "port prefix": ({"what": "port", "port": 8}, "port:80"),
    "attach with files": ({"what": "attach", "process": 1}, "files:read"),
}


@pytest.mark.parametrize(("opening", "may"), OPENINGS.values(), ids=OPENINGS.keys())
async def test_a_ticket_for_something_else_is_refused(opening: dict[str, object], may: str) -> None:
    async with open_gateway() as harness:
        with pytest.raises(ToolFailure) as refused:
            await harness.open(await harness.connect(), opening=opening, ticket=harness.ticket(may=(may,)))
        assert refused.value.code is ErrorCode.UNAUTHENTICATED


async def test_a_ticket_is_accepted_once() -> None:
    async with open_gateway() as harness:
        connection, ticket = await harness.connect(), harness.ticket()
        await harness.open(connection, "echo", ticket=ticket)
        for again in (connection, await harness.connect()):
            with pytest.raises(ToolFailure) as refused:
                await harness.open(again, "echo", ticket=ticket)
            assert refused.value.code is ErrorCode.UNAUTHENTICATED


async def test_a_changed_ticket_is_refused() -> None:
    async with open_gateway() as harness:
        ticket = harness.ticket().replace('"t"', '"u"')
        with pytest.raises(ToolFailure) as refused:
            await harness.open(await harness.connect(), "echo", ticket=ticket)
        assert refused.value.code is ErrorCode.UNAUTHENTICATED
        assert not harness.sandboxd.opens


async def test_an_old_fence_is_refused() -> None:
    async with open_gateway() as harness:
        harness.sandboxd.fences["t:s"] = 3
        connection = await harness.connect()

        async def find_refusal(fence: int) -> ErrorCode | None:
            try:
                await harness.open(connection, "echo", ticket=harness.ticket(fence=fence))
            except ToolFailure as failure:
                return failure.code
            return None

        # sandboxd refuses the first one, and the gateway the others.
        fences = (2, 3, 2, 1, 4, 3)
        results = [await find_refusal(fence) for fence in fences]
        old = ErrorCode.SESSION_NOT_FOUND
        assert dict(zip(range(6), results, strict=True)) == {0: old, 1: None, 2: old, 3: old, 4: None, 5: old}
        assert harness.sandboxd.opens == {"t:s": 2}
        assert harness.server.usage.total == 2


async def test_a_client_without_the_secret_is_not_served() -> None:
    async with open_gateway() as harness:
        with pytest.raises(SandboxUnavailable):
            await harness.connect(SigningKeys.of("another secret", deployment="tests"))


async def test_connections_without_a_proof_keep_no_client_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (daemon, gateway):
        monkeypatch.setattr(module, "MAX_UNPROVED", 4)
        monkeypatch.setattr(module, "HANDSHAKE_S", 3600.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with open_gateway() as harness, AsyncExitStack() as stack:
        address = ("127.0.0.1", harness.gateway.port)
        greeted = [await asyncio.open_connection(*address, ssl=context) for _ in range(6)]
        for _, writer in greeted:
            stack.callback(writer.transport.abort)
        silent = [await asyncio.open_connection(*address) for _ in range(6)]
        for _, writer in silent:
            stack.callback(writer.transport.abort)
        assert await silent[0][0].read() == b""
        await greeted[0][0].readline()
        assert await greeted[0][0].read() == b""
        stream = await harness.open(await harness.connect(), "flood", "1000")
        assert await read_all(stream) == pattern_at(0, 1000)


async def test_a_client_refuses_a_certificate_that_was_not_published() -> None:
    async with open_gateway() as harness:
        with pytest.raises(SandboxUnavailable, match="certificate"):
            await harness.connect(certificate="0" * 64)


async def test_a_client_and_a_gateway_accept_each_other_during_a_change_of_the_secret() -> None:
    changed = SigningKeys.of("the next secret", ["a secret of the tests"], deployment="tests")
    async with open_gateway(keys=changed) as harness:
        connection = await harness.connect(SigningKeys.of("a secret of the tests", deployment="tests"))
        await harness.open(connection, "echo")
