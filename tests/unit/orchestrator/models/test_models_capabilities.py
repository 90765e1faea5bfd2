"""The probe of a server's capabilities: servers that accept everything, some fields or none, and the cache of the
results.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.model_endpoint import END, answer, serving, stream
from toolcrew.contract.errors import ContextWindowExceeded, ModelRefused
from toolcrew.orchestrator.dialects.model import Chunk, ModelRequest
from toolcrew.orchestrator.models import capabilities
from toolcrew.orchestrator.models.capabilities import (
    LIFETIME_S,
    MAX_REQUESTS,
    Capabilities,
    CapabilityCache,
    ModelFacts,
    find_capabilities,
    probe,
)
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.retries import RetryPolicy
from toolcrew.orchestrator.models.scripted import ALL_CAPABILITIES, ScriptedModel

NOTHING = Capabilities()


@dataclass
class FakeServer:
    """A model whose server refuses requests with unknown fields. The refusal texts are stored by field name."""

    refuses: dict[str, str] = field(default_factory=dict)
    calls: bool = True
    follows_schema: bool = True
    cuts_below: int = 0
    name: str = "fake"
    requests: list[ModelRequest] = field(default_factory=list)

    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        sent = json.dumps({"tools": request.tools, **request.extra}) if request.tools else " ".join(request.extra)
        for part, message in self.refuses.items():
            if part in sent:
                raise ModelRefused(f"refused: {message}", message)
        delta: dict[str, Any] = {"content": "Hello!"}
        reason = "stop"
        if request.extra["max_tokens"] < self.cuts_below:
            delta, reason = {}, "length"
        elif request.tools and self.calls:
            delta = {
                "tool_calls": [{"index": 0, "id": "c", "function": {"name": "echo", "arguments": '{"text": "hello"}'}}]
            }
        elif "response_format" in request.extra and self.follows_schema:
            delta = {"content": '{"text": "hello"}'}
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    async def aclose(self) -> None:
        """Close nothing."""


async def ask(server: FakeServer) -> Capabilities:
    capabilities = await probe(server)
    assert len(server.requests) <= MAX_REQUESTS
    return capabilities


@pytest.mark.parametrize(
    ("refuses", "missing"),
    [
        ({"parallel_tool_calls": "Unknown parameter: 'parallel_tool_calls'."}, {"parallel"}),
        ({"strict": "Extra inputs are not permitted: tools.0.function.strict"}, {"strict"}),
        ({"additionalProperties": "Invalid JSON payload: Unknown name additionalProperties"}, {"strict"}),
        ({"tool_choice": "tool_choice 'required' is not supported in thinking mode"}, {"tool_choice"}),
        (
            {"tool_choice": "tool_choice?", "strict": "strict?", "parallel": "parallel?"},
            {"tool_choice", "strict", "parallel"},
        ),
        ({"tool_choice": "bad request"}, {"tool_choice", "strict", "parallel"}),
        ({"response_format": "This response_format type is unavailable now"}, {"json_schema"}),
    ],
)
async def test_refused_request_field_disables_only_its_capability(refuses: dict[str, str], missing: set[str]) -> None:
    assert await ask(FakeServer(refuses)) == replace(ALL_CAPABILITIES, **dict.fromkeys(missing, False))


@pytest.mark.parametrize(
    "server",
    [
        FakeServer({'"tools"': "fake does not support tools"}),
        FakeServer({'"tools"': "tools param requires --jinja flag"}),
        FakeServer({'"tools"': "No endpoints that support tool use"}),
        FakeServer({'"tools"': "no"}),
        FakeServer(calls=False),
    ],
)
async def test_server_without_working_tools_can_still_follow_a_schema(server: FakeServer) -> None:
    assert await ask(server) == Capabilities(json_schema=True)


class ForcedCallsServer(FakeServer):
    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        if request.tools and "tool_choice" not in request.extra:
            raise ModelRefused("no", '"auto" tool choice requires --enable-auto-tool-choice')
        async for chunk in super().stream(request):
            yield chunk


class TinyWindowServer(FakeServer):
    async def stream(self, request: ModelRequest) -> AsyncIterator[Chunk]:
        raise ContextWindowExceeded("too long", 16)
        yield {}


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (FakeServer(follows_schema=False), replace(ALL_CAPABILITIES, json_schema=False)),
        (FakeServer(cuts_below=1000), ALL_CAPABILITIES),
        (ForcedCallsServer(), Capabilities(json_schema=True)),
        (TinyWindowServer(), NOTHING),
    ],
    ids=["ignores the schema", "thinks before it replies", "only forced calls", "tiny window"],
)
async def test_probe_derives_capabilities_from_the_replies(server: FakeServer, expected: Capabilities) -> None:
    assert await ask(server) == expected


@pytest.mark.parametrize(
    ("listing", "window"),
    [
        (answer(200, {"data": [{"id": "other"}, {"id": "m", "max_model_len": 8192}]}), 8192),
        (answer(200, {"data": [{"id": "/models/x.gguf", "meta": {"n_ctx": 4096, "n_ctx_train": 32768}}]}), 4096),
        (answer(200, {"data": [{"id": "m", "context_length": True}]}), None),
        (answer(200, {"data": [{"id": "a", "max_model_len": 1}, {"id": "b", "max_model_len": 2}]}), None),
        (answer(200, "<html>", "text/html"), None),
        (answer(200, "{"), None),
        (answer(404, {}), None),
        (b"", None),
    ],
)
async def test_context_window_is_read_from_the_model_list(listing: bytes, window: int | None) -> None:
    async with serving([stream(END)]) as server:
        server.models = listing
        model = OpenAIModel("m", server.url, retries=0)
        assert (await probe(model)).context_window == window
        await model.aclose()


@pytest.mark.parametrize("broken", [b"", answer(503, {})])
async def test_failed_model_list_request_is_retried(broken: bytes) -> None:
    async with serving([stream(END)]) as server:
        server.models = broken

        async def fix_server(_: float) -> None:
            server.models = answer(200, {"data": [{"id": "m", "max_model_len": 8192}]})

        model = OpenAIModel("m", server.url, retries=RetryPolicy(attempts=2, sleep=fix_server))
        assert await model.describe() == ModelFacts(context_window=8192)
        await model.aclose()


# The memory


class Probe:
    """Counts its calls."""

    requests = 0

    async def __call__(self) -> Capabilities:
        self.requests += 1
        await asyncio.sleep(0)
        return ALL_CAPABILITIES


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def find(cache: CapabilityCache, probe: Probe, model: str = "m") -> Capabilities:
    return await cache.find("http://host/v1", model, probe)


async def test_probe_result_is_cached_for_thirty_days(tmp_path: Path) -> None:
    now, probe = [1_800_000_000.0], Probe()
    cache = CapabilityCache(tmp_path / "new" / "folder", now=lambda: now[0])
    assert await asyncio.gather(*(find(cache, probe) for _ in range(10))) == [ALL_CAPABILITIES] * 10
    assert await find(CapabilityCache(tmp_path / "new" / "folder", now=lambda: now[0]), probe) == ALL_CAPABILITIES
    now[0] += LIFETIME_S - 1
    await find(cache, probe)
    assert probe.requests == 1
    now[0] += 2
    await find(cache, probe)
    assert probe.requests == 2
    (tmp_path / "file").touch()
    assert await find(CapabilityCache(tmp_path / "file"), Probe()) == ALL_CAPABILITIES, "the folder cannot be written"
    assert await find(CapabilityCache(None), Probe()) == ALL_CAPABILITIES


def _edit(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    "damage_text",
    [
        lambda _: "",
        lambda text: text[:20],
        _edit(version=0),
        _edit(saved_at=9e12),
        _edit(more=1),
        _edit(capabilities={"native_tools": "yes"}),
    ],
)
async def test_damaged_outdated_or_future_cache_file_is_ignored(
    tmp_path: Path, damage_text: Callable[[str], str]
) -> None:
    probe = Probe()
    await find(CapabilityCache(tmp_path), probe)
    [path] = files(tmp_path)
    path.write_text(damage_text(path.read_text()))
    assert await find(CapabilityCache(tmp_path), probe) == ALL_CAPABILITIES
    assert probe.requests == 2


async def test_scripted_model_is_not_probed_and_model_without_url_is_not_cached(tmp_path: Path) -> None:
    cache, scripted, server = CapabilityCache(tmp_path), ScriptedModel([]), FakeServer()
    assert await find_capabilities(scripted, cache) == ALL_CAPABILITIES
    for _ in range(2):
        assert await find_capabilities(server, cache) == ALL_CAPABILITIES
    assert (len(scripted.requests), len(server.requests)) == (0, 6)
    assert files(tmp_path) == []
    first = server.requests[0]
    assert (first.extra["tool_choice"], first.extra["parallel_tool_calls"]) == ("required", True)
    assert first.tools[0]["function"]["strict"] is True


async def test_probe_result_of_an_endpoint_is_cached(tmp_path: Path) -> None:
    async with serving([stream(END)]) as server:
        for _ in range(2):
            model = OpenAIModel("m", server.url, retries=0)
            assert await find_capabilities(model, CapabilityCache(tmp_path)) == NOTHING
            await model.aclose()
        assert len(server.bodies) == 2


async def test_a_cache_holds_a_limited_number_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "MAX_ENTRIES", 10)
    cache, probe = CapabilityCache(None), Probe()
    for number in range(100):
        await find(cache, probe, f"model-{number}")
        assert len(cache._entries) <= 11
    assert len(cache._locks) <= 10
