"""The model server runs its script: replies by conversation, step and observation, in every dialect, with every
fault, counted.
"""

import json
import os

import httpx
import pytest

from contract.errors import ModelRefused
from tests.model_server.in_process import OK, TRUST_NOBODY, after_call, playing, read, user
from tests.model_server.running import running_model_server

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


async def test_a_request_that_no_rule_goes_for_is_refused_with_what_to_add() -> None:
    async with playing(CALL) as server:
        with pytest.raises(ModelRefused, match=r"conversation '9', step 1.*add a line of kind rule"):
            await read(server.model(attempts=3), *after_call("[item 9] go", "x"))
        assert (server.stats["requests"], server.stats["refused"]) == (1, 1)


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


# --- The wire ---------------------------------------------------------------------------------------------------------


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
