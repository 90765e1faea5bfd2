"""The model server runs its script: replies by conversation, step and observation, in every dialect, with every
fault, counted.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.errors import ModelRefused
from tests.model_server.in_process import OK, TRUST_NOBODY, Lines, Playing, after_call, playing, read, user
from tests.model_server.running import ROOT, running_model_server

CALL = {
    "kind": "rule",
    "when": {"step": 0},
    "reply": {"calls": [{"name": "bash_tool", "arguments": {"command": "seq {{item}}"}}]},
}
TOOLS = [{"type": "function", "function": {"name": "bash_tool", "parameters": {"type": "object"}}}]


# --- Replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_native_call_comes_with_the_item_in_it_and_the_answer_with_the_observation(streaming: bool) -> None:
    answer = {
        "kind": "rule",
        "when": {"observation": r"(?P<last>\d+)\n$"},
        "reply": {"text": "{{match.last}} of {{item}}"},
    }
    async with playing(CALL, answer) as server:
        call_reply = await read(server.model(streaming=streaming), user("[item 17] count"), tools=TOOLS)
        assert [(call.name, json.loads(call.raw)) for call in call_reply.calls] == [
            ("bash_tool", {"command": "seq 17"})
        ]
        text_reply = await read(
            server.model(streaming=streaming), *after_call("[item 17] count", "15\n16\n17\n"), tools=TOOLS
        )
        assert text_reply.text == "17 of 17"
        assert server.stats["conversations"] == {"17": {"requests": 2, "replies": {"0": 1, "1": 1}}}


@pytest.mark.parametrize(
    ("system", "fields", "expected"),
    [
        ('<tool_action name="x">', {}, '<tool_action name="bash_tool"><command value="seq 3" /></tool_action>'),
        ('{"tool": null, "reply": ""}', {}, '{"tool": "bash_tool", "arguments": {"command": "seq 3"}}'),
    ],
)
async def test_calls_use_the_dialect_of_the_request(system: str, fields: dict[str, Any], expected: str) -> None:
    async with playing(CALL) as server:
        reply = await server.ask({"role": "system", "content": system}, user("[item 3] count"), **fields)
        assert reply.json()["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("head", ["Tool result for bash_tool:", "[Tool result for bash_tool]"])
async def test_the_observation_is_the_last_result_in_text_dialects_too(head: str) -> None:
    async with playing({"kind": "rule", "reply": {"text": "<{{observation|strip}}>"}}) as server:
        reply = await server.ask(user("go"), user(f"{head}\nfirst\n\n{head}\nlast\n"))
        assert reply.json()["choices"][0]["message"]["content"] == "<last>"


async def test_the_first_rule_that_goes_for_a_request_answers_it() -> None:
    lines: Lines = [
        {"kind": "rule", "when": {"conversation": ["a", "b"], "user": "please"}, "reply": {"text": "polite"}},
        {"kind": "rule", "when": {"user": "now"}, "reply": {"text": "hasty"}},
        {"kind": "rule", "when": {"conversation": "a"}, "reply": {"text": "a"}},
        OK,
    ]
    async with playing(*lines) as server:
        texts = ["[item a] please now", "[item a] now", "[item a] go", "[item c] please"]
        assert [await server.say(text) for text in texts] == ["polite", "hasty", "a", "ok"]


async def test_without_a_marker_the_first_user_message_names_the_conversation() -> None:
    async with playing(OK) as server:
        for text in ("one", "two", "one"):
            await server.ask({"role": "system", "content": "s"}, user(text))
        assert sorted(entry["requests"] for entry in server.stats["conversations"].values()) == [1, 2]


async def test_raw_chunks_go_as_they_stand_and_filled_in_texts_are_not_filled_again() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "{{observation}}"}, "finish_reason": "stop"}]}
    async with playing({"kind": "rule", "reply": {"chunks": [chunk, "[DONE]"]}}) as server:
        reply = await server.ask(*after_call("go", r"{{item}} \1"), stream=True)
        assert reply.text.endswith("data: [DONE]\n\n")
        assert r"{{item}} \\1" in reply.text
        refused = await server.ask(user("go"))
        assert refused.status_code == 400
        assert "add whole" in refused.json()["error"]["message"]


async def test_a_request_that_no_rule_goes_for_is_refused_with_what_to_add() -> None:
    async with playing(CALL) as server:
        with pytest.raises(ModelRefused, match=r"conversation '9', step 1.*add a line of kind rule"):
            await read(server.model(attempts=3), *after_call("[item 9] go", "x"))
        assert (server.stats["requests"], server.stats["refused"]) == (1, 1)


async def test_a_script_s_replies_are_the_same_bytes_each_time() -> None:
    async with playing(CALL) as server:
        first, second = [await server.ask(user("[item 1] go"), stream=True, tools=TOOLS) for _ in range(2)]
        assert first.content == second.content


# --- Counting ---------------------------------------------------------------------------------------------------------


async def test_a_reply_sent_twice_is_reported_with_its_step() -> None:
    async with playing(OK) as server:
        for messages in ([user("[item 5]")], after_call("[item 5]", "x"), after_call("[item 5]", "x")):
            await server.ask(*messages)
        assert server.stats["repeated"] == [{"conversation": "5", "step": 1, "replies": 2}]
        assert (server.stats["replies_repeated"], server.stats["identical_requests"]) == (1, 1)
        assert (await server.client.get("/stats")).json() == server.stats
        assert (await server.client.post("/reset")).status_code == 200
        assert (server.stats["requests"], server.stats["conversations"]) == (0, {})


async def test_a_reply_that_its_client_did_not_take_is_not_whole() -> None:
    async with playing({"kind": "rule", "reply": {"text": "x" * 8_000_000}}) as server:
        body = json.dumps({"messages": [user("go")]}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readexactly(10)
        writer.transport.abort()
        await server.chat.gone.wait()
        assert server.stats["replies"] == 0
        assert len(await server.say("go")) == 8_000_000
        assert server.stats["replies"] == 1


# --- The wire ---------------------------------------------------------------------------------------------------------


async def talk(server: Playing, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    return answer


BODY = json.dumps({"messages": [{"role": "user", "content": "go"}]}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n" % len(BODY)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"411"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, b"431"),
        (b"GET /elsewhere HTTP/1.0\r\n\r\n", b"404"),
        (POST + b"connection: close\r\n\r\n" + BODY, b"200"),
        (b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n[]", b"400"),
        (b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 17\r\n\r\n" + b'{"messages": [1]}', b"400"),
    ],
)
async def test_an_invalid_request_ends_the_connection(raw: bytes, status: bytes) -> None:
    async with playing(OK) as server:
        assert (await talk(server, raw)).split(b" ")[1] == status


# --- The process ------------------------------------------------------------------------------------------------------


def test_the_program_says_its_url_first_serves_counts_and_goes_with_its_block() -> None:
    with running_model_server([OK]) as server, httpx.Client(verify=TRUST_NOBODY, trust_env=False, timeout=60) as client:
        reply = client.post(f"{server.url}/chat/completions", json={"messages": [user("go")]})
        assert reply.json()["choices"][0]["message"]["content"] == "ok"
        assert client.get(f"{server.url}/models").json()["data"][0]["id"] == "played"
        assert server.stats()["replies"] == 1
        server.reset()
        assert server.stats()["replies"] == 0
        assert server.environment()["OPENAI_BASE_URL"] == server.url
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "script.jsonl").write_text(json.dumps(OK))
    # No other process inherits the output, so its end shows the server's end.
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'tests.model_server', {str(tmp_path / 'script.jsonl')!r}])\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline().startswith(b"http://127.0.0.1:")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert parent.stdout.read() == b""
