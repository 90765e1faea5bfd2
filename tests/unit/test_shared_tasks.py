"""Tasks that one call starts and all calls use: they continue without the name of the first call."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import redis.asyncio
import structlog

from orchestrator.admission import SharedAdmission
from store.tasks import begin_shared
from telemetry.logs import bound
from tests.admission_harness import DEPLOYMENT, build_request, set_slots
from tests.conftest import RedisProcess

Begun = dict[str, list[dict[str, Any]]]


@pytest.fixture
async def begun() -> AsyncIterator[Begun]:
    """Record the log context in which each task starts, by the name of its coroutine."""
    begun: Begun = {}

    def begin(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
        names = {} if "context" in options else structlog.contextvars.get_contextvars()
        begun.setdefault(work.__qualname__, []).append(names)
        return asyncio.Task(work, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(begin)  # type: ignore[arg-type]
    yield begun
    loop.set_task_factory(None)


async def test_a_shared_task_does_not_know_who_began_it() -> None:
    async def names() -> dict[str, Any]:
        return structlog.contextvars.get_contextvars()

    with bound(call="first"):
        assert await asyncio.create_task(names()) == {"call": "first"}
        assert await begin_shared(names(), "shared") == {}


async def test_the_tasks_of_admission_have_no_call_context(redis_server: RedisProcess, begun: Begun) -> None:
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
    assert begun["SharedAdmission._keep"] == [{}]
    assert begun["ScriptConnection._open"] == [{}]
    assert begun["GrantListener.run"] == [{}]
