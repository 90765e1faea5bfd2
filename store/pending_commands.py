"""Commands whose answers nobody waits for: in order, and many in one round trip when there are many."""

import asyncio

import redis.asyncio
from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, RedisError

from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

AT_ONCE = 1000
RETRY_S = 0.5

_PASSING = (MasterDownError, OutOfMemoryError, ReadOnlyError)
_PASSING_WORDS = ("BUSY", "MISCONF", "NOREPLICAS")
"""Redis refuses with these for a while: it is full, a replica, or cannot write. Every other refusal is for good."""

Command = tuple[str | bytes | int, ...]


class Errands:
    """One connection, used while there is something to do. Commands are repeated after an outage, so they must be repeatable."""

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
            answers = await pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            await self._delay(error)
            return
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, _PASSING) or str(answer).startswith(_PASSING_WORDS):
                # The commands behind it are repeated as well, so that their order stays.
                await self._delay(answer)
                return
            del self._waiting[0]
            if isinstance(answer, Exception):
                log.error("redis_command_refused", command=str(command[0]), key=str(command[1]), error=str(answer))

    async def _delay(self, error: Exception) -> None:
        log.warning("errands_delayed", commands=len(self._waiting), error=str(error))
        await asyncio.sleep(RETRY_S)
