"""Locations of sessions: one hash for each session. Only the scripts of this module change a location.

Invariant: no two hosts serve the same session. The fence, a number in the location, grows with every change of the
host. A script changes a location only if the caller knows its present queue or fence, and a worker claims a call only
with the present fence. A location expires by itself when its session is not used.

::

    (none)
      | open: an orchestrator chooses a host; fence 1
      | fork: on the host of an open session that it was forked from; fence 1
      v
    open <---------------------------------------------------------------.
      |  hold: the worker of the host drains; fence + 1                  |
      |  begin_move: an orchestrator, if the host is lost; fence + 1     | settle(OPEN): the orchestrator of the move
      v                                                                  | unhold: the worker that holds the session
    moving --------------------------------------------------------------'
      |  begin_move: any orchestrator, if no other one moves the session; fence + 1, still moving
      |  release: the holding worker has a checkpoint; the session has no host until a call opens it
      |  settle(MOVING): the orchestrator could not open the session; any other may try
      v
    closed: an orchestrator closes the session, from any state. The hash then contains little more than this state,
    until every sandbox of the session has expired.

    open --adopt: the next worker of the same host--> open (fence + 1)
    open --forget: the worker of the host, if the time to live of the session has passed--> (none)
    any --has_ended: a count or a list, if the time to live has passed and no worker can serve the session--> (none)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import ValidationError

from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.names import (
    active_tenants_key,
    deployment_key,
    host_key,
    host_prefix,
    hosts_key,
    location_key,
    server_sessions_key,
    tenant_key,
    tenant_sessions_key,
    tombstone_key,
)
from toolcrew.contract.session_locations import (
    DEFAULT_TTL_S,
    LOCATION_MARGIN_S,
    LocationState,
    SessionLocation,
    open_checkpoint,
    seal_checkpoint,
)
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.usage import CHANGE_STORED_LUA, USAGE_LUA, StoredChange, usage_prefix

HostState = Literal["alive", "silent", "given_up"]
MOVE_S = 600
"""Seconds that a process has to open a session on another host. After this time, another process may try."""
MAX_SEEN_TENANTS = 10_000
FACTS_MARGIN_S = 24 * 3600
"""Additional lifetime, in seconds, of a session's facts (the report of its host) after the location expires. Calls
extend only the lifetime of the location.
"""
CLOSED = "closed"
"""Value of the field `state` in the location of a closed session. A host that still has a sandbox of the session reads
this state and removes the sandbox.
"""
CLOSED_MARGIN_S = 600
"""Additional lifetime, in seconds, of the hash of a closed session after the session's time to live. Until then, every
sandbox of the session has expired by itself.
"""
STARTS_BYTES, SMALL_START_BYTES = 16 * 1024 * 1024, 4096
"""Limit of the signed arguments of all open sessions of a tenant together, which contain the configurations of tools,
and the size up to which the arguments of a new session are not compared with it. The account of the tenant
(store/memory.py) does not count locations.
"""
_WHAT = "the sessions' locations were not read or changed"


# --- Keys -------------------------------------------------------------------------------------------------------------


def session_facts_key(deployment: str, tenant: str, session: str) -> str:
    """Return the key of a session's facts: the JSON that its host reported when it opened the session. A program that
    attaches to the session reads the facts.
    """
    return tenant_key(deployment, tenant, f"session.{session}:facts")


def open_sessions_key(deployment: str) -> str:
    """Return the key of the sorted set of open sessions of all tenants: `<tenant>|<session>` by the microsecond of the
    opening. Some of the sessions may have expired.
    """
    return deployment_key(deployment, "open-sessions")


def tenant_open_sessions_key(deployment: str, tenant: str) -> str:
    """Return the key of the sorted set of a tenant's open sessions: session names by the microsecond of the opening."""
    return tenant_key(deployment, tenant, "open-sessions")


