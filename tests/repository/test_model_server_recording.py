"""Replies of a real endpoint are recorded without its client's secrets, and replayed to messages with the same
content.
"""

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model_server.in_process import TRUST_NOBODY
from tests.model_server.recording import Recorder, load_pairs
from tests.model_server.script import Script, parse_script
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
    received_requests: list[httpx.Request] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        await request.aread()
        received_requests.append(request)
        response: httpx.Response = answer(request)
        return response

    recorder = Recorder("http://endpoint.invalid/v1/", file, transport=httpx.MockTransport(respond))
    async with serving(recorder) as (url, _):
        responses = [await ask(url, message, stream=stream, **HEADERS) for message, stream in requests]
    await recorder.aclose()
    return responses, received_requests


async def test_recording_contains_no_secret_that_the_endpoint_echoes(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    message = {"role": "user", "content": f"my key is {KEY}"}

    responses, received = await record(
        file, lambda _: httpx.Response(401, json=echo, headers={"set-cookie": "session=abcdef123456"}), (message, False)
    )

    assert received[0].headers["authorization"] == f"Bearer {KEY}"
    assert "cookie" not in received[0].headers
    assert (responses[0].status_code, responses[0].json()) == (401, echo)
    text = file.read_text()
    assert "secret-0123456789" not in text
    assert "abcdef123456" not in text
    assert text.count("[secret]") == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["content", "arguments"])
async def test_secret_split_across_stream_chunks_is_masked(tmp_path: Path, kind: str) -> None:
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
    responses, _ = await record(
        file, lambda _: httpx.Response(200, text=body, headers={"content-type": "text/event-stream"}), (HI, True)
    )
    assert responses[0].text == body
    [pair] = load_pairs(file)
    chunks = [json.loads(part.removeprefix("data: ")) for part in pair.body.split("\n\n")[:-2]]
    deltas_recorded = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    texts = [
        delta["content"] if kind == "content" else delta["tool_calls"][0]["function"]["arguments"]
        for delta in deltas_recorded
    ]
    assert "".join(texts) == "it is [secret], I think"
    assert len(texts) == len(pieces)
    assert pair.body.endswith("data: [DONE]\n\n")


async def test_interrupted_reply_is_not_recorded_and_is_interrupted_for_the_client(tmp_path: Path) -> None:
    rules = parse_script(
        '{"kind": "rule", "reply": {"text": "hello"}}\n{"kind": "fault", "fault": {"kind": "cut", "after_bytes": 99}}'
    )
    async with serving(None, rules) as (endpoint_url, _):
        recorder = Recorder(
            endpoint_url, tmp_path / "pairs.jsonl", transport=httpx.AsyncHTTPTransport(verify=TRUST_NOBODY)
        )
        async with serving(recorder) as (url, chat):
            with pytest.raises(httpx.HTTPError):
                await ask(url, HI, stream=True)
            assert chat.counters.replies == 0
        await recorder.aclose()
    assert (tmp_path / "pairs.jsonl").read_bytes() == b""
