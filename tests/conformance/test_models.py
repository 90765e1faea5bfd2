"""The contract of every model, the Model protocol: over an endpoint, scripted, and embedded."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from toolcrew.contract.errors import ConfigError, ModelUnavailable
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.base import CallRequested, ReplyEnd
from toolcrew.orchestrator.dialects.model import Chunk, Message, Model, ModelRequest
from toolcrew.orchestrator.dialects.native import NativeCallAssembler, NativeDialect
from toolcrew.orchestrator.models.capabilities import probe
from toolcrew.orchestrator.models.choice import SMALL_CAPABILITIES
from toolcrew.orchestrator.models.local import LocalModelServer
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.scripted import Reply, ScriptedModel, demo_script
from toolcrew.orchestrator.models.weights import DEFAULT_CACHE, load_weights

BASH = ToolSpec(
    name="bash_tool",
    description="Run one bash command and return its output.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "the bash command"}},
        "required": ["command"],
    },
)
DIALECT = NativeDialect()
ASK: list[Message] = [
    {"role": "system", "content": DIALECT.build_system("", [BASH])},
    {"role": "user", "content": "How many lines are in /workspace/data.csv? Use the tool."},
]


def _script(messages: list[Message]) -> Reply:
    return demo_script()(messages)


@asynccontextmanager
async def scripted() -> AsyncIterator[Model]:
    yield ScriptedModel(_script)


@asynccontextmanager
async def endpoint(*, streaming: bool = True) -> AsyncIterator[Model]:
    """Run an OpenAIModel on a loopback server that answers with the scripted model."""
    behind = ScriptedModel(_script)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = json.loads(await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0])))
        chunks = [chunk async for chunk in behind.stream(ModelRequest(body["messages"], body.get("tools", [])))]
        kind = "text/event-stream" if body["stream"] else "application/json"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode())
        if body["stream"]:
            writer.write("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n")
        else:
            writer.write(json.dumps(_join(chunks)).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        model = OpenAIModel("m", f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1", streaming=streaming)
        yield model
        await model.aclose()


def whole() -> AbstractAsyncContextManager[Model]:
    """Run the same model with replies in one piece."""
    return endpoint(streaming=False)


def _join(chunks: list[Chunk]) -> dict[str, Any]:
    """Return the reply that a server without streaming would send instead of the chunks."""
    assembler = NativeCallAssembler()
    for chunk in chunks:
        assembler.feed(chunk)
    reply = assembler.finish()
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
        for call in reply.calls
    ]
    message = {"role": "assistant", "content": reply.text or None, "tool_calls": calls or None}
    usage = next(chunk["usage"] for chunk in chunks if "usage" in chunk)
    return {"choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}], "usage": usage}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[LocalModelServer]:
    """Run one server for the whole file, because loading the weights takes seconds."""
    async with LocalModelServer(_weights()) as running:
        yield running


@asynccontextmanager
async def local(server: LocalModelServer) -> AsyncIterator[Model]:
    model = server.open_model()
    yield model
    await model.aclose()


def _weights() -> Path:
    try:
        # Offline: a test run must not download half a gigabyte.
        return load_weights(cache_dir=DEFAULT_CACHE, hub_url=None)
    except ConfigError as error:
        pytest.skip(str(error))


Opener = Callable[[], AbstractAsyncContextManager[Model]]
MODELS: dict[str, Opener] = {"scripted": scripted, "endpoint": endpoint, "whole": whole}


@pytest.fixture(params=[*MODELS, pytest.param("local", marks=[pytest.mark.model])])
def open_model(request: pytest.FixtureRequest) -> Opener:
    """Return an opener. This fixture is not async, because the server, which only the last model needs, has its own
    loop.
    """
    return partial(local, request.getfixturevalue("server")) if request.param == "local" else MODELS[request.param]


@pytest.fixture
async def model(open_model: Opener) -> AsyncIterator[Model]:
    async with open_model() as opened:
        yield opened


async def read(model: Model, messages: list[Message]) -> tuple[list[CallRequested], ReplyEnd]:
    reader, events = DIALECT.open_reader("run", len(messages)), []
    async for chunk in model.stream(DIALECT.build_request(messages, [BASH])):
        events += reader.feed(chunk)
    last, end = reader.finish()
    return [event for event in [*events, *last] if isinstance(event, CallRequested)], end


async def test_a_model_has_a_name_and_may_be_closed_twice(model: Model) -> None:
    assert model.name
    await model.aclose()
    await model.aclose()


async def test_a_model_calls_the_tool_and_answers_with_its_result(model: Model) -> None:
    [call], end = await read(model, ASK)
    assert "/workspace/data.csv" in str(call.call.arguments["command"])
    observation: Message = {"role": "tool", "tool_call_id": call.model_id, "content": "11 /workspace/data.csv\n"}
    calls, end = await read(model, [*ASK, end.message, observation])
    assert not calls
    assert "11" in end.text


async def test_a_reply_ends_with_a_finish_reason_and_token_usage(model: Model) -> None:
    _, end = await read(model, ASK)
    assert end.finish_reason
    assert end.usage.prompt_tokens > 0


async def test_a_model_answers_again_after_a_stream_was_closed_early(model: Model) -> None:
    stream = model.stream(ModelRequest(ASK))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # every model of ours is an async generator
    _, end = await read(model, ASK)
    assert end.message["tool_calls"]


async def test_a_model_that_cannot_answer_raises_an_operator_error() -> None:
    for broken in (ScriptedModel([]), OpenAIModel("m", "http://127.0.0.1:9/v1", retries=0)):
        with pytest.raises(ModelUnavailable):
            await anext(aiter(broken.stream(ModelRequest(ASK))))
        await broken.aclose()


@pytest.mark.model
async def test_the_embedded_model_has_its_recorded_capabilities(server: LocalModelServer) -> None:
    async with local(server) as model:
        assert await probe(model) == SMALL_CAPABILITIES
