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
    count  ------- XLEN ---------->  events  <----------- acknowledge ---------  after the handlers: deletes the entries
    await_answer  <----------------  answers list    <--- push_answer ---------  the reply to a question of the call
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolcrew.contract.call_events import CallEvent, entry_event, entry_fields
from toolcrew.contract.names import deployment_key, tenant_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors

READ_COUNT = 256
"""Limit of entries from one stream in one read. If a read returns this many, the stream may have more."""
IDLE_S = 5.0
"""Time that `take_wakes` waits for the first name, in seconds."""
WAKES_AT_ONCE = 64
WAKES_TTL_S = 60
WAIT_SLICE_S = 2.0
"""Maximum duration of one blocking command of a worker, in seconds. Must be shorter than the time limit of the
connection.
"""

Entry = tuple[bytes, Mapping[Any, Any]]
"""The id and the fields of one entry of a stream."""


@dataclass(frozen=True)
class CallEventKeys:
    """The keys of one call's events. `name`: the name of the call in the sorted set of calls with new events
    (`wakes_key`).
    """

    name: str
    events: str
    answers: str

    @property
    def question_purpose(self) -> str:
        """Return the purpose for which the call's requests to the model, and the replies, are signed."""
        return f"question {self.name}"

    @property
    def answer_purpose(self) -> str:
        return f"answer {self.name}"


def call_event_keys(deployment: str, tenant: str, call_id: str) -> CallEventKeys:
    """Return the keys of one call's events."""
    prefix = tenant_key(deployment, tenant, f"call.{call_id}")
    return CallEventKeys(f"{tenant}:{call_id}", f"{prefix}:events", f"{prefix}:answers")


def wakes_key(deployment: str, listener: str) -> str:
    """Return the key of the set of calls with new events: the name of each call, by the time of its oldest new
    event.
    """
    return deployment_key(deployment, f"listener:{listener}")


# --- Orchestrators ----------------------------------------------------------------------------------------------------


class CallEventStore:
    """The events of the calls that one process has sent. `listener`: the id of the process. The signed context of each
    call carries the id to the worker.

    Every asynchronous method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: RedisClient, deployment: str, signing: SigningKeys) -> None:
        self.listener = secrets.token_hex(8)
        self._client = client
        self._deployment = deployment
        self._signing = signing
        self._wakes = wakes_key(deployment, self.listener)

    def keys(self, tenant: str, call_id: str) -> CallEventKeys:
        """Return the keys of a call's events."""
        return call_event_keys(self._deployment, tenant, call_id)

    async def create(self, keys: CallEventKeys, ttl_s: int) -> None:
        """Create the empty stream of a call. Raises BrokerUnavailable when Redis does not answer, or when the stream
        exists: another process reads the events of this call.
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
        """Add the reply to a model request of the running call to its list of replies, which expires after `ttl_s`
        seconds.
        """
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
        """Return the next entries of each stream, at most READ_COUNT, in one round trip. Each position is a pair: the
        keys of a call, and the id of the last entry that was read.
        """
        with broker_errors("the events of running calls were not read"):
            pipe = self._client.pipeline(transaction=False)
            for keys, last_id in positions:
                pipe.xrange(keys.events, min=f"({last_id}", count=READ_COUNT)
            return list(await pipe.execute())

    async def acknowledge(self, keys: CallEventKeys, entries: Sequence[bytes]) -> None:
        """Delete handled entries. A worker that waits because the stream has too many unread entries then continues."""
        with broker_errors("the events of a running call were not acknowledged"):
            await self._client.xdel(keys.events, *entries)

    async def delete(self, keys: CallEventKeys) -> None:
        """Delete the keys of a call. A worker that still writes notices that no process reads its events."""
        with broker_errors("the events of a call were not deleted"):
            await self._client.delete(keys.events, keys.answers)


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
        """Sign and add a request to the caller's model. Return the same value as `add`."""
        return self.add(self._signing.seal(self._keys.question_purpose, question.decode()).encode())

    def count(self) -> int:
        """Return how many events wait to be read."""
        with broker_errors("the events of the call were not counted"):
            return int(self._client.xlen(self._keys.events))

    def is_read(self) -> bool:
        """Return whether a process still reads the events."""
        with broker_errors("it is not known whether the events of the call are read"):
            return bool(self._client.exists(self._keys.events))

    def await_answer(self, timeout_s: float) -> bytes | None:
        """Return the next answer to a question of the call; None if there is none within WAIT_SLICE_S seconds. Raises
        EnvelopeRefused: the answer is not signed for this call.
        """
        with broker_errors("the answer to the running call was not read"):
            item: Any = self._client.blpop([self._keys.answers], timeout=_slice(timeout_s))
        return self._signing.unseal(self._keys.answer_purpose, item[1]).encode() if item is not None else None


def _slice(seconds: float) -> float:
    """Return the time limit of one blocking command. The limit is never close to 0, because Redis takes 0 as no
    limit.
    """
    return max(0.05, min(seconds, WAIT_SLICE_S))
