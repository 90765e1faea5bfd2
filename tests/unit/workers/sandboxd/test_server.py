"""sandboxd over its real socket, with scripted guests: verbs, bodies, wrong fields, and workers that disconnect."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandboxd.fake_engine import FakeGuest
from tests.support.sandboxd.fake_sandboxd import Sandboxd, running_sandboxd
from tests.support.sandboxd.sandboxd_calls import EXEC, call, frame, raw_exchange
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable, ToolFailure
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd import sandbox as sandbox_module
from toolcrew.workers.sandboxd.connection import MAX_BODY_BYTES
from toolcrew.workers.sandboxd.frames import MAX_HEADER
from toolcrew.workers.sandboxd.sandbox import FRAME_COST_BYTES, count_budget


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "GUEST_GRACE_S", 0.05)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Sandboxd]:
    async with running_sandboxd(tmp_path) as opened:
        yield opened


# Verbs


@pytest.mark.parametrize("size", [0, 1, 512 * 1024, 512 * 1024 + 1, 3_000_000])
async def test_body_of_any_size_arrives_whole(tmp_path: Path, size: int) -> None:
    sent = os.urandom(size)
    bodies: list[bytes] = []

    async def record_request(guest: FakeGuest) -> None:
        await guest.hello()
        request, body = await guest.request()
        bodies.append(body)
        await guest.done(request)

    async with running_sandboxd(tmp_path, record_request) as daemon:
        client, name = await daemon.open()
        await call(client, name, body=sent)
    assert bodies == [sent]


async def test_guest_receives_requests_with_ids_made_by_sandboxd(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    async def record_request(guest: FakeGuest) -> None:
        await guest.hello()
        while True:
            request, _ = await guest.request()
            requests.append(request)
            await guest.done(request)

    async with running_sandboxd(tmp_path, record_request) as daemon:
        client, name = await daemon.open()
        for _ in range(2):
            await call(client, name, {**EXEC, "id": "0" * 32}, call_id="call-1")
    assert requests[0]["argv"] == ["true"]
    assert len({request["id"] for request in requests} - {"0" * 32}) == 2


async def test_cancel_ends_only_the_named_call(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def wait_for_cancel(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        started.set()
        cancel = await guest.next()
        assert cancel.header == {"op": "cancel", "id": request["id"]}
        await guest.done(request, cancelled=True)

    async with running_sandboxd(tmp_path, wait_for_cancel) as daemon:
        client, name = await daemon.open()
        running = asyncio.create_task(call(client, name, call_id="call-7"))
        await started.wait()
        assert await asyncio.to_thread(daemon.client().cancel, name, "call-8") is False
        assert await asyncio.to_thread(daemon.client().cancel, name, "call-7") is True
        assert (await running).done["cancelled"] is True


async def test_cancel_that_the_guest_ignores_removes_its_container(tmp_path: Path, short_grace: None) -> None:
    started = asyncio.Event()

    async def ignore_cancel(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.next()
        started.set()
        await guest.gone.wait()

    async with running_sandboxd(tmp_path, ignore_cancel) as daemon:
        client, name = await daemon.open()
        running = asyncio.create_task(call(client, name, {**EXEC, "timeout_s": 600}, call_id="c"))
        await started.wait()
        await asyncio.to_thread(daemon.client().cancel, name, "c")
        assert (await running).done["sandbox_lost"]
        await asyncio.wait_for(daemon.engine.emptied.wait(), SOON_S)


# Who may connect


async def test_connection_of_another_user_is_closed_without_a_reply(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, uids=frozenset({os.geteuid() + 1})) as daemon:
        assert await raw_exchange(daemon.path, frame({"verb": "status"})) == []
        with pytest.raises(SandboxUnavailable):
            await asyncio.to_thread(daemon.client().status)


async def test_second_daemon_on_one_socket_is_refused(daemon: Sandboxd) -> None:
    with pytest.raises(OSError, match="another sandboxd already listens"):
        await daemon.server.listen(daemon.path, 0o600)
    assert (await asyncio.to_thread(daemon.client().status))["ok"] is True


# Workers that leave


@pytest.mark.parametrize(("request_", "body"), [(EXEC, b""), ({**EXEC, "body_bytes": 100}, b"half")])
async def test_disconnect_of_a_worker_cancels_its_call(tmp_path: Path, request_: dict[str, Any], body: bytes) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def watch_for_cancel(guest: FakeGuest) -> None:
        await guest.hello()
        request = (await guest.next()).header
        started.set()
        assert (await guest.next()).header == {"op": "cancel", "id": request["id"]}
        cancelled.set()
        await guest.done(request, cancelled=True)

    async with running_sandboxd(tmp_path, watch_for_cancel) as daemon:
        await daemon.open()
        _, writer = await asyncio.open_unix_connection(str(daemon.path))
        writer.write(frame({"verb": "call", "sandbox": "acme:s1", "call": "c", "request": request_}, body))
        await started.wait()
        writer.close()
        await asyncio.wait_for(cancelled.wait(), SOON_S)


async def test_client_reconnects_after_a_closed_connection(daemon: Sandboxd) -> None:
    client = daemon.client()
    await asyncio.to_thread(client.status)
    await daemon.server.close_connections()
    assert (await asyncio.to_thread(client.status))["ok"] is True


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"verb": None},
        {"verb": "explode"},
        {"verb": "open"},
        {"verb": "open", "sandbox": 5},
        {"verb": "open", "sandbox": ""},
        {"verb": "open", "sandbox": "a"},
        {"verb": "open", "sandbox": "a:b:c"},
        {"verb": "open", "sandbox": "../a:b"},
        {"verb": "open", "sandbox": "a:b\n"},
        {"verb": "open", "sandbox": "a:b", "image": "evil/image"},
        {"verb": "open", "sandbox": "a:b", "image": ["default"]},
        {"verb": "close"},
        {"verb": "cancel", "sandbox": "a:b"},
        {"verb": "call", "sandbox": "a:b"},
        {"verb": "call", "sandbox": "a:b", "request": "exec"},
        {"verb": "call", "sandbox": "a:b", "request": {}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "cancel"}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "data"}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": 0}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": 86_401}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": True}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": "5"}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "body_bytes": -1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "body_bytes": 1.5}},
        {"verb": "call", "request": {"op": "exec"}},
        {"verb": "open", "sandbox": "a:b", "ttl_s": "soon"},
        {"verb": "open", "sandbox": "a:b", "ttl_s": None},
        {"verb": "open", "sandbox": "a:b", "ttl_s": "nan"},
        {"verb": "open", "sandbox": "a:b", "ttl_s": -1},
        {"verb": "open", "sandbox": "a:b", "ttl_s": 10**400},
        {"verb": "open", "sandbox": "a:b", "image": "x" * 200_000},
        {"verb": "call", "sandbox": "acme:s1", "request": {"op": "read_file", "max_bytes": "all"}},
        {"verb": "call", "sandbox": "acme:s1", "request": {"op": "read_file", "max_bytes": None}},
        {"verb": "call", "sandbox": "acme:s1", "request": {"op": ["exec"]}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "write_file", "body_bytes": MAX_BODY_BYTES + 1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "read_file", "max_bytes": -1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": 10**400}},
    ],
    ids=lambda header: str(header)[:100],
)
async def test_invalid_request_gets_a_short_error_and_the_connection_stays_open(
    daemon: Sandboxd, header: dict[str, Any]
) -> None:
    await daemon.open()
    refused, status = await raw_exchange(daemon.path, frame(header), frame({"verb": "status"}), answers=2)
    assert (refused["ok"], refused["code"], len(refused["message"]) < 5000) == (False, "INVALID_ARGUMENTS", True)
    assert status["ok"] is True


async def test_reply_never_belongs_to_an_earlier_refused_request(daemon: Sandboxd) -> None:
    client, name = await daemon.open()
    with pytest.raises(ToolFailure, match="timeout_s"):
        await call(client, name, {**EXEC, "timeout_s": 601}, body=bytes(1_500_000))
    assert (await call(client, name, body=b"mine")).streams == {"stdout": b"mine"}


@pytest.mark.parametrize(
    "sent",
    [
        [b"\xff" * 64],
        [frame({"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 1}}, b"four")],
        [
            frame({"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 9}}),
            frame({"verb": "status"}),
        ],
    ],
    ids=["no frame", "more body than declared", "no body"],
)
async def test_unreadable_frame_closes_only_its_connection(daemon: Sandboxd, sent: list[bytes]) -> None:
    await daemon.open()
    client, name = await daemon.open("s2")
    assert await raw_exchange(daemon.path, *sent) == []
    assert (await call(client, name, body=b"still here")).streams == {"stdout": b"still here"}


async def test_oversized_request_header_is_refused_by_the_client(daemon: Sandboxd) -> None:
    client, name = await daemon.open()
    with pytest.raises(ToolFailure, match="too large"):
        await call(client, name, {**EXEC, "argv": ["echo", "x" * MAX_HEADER]})
    assert (await call(client, name, body=b"next")).streams == {"stdout": b"next"}


async def test_request_too_large_for_the_guest_is_refused_without_loss(tmp_path: Path) -> None:
    # Two bytes a letter from the worker, six to the guest.
    text = '{"verb":"call","sandbox":"acme:s1","request":{"op":"exec","argv":["' + "é" * 100_000 + '"]}}'
    raw = text.encode()
    framed = (4 + len(raw)).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        refused, _ = await raw_exchange(daemon.path, framed, frame({"verb": "status"}), answers=2)
        [row] = await asyncio.to_thread(client.sessions)
        assert (refused["code"], row["calls"]) == ("INVALID_ARGUMENTS", 0)
        assert (await call(client, name)).done["sandbox"]["generation"] == 1


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    calls = [
        frame({"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 1}}, text)
        for text in (b"1", b"2")
    ]
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        answers = await raw_exchange(daemon.path, *calls, frame({"verb": "status"}), answers=5)
        assert [answer.get("ev", "status") for answer in answers] == ["data", "done", "data", "done", "status"]


def test_output_budget_allows_single_bytes_and_ignores_invalid_captures() -> None:
    assert count_budget({"op": "exec", "capture": {"stdout": 100, "stderr": -100, "merged": "all"}}) == 100
    limit = 10_000
    assert count_budget({"op": "exec", "capture": {"stream": limit}}) >= limit * (1 + FRAME_COST_BYTES)


async def test_client_without_a_daemon_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="start it, or read its log"):
        SandboxClient(tmp_path / "none.sock").status()


async def test_session_gets_the_requested_image(daemon: Sandboxd) -> None:
    await daemon.open(image="python")
    assert daemon.engine.guests[0].config["Image"] == "python"


async def test_output_is_forwarded_immediately(tmp_path: Path) -> None:
    first_received = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def stream_twice(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, b"one")
        await first_received.wait()
        await guest.send({"id": request["id"], "ev": "data", "stream": "stdout"}, b"two")
        await guest.done(request)

    pieces: list[tuple[str, bytes]] = []

    def on_data(stream: str, data: bytes) -> None:
        pieces.append((stream, data))
        loop.call_soon_threadsafe(first_received.set)

    async with running_sandboxd(tmp_path, stream_twice) as daemon:
        client, name = await daemon.open()
        await call(client, name, on_data=on_data)
    assert pieces == [("stdout", b"one"), ("stdout", b"two")]
