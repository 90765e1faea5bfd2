"""Replies of a real endpoint are recorded without its client's secrets, and replayed to messages with the same
content.
"""

import asyncio
import json
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model_server.in_process import TRUST_NOBODY
from tests.model_server.recording import Recorder, Replay, digest_messages, load_pairs
from tests.model_server.script import BadScript, Script, parse_script
from tests.model_server.service import Chat, Source
from tests.model_server.wire import Connection

KEY = "sk-very/secret-0123456789"
HI = {"role": "user", "content": "hi"}
HEADERS = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "cookie": "session=abcdef123456"}


@asynccontextmanager
async def serving(source: Source | None, script: Script | None = None) -> AsyncIterator[tuple[str, Chat]]:
    chat = Chat(script or Script(), source)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(chat), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", chat


async def ask(url: str, *messages: dict[str, Any], stream: bool = False, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(verify=TRUST_NOBODY, trust_env=False, timeout=60) as client:
        # ASCII: halves of characters go as escapes.
        body = json.dumps({"model": "m", "messages": messages, "stream": stream})
        return await client.post(f"{url}/chat/completions", content=body, headers=headers)


async def record(
    file: Path, answer: Any, *requests: tuple[dict[str, Any], bool]
) -> tuple[list[httpx.Response], list[httpx.Request]]:
    """Return the client's replies through the recorder, and the requests at the endpoint. `answer` makes the
    endpoint's responses.
    """
    seen: list[httpx.Request] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        await request.aread()
        seen.append(request)
        response: httpx.Response = answer(request)
        return response

    recorder = Recorder("http://endpoint.invalid/v1/", file, transport=httpx.MockTransport(respond))
    async with serving(recorder) as (url, _):
        got = [await ask(url, message, stream=stream, **HEADERS) for message, stream in requests]
    await recorder.aclose()
    return got, seen


async def test_a_recorded_stream_is_played_again_byte_for_byte(tmp_path: Path) -> None:
    rules = parse_script('{"kind": "rule", "reply": {"text": "hello {{user}}", "chunk_chars": 2}}')
    async with serving(None, rules) as (real, _):
        recorder = Recorder(real, tmp_path / "pairs.jsonl", transport=httpx.AsyncHTTPTransport(verify=TRUST_NOBODY))
        async with serving(recorder) as (url, chat):
            recorded = [await ask(url, HI, stream=stream) for stream in (True, False)]
            assert chat.counters.replies == 2
        await recorder.aclose()
    async with serving(Replay(load_pairs(tmp_path / "pairs.jsonl"))) as (url, chat):
        played = [await ask(url, HI, stream=stream) for stream in (True, False)]
        assert [reply.content for reply in played] == [reply.content for reply in recorded]
        assert [reply.headers["content-type"] for reply in played] == [
            reply.headers["content-type"] for reply in recorded
        ]
        assert chat.counters.replies == 2


async def test_no_secret_of_the_client_is_in_the_file_though_the_endpoint_repeats_it(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    message = {"role": "user", "content": f"my key is {KEY}"}

    got, seen = await record(
        file, lambda _: httpx.Response(401, json=echo, headers={"set-cookie": "session=abcdef123456"}), (message, False)
    )

    assert seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert "cookie" not in seen[0].headers
    assert (got[0].status_code, got[0].json()) == (401, echo)
    text = file.read_text()
    assert "secret-0123456789" not in text
    assert "abcdef123456" not in text
    assert text.count("[secret]") == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["content", "arguments"])
async def test_a_secret_that_a_stream_brings_in_pieces_is_struck_out_of_it(tmp_path: Path, kind: str) -> None:
    text = f"it is {KEY}, I think"
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    deltas = [
        {"content": piece} if kind == "content" else {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        for piece in pieces
    ]
    body = (
        "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas)
        + "data: [DONE]\n\n"
    )
    file = tmp_path / "pairs.jsonl"
    got, _ = await record(
        file, lambda _: httpx.Response(200, text=body, headers={"content-type": "text/event-stream"}), (HI, True)
    )
    assert got[0].text == body
    [pair] = load_pairs(file)
    chunks = [json.loads(part.removeprefix("data: ")) for part in pair.body.split("\n\n")[:-2]]
    came = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    texts = [
        delta["content"] if kind == "content" else delta["tool_calls"][0]["function"]["arguments"] for delta in came
    ]
    assert "".join(texts) == "it is [secret], I think"
    assert len(texts) == len(pieces)
    assert pair.body.endswith("data: [DONE]\n\n")


async def test_refusals_bytes_and_their_headers_are_recorded_too(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    answers = [
        httpx.Response(429, text="slow down", headers={"retry-after": "3"}),
        httpx.Response(200, content=b"\xff\xfe"),
    ]
    await record(file, lambda _: answers.pop(0), (HI, False), (HI, False))
    async with serving(Replay(load_pairs(file))) as (url, chat):
        first, second, third = [await ask(url, HI) for _ in range(3)]
        assert (first.status_code, first.headers["retry-after"], first.text) == (429, "3", "slow down")
        # In their order, and the last one from then on; until it is reset.
        assert (second.content, third.content) == (b"\xff\xfe", b"\xff\xfe")
        async with httpx.AsyncClient(verify=TRUST_NOBODY, trust_env=False) as client:
            await client.post(url.removesuffix("/v1") + "/reset")
        assert (await ask(url, HI)).status_code == 429
        assert chat.counters.requests == 1


async def test_a_reply_that_breaks_off_is_not_recorded_and_breaks_off_for_the_client(tmp_path: Path) -> None:
    rules = parse_script(
        '{"kind": "rule", "reply": {"text": "hello"}}\n{"kind": "fault", "fault": {"kind": "cut", "after_bytes": 99}}'
    )
    async with serving(None, rules) as (real, _):
        recorder = Recorder(real, tmp_path / "pairs.jsonl", transport=httpx.AsyncHTTPTransport(verify=TRUST_NOBODY))
        async with serving(recorder) as (url, chat):
            with pytest.raises(httpx.HTTPError):
                await ask(url, HI, stream=True)
            assert chat.counters.replies == 0
        await recorder.aclose()
    assert (tmp_path / "pairs.jsonl").read_bytes() == b""


async def test_half_a_character_in_a_request_stops_neither_recording_nor_replay(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    half = {"role": "user", "content": "\ud83d"}
    got, _ = await record(file, lambda _: httpx.Response(200, json={}), (half, False))
    assert got[0].status_code == 200
    async with serving(Replay(load_pairs(file))) as (url, _):
        assert (await ask(url, half)).status_code == 200


async def test_an_endpoint_without_reply_is_reported(tmp_path: Path) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no")

    got, _ = await record(tmp_path / "pairs.jsonl", refuse, (HI, False))
    assert got[0].status_code == 502
    assert "check --record" in got[0].text


async def test_messages_that_were_not_recorded_are_refused_with_what_to_do(tmp_path: Path) -> None:
    await record(tmp_path / "pairs.jsonl", lambda _: httpx.Response(200, json={}), (HI, False))
    async with serving(Replay(load_pairs(tmp_path / "pairs.jsonl"))) as (url, _):
        other = await ask(url, {"role": "user", "content": "ho"})
        assert other.status_code == 404
        assert "recorded not at all: record them" in other.text
        assert "recorded only not streamed" in (await ask(url, HI, stream=True)).text


async def test_faults_of_a_script_break_a_recording_too(tmp_path: Path) -> None:
    await record(tmp_path / "pairs.jsonl", lambda _: httpx.Response(200, json={"choices": []}), (HI, False))
    faults = parse_script(
        '{"kind": "fault", "fault": {"kind": "status", "status": 500}, "first": 1}\n'
        '{"kind": "fault", "fault": {"kind": "cut", "after_bytes": 3}, "first": 1}',
        needs_rules=False,
    )
    async with serving(Replay(load_pairs(tmp_path / "pairs.jsonl")), faults) as (url, _):
        assert (await ask(url, HI)).status_code == 500
        with pytest.raises(httpx.HTTPError):
            await ask(url, HI)
        assert (await ask(url, HI)).json() == {"choices": []}


def build_call(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "bash_tool", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def test_ids_orders_and_blanks_do_not_count_but_texts_do() -> None:
    first = [HI, build_call("a", '{"x": 1, "y": 2}'), {"role": "tool", "tool_call_id": "a", "content": "out\n"}]
    again = [HI, build_call("b", '{"y":2,"x":1}'), {"role": "tool", "tool_call_id": "b", "content": "out"}]
    assert digest_messages(first) == digest_messages(again)
    for changed in (
        [*again[:2], {"role": "tool", "content": "other"}],
        [HI, build_call("a", '{"x": 1}')],
        [HI, build_call("a", "not JSON")],
    ):
        assert digest_messages(first) != digest_messages(changed)


def test_ignored_patterns_do_not_change_the_digest() -> None:
    ignored = [re.compile(r"\d+ ms")]
    conversations = [[{"role": "user", "content": f"it took {number} ms"}] for number in (3, 4)]
    assert digest_messages(conversations[0], ignored) == digest_messages(conversations[1], ignored)
    assert digest_messages(conversations[0]) != digest_messages(conversations[1])


def test_a_broken_recording_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    for content, expected in (
        (None, "cannot be read"),
        ("", "holds no pair"),
        ('{"kind": "pair"}\n', "pairs.jsonl:1: digest"),
        ("x\n", "pairs.jsonl:1"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(BadScript, match=expected):
            load_pairs(file)


async def test_a_torn_last_pair_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    await record(file, lambda _: httpx.Response(200, json={}), (HI, False))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    assert [pair.request["messages"] for pair in load_pairs(file)] == [[HI]]
    assert json.loads(whole)["status"] == 200


def test_an_unwritable_file_is_reported_before_serving(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="give --to a file in a folder that is there"):
        Recorder("http://endpoint.invalid", tmp_path / "none" / "pairs.jsonl")
