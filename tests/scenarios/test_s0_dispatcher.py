"""Rows S0-09 to S0-13 of the scenarios: one dispatcher, the executor that a call reaches, and the errors for a
missing executor and a time-out.
"""

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.support.records.builders import KEY, build_call, build_exec_response, build_spec
from tests.support.records.fakes import (
    AnsweringTransport,
    FakeSandboxClient,
    MemoryBlobs,
    MemoryLedger,
    StaticCatalog,
    build_executor,
)
from tests.support.stack.stack import Stack
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.calls import ToolCall, ToolContext, ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.run_events import CallFinished, RunEvent
from toolcrew.contract.specs import ToolSpec
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dialects.tag_values import build_tag_call
from toolcrew.orchestrator.dialects.tags import TagsDialect
from toolcrew.orchestrator.dispatch.dispatcher import Dispatcher
from toolcrew.orchestrator.dispatch.in_process_transport import InProcessTransport
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.dispatch.tenant_catalog import TenantCatalog
from toolcrew.orchestrator.dispatch.transport import Transport
from toolcrew.orchestrator.functions.function_tools import tool
from toolcrew.orchestrator.loop.agent import Agent, RunResult
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sdk.local_tools import LocalTools
from toolcrew.workers.tools.builtin import build_registry

ROUTE = ("acme", "s1", "q")


class Harness:
    """A dispatcher in front of `transport`, and the results that passed through the dispatcher."""

    def __init__(self, transport: Transport, *specs: ToolSpec) -> None:
        self.specs = specs
        self.results: list[ToolResult] = []
        self._dispatcher = Dispatcher(transport, TenantCatalog(StaticCatalog(*specs)), KEY, queue_wait_s=1)

    async def run_call(self, call: ToolCall) -> ToolResult:
        self.results.append(await self._dispatcher.dispatch(Request(call, *ROUTE)))
        return self.results[-1]

    async def work(self, model: ScriptedModel, dialect: Any = None) -> RunResult:
        async with asyncio.timeout(SOON_S):
            return await Agent(model, dialect or TagsDialect(), self.specs, self.run_call).run("do it")


class Workers:
    """A real worker executor over its registry. The sandbox is scripted."""

    def __init__(self, *answers: Any) -> None:
        registry = build_registry()
        self.sandbox = FakeSandboxClient(*answers)
        executor = build_executor(registry, self.sandbox, MemoryLedger(), MemoryBlobs(), {"host": "h", "queue": "q"})
        self.transport = AnsweringTransport(executor.execute)
        self.specs = [spec for spec in registry.specs() if spec.audience == "model"]


async def test_s0_09_calls_of_every_dialect_reach_their_executor_through_one_dispatcher() -> None:
    harness = Harness(
        InProcessTransport({"add": lambda text: f"added {text}", "drop": lambda text: f"dropped {text}"}, KEY),
        build_spec("add"),
        build_spec("drop"),
    )
    await harness.work(
        ScriptedModel([build_tag_call("add", {"text": "a"}) + build_tag_call("drop", {"text": "b"}), "done"])
    )
    await harness.work(ScriptedModel([Calls([("drop", {"text": "c"})]), "done"]), NativeDialect())
    assert [result.output for result in harness.results] == ["added a", "dropped b", "dropped c"]


async def test_s0_10_a_built_in_tool_is_run_by_its_registry_and_its_result_is_returned() -> None:
    workers = Workers(build_exec_response(b"Linux\n"))
    harness = Harness(workers.transport, *workers.specs)
    model = ScriptedModel([build_tag_call("bash_tool", {"command": "uname -s"}), "It is Linux."])
    result = await harness.work(model)
    assert [(answer.name, answer.success, answer.metadata["stdout"]) for answer in harness.results] == [
        ("bash_tool", True, "Linux\n")
    ]
    assert (workers.sandbox.requests[0]["op"], workers.sandbox.bodies) == ("exec", [b"uname -s"])
    assert "Linux" in model.requests[1].messages[-1]["content"]
    assert result.answer == "It is Linux."


