"""Calls with live output for the caller: from a tool's `show` to the program's function and the run's events."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.redis.switched_pool import SwitchedPool
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.workers.tools.base import Outcome, ToolEnvironment, WorkerTool

pytestmark = pytest.mark.usefixtures("quiet_logs")


class Tools:
    """Tools that show their progress, and record their tool environment."""

    def __init__(self) -> None:
        self.watched: list[bool] = []
        self.may_end = threading.Event()

    def count(self, _: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        self.watched.append(bench.is_watched)
        for number in range(3):
            bench.show("stdout", f"{number}\n")
        return Outcome("0\n1\n2\n")

    def fail(self, _: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        bench.show("stderr", "it breaks")
        raise ToolFailure(ErrorCode.NO_MATCH, "broken")

    def bug(self, _: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        bench.show("stdout", "so far")
        raise RuntimeError("a bug")

    def wait(self, _: dict[str, Any], bench: ToolEnvironment) -> Outcome:
        bench.show("stdout", "begun")
        assert self.may_end.wait(5)
        bench.show("stdout", "late")
        return Outcome("ended")


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
def pool(redis_server: RedisProcess, tools: Tools) -> SwitchedPool:
    handlers = {"count": tools.count, "fail": tools.fail, "bug": tools.bug, "wait": tools.wait}
    return SwitchedPool(redis_server, *(WorkerTool(build_spec(name), handler) for name, handler in handlers.items()))


@pytest.fixture
async def client(pool: SwitchedPool) -> AsyncIterator[ToolClient]:
    async with pool.client() as opened:
        yield opened


class Screen:
    def __init__(self) -> None:
        self.text = ""

    def show(self, _: str, text: str) -> None:
        self.text += text


async def test_tool_environment_reports_whether_a_client_watches(
    pool: SwitchedPool, client: ToolClient, tools: Tools
) -> None:
    session = await client.open_session()
    await session.call("count", {})
    await session.call("count", {}, on_output=Screen().show)
    assert tools.watched == [False, True]
    assert [context.events is not None for context in pool.transport.contexts] == [False, True]


@pytest.mark.parametrize(
    ("name", "expected", "code"), [("fail", "it breaks", "NO_MATCH"), ("bug", "so far", "INTERNAL")]
)
async def test_output_of_a_failing_call_arrives(client: ToolClient, name: str, expected: str, code: str) -> None:
    screen = Screen()
    result = await (await client.open_session()).call(name, {}, on_output=screen.show)
    assert (screen.text, result.error_code) == (expected, code)


async def test_a_repeated_call_id_joins_the_first_call_without_its_events(client: ToolClient, tools: Tools) -> None:
    has_output, pieces = asyncio.Event(), list[str]()

    def on_output(_: str, text: str) -> None:
        pieces.append(text)
        has_output.set()

    session = await client.open_session()
    first = asyncio.create_task(session.call("wait", {}, call_id="same", on_output=on_output))
    async with asyncio.timeout(SOON_S):
        await has_output.wait()
    repeated = asyncio.create_task(session.call("wait", {}, call_id="same", on_output=on_output))
    other = await session.call("wait", {"other": 1}, call_id="same")
    tools.may_end.set()
    assert (await first).output == (await repeated).output == "ended"
    assert (other.error_code, "".join(pieces)) == (ErrorCode.INVALID_ARGUMENTS, "begunlate")


@pytest.mark.parametrize(
    "listener", [{}, {"on_event": lambda _: None, "shows_output": False}], ids=["no listener", "not to output"]
)
async def test_run_without_an_output_reader_requests_no_events(
    pool: SwitchedPool, client: ToolClient, listener: dict[str, Any]
) -> None:
    model = ScriptedModel([Calls([("count", {})]), "ok"])
    await client.run("go", session=await client.open_session(), model=model, **listener)
    assert [context.events for context in pool.transport.contexts] == [None]
