"""The example package of docs/add-a-tool.md, installed and served by a real worker next to the stack: state,
configuration, model and limits.
"""

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hatchling.build import build_wheel

from tests.support.stack.stack import ROOT, Stack, children_of
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.calls import ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import catalog_key
from toolcrew.orchestrator.approvals import AutoApprover
from toolcrew.orchestrator.dispatch.request import Request
from toolcrew.orchestrator.models.scripted import Calls, Raw, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

EXAMPLE = ROOT / "examples" / "order_tools"
PROBES = '''
"""Tools that misbehave, which no example shows."""

import asyncio, os, time

from toolcrew import CallContext, tool


@tool
def where_am_i() -> int:
    """The process."""
    return os.getpid()


@tool
def context_of_call(context: CallContext) -> dict[str, object]:
    """Shows what the tool knows of its call."""
    return {"cwd": context.cwd, "config": dict(context.config)}


@tool
def count(context: CallContext, times: int) -> int:
    """Counts in the session's state."""
    for _ in range(times):
        n = context.wait(context.state.update("n", lambda n: (n or 0) + 1))
    return n


@tool
async def sleep_async(seconds: float) -> None:
    """Sleeps on the loop."""
    await asyncio.sleep(seconds)


@tool
def sleep(seconds: float) -> None:
    """Sleeps, and takes no for an answer to exceptions only."""
    try:
        time.sleep(seconds)
    except Exception:
        time.sleep(seconds)


@tool
def leave() -> None:
    """Ends the process, as far as Python lets it."""
    raise SystemExit(1)


@tool
def flood() -> str:
    """Writes much."""
    return "line\\n" * 100_000


@tool
async def ask_often(context: CallContext, times: int) -> list[str]:
    """Asks the model at once."""
    return [completion.text for completion in await asyncio.gather(*(context.require_model().complete(f"q{n}") for n in range(times)))]
'''


@dataclass
class Harness:
    """A worker of operators' tools next to the shared stack."""

    worker: "subprocess.Popen[bytes]"
    log: Path