def parse_session_location(fields: Mapping[bytes, bytes]) -> SessionLocation | None:
    """Return the location in a hash; None if there is no hash, or if the session was closed. Raises ValidationError:
    the hash is not a valid location.
    """
    if not fields or fields.get(b"state") == CLOSED.encode():
        return None
    return SessionLocation.model_validate(
        {name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False
    )


# --- Scripts of orchestrators -----------------------------------------------------------------------------------------

# Whether a session has ended without a host that could report it: its location has expired, or its time to live is over
# and no worker can still serve it. The location of such a session is deleted. A host that only has not reported for a
# while may still run a long call, so its sessions stay. `prefix`: of the deployment's keys.
_HAS_ENDED = f"""
local function has_ended(prefix, location)
  local life = redis.call('TTL', location)
  if life == -2 then return true end
  if life == -1 or life > {LOCATION_MARGIN_S} then return false end
  local fields = redis.call('HMGET', location, 'state', 'queue', 'moving_until')
  if fields[1] == 'closed' then return true end
  if fields[1] == 'moving' and tonumber(fields[3] or '0') > tonumber(redis.call('TIME')[1]) then return false end
  if fields[1] == 'open' then
    local is_reported = redis.call('EXISTS', prefix .. 'host:' .. fields[2]) == 1
    local is_listed = redis.call('ZSCORE', prefix .. 'hosts', fields[2])
    local is_given_up = redis.call('EXISTS', prefix .. 'tombstone:' .. fields[2]) == 1
    if not is_given_up and (is_reported or is_listed) then return false end
  end
  redis.call('DEL', location)
  return true
end
"""

# `sessions`: the key of the tenant's sessions. Returns whether the tenant may have `count` more.
_HAS_ROOM = (
    _HAS_ENDED
    + """
local function session_key(prefix, tenant, session) return prefix .. 't:' .. tenant .. ':session.' .. session end
local function has_room(sessions, prefix, tenant, count, limit)
  local names = redis.call('SCARD', sessions) + count > limit and redis.call('SMEMBERS', sessions) or {}
  for _, name in ipairs(names) do
    if has_ended(prefix, session_key(prefix, tenant, name) .. ':place') then redis.call('SREM', sessions, name) end
  end
  return redis.call('SCARD', sessions) + count <= limit
end
-- `bytes`: of the arguments of the new sessions together, of which the largest has `largest`.
local function has_room_for_starts(sessions, prefix, tenant, bytes, largest)
  if largest <= SMALL_START_BYTES then return true end
  for _, name in ipairs(redis.call('SMEMBERS', sessions)) do
    if bytes > STARTS_BYTES then return false end
    bytes = bytes + redis.call('HSTRLEN', session_key(prefix, tenant, name) .. ':place', 'start')
  end
  return bytes <= STARTS_BYTES
end
""".replace("SMALL_START_BYTES", str(SMALL_START_BYTES)).replace("STARTS_BYTES", str(STARTS_BYTES))
)

# KEYS: location, the tenant's sessions. ARGV: prefix of the deployment's keys, session. Returns 1 if the session has
# ended.
REMOVE_ENDED_LUA = (
    _HAS_ENDED
    + """
if not has_ended(ARGV[1], KEYS[1]) then return 0 end
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""
)

# KEYS: location, the tenant's sessions, all open sessions, the tenant's open sessions, known tenants. ARGV: session,
# queue, start, ttl_s, margin_s, maximum sessions of the tenant, tenant, maximum of listed tenants, prefix of the
# deployment's keys.
_OPEN = (
    _HAS_ROOM
    + """
local state = redis.call('HGET', KEYS[1], 'state')
if state then return state == 'closed' and 'closed' or 'exists' end
if not has_room(KEYS[2], ARGV[9], ARGV[7], 1, tonumber(ARGV[6])) then return 'full' end
if not has_room_for_starts(KEYS[2], ARGV[9], ARGV[7], #ARGV[3], #ARGV[3]) then return 'large' end
local life = math.ceil(tonumber(ARGV[4])) + tonumber(ARGV[5])
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'open', 'queue', ARGV[2], 'fence', 1, 'start', ARGV[3],
  'ttl_s', ARGV[4], 'opened_at', time[1])
redis.call('EXPIRE', KEYS[1], life)
redis.call('SADD', KEYS[2], ARGV[1])
if redis.call('TTL', KEYS[2]) < life then redis.call('EXPIRE', KEYS[2], life) end
-- No process removes expired sessions from the lists. Each open checks three entries, so that expired ones stay few.
for _, member in ipairs(redis.call('ZRANDMEMBER', KEYS[3], 3)) do
  local tenant, session = string.match(member, '^(.-)|(.*)$')
  local key = session_key(ARGV[9], tenant, session)
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
)

# KEYS: location of the parent, the tenant's sessions, all open sessions, the tenant's open sessions, then location and
# facts of each new session. ARGV: the queue that made the fork, facts, maximum sessions of the tenant, tenant, prefix
# of the deployment's keys, margin_s, additional lifetime of the facts, then name and start of each new session.
_FORK = (
    _HAS_ROOM
    + """
local parent = redis.call('HMGET', KEYS[1], 'state', 'queue', 'ttl_s', 'folder')
if parent[1] ~= 'open' or parent[2] ~= ARGV[1] then return 'moved' end
local count = (#KEYS - 4) / 2
if not has_room(KEYS[2], ARGV[5], ARGV[4], count, tonumber(ARGV[3])) then return 'full' end
local bytes, largest = 0, 0
for i = 1, count do bytes, largest = bytes + #ARGV[7 + 2 * i], math.max(largest, #ARGV[7 + 2 * i]) end
if not has_room_for_starts(KEYS[2], ARGV[5], ARGV[4], bytes, largest) then return 'large' end
local life = math.ceil(tonumber(parent[3])) + tonumber(ARGV[6])
local time = redis.call('TIME')
local at = time[1] .. string.format('%06d', time[2])
for i = 1, count do
  local location, name = KEYS[3 + 2 * i], ARGV[6 + 2 * i]
  redis.call('HSET', location, 'state', 'open', 'queue', ARGV[1], 'fence', 1, 'start', ARGV[7 + 2 * i],
    'ttl_s', parent[3], 'opened_at', time[1], 'folder', parent[4] or '')
  redis.call('EXPIRE', location, life)
  redis.call('SET', KEYS[4 + 2 * i], ARGV[2], 'EX', life + ARGV[7])
  redis.call('SADD', KEYS[2], name)
  redis.call('ZADD', KEYS[3], at, ARGV[4] .. '|' .. name)
  redis.call('ZADD', KEYS[4], at, name)
end
if redis.call('TTL', KEYS[2]) < life then redis.call('EXPIRE', KEYS[2], life) end
return 'open'
"""
)

# KEYS: location. ARGV: the expected fence, the new queue, the time for the move in seconds, the expected state. The
# state is compared too, because the end of a move does not change the fence. Returns the new fence, or 0 if another
# process was first.
_MOVE = """
local location = redis.call('HMGET', KEYS[1], 'fence', 'state', 'moving_until')
if location[1] ~= ARGV[1] or location[2] ~= ARGV[4] then return 0 end
local now = tonumber(redis.call('TIME')[1])
if location[2] == 'moving' and tonumber(location[3] or '0') > now then return 0 end
redis.call('HSET', KEYS[1], 'state', 'moving', 'queue', ARGV[2], 'moving_until', now + tonumber(ARGV[3]))
return redis.call('HINCRBY', KEYS[1], 'fence', 1)
"""

# KEYS: location, facts. ARGV: fence, state, new facts or '', additional lifetime of the facts. Returns 1 if the
# location still had that fence.
_SETTLE = """
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'moving_until', 0)
if ARGV[3] ~= '' then redis.call('SET', KEYS[2], ARGV[3], 'EX', math.max(0, redis.call('TTL', KEYS[1])) + ARGV[4]) end
return 1
"""

# KEYS: location, the tenant's sessions, all open sessions, the tenant's open sessions, facts, MCP sessions. ARGV:
# session, the state "closed", margin_s, the time to live for a session without a location, tenant. Returns 1 if the
# session has MCP sessions.
_CLOSE = """
local ttl_s = redis.call('HGET', KEYS[1], 'ttl_s') or ARGV[4]
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'ttl_s', ttl_s)
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ttl_s)) + tonumber(ARGV[3]))
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[5] .. '|' .. ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[5])
return redis.call('EXISTS', KEYS[6])
"""

# --- Scripts of workers -----------------------------------------------------------------------------------------------

# KEYS: location. ARGV: this worker's queue, prefix of this host's queues, prefix of the keys of reports, then the
# queues whose workers have ended.
_ADOPT = """
local location = redis.call('HMGET', KEYS[1], 'state', 'queue', 'fence', 'held')
if not location[1] then return 'none' end
if location[1] == 'closed' then return 'closed' end
if location[2] == ARGV[1] then return 'ours' end
if string.sub(location[2], 1, #ARGV[2]) ~= ARGV[2] then return 'elsewhere' end
local has_ended = redis.call('EXISTS', ARGV[3] .. location[2]) == 0
for i = 4, #ARGV do has_ended = has_ended or location[2] == ARGV[i] end
-- A killed drain has not moved the session.
if location[1] ~= 'open' and location[4] ~= location[3] or not has_ended then return 'held' end
redis.call('HSET', KEYS[1], 'state', 'open', 'queue', ARGV[1], 'moving_until', 0)
redis.call('HINCRBY', KEYS[1], 'fence', 1)
return 'adopted'
"""

# KEYS: location, records of stored files. ARGV: this worker's queue, the fence (also of a hold) or '' for any fence,
# checkpoint, its time, 1 for an automatic checkpoint, prefix of the tenant's days of usage; of an automatic checkpoint:
# lifetime of its record, id, bytes. Returns 0 if the session does not belong to this worker; otherwise the previous
# automatic checkpoint, or 1.
_RECORD_CHECKPOINT = (
    USAGE_LUA
    + """
local location = redis.call('HMGET', KEYS[1], 'queue', 'state', 'fence', 'automatic', 'checkpoint_at')
if location[1] ~= ARGV[1] then return 0 end
if ARGV[2] == '' and location[2] ~= 'open' or ARGV[2] ~= '' and location[3] ~= ARGV[2] then return 0 end
-- A slow checkpoint may be older than one that started later.
if tonumber(ARGV[4]) >= tonumber(location[5] or '0') then
  redis.call('HSET', KEYS[1], 'checkpoint', ARGV[3], 'checkpoint_at', ARGV[4])
end
if ARGV[5] == '0' then return 1 end
-- If the client sends the command twice, the second one finds its own checkpoint.
if location[4] == ARGV[3] then return 1 end
redis.call('HSET', KEYS[1], 'automatic', ARGV[3])
count_usage(ARGV[6], '', '', '', 0, change_stored(KEYS[2], ARGV[7], ARGV[8], ARGV[9]))
return location[4] and location[4] ~= '' and location[4] or 1
"""
)

# KEYS: location. ARGV: this worker's queue, fence, seconds. Returns the new fence, or 0 if the session does not belong
# to this worker.
_HOLD = """
local location = redis.call('HMGET', KEYS[1], 'queue', 'state', 'fence')
if location[1] ~= ARGV[1] or location[2] ~= 'open' or location[3] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'moving', 'moving_until', redis.call('TIME')[1] + ARGV[3])
local fence = redis.call('HINCRBY', KEYS[1], 'fence', 1)
redis.call('HSET', KEYS[1], 'held', fence)
return fence
"""

# KEYS: location. ARGV: this worker's queue, the fence of the hold, the next state, the next queue. Returns 1 if the
# session was still held.
_END_HOLD = """
local location = redis.call('HMGET', KEYS[1], 'queue', 'state', 'fence')
if location[1] ~= ARGV[1] or location[2] ~= 'moving' or location[3] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'queue', ARGV[4], 'moving_until', 0)
return 1
"""

# KEYS: location, the tenant's sessions. ARGV: this worker's queue, session. Returns 1 if the session belonged to this
# worker and its location was removed.
_FORGET = """
local location = redis.call('HMGET', KEYS[1], 'queue', 'state')
if location[1] ~= ARGV[1] or location[2] ~= 'open' then return 0 end
redis.call('SREM', KEYS[2], ARGV[2])
return redis.call('DEL', KEYS[1])
"""


# --- Orchestrators ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionAddress:
    """Queue and fence to which the calls of a session are sent. An address is valid until the fence of the session
    changes.
    """

    queue: str
    fence: int


class SessionStore:
    """Locations of sessions, for orchestrators. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._open = client.register_script(_OPEN)
        self._fork = client.register_script(_FORK)
        self._move = client.register_script(_MOVE)
        self._settle = client.register_script(_SETTLE)
        self._close = client.register_script(_CLOSE)

    async def open(
        self, tenant: str, session: str, queue: str, *, start: str, ttl_s: float, limit: int
    ) -> SessionAddress:
        """Create the location of a new session. Raises ToolFailure: QUOTA_EXCEEDED if the tenant has `limit` sessions
        or their arguments reach STARTS_BYTES, SESSION_NOT_FOUND if the session was closed before it was opened. Raises
        ValueError: a session with that name exists.
        """
        keys = [*self._listed_keys(tenant, session), active_tenants_key(self._deployment)]
        arguments: list[str | float] = [
            session,
            queue,
            start,
            ttl_s,
            LOCATION_MARGIN_S,
            limit,
            tenant,
            MAX_SEEN_TENANTS,
        ]
        arguments.append(deployment_key(self._deployment, ""))
        with broker_errors(_WHAT):
            result = _text(await self._open(keys=keys, args=arguments))
        if result == "full":
            raise _full(tenant, limit)
        if result == "large":
            raise _too_large(tenant)
        if result == CLOSED:
            raise ToolFailure(
                ErrorCode.SESSION_NOT_FOUND, "the session was closed before it was opened: open a new session"
            )
        if result == "exists":
            raise ValueError(f"session {session} already exists")
        return SessionAddress(queue, 1)

    async def fork(
        self, tenant: str, parent: str, starts: Mapping[str, str], queue: str, *, facts: str, limit: int
    ) -> None:
        """Create the locations of all new sessions of a fork, or none. `starts`: name of each new session -> its signed
        opening arguments. `queue`: the queue of the host that made the fork. `facts`: the report of the host, as in
        `settle`.

        Raises ToolFailure: QUOTA_EXCEEDED as in `open`. Raises SandboxUnavailable: the parent was moved or closed.
        """
        keys = self._listed_keys(tenant, parent)
        arguments: list[str | int] = [queue, facts, limit, tenant, deployment_key(self._deployment, "")]
        arguments += [LOCATION_MARGIN_S, FACTS_MARGIN_S]
        for name, start in starts.items():
            keys += [location_key(self._deployment, tenant, name), session_facts_key(self._deployment, tenant, name)]
            arguments += [name, start]
        with broker_errors(_WHAT):
            result = _text(await self._fork(keys=keys, args=arguments))
        if result == "full":
            raise _full(tenant, limit)
        if result == "large":
            raise _too_large(tenant)
        if result == "moved":
            raise SandboxUnavailable("the session was moved or closed while it was forked: try again")

    async def find(self, tenant: str, session: str) -> SessionLocation | None:
        """Return the location of a session; None if it is closed, has expired, or belongs to another tenant."""
        with broker_errors(_WHAT):
            fields: Any = await self._client.hgetall(location_key(self._deployment, tenant, session))
        try:
            return parse_session_location(fields)
        except ValidationError as error:
            raise BrokerUnavailable(
                f"the location of session {session} in Redis cannot be read: run the same release everywhere"
            ) from error

    async def begin_move(
        self, tenant: str, session: str, expected_fence: int, expected_state: LocationState, queue: str
    ) -> SessionAddress | None:
        """Begin to move a session to the host of `queue`. Return None if the location has changed, or if another
        process is moving the session.
        """
        keys = [location_key(self._deployment, tenant, session)]
        with broker_errors(_WHAT):
            fence = int(await self._move(keys=keys, args=[expected_fence, queue, MOVE_S, expected_state.value]))
        return SessionAddress(queue, fence) if fence else None

    async def settle(self, tenant: str, session: str, fence: int, state: LocationState, facts: str = "") -> bool:
        """End a move: the session is open on the new host, or (MOVING) any process may try again. `facts`: the report
        of the new host about the session, for programs that attach to the session later. Return False if the session
        has been moved again.
        """
        keys = [location_key(self._deployment, tenant, session), session_facts_key(self._deployment, tenant, session)]
        with broker_errors(_WHAT):
            return bool(await self._settle(keys=keys, args=[fence, state.value, facts, FACTS_MARGIN_S]))

    async def facts(self, tenant: str, session: str) -> str | None:
        """Return what the host reported about the session when the host opened it; None if no report is stored."""
        with broker_errors(_WHAT):
            facts = await self._client.get(session_facts_key(self._deployment, tenant, session))
        return facts.decode(errors="replace") if isinstance(facts, bytes) else None

    async def host_state(self, queue: str) -> HostState:
        """Return the state of a host instance: alive, silent or given_up. A `silent` host may report again, because
        after an outage of Redis all reports are missing.
        """
        pipe = self._client.pipeline(transaction=True)
        pipe.mget(host_key(self._deployment, queue), tombstone_key(self._deployment, queue))
        pipe.zscore(hosts_key(self._deployment), queue)
        with broker_errors(_WHAT):
            (report, tombstone), listed_at = await pipe.execute()
        # The instance is lost if it has a tombstone. It has also ended if it is not listed: a worker that ended
        # normally leaves the list, and tombstones expire.
        if tombstone is not None or (report is None and listed_at is None):
            return "given_up"
        return "alive" if report is not None else "silent"

    async def close(self, tenant: str, session: str) -> bool:
        """Record the end of a session, even if it is still being opened. A host that has a sandbox of the session
        removes it (workers/host_duties.py). Return whether the session has MCP sessions, which a worker must end.
        """
        keys = [*self._listed_keys(tenant, session), session_facts_key(self._deployment, tenant, session)]
        keys.append(server_sessions_key(self._deployment, tenant, session))
        with broker_errors(_WHAT):
            return bool(await self._close(keys=keys, args=[session, CLOSED, CLOSED_MARGIN_S, DEFAULT_TTL_S, tenant]))

    def _listed_keys(self, tenant: str, session: str) -> list[str]:
        """Return the keys of a session's location and of all lists that contain the session."""
        return [
            location_key(self._deployment, tenant, session),
            tenant_sessions_key(self._deployment, tenant),
            open_sessions_key(self._deployment),
            tenant_open_sessions_key(self._deployment, tenant),
        ]


def _too_large(tenant: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED,
        f"the configurations of tools (`tool_config`) of tenant {tenant}'s open sessions have more than "
        f"{STARTS_BYTES // 2**20} MiB together: close sessions, or put large values into files of the sessions",
    )


def _full(tenant: str, limit: int) -> ToolFailure:
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED,
        f"tenant {tenant} has reached its limit of {limit} open sessions: close one, or ask the operator for a higher "
        f"limit (`toolcrew tenants set {tenant} --sandboxes X`)",
    )


