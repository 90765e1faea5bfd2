"""Reasoning and signatures in durable runs on a real Redis: the next request has them after the death of a process, and
in a fork.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.models.model_endpoint import END, Server, serving, stream
from tests.support.runs.durable_run_harness import DurableRunFactory
from tests.support.runs.item_harness import HarnessFactory, build_run
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.models.openai import OpenAIModel

SIGNED = {"extra_content": {"google": {"thought_signature": "S1"}}}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "need it"}]}
LOOK = {"type": "text", "text": "I look"}


def call_with_fields(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of a reply with a call and everything that providers want back."""
    number = str(sum(message["role"] == "assistant" for message in request["messages"]))
    function = {"name": "echo", "arguments": '{"text": "' + number + '"}'}
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "be"},
        {"reasoning_content": "cause"},
        {"content": [{**THOUGHT, "thinking": [{"type": "text", "text": "need "}]}]},
        {"content": [{**THOUGHT, "thinking": [{"type": "text", "text": "it"}]}]},
        {"content": [LOOK]},
        {"tool_calls": [{"index": 0, "id": f"c{number}", "type": "function", "function": function, **SIGNED}]},
    ]
    return [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]


def reply(_: int, request: dict[str, Any]) -> bytes:
    """Call twice, then answer."""
    if sum(message["role"] == "assistant" for message in request["messages"]) < 2:
        return stream(*call_with_fields(request), END)
    return stream({"choices": [{"index": 0, "delta": {"content": "done"}}]}, END)


@asynccontextmanager
async def open_endpoint() -> AsyncIterator[tuple[Server, OpenAIModel]]:
    async with serving(reply) as server:
        model = OpenAIModel("m", server.url, None, SOON_S, retries=0)
        yield server, model
        await model.aclose()


def find_replies(server: Server) -> list[dict[str, Any]]:
    """Return the replies in the last request."""
    return [message for message in server.bodies[-1]["messages"] if message["role"] == "assistant"]


def check(message: dict[str, Any]) -> None:
    assert message["reasoning_content"] == "because"
    assert message["content"] == [THOUGHT, LOOK]
    [call] = message["tool_calls"]
    assert call["extra_content"] == SIGNED["extra_content"]
    assert not [key for key in message if key.startswith("toolcrew")]


async def test_a_resumed_run_returns_the_fields_of_earlier_replies(make: HarnessFactory) -> None:
    reached = asyncio.Event()

    async def hang(call: ToolCall, context: ToolContext) -> ToolResult:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with open_endpoint() as (server, model):
        first, second = make(model), make(model)
        first.answers["echo"] = hang
        claim = await first.put(build_run())
        task = asyncio.create_task(first.execute(claim))
        await asyncio.wait_for(reached.wait(), SOON_S)
        task.cancel()
        await asyncio.wait({task}, timeout=SOON_S)
        outcome = await second.execute(await second.claim_by_other(claim))
        assert outcome.failure is None
        assert len(server.bodies) == 3
        replies = find_replies(server)
        assert len(replies) == 2
        for message in replies:
            check(message)


async def test_a_fork_of_a_run_returns_the_fields_of_the_shared_replies(make_durable: DurableRunFactory) -> None:
    async with open_endpoint() as (server, model):
        harness = make_durable(model)
        harness.runs._sessions = harness.places
        run = await harness.start(RunBody(instruction="say it", tools=("echo",), keep_states=True))
        async with harness.working():
            await harness.events(run)
            sent = len(server.bodies)
            [fork] = await harness.runs.fork("acme", run, 2, 1)
            await harness.events(fork.id)
        assert len(server.bodies) == sent + 1
        for message in find_replies(server):
            check(message)
        transcript = await harness.runs.transcript("acme", fork.id)
        replies = [message.get("reasoning_content") for message in transcript if message["role"] == "assistant"]
        assert replies == ["because", "because", None]
