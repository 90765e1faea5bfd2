"""sandboxd over its real socket, with our own guests in place of containers: verbs, bodies, limits, and workers that
disconnect.
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SandboxUnavailable, ToolFailure
from tests.fake_engine import FakeGuest
from tests.fake_sandboxd import running_sandboxd
from tests.sandboxd_calls import EXEC, SOON_S, call, frame, raw_exchange
from workers.sandbox_client import SandboxClient
from workers.sandboxd import sandbox as sandbox_module


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "GUEST_GRACE_S", 0.05)


# Verbs


async def test_closing_what_is_not_there_says_so(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        assert await asyncio.to_thread(daemon.client().close, "acme:none") is False


async def test_after_a_refused_call_with_a_large_body_the_connection_serves_the_next(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        with pytest.raises(ToolFailure):
            await call(client, "acme:none", body=bytes(2_000_000))
        assert (await call(client, name, body=b"next")).streams == {"stdout": b"next"}


@pytest.mark.parametrize("size", [0, 1, 512 * 1024, 512 * 1024 + 1, 3_000_000])
async def test_a_body_arrives_whole_in_however_many_frames(tmp_path: Path, size: int) -> None:
    sent = os.urandom(size)
    got: list[bytes] = []

    async def keeping(guest: FakeGuest) -> None:
        await guest.hello()
        request, body = await guest.request()
        got.append(body)
        await guest.done(request)

    async with running_sandboxd(tmp_path, keeping) as daemon:
        client, name = await daemon.open()
        await call(client, name, body=sent)
    assert got == [sent]


async def test_the_guest_sees_the_request_under_an_id_of_sandboxds_own(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    async def keeping(guest: FakeGuest) -> None:
        await guest.hello()
        while True:
            request, _ = await guest.request()
            requests.append(request)
            await guest.done(request)

    async with running_sandboxd(tmp_path, keeping) as daemon:
        client, name = await daemon.open()
        for _ in range(2):
            await call(client, name, {**EXEC, "id": "0" * 32}, call_id="call-1")
    assert requests[0]["argv"] == ["true"]
    assert len({request["id"] for request in requests} - {"0" * 32}) == 2


async def test_output_is_handed_on_as_it_comes(tmp_path: Path) -> None:
    first_seen = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def streaming(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, b"one")
        await first_seen.wait()
        await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, b"two")
        await guest.done(request)

    pieces: list[tuple[str, bytes]] = []

    def on_data(stream: str, data: bytes) -> None:
        pieces.append((stream, data))
        loop.call_soon_threadsafe(first_seen.set)

    async with running_sandboxd(tmp_path, streaming) as daemon:
        client, name = await daemon.open()
        await call(client, name, on_data=on_data)
    assert pieces == [("stdout", b"one"), ("stdout", b"two")]


async def test_cancelling_ends_the_call_that_is_named(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def waiting(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        started.set()
        cancel = await guest.next()
        assert cancel.header == {"op": "cancel", "id": request["id"]}
        await guest.done(request, cancelled=True)

    async with running_sandboxd(tmp_path, waiting) as daemon:
        client, name = await daemon.open()
        running = asyncio.create_task(call(client, name, call_id="call-7"))
        await started.wait()
        assert await asyncio.to_thread(daemon.client().cancel, name, "call-8") is False
        assert await asyncio.to_thread(daemon.client().cancel, name, "call-7") is True
        assert (await running).done["cancelled"] is True


async def test_a_cancel_that_the_guest_ignores_removes_its_container(tmp_path: Path, short_grace: None) -> None:
    started = asyncio.Event()

    async def deaf(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.next()
        started.set()
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, deaf) as daemon:
        client, name = await daemon.open()
        running = asyncio.create_task(call(client, name, {**EXEC, "timeout_s": 600}, call_id="c"))
        await started.wait()
        await asyncio.to_thread(daemon.client().cancel, name, "c")
        assert (await running).done["sandbox_lost"]
        await asyncio.wait_for(daemon.engine.emptied.wait(), SOON_S)


# Who may connect


async def test_another_user_is_refused_without_a_word(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, uids=frozenset({os.geteuid() + 1})) as daemon:
        assert await raw_exchange(daemon.path, frame({"verb": "status"})) == []
        with pytest.raises(SandboxUnavailable):
            await asyncio.to_thread(daemon.client().status)


async def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        assert daemon.path.stat().st_mode & 0o777 == 0o600


async def test_a_second_daemon_on_one_socket_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        with pytest.raises(OSError, match="another sandboxd already listens"):
            await daemon.server.listen(daemon.path, 0o600)
        assert (await asyncio.to_thread(daemon.client().status))["ok"] is True


async def test_the_socket_of_a_dead_daemon_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "sandboxd.sock"))
    async with running_sandboxd(tmp_path) as daemon:
        assert (await asyncio.to_thread(daemon.client().status))["ok"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
async def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    async with running_sandboxd(tmp_path) as daemon:
        with pytest.raises(OSError, match="another user"):
            (await daemon.server.listen(folder / "sandboxd.sock", 0o600)).close()


async def test_a_file_at_the_sockets_path_is_not_deleted(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        precious = tmp_path / "precious.txt"
        precious.write_text("mine")
        with pytest.raises(OSError, match="precious"):
            (await daemon.server.listen(precious, 0o600)).close()
        assert precious.read_text() == "mine"


# Workers that leave


@pytest.mark.parametrize(("request_", "body"), [(EXEC, b""), ({**EXEC, "body_bytes": 100}, b"half")])
async def test_a_worker_that_leaves_cancels_its_call(tmp_path: Path, request_: dict[str, Any], body: bytes) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def watching(guest: FakeGuest) -> None:
        await guest.hello()
        request = (await guest.next()).header
        started.set()
        assert (await guest.next()).header == {"op": "cancel", "id": request["id"]}
        cancelled.set()
        await guest.done(request, cancelled=True)

    async with running_sandboxd(tmp_path, watching) as daemon:
        await daemon.open()
        _, writer = await asyncio.open_unix_connection(str(daemon.path))
        writer.write(frame({"verb": "call", "sandbox": "acme:s1", "call": "c", "request": request_}, body))
        await started.wait()
        writer.close()
        await asyncio.wait_for(cancelled.wait(), SOON_S)


async def test_a_client_without_a_daemon_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="is it running on this host"):
        SandboxClient(tmp_path / "none.sock").status()


async def test_a_client_reconnects_and_loses_no_call(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client = daemon.client()
        await asyncio.to_thread(client.status)
        await daemon.server.close_connections()
        assert (await asyncio.to_thread(client.status))["ok"] is True
