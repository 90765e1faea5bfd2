"""Workers and guests that read too slowly: waiting data is bounded, none pays for another, and nothing waits without
limit.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.fake_engine import FakeGuest
from tests.support.sandboxd.fake_sandboxd import Sandboxd, running_sandboxd
from tests.support.sandboxd.sandboxd_calls import EXEC, call, frame
from tests.support.stack.waiting import SOON_S, until
from toolcrew.workers.sandboxd import sandbox as sandbox_module
from toolcrew.workers.sandboxd.frames import MAX_DOWN, FrameDecoder, WorkerLink

PIECE = bytes(64 * 1024)
PIECES = 160
STREAM = {**EXEC, "timeout_s": 0.05, "capture": {"stream": PIECES * len(PIECE)}}


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "GUEST_GRACE_S", 0.5)


async def flood_every_request(guest: FakeGuest) -> None:
    """Stream a reply to every request on arrival, while other requests run."""
    await guest.hello()
    running, lock = set(), asyncio.Lock()
    while True:
        request, _ = await guest.request()
        if request["op"] == "exec":
            running.add(asyncio.create_task(_flood(guest, request, lock)))


async def _flood(guest: FakeGuest, request: dict[str, Any], lock: asyncio.Lock) -> None:
    for _ in range(PIECES if "capture" in request else 0):
        async with lock:
            await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, PIECE)
    async with lock:
        await guest.done(request, exit_code=0)


async def start_unread_call(daemon: Sandboxd) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Start a worker that requests a stream and reads nothing. Return after sandboxd has stopped reading the guest."""
    reader, writer = await asyncio.open_unix_connection(str(daemon.path), limit=1024)
    writer.write(frame({"verb": "call", "sandbox": "acme:s1", "request": STREAM}))
    entry = daemon.session()
    await until(lambda: entry.sandbox._holders)
    return reader, writer


async def test_slow_worker_gets_all_output_and_keeps_its_sandbox(tmp_path: Path, short_grace: None) -> None:
    async with running_sandboxd(tmp_path, flood_every_request) as daemon:
        await daemon.open()
        reader, writer = await start_unread_call(daemon)
        await asyncio.sleep(0.7)  # past the limit and the guest's grace
        decoder, received_bytes, last = FrameDecoder(MAX_DOWN), 0, {}
        async with asyncio.timeout(SOON_S):
            while last.get("ev") != "done":
                for received in decoder.feed(await reader.read(65536)):
                    received_bytes, last = received_bytes + len(received.body), received.header
        assert (received_bytes, last.get("exit_code")) == (PIECES * len(PIECE), 0)
        writer.close()


async def test_worker_that_never_reads_loses_its_sandbox_after_a_limit(
    tmp_path: Path, short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "SLOW_WORKER_GRACE_S", 0.3)
    async with running_sandboxd(tmp_path, flood_every_request) as daemon:
        await daemon.open()
        _, writer = await start_unread_call(daemon)
        await asyncio.wait_for(daemon.engine.emptied.wait(), SOON_S)
        writer.close()


async def test_disconnect_of_a_slow_worker_lets_other_calls_continue(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, flood_every_request) as daemon:
        client, name = await daemon.open()
        _, writer = await start_unread_call(daemon)
        other = asyncio.create_task(call(client, name))
        writer.transport.abort()
        assert (await other).done["exit_code"] == 0


async def test_guest_that_never_reads_a_body_loses_its_container(
    tmp_path: Path, short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "BODY_TIMEOUT_S", 0.2)

    async def never_read(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, never_read) as daemon:
        client, name = await daemon.open()
        done = (await call(client, name, body=bytes(8_000_000))).done
        assert (done["error"]["code"], "sandbox_lost" in done) == ("CANCELLED", True)
        assert daemon.engine.alive == {}


async def test_worker_that_stops_sending_frees_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "BODY_TIMEOUT_S", 0.05)

    async def expect_cancel(guest: FakeGuest) -> None:
        await guest.hello()
        request = (await guest.next()).header
        assert (await guest.next()).header["op"] == "cancel"
        await guest.done(request, cancelled=True)
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, expect_cancel) as daemon:
        await daemon.open()
        _, writer = await asyncio.open_unix_connection(str(daemon.path))
        writer.write(frame({"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 100}}, b"half"))
        entry = daemon.session()
        await until(lambda: entry.sandbox.calls)
        await until(lambda: not entry.sandbox.calls)
        assert entry.sandbox.lost is None
        writer.close()


async def test_call_in_a_lost_sandbox_fails_immediately(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        _, name = await daemon.open()
        entry = daemon.session(name)
        await entry.sandbox.remove()
        call_after_loss = entry.sandbox.begin("c", EXEC, 0, lambda _: None)
        assert call_after_loss.done.result()["error"]["code"] == "SANDBOX_UNAVAILABLE"


async def test_unread_output_is_bounded(tmp_path: Path) -> None:
    links: list[WorkerLink] = []
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: WorkerLink(links.append), path=str(tmp_path / "s")
    )
    _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    sent = [frame({"n": number}, PIECE) for number in range(200)]
    writer.write(b"".join(sent))
    await until(lambda: links and not links[0].transport.is_reading())  # type: ignore[union-attr]
    assert links[0]._waiting_bytes < 4 * 1024 * 1024
    received_bytes = [await asyncio.wait_for(links[0].next(), SOON_S) for _ in sent]
    assert [received.header["n"] for received in received_bytes if received is not None] == list(range(200))
    writer.close()
    assert await asyncio.wait_for(links[0].next(), SOON_S) is None
    links[0].close()
    server.close()
