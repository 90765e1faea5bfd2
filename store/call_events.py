"""Events of running calls in Redis: one stream for each call, and one set for each process that reads such streams.

Invariant: nothing remains if the orchestrator dies. The orchestrator creates the stream, and the worker only adds
entries (XADD NOMKSTREAM). If the stream is missing, no process reads the events, and the worker stops writing. All
keys expire.

::

    worker                          Redis                                        orchestrator that sent the call
                                    events  stream   <--- create, delete ------  before the call is sent; after it ended
    add  ------- XADD, if it exists ->  events
         ------- ZADD, the call's name -->  wakes   sorted set  --- take_wakes ->  one blocked connection per process
                                            events  -------------- read ------->  the handlers of the call
    await_room  <------------------  room   list     <--- acknowledge ---------  after the handlers: deletes the entries
    await_answer  <----------------  answers list    <--- push_answer ---------  the reply to a question of the call
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError

from contract.call_events import CallEvent, entry_event, entry_fields
from contract.errors import BrokerUnavailable
from contract.names import deployment_key, tenant_key
from contract.signing import SigningKeys
from store.connection import RedisClient, SyncRedis, broker_errors
from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

READ_COUNT = 256
"""Limit of entries from one stream in one read. A stream that returns this many may have more."""
IDLE_S = 5.0
"""Time that `take_wakes` waits for the first name, in seconds."""
WAKES_AT_ONCE = 64
WAKES_TTL_S = 60
WAIT_SLICE_S = 2.0
"""Maximum duration of one blocking command of a worker, in seconds. Must be shorter than the time limit of the
connection.
"""

COMMANDS_AT_ONCE = 1000
RETRY_S = 0.5
_TEMPORARY = (MasterDownError, OutOfMemoryError, ReadOnlyError)
_TEMPORARY_PREFIXES = ("BUSY", "MISCONF", "NOREPLICAS")
"""Prefixes of temporary errors: Redis is full, is a replica, or cannot write at the moment. Any other error would
return on every repetition.
"""

Command = tuple[str | bytes | int, ...]
Entry = tuple[bytes, Mapping[Any, Any]]
"""The id and the fields of one entry of a stream."""


@dataclass(frozen=True)
class CallEventKeys:
    """The keys of one call's events. `name`: the call's member in the set of its reader."""

    name: str
    events: str
    room: str
    answers: str

    @property
    def question_purpose(self) -> str:
        """Return the signing purpose of the call's questions."""
        return f"question {self.name}"

    @property
    def answer_purpose(self) -> str:
        return f"answer {self.name}"


def call_event_keys(deployment: str, tenant: str, call_id: str) -> CallEventKeys:
    """Return the keys of one call's events."""
    prefix = tenant_key(deployment, tenant, f"call.{call_id}")
    return CallEventKeys(f"{tenant}:{call_id}", f"{prefix}:events", f"{prefix}:room", f"{prefix}:answers")


def wakes_key(deployment: str, listener: str) -> str:
    """Return the key of the set of calls with new events: the name of each call, by the time of its oldest new
    event.
    """
    return deployment_key(deployment, f"listener:{listener}")


# --- Orchestrators ----------------------------------------------------------------------------------------------------


