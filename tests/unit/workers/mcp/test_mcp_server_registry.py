"""The tools of MCP servers while a worker runs: servers that start late, stop answering, or change their list, in the
worker's process and in its pool.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.mcp.mcp_peers import TOOL
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.registry import ToolRegistry
from toolcrew.workers.celery_edge.broker import LiveTasks
from toolcrew.workers.mcp.imports import ImportedTool, import_tools
from toolcrew.workers.mcp.server_registry import FIRST_RETRY_S, ServerRegistry
from toolcrew.workers.mcp.settings import HttpEntry
from toolcrew.workers.tools.base import Outcome, WorkerRegistry, WorkerTool

REFRESH_S = 600.0


@dataclass
class FakeSource:
    """Lists the tools that a test gives. None: the server is down."""

    name: str = "docs"
    listed: list[Any] | None = field(default_factory=lambda: [TOOL])
    is_sessionless: bool | None = None
    requests: int = 0

    def list_tools(self) -> list[Any]:
        self.requests += 1
        if self.listed is None:
            raise ToolFailure(ErrorCode.HTTP_ERROR, "it is down")
        self.is_sessionless = True
        return self.listed

    def import_tools(self, listed: Iterable[Any]) -> tuple[ImportedTool, ...]:
        return import_tools(self.name, HttpEntry(url="https://tools.example/mcp"), listed, "tools")

    def build(self, tool: ImportedTool) -> WorkerTool:
        return WorkerTool(tool.spec, lambda arguments, bench: Outcome(tool.name))


class Harness:
    """A registry of servers with a clock that the test advances."""

    def __init__(self, *sources: FakeSource) -> None:
        self.now = 0.0
        self.registry: WorkerRegistry = ToolRegistry()
        self.changes = 0
        self.servers = ServerRegistry(self.registry, sources, REFRESH_S, 4, lambda: self.now)
        self.servers.on_change = self._note

    def _note(self) -> None:
        self.changes += 1

    def ask(self, after_s: float = 0.0) -> float:
        self.now += after_s
        return self.servers.list_due_servers()

    def names(self) -> list[str]:
        return [spec.name.removeprefix("mcp__") for spec in self.registry.specs()]


def _tool(name: str, description: str = "") -> dict[str, Any]:
    return {**TOOL, "name": name, "description": description}


def test_unreachable_server_is_retried_with_growing_pauses() -> None:
    source = FakeSource(listed=None)
    harness = Harness(source)
    pauses = [harness.ask()]
    for _ in range(6):
        pauses.append(harness.ask(pauses[-1]))
    assert pauses == [FIRST_RETRY_S, 60, 120, 240, 480, REFRESH_S, REFRESH_S]
    source.listed = [TOOL]
    assert harness.ask(REFRESH_S) == REFRESH_S
    assert (harness.names(), harness.changes) == (["docs__echo"], 1)


def test_exception_in_one_refresh_does_not_end_the_refreshes() -> None:
    failed, refreshed = threading.Event(), threading.Event()
    harness = Harness(FakeSource())
    results: Iterator[Any] = iter([RuntimeError("a bug of ours")])

    def list_due_servers() -> float:
        failure = next(results, None)
        if failure is not None:
            failed.set()
            raise failure
        refreshed.set()
        return REFRESH_S

    harness.servers.list_due_servers = list_due_servers  # type: ignore[method-assign]
    harness.servers.again_s = 0.01
    harness.servers.start()
    assert failed.wait(5)
    assert refreshed.wait(5)
    harness.servers.stop()


@pytest.mark.parametrize("method", ["list_tools", "import_tools", "build"])
def test_exception_for_one_server_does_not_delay_another(method: str) -> None:
    """The bug stays: each refresh meets it first."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    bad, good = FakeSource(listed=[_tool("bad")], name="bad"), FakeSource(listed=[_tool("one")], name="good")
    working = getattr(bad, method)
    setattr(bad, method, fail)
    harness = Harness(bad, good)
    with capture_logs() as logs:
        harness.ask()
    assert harness.names() == ["good__one"]
    assert [entry["server"] for entry in logs if entry["event"] == "mcp_server_failed"] == ["bad"]
    setattr(bad, method, working)
    harness.ask(REFRESH_S)
    assert harness.names() == ["bad__bad", "good__one"]


def test_refresh_adds_replaces_and_removes_tools() -> None:
    source = FakeSource(listed=[_tool("one"), _tool("two", "old")])
    harness = Harness(source)
    harness.ask()
    source.listed = [_tool("two", "new"), _tool("three")]
    harness.ask(REFRESH_S)
    assert harness.names() == ["docs__three", "docs__two"]
    two = harness.registry.get("mcp__docs__two")
    assert two.spec.description.endswith("new")
    assert harness.changes == 2


def test_unreachable_server_keeps_its_tools_and_is_retried_sooner() -> None:
    source = FakeSource()
    harness = Harness(source)
    harness.ask()
    assert (harness.ask(REFRESH_S - 1), source.requests) == (1, 1)
    with capture_logs() as logs:
        harness.ask(1)
    assert (logs, harness.changes) == ([], 1), "the same list is no change"
    source.listed = None
    with capture_logs() as logs:
        assert harness.ask(REFRESH_S) == FIRST_RETRY_S
    assert [log["event"] for log in logs] == ["mcp_server_silent"]
    assert harness.names() == ["docs__echo"]
    assert harness.changes == 1


def test_registered_tool_is_never_replaced_by_an_mcp_tool() -> None:
    harness = Harness(FakeSource())
    [imported] = import_tools("docs", HttpEntry(url="https://tools.example/mcp"), [TOOL], "tools")
    registered = WorkerTool(imported.spec, lambda arguments, bench: Outcome("ours"))
    harness.registry.register(registered)
    harness.ask()
    assert harness.registry.get("mcp__docs__echo") is registered


# Other processes


def test_forked_pool_process_sees_later_tools() -> None:
    source = FakeSource()
    harness = Harness(source)
    harness.ask()
    start_reader, start_writer = os.pipe()
    result_reader, result_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(start_reader, 1)
        harness.servers.copy_updates()
        os.write(result_writer, f"{harness.names()} {source.is_sessionless}".encode())
        os._exit(0)
    source.listed = [_tool("later")]
    harness.ask(REFRESH_S)
    os.write(start_writer, b"x")
    assert os.read(result_reader, 1000).decode() == "['docs__later'] True"
    os.waitpid(child, 0)
    for fd in (start_reader, start_writer, result_reader, result_writer):
        os.close(fd)


def test_a_missing_task_is_an_error_after_one_lookup() -> None:
    tasks, requests = LiveTasks(), []
    tasks.find = requests.append
    with pytest.raises(tasks.NotRegistered):
        tasks["tool.none"]
    assert requests == ["tool.none"]
