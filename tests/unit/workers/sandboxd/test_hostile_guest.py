"""Forbidden actions of a guest: exceeding its limit, sending too much, sending invalid data, and claiming facts that
only sandboxd knows. Each test names the attacker's aim.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.sandboxd.fake_engine import Behaviour, FakeGuest, echoing, silent
from tests.support.sandboxd.fake_sandboxd import Sandboxd, running_sandboxd
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd import sandbox as sandbox_module
from toolcrew.workers.sandboxd.frames import MAX_HEADER, MAX_UP, encode_frame

EXEC = {"op": "exec", "argv": ["true"], "timeout_s": 0.05, "capture": {"stdout": 100}}
LONG_EXEC = {**EXEC, "timeout_s": 60}


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "GUEST_GRACE_S", 0.05)


async def call(
    client: SandboxClient, name: str, request: dict[str, Any] = LONG_EXEC, body: bytes = b""
) -> dict[str, Any]:
    response = await asyncio.wait_for(asyncio.to_thread(client.call, name, request, body), SOON_S)
    return dict(response.done)


@asynccontextmanager
async def open_session(folder: Path, *behaviours: Behaviour) -> AsyncIterator[tuple[Sandboxd, SandboxClient, str]]:
    async with running_sandboxd(folder, *behaviours) as daemon:
        client, name = await daemon.open()
        yield daemon, client, name


async def wait_until_empty(daemon: Sandboxd) -> None:
    await asyncio.wait_for(daemon.engine.emptied.wait(), SOON_S)


def build_answering_guest(*parts: Any) -> Behaviour:
    """Return a guest that greets, then answers its first request with these: headers (the id is filled in), (header,
    body), or raw bytes.
    """

    async def play(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        for part in parts:
            if isinstance(part, bytes):
                await guest.send_raw(part)
            else:
                header, body = part if isinstance(part, tuple) else (part, b"")
                await guest.send({"id": request["id"], **header}, body)
        await guest.gone.wait()

    return play


# Outliving the limit


async def test_guest_that_never_replies_is_a_timeout_and_loses_its_container(tmp_path: Path) -> None:
    async with open_session(tmp_path, silent) as (daemon, client, name):
        done = await call(client, name, EXEC)
        assert done["sandbox_lost"]
        assert done["error"]["code"] == "TIMEOUT"
        assert (done["kill"]["method"], done["kill"]["survivors"]) == ("container", 0)
        await wait_until_empty(daemon)


async def test_overdue_call_is_answered_after_its_processes_have_ended(tmp_path: Path) -> None:
    async with open_session(tmp_path, silent) as (daemon, client, name):
        daemon.engine.remove_gate.clear()
        running = asyncio.create_task(call(client, name, EXEC))
        await daemon.engine.removing.wait()
        finished, _ = await asyncio.wait({running}, timeout=0.3)
        assert not finished
        daemon.engine.remove_gate.set()
        await running


async def test_call_with_surviving_processes_keeps_its_own_reply(tmp_path: Path) -> None:
    kill = {"signalled": 9, "survivors": 1, "method": "tree", "ms": 3.0}
    async with running_sandboxd(
        tmp_path, build_answering_guest({"ev": "done", "timed_out": True, "kill": kill})
    ) as daemon:
        client, name = await daemon.open()
        done = await call(client, name)
        assert done.get("timed_out") is True
        assert (done["kill"]["signalled"], done["kill"]["method"]) == (9, "container")


@pytest.mark.parametrize("survivors", [1, -1, "1", None, [], 0.5])
async def test_invalid_survivor_count_counts_as_survivors(tmp_path: Path, survivors: Any) -> None:
    kill = {"signalled": 1, "survivors": survivors, "method": "tree", "ms": 1.0}
    async with open_session(tmp_path, build_answering_guest({"ev": "done", "kill": kill})) as (daemon, client, name):
        assert (await call(client, name))["sandbox_lost"]
        await wait_until_empty(daemon)


# Flooding the host


@pytest.mark.parametrize(
    "flood",
    [[({"ev": "data", "stream": "stdout"}, bytes(200_000))] * 3, [{"ev": "data", "stream": "stdout"}] * 6000],
    ids=["data", "frames without a body"],
)
async def test_sending_more_than_requested_removes_the_container(tmp_path: Path, flood: list[Any]) -> None:
    async with open_session(tmp_path, build_answering_guest(*flood)) as (daemon, client, name):
        done = await call(client, name)
        assert done["error"]["code"] == "SANDBOX_UNAVAILABLE"
        assert "more output than was asked for" in done["error"]["message"]
        await wait_until_empty(daemon)


STDOUT_DATA = ({"ev": "data", "stream": "stdout"}, b"x")


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (LONG_EXEC, [{"ev": "data", "stream": f"{number}" + "x" * 200_000} for number in range(50)] + [{"ev": "done"}]),
        (LONG_EXEC, [({"ev": "data", "stream": "../evil"}, b"x"), {"ev": "done"}]),
        (LONG_EXEC, [{"ev": "hello", "v": 1}]),
        (EXEC, [{"ev": "pong"}]),
        ({"op": "read_file", "path": "x", "max_bytes": 9, "timeout_s": 60}, [STDOUT_DATA, {"ev": "done"}]),
        ({"op": "ping", "timeout_s": 60}, [{"ev": "done"}]),
    ],
    ids=["frames without a body", "unknown stream", "second hello", "pong to exec", "stdout to read", "done to ping"],
)
async def test_frame_that_the_request_does_not_allow_removes_the_container(
    tmp_path: Path, request_: dict[str, Any], parts: list[Any]
) -> None:
    async with open_session(tmp_path, build_answering_guest(*parts)) as (_, client, name):
        assert (await call(client, name, request_)).get("sandbox_lost")


async def test_repeated_protocol_breaches_are_logged_once(tmp_path: Path) -> None:
    stray = encode_frame({"id": "0" * 32, "ev": "data"}, max_total=MAX_UP)
    with capture_logs() as logs:
        async with running_sandboxd(tmp_path, build_answering_guest(stray * 500)) as daemon:
            client, name = await daemon.open()
            await call(client, name)
            await wait_until_empty(daemon)
    assert len([line for line in logs if line.get("cause") == "guest_broke_protocol"]) == 1


async def test_reply_header_of_the_largest_size_is_forwarded(tmp_path: Path) -> None:
    async with running_sandboxd(
        tmp_path, build_answering_guest({"ev": "done", "x": "y" * (MAX_HEADER - 70)})
    ) as daemon:
        client, name = await daemon.open()
        done = await call(client, name)
        assert "sandbox" in done


# Nonsense


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        bytes(8),
        b"\x00\x00\x00\x06\x00\x00\x00\x02[]",
        encode_frame({"ev": "data", "id": "0" * 32}, b"x", max_total=MAX_UP),
        encode_frame({"ev": "done", "id": "0" * 32}, max_total=MAX_UP),
        encode_frame({"ev": "fatal", "message": "no"}, max_total=MAX_UP),
        encode_frame({"ev": None}, max_total=MAX_UP),
        encode_frame({"id": {}}, max_total=MAX_UP),
    ],
    ids=lambda data: repr(data[:24]),
)
async def test_invalid_data_during_a_call_is_one_error_and_removes_the_container(tmp_path: Path, data: bytes) -> None:
    async with open_session(tmp_path, build_answering_guest(data)) as (daemon, client, name):
        done = await call(client, name)
        assert done["error"]["code"] == "SANDBOX_UNAVAILABLE"
        async with asyncio.timeout(1):
            await daemon.engine.emptied.wait()


async def test_reply_with_an_unknown_id_ends_every_call_of_the_sandbox(tmp_path: Path) -> None:
    both = asyncio.Event()

    async def answer_wrong_id(guest: FakeGuest) -> None:
        await guest.hello()
        await guest.request()
        await guest.request()
        both.set()
        await guest.send({"id": "f" * 32, "ev": "done"})
        await guest.gone.wait()

    async with open_session(tmp_path, answer_wrong_id) as (daemon, client, name):
        answers = await asyncio.gather(call(client, name), call(daemon.client(), name))
        assert [done["error"]["code"] for done in answers] == ["SANDBOX_UNAVAILABLE"] * 2


async def test_second_reply_to_a_request_removes_the_container(tmp_path: Path) -> None:
    async with open_session(tmp_path, build_answering_guest({"ev": "done"}, {"ev": "done"})) as (daemon, client, name):
        await call(client, name)
        await wait_until_empty(daemon)


async def test_stderr_of_pid_1_is_never_parsed_as_a_frame(tmp_path: Path) -> None:
    async def write_to_stderr(guest: FakeGuest) -> None:
        await guest.send_raw(encode_frame({"ev": "done", "id": "0" * 32}, max_total=MAX_UP), stream=2)
        await echoing(guest)

    async with open_session(tmp_path, write_to_stderr) as (_, client, name):
        assert (await call(client, name))["run_s"] == 0.01


@pytest.mark.parametrize("cut", [1, 3, 7])
async def test_frames_sent_in_small_pieces_are_parsed(tmp_path: Path, cut: int) -> None:
    async def send_in_pieces(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        data = encode_frame({"id": request["id"], "ev": "done", "exit_code": 7}, max_total=MAX_UP)
        for at in range(0, len(data), cut):
            await guest.send_raw(data[at : at + cut])
        await guest.gone.wait()

    async with open_session(tmp_path, send_in_pieces) as (_, client, name):
        assert (await call(client, name))["exit_code"] == 7


# Claiming what only sandboxd knows


async def test_guest_cannot_hide_the_loss_of_its_files(tmp_path: Path) -> None:
    async with running_sandboxd(
        tmp_path, build_answering_guest({"ev": "done", "sandbox_lost": "x"}), echoing
    ) as daemon:
        client, name = await daemon.open()
        await call(client, name)
        entry = daemon.session(name)
        noticing = entry.sandbox.begin("", EXEC, 0, lambda _: None)
        await daemon.engine.remove(entry.sandbox.container)
        await asyncio.wait_for(noticing.done, SOON_S)
        with pytest.raises(SandboxUnavailable, match="files are lost"):
            await call(client, name)


# Not starting


async def stay_silent(guest: FakeGuest) -> None:
    await guest.next()


async def die_at_start(guest: FakeGuest) -> None:
    await guest.send_raw(b"python3: not found\n", stream=2)
    guest.die()


async def greet_with_newer_version(guest: FakeGuest) -> None:
    await guest.send({"ev": "hello", "v": 2})
    await guest.gone.wait()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [(stay_silent, "did not answer in time"), (die_at_start, "python3: not found"), (greet_with_newer_version, ".")],
)
async def test_guest_without_a_valid_hello_fails_the_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, message: str
) -> None:
    monkeypatch.setattr(sandbox_module, "HELLO_TIMEOUT_S", 0.05 if behaviour is stay_silent else SOON_S)
    async with running_sandboxd(tmp_path, behaviour) as daemon:
        with pytest.raises(SandboxUnavailable, match=message):
            await daemon.open()
        assert (daemon.engine.alive, len(daemon.sessions)) == ({}, 0)


# What is handed on


async def test_guest_cannot_set_fields_of_sandboxd(tmp_path: Path) -> None:
    kill = {"signalled": 1, "survivors": 0, "method": "tree", "ms": 1.0, "paid": True}
    names = ("ok", "code", "message", "is_ending", "sandbox", "sandbox_s", "sandbox_lost", "removal_failed")
    claims = dict.fromkeys((*names, "workspace_kept", "usage", "session_usage"), "the guest's")
    async with running_sandboxd(
        tmp_path, build_answering_guest({**claims, "ev": "done", "exit_code": 3, "kill": kill})
    ) as daemon:
        client, name = await daemon.open()
        done = await call(client, name)
        assert set(done) == {"ev", "ok", "exit_code", "kill", "sandbox", "sandbox_s", "session_usage"}
        assert "the guest's" not in done.values()
        assert set(done["kill"]) == {"signalled", "survivors", "method", "ms"}


async def test_guest_cannot_report_a_kill_by_container(tmp_path: Path) -> None:
    kill = {"signalled": 1, "survivors": 0, "method": "container", "ms": 1.0}
    async with open_session(tmp_path, build_answering_guest({"ev": "done", "kill": kill})) as (_, client, name):
        assert (await call(client, name))["kill"] is None


async def test_reply_too_large_for_a_frame_fails_only_its_call(tmp_path: Path) -> None:
    # Three bytes a letter from the guest, six to the worker.
    async def send_growing_header(guest: FakeGuest) -> None:
        await guest.hello()
        request, _ = await guest.request()
        header = f'{{"id":"{request["id"]}","ev":"done","streams":"{"€" * 80_000}"}}'.encode()
        await guest.send_raw((4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header)
        await echoing(guest)

    async with open_session(tmp_path, send_growing_header) as (_, client, name):
        done = await call(client, name)
        assert (done["error"]["code"], done["sandbox"]["generation"]) == ("INTERNAL", 1)


async def test_fatal_message_of_a_guest_is_escaped_and_cut(tmp_path: Path) -> None:
    frame_bytes = encode_frame({"ev": "fatal", "message": "\x1b[2J\nunknown op" + "x" * 100_000}, max_total=MAX_UP)
    async with open_session(tmp_path, build_answering_guest(frame_bytes)) as (_, client, name):
        message = (await call(client, name))["error"]["message"]
        assert "unknown op" in message
        assert message.isprintable()
        assert len(message) < 400
