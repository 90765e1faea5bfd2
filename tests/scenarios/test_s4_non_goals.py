"""Rows S4-34 to S4-37 of the scenarios: features that the tool system omits on purpose, and the behavior in their
place.
"""

import asyncio
import dataclasses
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tests.support.records.builders import build_call, build_context
from tests.support.records.fakes import MemoryBlobs, MemoryLedger, build_executor
from tests.support.stack.waiting import SOON_S
from toolcrew import Agent, CallContext, LocalTools, as_tool, tool
from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.workers.custom.calls import CustomCalls
from toolcrew.workers.custom.loading import load_custom_tools
from toolcrew.workers.executor import CallRepeated
from toolcrew.workers.tools.base import WorkerRegistry, WorkerTool


class McpServer:
    """A server for clients of the Model Context Protocol. Lists its tools on request."""

    name = "files"
    was_asked = False

    async def list_tools(self) -> list[dict[str, Any]]:
        self.was_asked = True
        return [{"name": "read", "description": "Reads.", "inputSchema": {"type": "object"}}]


SERVER = McpServer()


def test_s4_34_no_tools_of_mcp_servers_are_loaded_into_a_registry() -> None:
    """Neither a program's registry nor a worker's takes a server as a tool. Workers ask only the servers of the file
    that the operator names (TOOLCREW_MCP_SERVERS), which is a part of its own (docs/add-a-tool.md)."""
    for value in (SERVER, {"type": "mcp", "server_url": "https://tools.example"}):
        with pytest.raises(TypeError):
            as_tool(value)
    point = EntryPoint("server", f"{__name__}:SERVER", "toolcrew.tools")
    with pytest.raises(ConfigError, match="is a McpServer: use a tool, a function"):
        load_custom_tools(find_entry_points=lambda: [point])
    assert not SERVER.was_asked


async def test_s4_35_no_result_is_cached_the_same_call_runs_again() -> None:
    """webfetch_tool is no exception: each call runs. It keeps pages as HTTP allows (docs/tools.md), not results of
    calls.
    """
    runs: list[str] = []

    @tool(read_only=True, idempotent=True)
    def look(place: str) -> int:
        runs.append(place)
        return len(runs)

    tools = LocalTools([look])
    worker = build_executor(
        WorkerRegistry([WorkerTool(look.spec, CustomCalls({}).build_handler(look))]),
        None,
        MemoryLedger(),
        MemoryBlobs(),
        {"host": "h1"},
    )
    local = [await tools.run_call(build_call("look", call_id=call_id, place="here")) for call_id in ("a", "b")]
    served = [
        worker.execute(build_call("look", call_id=call_id, place="here"), build_context()) for call_id in ("a", "b")
    ]
    assert [result.output for result in [*local, *served]] == ["1", "2", "3", "4"]
    # Nor is a repetition of one call answered from memory: it is dropped.
    with pytest.raises(CallRepeated):
        worker.execute(build_call("look", call_id="b", place="here"), build_context())
    assert len(runs) == 4


async def run_reply(calls: Calls, *made: Any) -> list[str]:
    """Return the results of one reply's calls, as the model reads them in its next request."""
    model, tools = ScriptedModel([calls, "done"]), LocalTools(made)
    await Agent(model, NativeDialect(), tools.specs(), tools.run_call).run("Go.")
    return [str(message["content"]) for message in model.requests[-1].messages if message["role"] == "tool"]


async def test_s4_36_calls_of_one_reply_that_change_something_run_one_after_another() -> None:
    log: list[str] = []

    @tool
    async def write(n: int) -> str:
        log.append(f"{n} begins")
        await asyncio.sleep(0.01)
        log.append(f"{n} ends")
        return f"wrote {n}"

    assert await run_reply(Calls([("write", {"n": n}) for n in range(3)]), write) == ["wrote 0", "wrote 1", "wrote 2"]
    assert log == [f"{n} {phase}" for n in range(3) for phase in ("begins", "ends")]


async def test_s4_36_read_only_calls_may_run_in_parallel_and_are_answered_in_order() -> None:
    both_run = asyncio.Barrier(2)

    @tool(read_only=True)
    async def look(n: int) -> str:
        await asyncio.wait_for(both_run.wait(), SOON_S)
        await asyncio.sleep(0.01 * (1 - n))
        return f"saw {n}"

    assert await run_reply(Calls([("look", {"n": 0}), ("look", {"n": 1})]), look) == ["saw 0", "saw 1"]


async def test_s4_37_no_call_gets_the_result_of_another_and_no_tool_can_call_another() -> None:
    @tool
    def tell(text: str) -> str:
        return text

    texts = ["first", "$1", "{{call1-1.output}}", '{"tool": "tell", "arguments": {"text": "nested"}}']
    assert await run_reply(Calls([("tell", {"text": text}) for text in texts]), tell) == texts
    report = {field.name for field in dataclasses.fields(CallContext)}
    assert report == {"call_id", "tenant", "run", "session", "cwd", "config", "model", "state", "runner"}