class PendingCommands:
    """Commands whose replies no caller awaits. They are sent in order, many in one round trip. After an outage they
    are sent again, so they must be repeatable.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._waiting: list[Command] = []
        self._added = asyncio.Event()
        self._sent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, *commands: Command) -> None:
        """Send these commands soon, after all earlier ones."""
        self._waiting += commands
        self._sent.clear()
        self._added.set()
        if self._task is None:
            self._task = begin_shared(self._run(), "pending-commands")

    async def close(self, within_s: float) -> None:
        """Send the waiting commands, for at most `within_s` seconds, and stop."""
        if self._task is None:
            return
        await asyncio.wait(
            {self._task, waiting := asyncio.create_task(self._sent.wait())},
            timeout=within_s,
            return_when="FIRST_COMPLETED",
        )
        waiting.cancel()
        await cancel_all((self._task,))

    async def _run(self) -> None:
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                await self._send(self._waiting[:COMMANDS_AT_ONCE])
            self._sent.set()

    async def _send(self, commands: list[Command]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            with broker_errors("commands were not sent"):
                replies = await pipe.execute(raise_on_error=False)
        except BrokerUnavailable as error:
            await self._delay(error)
            return
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, _TEMPORARY) or str(reply).startswith(_TEMPORARY_PREFIXES):
                # This command and all later ones are sent again, so that the order is preserved.
                await self._delay(reply)
                return
            del self._waiting[0]
            if isinstance(reply, Exception):
                log.error("redis_command_refused", command=str(command[0]), key=str(command[1]), error=str(reply))

    async def _delay(self, error: Exception) -> None:
        log.warning("redis_commands_delayed", commands=len(self._waiting), error=str(error))
        await asyncio.sleep(RETRY_S)


class CallEventStore:
    """The events of the calls that one process has sent. `listener`: the id of the process. The signed context of each
    call carries the id to the worker.

    The asynchronous methods raise BrokerUnavailable when Redis does not answer. `acknowledge` and `delete` return at
    once and send their commands later.
    """

    def __init__(self, client: RedisClient, deployment: str, signing: SigningKeys) -> None:
        self.listener = secrets.token_hex(8)
        self._client = client
        self._deployment = deployment
        self._signing = signing
        self._wakes = wakes_key(deployment, self.listener)
        self._pending = PendingCommands(client)

    def keys(self, tenant: str, call_id: str) -> CallEventKeys:
        """Return the keys of a call's events."""
        return call_event_keys(self._deployment, tenant, call_id)

    async def create(self, keys: CallEventKeys, ttl_s: int) -> None:
        """Create the empty stream of a call. Raises BrokerUnavailable when Redis does not answer, or when the stream
        exists: another process reads this call.
        """
        with broker_errors("the stream of the call's events was not created"):
            async with self._client.pipeline(transaction=True) as pipe:
                # No process uses this group. XGROUP CREATE is the only command that creates an empty stream. It fails
                # if the stream exists.
                pipe.xgroup_create(keys.events, "caller", id="$", mkstream=True)
                pipe.expire(keys.events, ttl_s)
                await pipe.execute()

    def parse(self, keys: CallEventKeys, fields: Mapping[Any, Any]) -> CallEvent:
        """Return the event of an entry. Raises EnvelopeRefused: the entry is invalid, or its question is not signed
        for this call.
        """
        return entry_event(fields, partial(self._signing.unseal, keys.question_purpose))

    async def push_answer(self, keys: CallEventKeys, answer: bytes, ttl_s: int) -> None:
        """Answer a question of the running call."""
        answer = self._signing.seal(keys.answer_purpose, answer.decode()).encode()
        with broker_errors("the answer was not sent to the running call"):
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.rpush(keys.answers, answer)
                pipe.expire(keys.answers, ttl_s)
                await pipe.execute()

    async def take_wakes(self) -> list[str] | None:
        """Return the names of calls with new events, the longest waiting first. Return None if there is none for
        IDLE_S seconds.
        """
        with broker_errors("the calls with new events were not read"):
            rows: Any = await self._client.zpopmin(self._wakes, WAKES_AT_ONCE)
            if not rows:
                row: Any = await self._client.bzpopmin([self._wakes], timeout=IDLE_S)
                if row is None:
                    return None
                rows = [(row[1], row[2])]
        return [name.decode(errors="replace") for name, _ in rows]

    async def read(self, positions: Sequence[tuple[CallEventKeys, str]]) -> list[list[Entry]]:
        """Return the next entries of each stream, at most READ_COUNT, in one round trip. A position: the keys of a
        call, and the id of the last entry read.
        """
        with broker_errors("the events of running calls were not read"):
            pipe = self._client.pipeline(transaction=False)
            for keys, last_id in positions:
                pipe.xrange(keys.events, min=f"({last_id}", count=READ_COUNT)
            return list(await pipe.execute())

    def acknowledge(self, keys: CallEventKeys, entries: Sequence[bytes], ttl_s: int) -> None:
        """Delete handled entries, and let a worker that waits for room continue."""
        # One item in `room` is enough: the worker reads the length of the stream after it wakes.
        self._pending.add(
            ("XDEL", keys.events, *entries),
            ("LPUSH", keys.room, 1),
            ("LTRIM", keys.room, 0, 0),
            ("EXPIRE", keys.room, ttl_s),
        )

    def delete(self, keys: CallEventKeys) -> None:
        """Delete the keys of a call. A worker that still writes notices that no process reads its events."""
        self._pending.add(("DEL", keys.events, keys.room, keys.answers))

    async def close(self, within_s: float) -> None:
        """Send the commands of `acknowledge` and `delete` that still wait, for at most `within_s` seconds."""
        await self._pending.close(within_s)


