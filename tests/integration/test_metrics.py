"""Metrics of a real stack: exact counts of successful, failed, killed and refused calls, also across restarts of the
counting processes.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
from docker import APIClient

from tests.repository.test_metric_files import promtool
from tests.support.stack.metric_harness import Key, key, nonzero_samples, read_page
from tests.support.stack.stack import UP_S, Stack, open_stack
from tests.support.stack.waiting import wait_until_async
from toolcrew.orchestrator.metrics.page import render_metrics
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.connection import open_redis
from toolcrew.store.metrics import metrics_key
from toolcrew.workers.sandbox_client import SandboxClient

pytestmark = pytest.mark.stack

STARTS = key("toolcrew_sandbox_start_seconds_count")


@pytest.fixture(scope="module")
def stack(engine: APIClient) -> Iterator[Stack]:
    """Yield a separate stack, because its counts must be exact."""
    with open_stack(engine) as opened:
        yield opened
        assert opened.end() == 0
        opened.footprint.assert_nothing_left()


@pytest.fixture
async def session(stack: Stack) -> AsyncIterator[Session]:
    async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as opened:
        yield opened


async def scrape(stack: Stack) -> dict[Key, float]:
    client = open_redis(stack.broker)
    try:
        return dict(read_page(await render_metrics(client, stack.broker.deployment)))
    finally:
        await client.aclose()


async def scrape_until(
    stack: Stack, is_so: Callable[[Mapping[Key, float]], bool], expectation: str
) -> dict[Key, float]:
    """Return the first page that meets the condition. Counts appear one to three seconds late."""
    pages = list[dict[Key, float]]()

    def look() -> bool:
        pages.append(asyncio.run(scrape(stack)))
        return is_so(pages[-1])

    await wait_until_async(look, UP_S, lambda: f"{expectation}: {pages[-1]}")
    return pages[-1]


def calls(page: Mapping[Key, float], before: Mapping[Key, float]) -> dict[tuple[str, ...], float]:
    """Return the new tool calls by (code, status, tool)."""
    now, then = nonzero_samples(page, "toolcrew_tool_calls_total"), nonzero_samples(before, "toolcrew_tool_calls_total")
    return {
        labels: number - then.get(labels, 0)
        for labels, number in now.items()
        if number != then.get(labels, 0) and "session." not in labels[2]
    }


def starts(stack: Stack) -> float:
    """Return the number of sandbox starts that sandboxd has counted since its start."""
    with SandboxClient(stack.info.sandboxd_socket) as sandboxd:
        return float(sandboxd.status()["counts"]["starts"]["count"])


async def test_every_call_is_counted_once_by_its_result(stack: Stack, session: Session) -> None:
    before = await scrape(stack)
    for _ in range(3):
        assert (await session.call("bash_tool", {"command": "echo hi"})).success
    assert not (await session.call("read_tool", {"file_path": "nothing.txt"})).success
    killed = await session.call("bash_tool", {"command": "sleep 60"}, timeout_s=1)
    assert killed.kill is not None
    assert not (await session.call("bash_tool", {"command": "rm -rf /"})).success
    assert not (await session.call("no_such_tool", {})).success

    def has_all(page: Mapping[Key, float]) -> bool:
        kills = nonzero_samples(page, "toolcrew_sandbox_kills_total")
        has_ours = kills != nonzero_samples(before, "toolcrew_sandbox_kills_total") and nonzero_samples(
            page, "toolcrew_host_sandboxes"
        )
        return sum(calls(page, before).values()) >= 7 and bool(has_ours)

    page = await scrape_until(stack, has_all, "all are counted")
    assert calls(page, before) == {
        ("", "ok", "bash_tool"): 3,
        ("FILE_NOT_FOUND", "error", "read_tool"): 1,
        ("TIMEOUT", "error", "bash_tool"): 1,
        ("SECURITY_REFUSED", "error", "bash_tool"): 1,
        ("TOOL_NOT_FOUND", "error", "other"): 1,
    }
    assert nonzero_samples(page, "toolcrew_security_refusals_total") == {("SECURITY_REFUSED",): 1}
    assert page[key("toolcrew_tool_duration_seconds_count", tool="bash_tool")] == 4
    assert page[key("toolcrew_sandbox_start_seconds_count")] >= 1
    assert sum(nonzero_samples(page, "toolcrew_sandbox_kills_total").values()) == 1
    assert list(nonzero_samples(page, "toolcrew_host_sandboxes").values()) == [1]
    assert page[key("toolcrew_redis_memory_used_bytes")] > 0


async def test_calls_of_two_clients_that_close_at_once_are_all_counted(stack: Stack) -> None:
    before = await scrape(stack)

    async def work() -> None:
        async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
            await asyncio.gather(*(session.call("glob_tool", {"pattern": "*"}) for _ in range(5)))

    await asyncio.gather(work(), work())
    assert calls(await scrape(stack), before) == {("", "ok", "glob_tool"): 10}


async def test_a_restarted_worker_counts_no_start_of_its_sandboxd_twice(stack: Stack) -> None:
    await scrape_until(stack, lambda page: page[STARTS] == starts(stack), "what sandboxd counted is taken over")
    pid = stack.pid("worker")
    os.kill(pid, signal.SIGKILL)
    with SandboxClient(stack.info.sandboxd_socket) as sandboxd:
        name = await asyncio.to_thread(sandboxd.open, "default", "meanwhile")
        await asyncio.to_thread(sandboxd.close, name)
    stack.wait_for_another("worker", pid)
    result = starts(stack)
    page = await scrape_until(
        stack, lambda page: page[STARTS] >= result, "what was started meanwhile is counted by the next worker"
    )
    assert page[STARTS] == result


async def test_a_restarted_sandboxd_adds_to_the_previous_counts(stack: Stack) -> None:
    before = await scrape_until(
        stack, lambda page: page[STARTS] == starts(stack), "what sandboxd counted is taken over"
    )
    pid = stack.pid("sandboxd")
    os.kill(pid, signal.SIGKILL)
    stack.wait_for_another("sandboxd", pid)
    # A new sandboxd checks the profile on a sandbox.
    page = await scrape_until(stack, lambda page: page[STARTS] > before[STARTS], "the next sandboxd's proof is counted")
    assert page[STARTS] == before[STARTS] + starts(stack)
    went_back = {
        key: number
        for key, number in before.items()
        if key[0].endswith(("_total", "_count")) and page.get(key, 0) < number
    }
    assert went_back == {}


async def test_promtool_accepts_the_page(stack: Stack) -> None:
    client = open_redis(stack.broker)
    try:
        promtool("check", "metrics", text=await render_metrics(client, stack.broker.deployment))
        page = await render_metrics(client, stack.broker.deployment, is_open=True)
        assert read_page(page, is_open=True)[key("toolcrew_build_info", release="1")] == 1
        assert await client.exists(metrics_key(stack.broker.deployment))
    finally:
        await client.aclose()
