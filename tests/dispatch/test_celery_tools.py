"""Tasks of a user's Celery application as tools: on its own broker and its own worker."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from tests.support.redis.redis_harness import open_server
from tests.support.stack.celery_shop import connect, running_worker
from tests.support.stack.processes import read_proc
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew import ErrorCode, LocalTools, ToolCall, ToolResult
from toolcrew.celery import tools_from


class Shop:
    """The application with a running worker. `folder`: one line of the process for each run of a task."""

    def __init__(self, app: Celery, folder: Path) -> None:
        self.app = app
        self.folder = folder
        self.tools = LocalTools(tools_from(app, ["shop.*"]), timeout_s=60)

    async def call(self, tool: str, call_id: str, /, **arguments: object) -> ToolResult:
        return await self.tools.run_call(ToolCall(id=call_id, name=tool, arguments=arguments))

    def runs(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with open_server() as server, running_worker(server.url(), folder):
        yield Shop(connect(server.url()), folder)


def test_signatures_and_docstrings_become_specifications(shop: Shop) -> None:
    specs = {spec.name: spec for spec in shop.tools.specs()}
    assert set(specs) == {f"shop_{name}" for name in ("add", "collect", "fail", "flaky", "limited", "routed", "slow")}
    assert specs["shop_add"].description == "Add two numbers."
    assert specs["shop_add"].parameters["required"] == ["first"]
    assert specs["shop_add"].parameters["properties"]["first"]["description"] == "the first number"
    assert (specs["shop_limited"].timeout_s, specs["shop_add"].timeout_s) == (1.0, None)
    assert specs["shop_flaky"].parameters["properties"] == {}


async def test_a_call_is_one_task_of_the_application(shop: Shop) -> None:
    before = len(shop.runs("add"))
    assert (await shop.call("shop_add", "a1", first=40)).output == "42"
    assert (await shop.call("shop_add", "a1", first=40)).output == "42"
    assert len(shop.runs("add")) == before + 1
    refused = await shop.call("shop_add", "a2", first="many")
    assert refused.error_code is ErrorCode.INVALID_ARGUMENTS
    assert len(shop.runs("add")) == before + 1


async def test_retries_routes_and_errors_are_those_of_the_task(shop: Shop) -> None:
    flaky, routed, failed, late = await asyncio.gather(
        shop.call("shop_flaky", "f1"),
        shop.call("shop_routed", "r1"),
        shop.call("shop_fail", "e1", text="no such shop"),
        shop.call("shop_limited", "l1"),
    )
    assert (flaky.output, len(shop.runs("flaky"))) == ("third", 3)
    assert routed.output == "other"
    assert (failed.success, failed.error) == (False, "LookupError: no such shop")
    assert late.error_code is ErrorCode.TIMEOUT


async def test_a_cancelled_call_revokes_its_task(shop: Shop) -> None:
    running = asyncio.ensure_future(shop.call("shop_slow", "s1", name="cancelled"))
    await wait_until_async(lambda: len(shop.runs("cancelled")) == 1, SOON_S, "the task runs")
    (process,) = shop.runs("cancelled")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await wait_until_async(lambda: not read_proc(process, "cmdline"), SOON_S, "the process of the task has ended")


async def test_a_call_that_reaches_its_limit_revokes_its_task(shop: Shop) -> None:
    tools = LocalTools(tools_from(shop.app, ["shop.slow"], timeout_s=2.0))
    call = ToolCall(id="s2", name="shop_slow", arguments={"name": "late"})
    assert (await tools.run_call(call)).error_code is ErrorCode.TIMEOUT
    for process in shop.runs("late"):
        await wait_until_async(lambda pid=process: not read_proc(pid, "cmdline"), SOON_S, "its process has ended")


def test_applications_and_tasks_without_a_form_are_refused() -> None:
    with pytest.raises(TypeError, match="result_backend"):
        tools_from(Celery("silent", broker="memory://"))
    app = Celery("odd", broker="memory://", backend="cache+memory://")
    for name in ("a.b", "a_b"):
        app.task(name=name)(_echo)
    with pytest.raises(TypeError, match="a_b"):
        tools_from(app)
    assert [tool.spec.name for tool in tools_from(app, ["a.b"])] == ["a_b"]


def _echo(text: str) -> str:
    return text
