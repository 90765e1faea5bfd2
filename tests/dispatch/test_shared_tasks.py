"""Tasks that one call starts and all calls use: they continue without the name of the first call."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import redis.asyncio
import structlog

from tests.conftest import RedisProcess
from tests.support.redis.admission_harness import DEPLOYMENT, build_request, set_slots
from toolcrew.concurrency.tasks import begin_shared
from toolcrew.orchestrator.admission import SharedAdmission
from toolcrew.telemetry.logs import bound

StartedTasks = dict[str, list[dict[str, Any]]]


@pytest.fixture
async def started_tasks() -> AsyncIterator[StartedTasks]:
    """Record the log context in which each task starts, by the name of its coroutine."""
    started_tasks: StartedTasks = {}

    def begin(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
        names = {} if "context" in options else structlog.contextvars.get_contextvars()
        started_tasks.setdefault(work.__qualname__, []).append(names)
        return asyncio.Task(work, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(begin)  # type: ignore[arg-type]
    yield started_tasks
    loop.set_task_factory(None)


async def test_shared_task_has_no_log_context_of_its_first_call() -> None:
    async def names() -> dict[str, Any]:
        return structlog.contextvars.get_contextvars()

    with bound(call="first"):
        assert await asyncio.create_task(names()) == {"call": "first"}
        assert await begin_shared(names(), "shared") == {}


async def test_admission_tasks_have_no_call_context(redis_server: RedisProcess, started_tasks: StartedTasks) -> None:
    with redis_server.client() as client:
        set_slots(client, 1)
    async with redis.asyncio.Redis.from_url(redis_server.url) as connected:
        admission = SharedAdmission(connected, DEPLOYMENT)
        try:
            with bound(call="first"):
                async with admission.slot(build_request()):
                    pass
        finally:
            await admission.aclose()
    assert started_tasks["SharedAdmission._keep"] == [{}]
    assert started_tasks["ScriptConnection._open"] == [{}]
    assert started_tasks["GrantListener.run"] == [{}]