@pytest.fixture(scope="module")
def harness(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    place = tmp_path_factory.mktemp("desk")
    # The same result as pip, in a tenth of the time.
    with contextlib.chdir(EXAMPLE):
        wheel = place / build_wheel(str(place))
    zipfile.ZipFile(wheel).extractall(place)
    (place / "probe_tools.py").write_text(PROBES)
    settings = {
        "PYTHONPATH": str(place),
        "TOOLCREW_REDIS_URL": stack.redis_url,
        "TOOLCREW_WORKER_KIND": "web",
        "TOOLCREW_WORKER_QUEUES": '["pool.tools"]',
        "TOOLCREW_TOOL_MODULES": '["probe_tools"]',
        "TOOLCREW_TOOL_CONFIG": '{"currency": "JPY"}',
        "TOOLCREW_HOST": "desk",
        "TOOLCREW_CONCURRENCY": "2",
    }
    log, key = place / "worker.log", catalog_key("default", "tools")
    with log.open("wb") as out, stack.open_redis() as store:
        worker = subprocess.Popen(
            [sys.executable, "-m", "toolcrew.workers"],
            env=stack.footprint.environment(settings),
            stdout=out,
            stderr=out,
        )
        try:
            wait_until(lambda: store.exists(key) or worker.poll() is not None, SOON_S, "the worker is ready")
            assert worker.poll() is None, log.read_text()
            yield Harness(worker, log)
        finally:
            # Other tests cover the end of workers. An orderly end takes seconds.
            worker.kill()
            worker.wait()
            # The next test on this stack finds the stack unchanged.
            store.delete(key)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fresh_client(stack: Stack, harness: Harness) -> AsyncIterator[ToolClient]:
    """Yield a client that has not read the catalog before the worker started."""
    async with ToolClient.connect(stack.redis_url, approver=AutoApprover()) as connected:
        yield connected


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tool_session(fresh_client: ToolClient) -> AsyncIterator[Session]:
    """Yield one session for all tests, because their tools need no sandbox."""
    async with await fresh_client.open_session() as opened:
        yield opened


async def send(session: Session, name: str, arguments: Mapping[str, Any] | None = None, **fields: Any) -> ToolResult:
    made = ToolCall(id=secrets.token_hex(8), name=name, arguments=dict(arguments or {}))
    return await session.send(Request(made, session.tenant, session.id, **fields))


async def call(session: Session, name: str, timeout_s: float | None = None, **arguments: Any) -> Any:
    result = await session.call(name, arguments, timeout_s=timeout_s)
    assert result.success, result.error
    return json.loads(result.output or "null")


async def test_an_installed_package_serves_its_tools_and_keeps_session_state(
    fresh_client: ToolClient, tool_session: Session
) -> None:
    specs = {spec.name: spec for spec in await fresh_client.tools()}
    assert {"add_to_basket", "quote_basket", "place_order", "word_thanks", "where_am_i", "bash_tool"} <= specs.keys()
    assert (specs["place_order"].requires_permission, specs["quote_basket"].timeout_s) == (True, 5)
    await call(tool_session, "add_to_basket", article="lamp", pieces=2)
    assert await call(tool_session, "add_to_basket", article="chair") == {"lamp": 2, "chair": 1}
    assert await call(tool_session, "quote_basket") == {"total": 170.0, "currency": "JPY"}
    async with await fresh_client.open_session() as other:
        assert (await call(other, "quote_basket"))["total"] == 0


async def test_a_tool_outside_of_the_sandbox_gets_the_shells_folder_and_the_callers_configuration(
    fresh_client: ToolClient, stack: Stack
) -> None:
    """Requirement S4-13: the context of a tool has the current configuration and the working directory."""
    config = {"context_of_call": {"units": ["kg"], "currency": "EUR"}, "count": {"step": 2}}
    # The operator's settings replace the caller's.
    given = {"units": ["kg"], "currency": "JPY"}
    async with await fresh_client.open_session(tool_config=config) as session:
        assert await call(session, "context_of_call") == {"cwd": "/workspace", "config": given}
        await session.call("bash_tool", {"command": "mkdir -p a/b && cd a/b"})
        assert await call(session, "context_of_call") == {"cwd": "/workspace/a/b", "config": given}
        # A command that only starts in a folder does not move the session.
        await session.call("bash_tool", {"command": "true", "cwd": "/workspace"})
        fork = (await session.fork())[0]
        async with fork, ToolClient.connect(stack.redis_url, approver=AutoApprover()) as other:
            # Another program, which has not opened the session.
            attached = await other.session(fork.id)
            assert await call(attached, "context_of_call") == {"cwd": "/workspace/a/b", "config": given}
            assert (await attached.call("bash_tool", {"command": "pwd; cd /tmp"})).output.startswith("/workspace/a/b")
            assert (await call(attached, "context_of_call"))["cwd"] == "/tmp"
        assert (await call(session, "context_of_call"))["cwd"] == "/workspace/a/b"


async def test_a_configuration_for_an_unknown_tool_is_refused(fresh_client: ToolClient) -> None:
    with pytest.raises(ToolFailure) as refused:
        await fresh_client.open_session(tool_config={"context_of_cal": {}})
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert "context_of_cal" in refused.value.message


async def test_processes_of_the_pool_share_session_state_without_lost_updates(tool_session: Session) -> None:
    await asyncio.gather(*(call(tool_session, "count", times=10) for _ in range(4)))
    assert await call(tool_session, "count", times=1) == 41


async def test_a_tool_uses_the_model_of_the_run_and_the_run_is_charged(fresh_client: ToolClient) -> None:
    counted = {"choices": [], "usage": {"prompt_tokens": 7000, "completion_tokens": 3000}}

    def reply(messages: list[Any]) -> Any:
        content = str(messages[-1]["content"])
        if content.startswith("Thank"):
            return Raw([{"choices": [{"delta": {"content": f"<{content}>"}}]}, counted])
        return content if messages[-1]["role"] == "tool" else Calls([("word_thanks", {"customer": "Ada"})])

    result = await fresh_client.run(
        "Say thanks to Ada.", model=ScriptedModel(reply), dialect="native", tools=["word_thanks"]
    )
    assert result.answer == "<Thank Ada for an order, in one friendly sentence.>"
    assert 7000 < result.usage.prompt_tokens < 8000
    assert 3000 < result.usage.completion_tokens < 4000


async def test_a_call_whose_caller_has_no_model_is_refused(tool_session: Session) -> None:
    none = await tool_session.call("word_thanks", {"customer": "Ada"})
    assert (none.error_code, "its caller has none" in str(none.error)) == (ErrorCode.CONFIG_MISSING, True)
    # A session that names a model and receives no questions.
    deaf = await send(tool_session, "word_thanks", {"customer": "Ada"}, model="named")
    assert (deaf.error_code, "no model" in str(deaf.error)) == (ErrorCode.CONFIG_MISSING, True)


@pytest.mark.parametrize("name", ["sleep", "sleep_async"])
async def test_a_tool_is_stopped_at_its_limit_and_the_next_call_works(tool_session: Session, name: str) -> None:
    result = await tool_session.call(name, {"seconds": 30}, timeout_s=0.3)
    assert (result.error_code, "limit of 0.3 s" in str(result.error)) == (ErrorCode.TIMEOUT, True)
    assert await call(tool_session, "where_am_i") > 0


async def test_a_tool_that_raises_system_exit_fails_its_call_and_not_the_worker(
    harness: Harness, tool_session: Session
) -> None:
    before = set(children_of(harness.worker.pid))
    result = await tool_session.call("leave", {})
    assert (result.error_code, result.error) == (ErrorCode.INTERNAL, "SystemExit: 1")
    assert set(children_of(harness.worker.pid)) == before
