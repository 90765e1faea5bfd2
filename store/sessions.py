"""Where sessions live, as Redis knows it: each change of a place is one atomic step, decided by its fence."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import (
    deployment_key,
    host_key,
    hosts_key,
    open_sessions_key,
    place_key,
    seen_tenants_key,
    session_facts_key,
    tenant_open_sessions_key,
    tenant_sessions_key,
    tombstone_key,
)
from contract.places import CLOSED, CLOSED_MARGIN_S, PLACE_MARGIN_S, PlaceState, SessionPlace, parse_place

HostFate = Literal["alive", "silent", "given_up"]
DEFAULT_TTL_S = 1800.0
MOVE_S = 600
"""How long one process may take to open a session elsewhere before another may try."""

MAX_SEEN_TENANTS = 10_000
FACTS_MARGIN_S = 24 * 3600
"""How long what a session's host told outlives its place, which every call keeps for longer."""

# KEYS: place, the tenant's sessions, all open sessions, the tenant's, tenants seen. ARGV: session, queue, start, ttl_s, margin_s, how many sessions the
# tenant may have, tenant, how many tenants are remembered, prefix of the deployment's keys.
_OPEN = """
local known = redis.call('HGET', KEYS[1], 'state')
if known then return known == 'closed' and 'closed' or 'exists' end
local limit = tonumber(ARGV[6])
local function session_key(tenant, session) return ARGV[9] .. 't:' .. tenant .. ':session.' .. session end
if redis.call('SCARD', KEYS[2]) >= limit then
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
    if redis.call('EXISTS', session_key(ARGV[7], name) .. ':place') == 0 then redis.call('SREM', KEYS[2], name) end
  end
  if redis.call('SCARD', KEYS[2]) >= limit then return 'full' end
end
local life = math.ceil(tonumber(ARGV[4])) + tonumber(ARGV[5])
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'open', 'queue', ARGV[2], 'fence', 1, 'start', ARGV[3], 'ttl_s', ARGV[4], 'opened_at', time[1])
redis.call('EXPIRE', KEYS[1], life)
redis.call('SADD', KEYS[2], ARGV[1])
if redis.call('TTL', KEYS[2]) < life then redis.call('EXPIRE', KEYS[2], life) end
-- Sessions that expired are nobody's to take out of the lists: each one that is opened looks at three of them, so that those never become many.
for _, member in ipairs(redis.call('ZRANDMEMBER', KEYS[3], 3)) do
  local tenant, session = string.match(member, '^(.-)|(.*)$')
  local key = session_key(tenant, session)
  if redis.call('EXISTS', key .. ':place') == 0 then
    redis.call('ZREM', KEYS[3], member)
    redis.call('ZREM', ARGV[9] .. 't:' .. tenant .. ':open-sessions', session)
    redis.call('DEL', key .. ':facts')
  end
end
local at = time[1] .. string.format('%06d', time[2])
redis.call('ZADD', KEYS[3], at, ARGV[7] .. '|' .. ARGV[1])
redis.call('ZADD', KEYS[4], at, ARGV[1])
redis.call('ZADD', KEYS[5], time[1], ARGV[7])
redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -1 - ARGV[8])
return 'open'
"""

# KEYS: place. ARGV: the fence as known, new queue, seconds to move in, the state as known: a move that has just ended has left the fence. Gives the new fence; 0 when somebody else was first.
_MOVE = """
local place = redis.call('HMGET', KEYS[1], 'fence', 'state', 'moving_until')
if place[1] ~= ARGV[1] or place[2] ~= ARGV[4] then return 0 end
local now = tonumber(redis.call('TIME')[1])
if place[2] == 'moving' and tonumber(place[3] or '0') > now then return 0 end
redis.call('HSET', KEYS[1], 'state', 'moving', 'queue', ARGV[2], 'moving_until', now + tonumber(ARGV[3]))
return redis.call('HINCRBY', KEYS[1], 'fence', 1)
"""

# KEYS: place, facts. ARGV: fence, state, facts ('' for none that are new), how long they outlive the place. 1 when the place was still of that fence.
_SETTLE = """
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'moving_until', 0)
if ARGV[3] ~= '' then redis.call('SET', KEYS[2], ARGV[3], 'EX', math.max(0, redis.call('TTL', KEYS[1])) + ARGV[4]) end
return 1
"""


# KEYS: place, the tenant's sessions, all open sessions, the tenant's, facts. ARGV: session, the state that says so, margin_s, the time to live of one that
# has no place, tenant.
_CLOSE = """
local ttl_s = redis.call('HGET', KEYS[1], 'ttl_s') or ARGV[4]
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'ttl_s', ttl_s)
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ttl_s)) + tonumber(ARGV[3]))
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[5] .. '|' .. ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[5])
"""


@dataclass(frozen=True)
class Home:
    """Where a session's calls go, as far as the fence says that it has not moved."""

    queue: str
    fence: int


