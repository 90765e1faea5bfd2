"""Processes of the HTTP clients over a network that breaks: every byte of output and of input once."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from importlib import import_module
from inspect import isfunction, signature

import pytest

from tests.support.api.stream_service import BreakingNetwork, FakeProcess, StreamService, serving
from toolcrew import ApiUnavailable, AsyncClient, Client, ErrorCode, ToolFailure
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.orchestrator.sdk.http import handshakes

OUTPUT = [(1, b"first "), (2, b"problem "), (1, b"second " * 10), (1, b"end")]
TEXT = b"".join(data for _, data in OUTPUT)
ROUNDS = 200


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def service() -> Iterator[tuple[StreamService, str]]:
    service = StreamService(FakeProcess())
    with serving(service.app) as url:
        yield service, url


async def test_output_continues_at_its_position_wherever_the_connection_breaks(
    service: tuple[StreamService, str],
) -> None:
    fake, url = service
    network = BreakingNetwork(url)
    async with network.serving() as address, AsyncClient(address, "tc_key") as client:
        for cut in range(ROUNDS):
            fake.process = FakeProcess(list(OUTPUT))
            # The first bytes of a connection are the answer to its handshake, of about 130 bytes.
            network.down[:] = [cut + 100, 400 - cut]
            async with client.sessions.get("s").processes.attach(7, 0, pace=True) as attached:
                pieces = [piece async for piece in attached]
                end = await attached.wait()
            assert b"".join(piece.data for piece in pieces) == TEXT, cut
            assert pieces[0].position == 0
            assert sum(len(piece.data) for piece in pieces if piece.stream == "stderr") == len(b"problem ")
            assert (end.exit_code, end.lost_bytes) == (3, 0)
    assert network.broken > ROUNDS


async def test_input_is_typed_once_wherever_the_connection_breaks(service: tuple[StreamService, str]) -> None:
    fake, url = service
    lines = [f"line {number}\n".encode() for number in range(6)]
    typed = b"".join(lines)
    network = BreakingNetwork(url)
    async with network.serving() as address, AsyncClient(address, "tc_key") as client:
        for cut in range(ROUNDS):
            fake.process = process = FakeProcess(reads=len(typed), reads_to_end=True, echoes=True)
            network.up[:] = [cut + 250, cut * 3 + 300] if cut % 2 else []
            network.down[:] = [] if cut % 2 else [cut + 120, cut * 2 + 120]
            async with client.sessions.get("s").processes.attach(7, 0, pace=True) as attached:
                for line in lines:
                    await attached.write(line)
                await attached.close_stdin()
                output = b"".join([piece.data async for piece in attached])
            assert (bytes(process.typed), output, process.gaps) == (typed, typed, 0), cut
            assert {count for _, count in process.commands} == {len(typed)}, "the end follows the input"
            assert len(process.accepted) == 1, "the writer keeps its name"
    assert network.broken > ROUNDS / 2


def test_the_synchronous_client_types_and_reads_over_broken_connections(service: tuple[StreamService, str]) -> None:
    fake, url = service
    fake.process = FakeProcess(reads=400_000, echoes=True)
    lines = [bytes([number % 256]) * 1000 for number in range(400)]
    network = BreakingNetwork(url, down=[1000, 5_000, 90_000], up=[50_000, 90_000])
    read = bytearray()
    with (
        in_thread(network.serving()) as address,
        Client(address, "tc_key") as client,
        client.sessions.get("s").processes.start(["cat"]) as process,
    ):
        reader = threading.Thread(target=lambda: read.extend(b"".join(piece.data for piece in process)))
        reader.start()
        for line in lines:
            process.write(line)
        reader.join(60)
        assert process.wait().exit_code == 3
    assert bytes(read) == bytes(fake.process.typed) == b"".join(lines)
    assert network.broken == 5
    assert fake.process.gaps == 0


@contextmanager
def in_thread(manager: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """Enter a manager in an event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(manager.__aenter__(), loop).result(30)
        asyncio.run_coroutine_threadsafe(manager.__aexit__(None, None, None), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_the_program_of_a_process_and_its_control(service: tuple[StreamService, str]) -> None:
    fake, url = service
    fake.process = FakeProcess(reads=1)
    async with AsyncClient(url, "tc_key") as client:
        processes = client.sessions.get("s").processes
        process = await processes.start(["sh"], pty=(80, 24), env={"A": "b"}, tag="shell", timeout_s=5)
        assert process.process == 7
        await process.resize(100, 30)
        await process.kill()
        with pytest.raises(ToolFailure) as running:
            await process.wait(0.01)
        assert running.value.code is ErrorCode.TIMEOUT
        await process.write("x")
        await process.close_stdin()
        with pytest.raises(ToolFailure):
            await process.write("y")
        assert (await process.wait()).exit_code == 3
        assert await process.read() == b""
        with pytest.raises(ToolFailure):
            await process.write("y")
    body = {
        "argv": ["sh"],
        "pty": {"cols": 80, "rows": 24},
        "stdin": True,
        "env": {"A": "b"},
        "cwd": None,
        "user": None,
    }
    assert fake.process.requests == [
        ("start", {**body, "tag": "shell", "timeout_s": 5, "pace": True}),
        ("resize", {"cols": 100, "rows": 30}),
        ("signal", {"signal": 9, "tree": True}),
    ]
    assert fake.process.attached[0]["pace"] == "true"


async def test_a_busy_service_is_asked_again_and_an_error_is_raised(service: tuple[StreamService, str]) -> None:
    fake, url = service
    busy = {"status": 503, "code": "SANDBOX_UNAVAILABLE", "detail": "the sandbox starts"}
    async with AsyncClient(url, "tc_key") as client:
        processes = client.sessions.get("s").processes
        fake.process = FakeProcess(list(OUTPUT))
        fake.refusals = [busy, {"status": 429, "code": "TOO_MANY_REQUESTS", "detail": "wait"}]
        async with processes.attach(7) as attached:
            assert b"".join([piece.data async for piece in attached]) == TEXT
        fake.refusals = [{"status": 404, "code": "SESSION_NOT_FOUND", "detail": "the session is closed"}]
        async with processes.attach(7) as attached:
            with pytest.raises(ToolFailure) as closed:
                await attached.read()
        assert closed.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_a_service_that_stays_away_is_an_error(
    service: tuple[StreamService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = service
    monkeypatch.setattr(handshakes, "RETRY_S", 0.2)
    fake.refusals = [{"status": 503, "code": "SANDBOX_UNAVAILABLE", "detail": "no host"}] * 10_000
    async with AsyncClient(url, "tc_key") as client:
        with pytest.raises(SandboxUnavailable):
            await client.sessions.get("s").processes.attach(7).read()
    async with AsyncClient("http://127.0.0.1:1", "tc_key") as client:
        with pytest.raises(ApiUnavailable):
            await client.sessions.get("s").processes.attach(7).wait()


async def test_output_that_the_sandbox_no_longer_has_is_counted(service: tuple[StreamService, str]) -> None:
    fake, url = service
    fake.process = FakeProcess(list(OUTPUT), ring_start=10)
    fake.process.end["lost_bytes"] = 10
    async with AsyncClient(url, "tc_key") as client, client.sessions.get("s").processes.attach(7, 0) as attached:
        pieces = [piece async for piece in attached]
        assert pieces[0].position == 10
        assert b"".join(piece.data for piece in pieces) == TEXT[10:]
        assert (await attached.wait()).lost_bytes == 10


async def test_detaching_ends_what_waits(service: tuple[StreamService, str]) -> None:
    fake, url = service
    fake.process = FakeProcess(reads=1)
    async with AsyncClient(url, "tc_key") as client:
        async with client.sessions.get("s").processes.attach(7) as attached:
            reading = asyncio.ensure_future(attached.read())
            await asyncio.sleep(0)
        with pytest.raises(ToolFailure):
            await reading
        with pytest.raises(ToolFailure):
            await attached.write(b"x")


@pytest.mark.parametrize("module", ["client", "processes"])
def test_both_clients_have_the_same_names(module: str) -> None:
    path = "toolcrew.orchestrator.sdk.http."
    asynchronous, synchronous = import_module(f"{path}async_{module}"), import_module(f"{path}{module}")
    classes = [name for name in vars(asynchronous) if name.startswith("Async") and name != "AsyncGenerator"]
    assert classes
    for name in classes:
        assert methods(getattr(asynchronous, name)) == methods(getattr(synchronous, name.removeprefix("Async")))


def methods(kind: type) -> dict[str, list[str]]:
    """Return the names of the methods with those of their parameters."""
    functions = [(name, value) for name, value in vars(kind).items() if isfunction(value) and not name.startswith("_")]
    return {name: list(signature(value).parameters) for name, value in functions}