# --- Workers ----------------------------------------------------------------------------------------------------------


class WorkerCallEventStore:
    """The events of one running call, for its worker. Every method raises BrokerUnavailable when Redis does not
    answer.

    `client` must send every command once (`connect_once`), so that no entry is added twice. `listener`: the process
    that reads the events.
    """

    def __init__(
        self, client: SyncRedis, deployment: str, signing: SigningKeys, tenant: str, call_id: str, listener: str
    ) -> None:
        self._client = client
        self._signing = signing
        self._keys = call_event_keys(deployment, tenant, call_id)
        self._wakes = wakes_key(deployment, listener)

    def add(self, event: bytes) -> int | None:
        """Add an event and wake its reader. Return how many events wait to be read. Return None if there is no stream:
        no process reads the events any longer.
        """
        with broker_errors("an event of the call was not written"):
            pipe = self._client.pipeline(transaction=False)
            pipe.xadd(self._keys.events, entry_fields(event), nomkstream=True)  # type: ignore[arg-type]
            pipe.xlen(self._keys.events)
            # NX keeps the time of the oldest event. The reader serves the oldest call first, so a noisy call does not
            # delay others.
            pipe.zadd(self._wakes, {self._keys.name: time.time()}, nx=True)
            pipe.expire(self._wakes, WAKES_TTL_S)
            replies = pipe.execute()
        return int(replies[1]) if replies[0] is not None else None

    def ask(self, question: bytes) -> int | None:
        """Add a signed question. Return the same value as `add`."""
        return self.add(self._signing.seal(self._keys.question_purpose, question.decode()).encode())

    def count(self) -> int:
        """Return how many events wait to be read."""
        with broker_errors("the events of the call were not counted"):
            return int(self._client.xlen(self._keys.events))

    def is_read(self) -> bool:
        """Return whether a process still reads the events."""
        with broker_errors("it is not known whether the events of the call are read"):
            return bool(self._client.exists(self._keys.events))

    def await_room(self, timeout_s: float) -> bool:
        """Wait until the reader has handled events, at most WAIT_SLICE_S seconds. Return False if it has not."""
        with broker_errors("the reader of the call's events was not awaited"):
            return self._client.blpop([self._keys.room], timeout=_slice(timeout_s)) is not None

    def await_answer(self, timeout_s: float) -> bytes | None:
        """Return the next answer to a question of the call; None if there is none within WAIT_SLICE_S seconds. Raises
        EnvelopeRefused: the answer is not signed for this call.
        """
        with broker_errors("the answer to the running call was not read"):
            item: Any = self._client.blpop([self._keys.answers], timeout=_slice(timeout_s))
        return self._signing.unseal(self._keys.answer_purpose, item[1]).encode() if item is not None else None


def _slice(seconds: float) -> float:
    """Return the time limit of one blocking command. It is never close to 0, which Redis understands as no limit."""
    return max(0.05, min(seconds, WAIT_SLICE_S))
