"""sandboxd over its real socket, with scripted guests: verbs, bodies, wrong fields, and workers that disconnect."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SandboxUnavailable, ToolFailure
from tests.fake_engine import FakeGuest
from tests.fake_sandboxd import running_sandboxd
from tests.sandboxd_calls import EXEC, SOON_S, call, frame, raw_exchange
from workers.sandbox_client import SandboxClient
from workers.sandboxd import sandbox as sandbox_module
from workers.sandboxd.connection import MAX_BODY_BYTES
from workers.sandboxd.frames import MAX_HEADER
from workers.sandboxd.sandbox import FRAME_COST_BYTES, count_budget


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "GUEST_GRACE_S", 0.05)


# Verbs


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


async def test_a_second_daemon_on_one_socket_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        with pytest.raises(OSError, match="another sandboxd already listens"):
            await daemon.server.listen(daemon.path, 0o600)
        assert (await asyncio.to_thread(daemon.client().status))["ok"] is True


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


async def test_a_client_reconnects_and_loses_no_call(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
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
    ],
    ids=str,
)
async def test_a_bad_request_is_answered_and_the_connection_lives(tmp_path: Path, header: dict[str, Any]) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        refused, status = await raw_exchange(daemon.path, frame(header), frame({"verb": "status"}), answers=2)
        assert (refused["ok"], refused["code"]) == (False, "INVALID_ARGUMENTS")
        assert status["ok"] is True


@pytest.mark.parametrize(
    "header",
    [
        {"verb": "open", "sandbox": "a:b", "ttl_s": "soon"},
        {"verb": "open", "sandbox": "a:b", "ttl_s": None},
        {"verb": "open", "sandbox": "a:b", "ttl_s": "nan"},
        {"verb": "open", "sandbox": "a:b", "ttl_s": -1},
        {"verb": "call", "sandbox": "acme:s1", "request": {"op": "read_file", "max_bytes": "all"}},
        {"verb": "call", "sandbox": "acme:s1", "request": {"op": "read_file", "max_bytes": None}},
        {"verb": "call", "sandbox": "acme:s1", "request": {"op": ["exec"]}},
        {"verb": "open", "sandbox": "a:b", "image": "x" * 200_000},
        {"verb": "open", "sandbox": "a:b", "ttl_s": 10**400},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "write_file", "body_bytes": MAX_BODY_BYTES + 1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "read_file", "max_bytes": -1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": 10**400}},
    ],
    ids=lambda header: str(header)[:60],
)
async def test_a_huge_field_or_one_of_another_type_gets_a_short_error(tmp_path: Path, header: dict[str, Any]) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        [refused] = await raw_exchange(daemon.path, frame(header))
        assert (refused["code"], len(refused["message"]) < 5000) == ("INVALID_ARGUMENTS", True)


async def test_an_answer_is_never_the_answer_to_another_request(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
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
async def test_what_cannot_be_read_ends_the_connection_and_nothing_else(tmp_path: Path, sent: list[bytes]) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        client, name = await daemon.open("s2")
        assert await raw_exchange(daemon.path, *sent) == []
        assert (await call(client, name, body=b"still here")).streams == {"stdout": b"still here"}


async def test_too_many_arguments_are_the_callers_fault_and_not_sandboxds(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        with pytest.raises(ToolFailure, match="too large"):
            await call(client, name, {**EXEC, "argv": ["echo", "x" * MAX_HEADER]})
        assert (await call(client, name, body=b"next")).streams == {"stdout": b"next"}


async def test_a_request_that_grows_too_large_on_its_way_costs_neither_connection_nor_sandbox(tmp_path: Path) -> None:
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


async def test_requests_sent_in_advance_are_answered_in_their_order(tmp_path: Path) -> None:
    calls = [
        frame({"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 1}}, text)
        for text in (b"1", b"2")
    ]
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        answers = await raw_exchange(daemon.path, *calls, frame({"verb": "status"}), answers=5)
        assert [answer.get("ev", "status") for answer in answers] == ["data", "done", "data", "done", "status"]


def test_a_stream_may_come_a_byte_at_a_time_and_a_wrong_capture_takes_nothing_from_the_others() -> None:
    assert count_budget({"op": "exec", "capture": {"stdout": 100, "stderr": -100, "merged": "all"}}) == 100
    limit = 10_000
    assert count_budget({"op": "exec", "capture": {"stream": limit}}) >= limit * (1 + FRAME_COST_BYTES)


async def test_a_client_without_a_daemon_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="start it, or read its log"):
        SandboxClient(tmp_path / "none.sock").status()


async def test_a_session_gets_the_requested_image(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open(image="python")
        assert daemon.engine.guests[0].config["Image"] == "python"


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
