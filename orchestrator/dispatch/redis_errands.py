"""Commands whose answers nobody waits for: in order, and many in one round trip when there are many."""

import asyncio

import redis.asyncio
from redis.exceptions import RedisError

from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

AT_ONCE = 1000
RETRY_S = 0.5

Command = tuple[str | bytes | int, ...]


class Errands:
    """One connection, used while there is something to do. Repeated after an outage: only for commands that may be."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._waiting: list[Command] = []
        self._come = asyncio.Event()
        self._done = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, *commands: Command) -> None:
        """To be sent soon, behind all that was added before."""
        self._waiting += commands
        self._done.clear()
        self._come.set()
        if self._task is None:
            self._task = begin_shared(self._run(), "errands")

    async def close(self, within_s: float) -> None:
        """Send what waits, as far as that can be done in time."""
        if self._task is None:
            return
        await asyncio.wait({self._task, waiting := asyncio.create_task(self._done.wait())}, timeout=within_s, return_when="FIRST_COMPLETED")
        waiting.cancel()
        await cancel_all((self._task,))

    async def _run(self) -> None:
        while True:
            await self._come.wait()
            self._come.clear()
            while self._waiting:
                await self._send(self._waiting[:AT_ONCE])
            self._done.set()

    async def _send(self, commands: list[Command]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            await pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            log.warning("errands_delayed", commands=len(self._waiting), error=str(error))
            await asyncio.sleep(RETRY_S)
        else:
            del self._waiting[: len(commands)]