# --- Workers ----------------------------------------------------------------------------------------------------------


class AdoptionResult(StrEnum):
    """Result of an adoption: what a worker that starts must do with a session that it finds in its sandboxd."""

    OURS = "ours"
    ADOPTED = "adopted"
    """The session belonged to an earlier worker of this host, and now belongs to this one. Calls that were sent to the
    earlier worker are refused from now on, and are sent again.
    """
    ELSEWHERE = "elsewhere"
    """The session is on another host. The sandbox on this host is useless."""
    CLOSED = "closed"
    """The session was closed while no worker served it. The sandbox on this host is useless."""
    HELD = "held"
    """An earlier worker of the host may still serve the session, or the session may be moving. The worker must try
    again later.
    """
    NONE = "none"
    """Redis has no location of the session: a program that uses sandboxd directly has opened it, or Redis was flushed.
    The session ends after its time to live.
    """


@dataclass(frozen=True)
class RecordedCheckpoint:
    """A checkpoint that was written into a location. `previous`: the earlier automatic checkpoint, which is no longer
    needed; None if there was none.
    """

    previous: str | None


class WorkerSessionStore:
    """Locations of the sessions of one host instance. A session's name is the one that sandboxd uses:
    `<tenant>:<session>`.

    Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: SyncRedis, deployment: str, host: str, queue: str, keys: SigningKeys) -> None:
        self.queue = queue
        self._keys = keys
        self._client = client
        self._deployment = deployment
        self._prefix = host_prefix(host)
        self._adopt = client.register_script(_ADOPT)
        self._record = client.register_script(_RECORD_CHECKPOINT)
        self._change_stored = client.register_script(CHANGE_STORED_LUA)
        self._hold = client.register_script(_HOLD)
        self._end_hold = client.register_script(_END_HOLD)
        self._forget = client.register_script(_FORGET)

    def adopt(self, names: Sequence[str], ended: Sequence[str] = ()) -> dict[str, AdoptionResult]:
        """Take over the sessions that earlier workers of this host served. `ended`: queues of the workers that have
        ended but whose reports have not expired.
        """
        with broker_errors(_WHAT), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                self._adopt(
                    keys=[self._key(name)],
                    args=[self.queue, self._prefix, host_key(self._deployment, ""), *ended],
                    client=pipe,
                )
            return {name: AdoptionResult(result.decode()) for name, result in zip(names, pipe.execute(), strict=True)}

    def find(self, names: Iterable[str]) -> dict[str, SessionLocation]:
        """Return the locations that exist and that this release can read."""
        names = list(names)
        with broker_errors(_WHAT), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._key(name))
            locations = {name: _parse_readable(fields) for name, fields in zip(names, pipe.execute(), strict=True)}
        return {name: location for name, location in locations.items() if location is not None}

    def find_ended(self, names: Sequence[str]) -> set[str]:
        """Return the sessions that are certainly useless on this host: closed, or on another host. A session without a
        location is not returned, because Redis may have been flushed.
        """
        with broker_errors(_WHAT), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self._key(name), "state", "queue")
            rows = [
                tuple(field.decode(errors="replace") if field is not None else None for field in fields)
                for fields in pipe.execute()
            ]
        return {
            name
            for name, (state, queue) in zip(names, rows, strict=True)
            if state == CLOSED or self._is_elsewhere(queue)
        }

    def record_automatic(
        self, name: str, fence: int, checkpoint: str, checkpoint_at: float, stored_bytes: int
    ) -> RecordedCheckpoint | None:
        """Write an automatic checkpoint into the location, and count its bytes. Another host can then open the session
        from the checkpoint. Return None if the session has moved or was closed.
        """
        result = self._recorded(name, str(fence), checkpoint, checkpoint_at, stored_bytes)
        if not result:
            return None
        previous = result.decode(errors="replace") if isinstance(result, bytes) else ""
        tenant, _, session = name.partition(":")
        return RecordedCheckpoint(open_checkpoint(self._keys, tenant, session, previous) or None)

    def record_requested(self, name: str, checkpoint: str, checkpoint_at: float) -> bool:
        """Write a checkpoint that a caller requested into the location. Only that caller deletes the checkpoint."""
        return bool(self._recorded(name, "", checkpoint, checkpoint_at))

    def count_deleted(self, name: str, checkpoint: str) -> None:
        """Subtract the bytes of a deleted automatic checkpoint from the usage of the tenant, once."""
        change = StoredChange(checkpoint, None)
        key = change.key(self._deployment, name.partition(":")[0])
        with broker_errors(_WHAT):
            self._change_stored(keys=[key], args=[self._usage_prefix(name), *change.amounts()])

    def hold(self, name: str, fence: int, seconds: float) -> int | None:
        """Prevent new calls of the session for `seconds`, while a drain moves it; callers wait. Return the fence of the
        session after this; None if the session no longer belongs to this worker.
        """
        with broker_errors(_WHAT):
            return int(self._hold(keys=[self._key(name)], args=[self.queue, fence, int(seconds)])) or None

    def unhold(self, name: str, fence: int) -> bool:
        """End the effect of `hold` and continue to serve the session on this host. Return False if it had already
        ended.
        """
        return self._hold_ended(name, fence, LocationState.OPEN, self.queue)

    def release(self, name: str, fence: int) -> bool:
        """End the effect of `hold` and leave the session without a host. The next call opens the session on another
        host, from the checkpoint in its location. Return False if it had already ended.
        """
        return self._hold_ended(name, fence, LocationState.MOVING, "")

    def forget(self, names: Iterable[str]) -> int:
        """Remove the locations of sessions that sandboxd has ended. Return how many of them belonged to this worker."""
        with broker_errors(_WHAT), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                tenant, _, session = name.partition(":")
                keys = [self._key(name), tenant_sessions_key(self._deployment, tenant)]
                self._forget(keys=keys, args=[self.queue, session], client=pipe)
            return sum(pipe.execute())

    def _is_elsewhere(self, queue: str | None) -> bool:
        return queue is not None and not queue.startswith(self._prefix)

    def _recorded(
        self, name: str, fence: str, checkpoint: str, checkpoint_at: float, automatic_bytes: int | None = None
    ) -> Any:
        tenant, _, session = name.partition(":")
        sealed = seal_checkpoint(self._keys, tenant, session, checkpoint)
        change, is_automatic = StoredChange(checkpoint, automatic_bytes), int(automatic_bytes is not None)
        args = [self.queue, fence, sealed, checkpoint_at, is_automatic, self._usage_prefix(name), *change.amounts()]
        with broker_errors(_WHAT):
            return self._record(keys=[self._key(name), change.key(self._deployment, tenant)], args=args)

    def _hold_ended(self, name: str, fence: int, state: LocationState, queue: str) -> bool:
        with broker_errors(_WHAT):
            return bool(self._end_hold(keys=[self._key(name)], args=[self.queue, fence, state.value, queue]))

    def _usage_prefix(self, name: str) -> str:
        return usage_prefix(self._deployment, name.partition(":")[0])

    def _key(self, name: str) -> str:
        tenant, _, session = name.partition(":")
        return location_key(self._deployment, tenant, session)


def _parse_readable(fields: Any) -> SessionLocation | None:
    try:
        return parse_session_location(fields)
    except ValidationError:
        return None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
