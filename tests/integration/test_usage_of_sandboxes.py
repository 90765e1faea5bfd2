"""What calls and sessions use, compared with the counters of the sandbox's own control group."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from docker import APIClient

from tests.support.cli.command_server import run_toolcrew
from tests.support.sandboxd.containers import watch
from tests.support.stack.stack import Stack, all_of, commands_in, open_stack
from tests.support.stack.waiting import SOON_S, assert_in_force, wait_until_async
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.workers.sandboxd.metering import UsageReader

pytestmark = pytest.mark.stack

MIB = 1024 * 1024
BUSY_LOOP = "i=0; while [ $i -lt {loops}000 ]; do i=$((i+1)); done"


@pytest.fixture(scope="module", params=["oci", "engine"])
def metered_stack(engine: APIClient, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with open_stack(engine, {"TOOLCREW_SANDBOX_START": request.param}) as opened:
        yield opened


@pytest.fixture
async def client(metered_stack: Stack) -> AsyncIterator[ToolClient]:
    async with ToolClient.connect(metered_stack.redis_url) as connected:
        yield connected


async def reader_of(stack: Stack, session: Session) -> UsageReader:
    """Return a reader of the sandbox's own counters."""
    info = await session.info()
    assert info.sandbox is not None
    watched = watch(stack.api, info.sandbox.id)
    return UsageReader(info.sandbox.id, watched.pid)


async def bash(session: Session, command: str, call_id: str | None = None) -> float:
    """Return the CPU seconds that the result of a command reports."""
    result = await session.call("bash_tool", {"command": command}, call_id=call_id)
    assert result.usage is not None, result.error
    return result.usage.cpu_s


async def test_the_cpu_time_of_parallel_calls_adds_up_to_that_of_the_control_group(
    metered_stack: Stack, client: ToolClient
) -> None:
    async with await client.open_session() as session:
        reader = await reader_of(metered_stack, session)
        await bash(session, "true")
        before = reader.read().cpu_us / 1e6
        calls = [bash(session, BUSY_LOOP.format(loops=loops)) for loops in (40, 80, 120, 160)]
        used = sum(await all_of([*calls, *(bash(session, "true") for _ in range(6))], SOON_S))
        in_group = reader.read().cpu_us / 1e6 - before
        reader.close()
        assert in_group > 0.2
        assert used == pytest.approx(in_group, rel=0.02)


async def test_a_result_reports_peak_memory_and_written_bytes(client: ToolClient) -> None:
    async with await client.open_session() as session:
        written = await session.call(
            "bash_tool",
            {"command": f"head -c {8 * MIB} /dev/zero >file; b=$(head -c {32 * MIB} /dev/zero | tr '\\0' a)"},
        )
        idle = await session.call("bash_tool", {"command": "true"})
    assert written.usage is not None
    assert idle.usage is not None
    assert 32 * MIB < written.usage.memory_peak_bytes < 512 * MIB
    assert 8 * MIB <= written.usage.written_bytes < 9 * MIB
    assert idle.usage.memory_peak_bytes < written.usage.memory_peak_bytes
    assert idle.usage.written_bytes < MIB
    assert idle.usage.network_bytes == 0


async def test_session_totals_match_the_control_group_with_jobs_and_a_killed_worker(
    metered_stack: Stack, client: ToolClient
) -> None:
    began = time.time()
    session = await client.open_session()
    reader = await reader_of(metered_stack, session)
    job = await session.call("bash_tool", {"command": BUSY_LOOP.format(loops=150), "background": True})
    assert job.success, job.error
    sandbox = (await session.info()).sandbox
    assert sandbox is not None
    container, burn = metered_stack.full_id(sandbox.id), BUSY_LOOP.format(loops=9000)
    lost = asyncio.create_task(session.call("bash_tool", {"command": f"bash -c '{burn}'"}))
    await wait_until_async(lambda: f"bash -c {burn}" in commands_in(container).values(), SOON_S, "the command runs")
    worker = metered_stack.pid("worker")
    os.kill(worker, signal.SIGKILL)
    metered_stack.wait_for_another("worker", worker)
    assert (await lost).error_code is ErrorCode.OUTCOME_UNKNOWN
    await bash(session, BUSY_LOOP.format(loops=100))
    in_group = reader.read().cpu_us / 1e6
    reader.close()
    counted = await client.session_usage(session.id)
    await session.close()

    assert in_group > 0.2
    assert counted["cpu_s"] == pytest.approx(in_group, rel=0.02)

    async def is_counted() -> bool:
        return (await client.session_usage(session.id))["sandbox_s"] > counted["sandbox_s"]

    await wait_until_async(is_counted, SOON_S, "the time until the close is counted")
    total = (await client.session_usage(session.id))["sandbox_s"]
    assert 0 < total <= time.time() - began
    rows = await client.usage(began, time.time())
    assert sum(row.amounts["cpu_us"] for row in rows) / 1e6 >= in_group * 0.98


async def test_a_budget_takes_effect_in_every_process_within_two_seconds(
    metered_stack: Stack, client: ToolClient
) -> None:
    def set_limit(*options: str) -> None:
        environment = {"TOOLCREW_REDIS_URL": metered_stack.redis_url}
        done = run_toolcrew(metered_stack.footprint, "tenants", "set", "default", *options, environment=environment)
        assert done.returncode == 0, done.stderr

    session = await client.open_session()
    assert (await session.call("bash_tool", {"command": "true"})).success
    await asyncio.to_thread(set_limit, "--cpu-s-per-day", "0.001")
    results = list[ToolResult]()

    async def is_refused() -> bool:
        results.append(await session.call("bash_tool", {"command": "true"}))
        return not results[-1].success

    try:
        await assert_in_force(is_refused)
        refused = results[-1]
        assert refused.error_code is ErrorCode.BUDGET_EXCEEDED
        assert refused.metadata["budget"] == "cpu_s_per_day"
        await session.close()
    finally:
        await asyncio.to_thread(set_limit, "--unset", "cpu-s-per-day")
