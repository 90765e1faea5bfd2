"""The publisher of a batch's events."""

import asyncio
from typing import Any

import redis.asyncio

from contract.run_events import BatchNotice
from orchestrator.runs.event_publisher import RunEventPublisher
from store.run_events import BatchEventReader
from tests.conftest import RedisProcess


class LateReplies(redis.asyncio.Redis):
    """A connection on which the first reply to a pipeline arrives late. `executed`: Redis has executed the pipeline."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.executed, self.may_arrive = asyncio.Event(), asyncio.Event()

    def pipeline(self, *arguments: Any, **fields: Any) -> Any:
        pipe = super().pipeline(*arguments, **fields)
        execute = pipe.execute

        async def execute_late() -> Any:
            reply = await execute()
            self.executed.set()
            await self.may_arrive.wait()
            return reply

        pipe.execute = execute_late  # type: ignore[method-assign,assignment]
        return pipe


async def test_a_flush_during_a_write_writes_each_event_once(redis_server: RedisProcess) -> None:
    async with LateReplies.from_url(redis_server.url, socket_timeout=5) as client:
        publisher = RunEventPublisher(client, "d")
        publisher.add("acme", "b", BatchNotice(message="first"))
        await client.executed.wait()
        publisher.add("acme", "b", BatchNotice(message="last"))
        asyncio.get_running_loop().call_later(0.05, client.may_arrive.set)
        await publisher.flush()
        events = await BatchEventReader(client, "d", "acme", "b").read(0)
    assert [getattr(event, "message", "") for event in events] == ["first", "last"]
