"""Requests of a worker to sandboxd. A wrong field or body gets an error message, and the connection stays open."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ToolFailure
from tests.fake_sandboxd import running_sandboxd
from tests.sandboxd_calls import EXEC, call, frame, raw_exchange
from workers.sandboxd.connection import MAX_BODY_BYTES
from workers.sandboxd.frames import MAX_HEADER
from workers.sandboxd.sandbox import FRAME_COST_BYTES, count_budget


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
    ],
    ids=str,
)
async def test_a_field_of_another_type_is_answered_like_any_bad_request(tmp_path: Path, header: dict[str, Any]) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        answers = await raw_exchange(daemon.path, frame(header))
        assert [answer.get("code") for answer in answers] == ["INVALID_ARGUMENTS"]


async def test_an_answer_is_never_the_answer_to_another_request(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        with pytest.raises(ToolFailure, match="timeout_s"):
            await call(client, name, {**EXEC, "timeout_s": 601}, body=bytes(1_500_000))
        assert (await call(client, name, body=b"mine")).streams == {"stdout": b"mine"}


async def test_bytes_that_are_no_frame_end_the_connection_and_nothing_else(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        assert await raw_exchange(daemon.path, b"\xff" * 64) == []
        assert (await call(client, name, body=b"still here")).streams == {"stdout": b"still here"}


async def test_an_image_that_is_not_allowed_is_refused_with_those_that_are(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        with pytest.raises(ToolFailure, match="default, foreign, python"):
            await daemon.open(image="evil/image")
        assert daemon.engine.guests == []


async def test_a_session_gets_the_requested_image(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open(image="python")
        assert daemon.engine.guests[0].config["Image"] == "python"


async def test_more_body_than_was_declared_ends_the_connection(tmp_path: Path) -> None:
    request = {"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 1}}
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        assert await raw_exchange(daemon.path, frame(request, b"four")) == []


async def test_too_many_arguments_are_the_callers_fault_and_not_sandboxds(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        client, name = await daemon.open()
        with pytest.raises(ToolFailure, match="too large"):
            await call(client, name, {**EXEC, "argv": ["echo", "x" * MAX_HEADER]})
        assert (await call(client, name, body=b"next")).streams == {"stdout": b"next"}


@pytest.mark.parametrize(
    "header",
    [
        {"verb": "open", "sandbox": "a:b", "image": "x" * 200_000},
        {"verb": "open", "sandbox": "a:b", "ttl_s": 10**400},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "write_file", "body_bytes": MAX_BODY_BYTES + 1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "read_file", "max_bytes": -1}},
        {"verb": "call", "sandbox": "a:b", "request": {"op": "exec", "timeout_s": 10**400}},
    ],
    ids=lambda header: str(header)[:60],
)
async def test_a_huge_field_gets_a_short_error(tmp_path: Path, header: dict[str, Any]) -> None:
    async with running_sandboxd(tmp_path) as daemon:
        [refused] = await raw_exchange(daemon.path, frame(header))
        assert (refused["code"], len(refused["message"]) < 5000) == ("INVALID_ARGUMENTS", True)


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


async def test_a_missing_body_ends_the_connection_and_the_call(tmp_path: Path) -> None:
    request = {"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 9}}
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        assert await raw_exchange(daemon.path, frame(request), frame({"verb": "status"})) == []


async def test_requests_sent_in_advance_are_answered_in_their_order(tmp_path: Path) -> None:
    calls = [
        frame({"verb": "call", "sandbox": "acme:s1", "request": {**EXEC, "body_bytes": 1}}, text)
        for text in (b"1", b"2")
    ]
    async with running_sandboxd(tmp_path) as daemon:
        await daemon.open()
        answers = await raw_exchange(daemon.path, *calls, frame({"verb": "status"}), answers=5)
        assert [answer.get("ev", "status") for answer in answers] == ["data", "done", "data", "done", "status"]


def test_a_stream_may_come_a_byte_at_a_time() -> None:
    limit = 10_000
    assert count_budget({"op": "exec", "capture": {"stream": limit}}) >= limit * (1 + FRAME_COST_BYTES)


def test_a_negative_or_wrong_capture_takes_nothing_from_the_others() -> None:
    assert count_budget({"op": "exec", "capture": {"stdout": 100, "stderr": -100, "merged": "all"}}) == 100
