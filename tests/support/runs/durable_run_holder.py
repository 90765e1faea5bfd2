"""A process that executes one run of tenant acme until a test kills the process. The model calls a tool in each step,
and the second call never ends.

python -m tests.support.runs.durable_run_holder REDIS_URL
"""

import asyncio
import sys
from typing import Any

import redis.asyncio

from tests.support.runs.durable_run_harness import DurableRunHarness
from tests.support.runs.item_harness import echo_then
from tests.support.sandboxd.fake_hosts import MemorySessionStore
from toolcrew.contract.calls import ToolResult


async def hang_at_the_second(call: Any, _: Any) -> ToolResult:
    if call.arguments["text"] == "two":
        await asyncio.get_running_loop().create_future()
    return ToolResult(call_id=call.id, name=call.name, success=True, output="said one")


async def work(url: str) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        harness = DurableRunHarness(
            client, echo_then("never", "one", "two"), places=MemorySessionStore(), answers={"echo": hang_at_the_second}
        )
        await harness.runner().run()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
