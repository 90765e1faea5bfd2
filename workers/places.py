"""Where sessions live, as a sandbox worker changes it: each change is one atomic step, made only while the session is this worker's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis
from pydantic import ValidationError

from contract.names import host_key, host_prefix, place_key, tenant_sessions_key
from contract.places import CLOSED, SessionPlace, parse_place

# KEYS: place. ARGV: our queue, what the queues of this host begin with, what the keys of reports begin with, then the queues that are known to be gone.
_ADOPT = """
local place = redis.call('HMGET', KEYS[1], 'state', 'queue', 'fence', 'held')
if not place[1] then return 'none' end
if place[1] == 'closed' then return 'closed' end
if place[2] == ARGV[1] then return 'ours' end
if string.sub(place[2], 1, #ARGV[2]) ~= ARGV[2] then return 'elsewhere' end
local is_gone = redis.call('EXISTS', ARGV[3] .. place[2]) == 0
for i = 4, #ARGV do is_gone = is_gone or place[2] == ARGV[i] end
-- A drain that was killed has moved nothing yet.
if place[1] ~= 'open' and place[4] ~= place[3] or not is_gone then return 'held' end
redis.call('HSET', KEYS[1], 'state', 'open', 'queue', ARGV[1], 'moving_until', 0)
redis.call('HINCRBY', KEYS[1], 'fence', 1)
return 'adopted'
"""

# KEYS: place. ARGV: our queue, fence (of a hold, too) or '' for any, checkpoint, taken at, whether nobody has asked for it.
# Gives 0 when the session is not ours (any more), else the automatic checkpoint before it, or 1.
_NOTE = """
local place = redis.call('HMGET', KEYS[1], 'queue', 'state', 'fence', 'automatic', 'checkpoint_at')
if place[1] ~= ARGV[1] then return 0 end
if ARGV[2] == '' and place[2] ~= 'open' or ARGV[2] ~= '' and place[3] ~= ARGV[2] then return 0 end
-- One that took long may be older than one that was begun after it.
if tonumber(ARGV[4]) >= tonumber(place[5] or '0') then redis.call('HSET', KEYS[1], 'checkpoint', ARGV[3], 'checkpoint_at', ARGV[4]) end
if ARGV[5] == '0' then return 1 end
redis.call('HSET', KEYS[1], 'automatic', ARGV[3])
-- A note that is sent again finds itself.
return place[4] and place[4] ~= '' and place[4] ~= ARGV[3] and place[4] or 1
"""

# KEYS: place. ARGV: our queue, fence, seconds. Gives the new fence; 0 when the session is not ours.
_HOLD = """
local place = redis.call('HMGET', KEYS[1], 'queue', 'state', 'fence')
if place[1] ~= ARGV[1] or place[2] ~= 'open' or place[3] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'moving', 'moving_until', redis.call('TIME')[1] + ARGV[3])
local fence = redis.call('HINCRBY', KEYS[1], 'fence', 1)
redis.call('HSET', KEYS[1], 'held', fence)
return fence
"""

# KEYS: place. ARGV: our queue, the fence of the hold, the state that follows, the queue that follows. 1 when it was still held.
_LET_GO = """
local place = redis.call('HMGET', KEYS[1], 'queue', 'state', 'fence')
if place[1] ~= ARGV[1] or place[2] ~= 'moving' or place[3] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'queue', ARGV[4], 'moving_until', 0)
return 1
"""

# KEYS: place, the tenant's sessions. ARGV: our queue, session. 1 when the session was ours, and is forgotten.
_FORGET = """
local place = redis.call('HMGET', KEYS[1], 'queue', 'state')
if place[1] ~= ARGV[1] or place[2] ~= 'open' then return 0 end
redis.call('SREM', KEYS[2], ARGV[2])
return redis.call('DEL', KEYS[1])
"""


class Adoption(StrEnum):
    """What becomes of a session that sandboxd has, when a worker starts."""

    OURS = "ours"
    ADOPTED = "adopted"
    """An earlier incarnation of this host had it: what was sent to that one is refused from now on, and sent again."""
    ELSEWHERE = "elsewhere"
    """It lives on another host by now: what is here is of no use to anybody."""
    CLOSED = "closed"
    """It was closed, and not here: nobody knows any more of what is here."""
    HELD = "held"
    """An earlier incarnation may still have it, or is moving it: to be asked again."""
    NONE = "none"
    """Of a program that uses sandboxd without a queue, or forgotten by Redis: its time to live ends it."""


@dataclass(frozen=True)
class Noted:
    """A checkpoint that a place tells of. `previous`: the automatic one before it, which nothing needs any more."""

    previous: str | None


class WorkerPlaces:
    """The places of the sessions of one incarnation. Every method raises redis.RedisError."""

    def __init__(self, client: "redis.Redis", deployment: str, host: str, queue: str) -> None:
        self.queue = queue
        self._client = client
        self._deployment = deployment
        self._prefix = host_prefix(host)
        self._adopt = client.register_script(_ADOPT)
        self._note = client.register_script(_NOTE)
        self._hold = client.register_script(_HOLD)
        self._let_go = client.register_script(_LET_GO)
        self._forget = client.register_script(_FORGET)

    def adopt(self, names: Sequence[str], gone: Sequence[str] = ()) -> dict[str, Adoption]:
        """Take over what is this host's. `names` as sandboxd's: `<tenant>:<session>`; `gone`: queues of earlier incarnations that still count as alive."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                self._adopt(keys=[self._key(name)], args=[self.queue, self._prefix, host_key(self._deployment, ""), *gone], client=pipe)
            return {name: Adoption(told.decode()) for name, told in zip(names, pipe.execute(), strict=True)}

    def find(self, names: Iterable[str]) -> dict[str, SessionPlace]:
        """Those that have a place; one that is none of ours counts as none."""
        names = list(names)
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._key(name))
            found = {name: _parsed(fields) for name, fields in zip(names, pipe.execute(), strict=True)}
        return {name: place for name, place in found.items() if place is not None}

    def find_ended(self, names: Sequence[str]) -> set[str]:
        """Those that are surely of no use here: closed, or living on another host by now. One of which Redis knows nothing is not among them: it may have
        been flushed."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self._key(name), "state", "queue")
            told = [tuple(field.decode(errors="replace") if field is not None else None for field in fields) for fields in pipe.execute()]
        return {name for name, (state, queue) in zip(names, told, strict=True) if state == CLOSED or self._is_elsewhere(queue)}

    def note_automatic(self, name: str, fence: int, checkpoint: str, taken_at: float) -> Noted | None:
        """The session's next home begins with that checkpoint. None when the session has moved, or was closed."""
        told = self._noted(name, str(fence), checkpoint, taken_at, is_automatic=True)
        if not told:
            return None
        return Noted(told.decode() if isinstance(told, bytes) else None)

    def note_explicit(self, name: str, checkpoint: str, taken_at: float) -> bool:
        """The same for one that somebody asked for, and who alone deletes it."""
        return bool(self._noted(name, "", checkpoint, taken_at, is_automatic=False))

    def hold(self, name: str, fence: int, seconds: float) -> int | None:
        """Let no call begin for a while: whoever sends one waits. Gives the fence of the hold; None when the session is not ours any more."""
        return int(self._hold(keys=[self._key(name)], args=[self.queue, fence, int(seconds)])) or None

    def unhold(self, name: str, fence: int) -> bool:
        """Go on serving it here."""
        return bool(self._let_go(keys=[self._key(name)], args=[self.queue, fence, "open", self.queue]))

    def release(self, name: str, fence: int) -> bool:
        """It has no host any more: the next call opens it elsewhere, from the checkpoint in its place. False when the hold was over before."""
        return bool(self._let_go(keys=[self._key(name)], args=[self.queue, fence, "moving", ""]))

    def forget(self, names: Iterable[str]) -> int:
        """Sessions that sandboxd has ended; gives how many were ours."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                tenant, _, session = name.partition(":")
                keys = [self._key(name), tenant_sessions_key(self._deployment, tenant)]
                self._forget(keys=keys, args=[self.queue, session], client=pipe)
            return sum(pipe.execute())

    def _is_elsewhere(self, queue: str | None) -> bool:
        return queue is not None and not queue.startswith(self._prefix)

    def _noted(self, name: str, fence: str, checkpoint: str, taken_at: float, *, is_automatic: bool) -> Any:
        return self._note(keys=[self._key(name)], args=[self.queue, fence, checkpoint, taken_at, int(is_automatic)])

    def _key(self, name: str) -> str:
        tenant, _, session = name.partition(":")
        return place_key(self._deployment, tenant, session)


def _parsed(fields: Any) -> SessionPlace | None:
    try:
        return parse_place(fields)
    except ValidationError:
        return None
