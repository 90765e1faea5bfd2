"""Budgets of tenants: refused calls, notices, resets, and runs that end at their next step."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from tests.conftest import RedisProcess
from tests.support.records.builders import KEY, build_spec
from toolcrew.contract.calls import SessionUsage, ToolCall, ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.tenancy import Budgets, TenantPolicy
from toolcrew.orchestrator.dialects.model import TokenUsage
from toolcrew.orchestrator.dialects.native import NativeDialect
from toolcrew.orchestrator.dispatch.tenant_catalog import CallRules
from toolcrew.orchestrator.loop.agent import Agent
from toolcrew.orchestrator.loop.limits import ReActOptions, StopReason
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.runs.journal import MemoryJournal
from toolcrew.orchestrator.runs.model_account import ModelAccount
from toolcrew.orchestrator.runs.outcomes import judge_run
from toolcrew.orchestrator.runs.run_gate import UngatedRun
from toolcrew.orchestrator.runs.run_model import RunModel
from toolcrew.store.audit import Audit
from toolcrew.store.budgets import BudgetStore
from toolcrew.store.tenants import RedisTenants
from toolcrew.store.usage import DAY_S, ReplySpending, UsageStore, WorkerUsageStore, pack_amounts, usage_prefix

LIMITS = Budgets(cpu_s_per_day=10.0, tokens_per_month=1000, cost_per_day=2.0, stored_bytes_per_month=100)


class Harness:
    """A tenant `acme` with budgets, in two orchestrators, and a worker that reports what it used."""

    def __init__(self, server: RedisProcess, clients: list["redis.asyncio.Redis"]) -> None:
        self.client = clients[0]
        self.worker = WorkerUsageStore(server.client(), "d")
        self.tenants, self.other_process = (RedisTenants(client, "d", KEY) for client in clients)
        self.usage = UsageStore(self.client, "d")
        self.audit = Audit(self.client, "d")

    def use_cpu(self, cpu_s: float) -> None:
        """Report the CPU time of the session so far."""
        self.worker.count([("acme:s1", SessionUsage(meter="m1", cpu_s=cpu_s))])

    async def reply(self, tokens: int, cost: float = 0.0) -> None:
        await self.usage.count_reply("acme", "s1", ReplySpending(TokenUsage(tokens, 0), cost))

    async def refusal(self, tenants: RedisTenants | None = None) -> ToolFailure | None:
        """Return why a call is refused now, without the copies of the last second."""
        source = tenants or self.tenants
        source._budgets._read.clear()
        try:
            await CallRules(source).policy("acme", "bash_tool")
        except ToolFailure as failure:
            return failure
        return None

    async def notices(self) -> list[tuple[str, str]]:
        page = await self.audit.read(actions=("budget.warn", "budget.exceed"))
        return [(row.action, row.target) for row in page.entries][::-1]


@pytest.fixture
async def harness(redis_server: RedisProcess) -> AsyncIterator[Harness]:
    clients = [redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=5) for _ in range(2)]
    with capture_logs():
        opened = Harness(redis_server, clients)
        await opened.tenants.add("acme", TenantPolicy(budgets=LIMITS))
        yield opened
    for client in clients:
        await client.aclose()


async def test_an_exceeded_budget_refuses_calls_in_all_processes_after_a_warning(harness: Harness) -> None:
    harness.use_cpu(7.9)
    assert await harness.refusal() is None
    assert await harness.notices() == []
    harness.use_cpu(8.0)
    assert await harness.refusal() is None
    harness.use_cpu(10.0)
    for tenants in (harness.tenants, harness.other_process, harness.tenants):
        refusal = await harness.refusal(tenants)
        assert refusal is not None
        assert (refusal.code, refusal.metadata["budget"]) == (ErrorCode.BUDGET_EXCEEDED, "cpu_s_per_day")
        assert 0 < int(str(refusal.metadata["retry_after_s"])) <= DAY_S
        assert str(refusal.metadata["resets_at"]).endswith("T00:00:00Z")
    assert await harness.notices() == [("budget.warn", "cpu_s_per_day"), ("budget.exceed", "cpu_s_per_day")]
    # Only what ends work is still allowed.
    assert (await CallRules(harness.tenants).policy("acme", "session.close")).budgets == LIMITS


# With two used budgets, the error names the one that resets last.
@pytest.mark.parametrize(
    ("tokens", "cost", "budget"),
    [(1000, 0.0, "tokens_per_month"), (1, 2.0, "cost_per_day"), (1000, 2.0, "tokens_per_month")],
)
async def test_token_and_cost_budgets_refuse_calls(harness: Harness, tokens: int, cost: float, budget: str) -> None:
    await harness.reply(tokens, cost)
    refusal = await harness.refusal()
    assert refusal is not None
    assert refusal.metadata["budget"] == budget


async def test_monthly_usage_sums_days_and_daily_usage_resets(harness: Harness) -> None:
    now = (await harness.client.time())[0]
    yesterday = f"{usage_prefix('d', 'acme')}{now // DAY_S - 1}"
    await harness.client.hset(yesterday, mapping={"23": pack_amounts({"cpu_us": 99_000_000, "stored_bytes": 100})})
    states = {state.name: state for state in await harness.tenants.budgets("acme")}
    is_first_day = time.gmtime(now).tm_mday == 1
    assert states["cpu_s_per_day"].used == 0
    assert states["stored_bytes_per_month"].used == (0 if is_first_day else 100)


async def test_a_higher_limit_applies_at_once_and_elsewhere_after_the_cache_expires(harness: Harness) -> None:
    harness.use_cpu(10.0)
    assert await harness.refusal() is not None
    await harness.tenants.change(
        "acme", lambda policy: policy.model_copy(update={"budgets": Budgets(cpu_s_per_day=99)})
    )
    await CallRules(harness.tenants).policy("acme", "bash_tool")
    harness.other_process._cache.forget()
    assert await harness.refusal(harness.other_process) is None
    # The new limit has its own notice.
    harness.use_cpu(99.0)
    assert await harness.refusal() is not None
    assert len(await harness.notices()) == 2


async def test_a_run_over_budget_ends_at_its_next_step(harness: Harness) -> None:
    model = ScriptedModel([Calls([("echo", {})], "first"), "never asked"])
    account = ModelAccount(
        lambda: harness.tenants.check_budgets("acme"),
        lambda spending: harness.usage.count_reply("acme", "s1", spending),
    )
    billed = RunModel(model, account, MemoryJournal(account.count), UngatedRun(), {})

    async def run_call(call: ToolCall) -> ToolResult:
        harness.use_cpu(10.0)
        harness.tenants._budgets._read.clear()
        return ToolResult(call_id=call.id, name=call.name, success=True, output="did")

    agent = Agent(billed, NativeDialect(), [build_spec("echo")], run_call, options=ReActOptions(max_iterations=9))
    result = await agent.run("go")
    assert (result.stop_reason, result.answer, len(model.requests)) == (StopReason.BUDGET_EXCEEDED, "first", 1)
    failure = judge_run(result)
    assert failure is not None
    assert failure.code == ErrorCode.BUDGET_EXCEEDED


async def test_budget_checks_read_the_usage_once_per_cache_period(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = 0, BudgetStore.read

    async def count_read(self: BudgetStore, *arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read(self, *arguments)

    monkeypatch.setattr(BudgetStore, "read", count_read)
    for _ in range(100):
        await harness.tenants.check_budgets("acme")
    assert reads == 1