class PlaceBook(Protocol):
    """Where it is known where sessions live. Every method raises BrokerUnavailable when that cannot be asked."""

    async def open(self, tenant: str, session: str, queue: str, *, start: str, ttl_s: float, limit: int) -> Home:
        """A place for a new session. Raises ToolFailure: QUOTA_EXCEEDED when the tenant has `limit` sessions, SESSION_NOT_FOUND for one that was closed before it was
        opened; ValueError when there is one of that name."""
        ...

    async def find(self, tenant: str, session: str) -> SessionPlace | None:
        """The place of a session; None for one that is closed, has expired, or is another tenant's."""
        ...

    async def begin_move(self, tenant: str, session: str, seen_fence: int, seen_state: PlaceState, queue: str) -> Home | None:
        """Claim the move of a session to `queue`; None when its place is not as it was seen any more, or another is moving it."""
        ...

    async def settle(self, tenant: str, session: str, fence: int, state: PlaceState, facts: str = "") -> bool:
        """End a move: the session is open there, or (`moving`) anybody may try again. `facts`: what its host told, kept for whoever takes the session over.
        False when it was taken over meanwhile."""
        ...

    async def facts(self, tenant: str, session: str) -> str | None:
        """What the session's host told when it was opened there; None when that is not known (any more)."""
        ...

    async def fate(self, queue: str) -> HostFate:
        """What became of a host's incarnation. A silent one may come back: after an outage of Redis every host is silent for a moment."""
        ...

    async def close(self, tenant: str, session: str) -> None:
        """A session has ended, wherever it is or is about to be opened: whoever still has a sandbox of it removes that (workers/leftovers.py)."""
        ...


class Places:
    """The places of sessions in Redis. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._open = client.register_script(_OPEN)
        self._move = client.register_script(_MOVE)
        self._settle = client.register_script(_SETTLE)
        self._close = client.register_script(_CLOSE)

    async def open(self, tenant: str, session: str, queue: str, *, start: str, ttl_s: float, limit: int) -> Home:
        keys = [*self._listed_keys(tenant, session), seen_tenants_key(self._deployment)]
        arguments: list[str | float] = [session, queue, start, ttl_s, PLACE_MARGIN_S, limit, tenant, MAX_SEEN_TENANTS]
        arguments.append(deployment_key(self._deployment, ""))
        told = _text(await _asked(self._open(keys=keys, args=arguments)))
        if told == "full":
            raise ToolFailure(
                ErrorCode.QUOTA_EXCEEDED,
                f"tenant {tenant} has {limit} sessions open, which is all it may have: close one, or have the operator raise it "
                f"(`toolcrew tenants set {tenant} --sandboxes {limit + 1}`)",
            )
        if told == CLOSED:
            raise ToolFailure(ErrorCode.SESSION_NOT_FOUND, "the session was closed before it was opened: open a new one")
        if told == "exists":
            raise ValueError(f"there is a session {session} already")
        return Home(queue, 1)

    async def find(self, tenant: str, session: str) -> SessionPlace | None:
        fields: Any = await _asked(self._client.hgetall(place_key(self._deployment, tenant, session)))
        try:
            return parse_place(fields)
        except ValidationError as error:
            raise BrokerUnavailable(f"the place of session {session} in Redis is none of ours: run the same release everywhere") from error

    async def begin_move(self, tenant: str, session: str, seen_fence: int, seen_state: PlaceState, queue: str) -> Home | None:
        key = place_key(self._deployment, tenant, session)
        fence = int(await _asked(self._move(keys=[key], args=[seen_fence, queue, MOVE_S, seen_state.value])))
        return Home(queue, fence) if fence else None

    async def settle(self, tenant: str, session: str, fence: int, state: PlaceState, facts: str = "") -> bool:
        keys = [place_key(self._deployment, tenant, session), session_facts_key(self._deployment, tenant, session)]
        return bool(await _asked(self._settle(keys=keys, args=[fence, state.value, facts, FACTS_MARGIN_S])))

    async def facts(self, tenant: str, session: str) -> str | None:
        told = await _asked(self._client.get(session_facts_key(self._deployment, tenant, session)))
        return told.decode(errors="replace") if isinstance(told, bytes) else None

    async def fate(self, queue: str) -> HostFate:
        pipe = self._client.pipeline(transaction=True)
        pipe.mget(host_key(self._deployment, queue), tombstone_key(self._deployment, queue))
        pipe.zscore(hosts_key(self._deployment), queue)
        (report, tombstone), listed_at = await _asked(pipe.execute())
        # Whoever left in order is listed no more, and a tombstone does not stand for ever.
        if tombstone is not None or (report is None and listed_at is None):
            return "given_up"
        return "alive" if report is not None else "silent"

    async def close(self, tenant: str, session: str) -> None:
        keys = [*self._listed_keys(tenant, session), session_facts_key(self._deployment, tenant, session)]
        await _asked(self._close(keys=keys, args=[session, CLOSED, CLOSED_MARGIN_S, DEFAULT_TTL_S, tenant]))

    def _listed_keys(self, tenant: str, session: str) -> list[str]:
        """Of a session's place, and of all that names the session."""
        return [
            place_key(self._deployment, tenant, session),
            tenant_sessions_key(self._deployment, tenant),
            open_sessions_key(self._deployment),
            tenant_open_sessions_key(self._deployment, tenant),
        ]


async def _asked(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except (RedisError, OSError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> BrokerUnavailable:
    return BrokerUnavailable(f"Redis does not say where sessions live ({error}): see that it is up")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