@pytest.mark.stack
async def test_s0_11_the_skill_of_the_document_is_called_through_a_tag_on_an_unconfigured_pool(stack: Stack) -> None:
    tag = '<tool_action name="vector-search">\n  <query value="读取文件" />\n  <limit value="5" />\n</tool_action>'
    model = ScriptedModel([tag, "It is in notes.md."])
    results: list[ToolResult] = []

    def note(event: RunEvent) -> None:
        if isinstance(event, CallFinished):
            results.append(event.result)

    async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
        await session.write_file("notes.md", "先读取文件，然后写入。\n".encode())
        await session.write_file("other.md", b"Roses are cut in spring.\n")
        result = await client.run("find it", session=session, model=model, dialect="tags", on_event=note)
    assert [(answer.name, answer.success) for answer in results] == [("vector-search", True)]
    assert json.loads(results[0].output or "")["results"][0]["path"] == "notes.md"
    assert "notes.md" in model.requests[1].messages[-1]["content"]
    assert result.answer == "It is in notes.md."


async def test_s0_12_an_unknown_tool_is_an_error_result_that_the_model_reads() -> None:
    dispatcher = Dispatcher(
        InProcessTransport({}, KEY), TenantCatalog(StaticCatalog(build_spec("echo"))), KEY, queue_wait_s=1
    )
    reply = await dispatcher.dispatch(Request(build_call("vector-search"), "acme", "s1", "q"))
    assert (reply.success, reply.error) == (False, "Tool not found: vector-search")

    model = ScriptedModel(
        ['<tool_action name="vector-search"><query value="x" /></tool_action>', "There is no such tool."]
    )
    result = await Harness(InProcessTransport({}, KEY), build_spec("echo")).work(model)
    assert "Tool not found: vector-search" in model.requests[1].messages[-1]["content"]
    assert result.answer == "There is no such tool."


async def test_s0_12_an_unknown_tool_of_a_local_registry_is_an_error_result() -> None:
    result = await LocalTools().run_call(build_call("vector-search"))
    assert (result.success, result.error) == (False, "Tool not found: vector-search")


async def test_s0_13_a_tool_above_its_time_limit_is_interrupted_and_the_loop_continues() -> None:
    interrupted = asyncio.Event()

    @tool(timeout_s=0.05)
    async def crawl(text: str) -> str:
        """Never ends."""
        try:
            return str(await asyncio.Event().wait())
        finally:
            interrupted.set()

    tools = LocalTools([crawl])
    model = ScriptedModel([build_tag_call("crawl", {"text": "a"}), "It took too long."])
    async with asyncio.timeout(SOON_S):
        result = await Agent(model, TagsDialect(), tools.specs(), tools.run_call).run("crawl")
    assert interrupted.is_set()
    assert "Error [TIMEOUT]: crawl did not end within its limit of 0.05 s" in model.requests[1].messages[-1]["content"]
    assert (result.answer, result.steps) == ("It took too long.", 2)


async def test_s0_13_a_synchronous_function_above_its_time_limit_is_interrupted() -> None:
    steps: list[int] = []
    interrupted = threading.Event()

    @tool(timeout_s=0.05)
    def count() -> None:
        """Never ends."""
        try:
            while True:
                steps.append(len(steps))
        except BaseException:
            interrupted.set()
            raise

    async with asyncio.timeout(SOON_S):
        result = await LocalTools([count]).run_call(build_call("count"))
    assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT)
    assert interrupted.is_set()
    assert "still run" not in str(result.error)


async def test_s0_13_a_tool_without_its_own_timeout_gets_the_configured_one() -> None:
    @tool
    async def crawl() -> str:
        """Never ends."""
        return str(await asyncio.Event().wait())

    async with asyncio.timeout(SOON_S):
        result = await LocalTools([crawl], timeout_s=0.05).run_call(build_call("crawl"))
    assert (result.success, result.error_code) == (False, ErrorCode.TIMEOUT)


async def test_s0_13_the_default_timeout_is_30_seconds() -> None:
    def answer(call: ToolCall, _: ToolContext) -> ToolResult:
        return ToolResult(call_id=call.id, name=call.name, success=True, output="")

    transport = AnsweringTransport(answer)
    await Harness(transport, build_spec("echo")).run_call(build_call())
    assert (transport.contexts[0].timeout_s, ReActOptions().tool_timeout_s) == (30.0, 30.0)
