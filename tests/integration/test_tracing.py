"""Spans of real calls through a real stack, as a collector receives them."""

import json
from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient

from tests.support.stack.otlp_collector import CollectedSpan, Collector, assert_one_tree, open_collector
from tests.support.stack.stack import Stack, open_stack
from toolcrew.contract.traceparent import run_span_id, trace_id_of
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient

pytestmark = pytest.mark.stack

KEY = "sk-abcdefghijklmnop1234567890"
HOSTILE = "\x1b[31m\u202e<script>" + "x" * 20_000
TOOLS = '''
import os
from toolcrew import tool

@tool
def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()

@tool
def leave() -> None:
    """Ends its process, as an operating system that wants memory does."""
    os._exit(9)
'''


@pytest.fixture(scope="module")
def shared_collector() -> Iterator[Collector]:
    with open_collector() as opened:
        yield opened


@pytest.fixture(scope="module")
def traced_stack(
    engine: APIClient, shared_collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    place = tmp_path_factory.mktemp("tools")
    (place / "loud_tools.py").write_text(TOOLS)
    more = {"PYTHONPATH": str(place), "TOOLCREW_TOOL_MODULES": '["loud_tools"]'}
    with open_stack(engine, environment=shared_collector.environment(**more)) as opened:
        yield opened
        assert opened.end() == 0
        opened.footprint.assert_nothing_left(within_s=5)


@pytest.fixture
def collector(shared_collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Collector:
    """Return the empty collector, which also receives the spans of this process."""
    shared_collector.forget()
    for name, value in shared_collector.environment().items():
        monkeypatch.setenv(name, value)
    return shared_collector


@pytest.fixture
async def client(traced_stack: Stack, collector: Collector) -> AsyncIterator[ToolClient]:
    async with ToolClient.connect(traced_stack.redis_url, approver=AutoApprover()) as connected:
        yield connected


def child_names(spans: list[CollectedSpan], parent: CollectedSpan) -> list[str]:
    return sorted(span.name for span in spans if span.parent == parent.id)


def spans_of_trace(collector: Collector, trace: str) -> list[CollectedSpan]:
    return [span for span in list(collector.spans) if span.trace == trace]


async def test_a_run_with_calls_in_a_sandbox_and_in_a_pool_is_one_trace(
    traced_stack: Stack, collector: Collector
) -> None:
    turns = [Calls([("bash_tool", {"command": "sleep 0.05; echo hi"})]), Calls([("shout", {"text": "hi"})]), "done"]
    async with ToolClient.connect(traced_stack.redis_url, approver=AutoApprover()) as client:
        result = await client.run("say hi", model=ScriptedModel(turns), tools=["bash_tool", "shout"])
    collector.wait_for("process bash_tool", "process shout", "process session.close", "process session.open")

    spans = list(collector.spans)
    root = assert_one_tree(spans)
    assert (root.trace, root.id) == (trace_id_of("default", result.run), run_span_id("default", result.run))
    assert root.name == "invoke_agent toolcrew"
    assert child_names(spans, root) == [
        "chat scripted",
        "chat scripted",
        "chat scripted",
        "execute_tool bash_tool",
        "execute_tool shout",
        "session.close",
        "session.open",
    ]
    for tool, inside in (("bash_tool", ["sandboxd exec"]), ("shout", [])):
        assert child_names(spans, collector.one(f"execute_tool {tool}")) == [f"admission {tool}", f"send {tool}"]
        assert child_names(spans, collector.one(f"send {tool}")) == [f"process {tool}"]
        assert child_names(spans, collector.one(f"process {tool}")) == inside
    guest = collector.one("guest exec")
    assert guest.end - guest.start >= 50_000_000
    assert {span.service for span in spans} == {
        "toolcrew-orchestrator",
        "toolcrew-sandbox-worker",
        "toolcrew-web-worker",
    }
    assert {span.kind for span in spans if span.name.startswith("send ")} == {"producer"}
    assert {span.kind for span in spans if span.name.startswith("process ")} == {"consumer"}
    assert {span.kind for span in spans if span.name.startswith("chat ")} == {"client"}


async def test_attributes_follow_the_conventions_and_contain_no_content(
    traced_stack: Stack, collector: Collector
) -> None:
    turns = [Calls([("bash_tool", {"command": f"echo needle {KEY}"})], "needle"), "needle"]
    async with ToolClient.connect(traced_stack.redis_url, approver=AutoApprover()) as client:
        result = await client.run("find the needle", model=ScriptedModel(turns), tools=["bash_tool"])
    collector.wait_for("process bash_tool")
    call = collector.one("execute_tool bash_tool").attributes
    assert call["gen_ai.operation.name"] == "execute_tool"
    assert (call["gen_ai.tool.name"], call["gen_ai.tool.type"]) == ("bash_tool", "function")
    assert call["gen_ai.tool.description"]
    assert call["gen_ai.conversation.id"] == call["toolcrew.run"] == result.run
    chat = collector.named("chat scripted")[0].attributes
    assert (chat["gen_ai.operation.name"], chat["gen_ai.provider.name"], chat["gen_ai.request.model"]) == (
        "chat",
        "openai",
        "scripted",
    )
    assert chat["gen_ai.usage.output_tokens"] == len("needle")
    assert chat["gen_ai.response.finish_reasons"] == ["tool_calls"]
    run = collector.one("invoke_agent toolcrew").attributes
    assert (run["gen_ai.agent.name"], run["toolcrew.tenant"], run["toolcrew.stop_reason"]) == (
        "toolcrew",
        "default",
        "answered",
    )
    assert collector.one("process bash_tool").attributes["toolcrew.queued_s"] >= 0
    everything = json.dumps([span.attributes for span in collector.spans])
    assert "needle" not in everything
    assert KEY not in everything


async def test_recorded_content_is_masked_cleaned_and_truncated(
    traced_stack: Stack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_TRACING", "otlp-content")
    async with ToolClient.connect(traced_stack.redis_url) as client, await client.open_session() as session:
        result = await session.call("bash_tool", {"command": f"echo {KEY}; : '{HOSTILE}'"})
        assert result.success
    call = collector.one("execute_tool bash_tool").attributes
    reply = call["gen_ai.tool.call.arguments"]
    assert "[masked: API key]" in reply
    assert "characters left out" in reply
    assert len(reply) < 9000
    assert "[masked: API key]" in call["gen_ai.tool.call.result"]
    everything = json.dumps([span.attributes for span in collector.spans], ensure_ascii=False)
    assert KEY not in everything
    assert not {"\x1b", "\u202e"} & set(everything)


async def test_each_call_and_each_session_operation_is_its_own_trace(client: ToolClient, collector: Collector) -> None:
    async with await client.open_session() as session:
        await session.write_file("note", b"kept")
        checkpoint = await session.checkpoint()
        await session.call("bash_tool", {"command": "true"})
    async with await client.open_session(restore=checkpoint):
        pass
    collector.wait_for(
        "execute_tool bash_tool", "sandboxd checkpoint", "sandboxd restore", "sandboxd close", "process bash_tool"
    )
    root = collector.one("execute_tool bash_tool")
    assert root.attributes["toolcrew.session"] == session.id
    assert assert_one_tree(spans_of_trace(collector, root.trace)) == root
    roots = [span.name for span in collector.spans if not span.parent]
    assert {"session.open", "session.write_file", "session.checkpoint", "session.close"} <= set(roots)
    for span in list(collector.spans):
        assert_one_tree(spans_of_trace(collector, span.trace))


async def test_a_call_whose_process_dies_leaves_a_trace_without_orphans(
    client: ToolClient, collector: Collector
) -> None:
    async with await client.open_session() as session:
        result = await session.call("leave", {}, timeout_s=20)
    assert not result.success
    collector.wait_for("execute_tool leave")
    root = collector.one("execute_tool leave")
    assert root.attributes["error.type"] == result.error_code
    assert assert_one_tree(spans_of_trace(collector, root.trace)) == root


async def test_workers_record_no_spans_for_an_unsampled_trace(
    traced_stack: Stack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with ToolClient.connect(traced_stack.redis_url, approver=AutoApprover()) as client:
        await client.run(
            "go", model=ScriptedModel([Calls([("bash_tool", {"command": "true"})]), "done"]), tools=["bash_tool"]
        )
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    # Spans of one worker arrive in order: the spans of the second call come after the spans of the first.
    async with ToolClient.connect(traced_stack.redis_url) as client, await client.open_session() as session:
        await session.call("write_tool", {"file_path": "a", "content": "b"})
    collector.wait_for("process write_tool", "process session.close")
    assert [span.name for span in collector.spans if "bash_tool" in span.name] == []
