"""Slow work of one tenant in threads delays the work of another by one piece of work at most."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from tests.support.records.builders import KEY
from toolcrew.concurrency.tenant_threads import TenantThreads, in_tenant_thread
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.batches.lines import BatchFile
from toolcrew.orchestrator.runs.client_batches import ClientBatches
from toolcrew.store.batches import BatchDefaults, BatchItem


async def test_tenants_take_turns_however_much_work_one_of_them_has() -> None:
    threads, order, may_run = TenantThreads(max_threads=1), list[str](), threading.Event()

    def work(name: str) -> None:
        may_run.wait(60)
        order.append(name)

    tasks = [
        asyncio.create_task(threads.run("greedy", lambda number=number: work(f"greedy-{number}")))
        for number in range(5)
    ]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(threads.run("other", lambda: work("other"))))
    await asyncio.sleep(0)
    may_run.set()
    await asyncio.gather(*tasks)
    assert order[:2] == ["greedy-0", "other"]
    assert order[2:] == [f"greedy-{number}" for number in range(1, 5)]


async def test_a_tenant_uses_one_thread_and_leaves_the_others_free() -> None:
    threads, may_end = TenantThreads(max_threads=2), threading.Event()
    slow = [asyncio.create_task(threads.run("slow", lambda: may_end.wait(60))) for _ in range(10)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run("other", lambda: "done"), 30) == "done"
    may_end.set()
    await asyncio.gather(*slow)


async def test_work_whose_caller_is_cancelled_counts_until_its_end() -> None:
    threads, may_end, has_begun = TenantThreads(max_threads=2), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(has_begun.set)
        may_end.wait(60)
        raise ValueError("no caller reads this")

    task = asyncio.create_task(threads.run("acme", work))
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    next_work = asyncio.create_task(threads.run("acme", lambda: "next"))
    await asyncio.sleep(0.05)
    assert not next_work.done()
    may_end.set()
    assert await next_work == "next"
    assert not threads._turns


async def test_the_errors_of_the_work_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_tenant_thread("acme", lambda: 1 // 0)


class _WasRead(Exception):
    """The lines were read in the thread with this name."""


class _WatchedItems(Sequence[BatchItem]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[BatchItem]:
        raise _WasRead(threading.current_thread().name)


class _KnownTenant:
    async def policy(self, tenant: str) -> TenantPolicy:
        return TenantPolicy()

    async def of(self, tenant: str) -> SimpleNamespace:
        return SimpleNamespace(tools=())


async def test_every_check_of_a_batch_reads_its_lines_in_the_thread_of_its_tenant() -> None:
    pool: Any = SimpleNamespace(
        redis=redis.asyncio.Redis(),
        keys=KEY,
        dispatcher=None,
        tenants=_KnownTenant(),
        offers=_KnownTenant(),
    )
    runs = ClientBatches(OrchestratorSettings(deployment="d"), pool, None, "acme")  # type: ignore[arg-type]
    file, defaults = BatchFile(_WatchedItems(), "", 1, None), BatchDefaults()
    for check in (
        runs.check_tools(file, "the body"),
        runs.check_models(file, defaults, "the body"),
        runs.check_limits(file, defaults, "the body"),
        runs.batches.submit(file, defaults=defaults, is_detached=True),
    ):
        with pytest.raises(_WasRead, match="tenant-acme"):
            await check
