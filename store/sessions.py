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
    open_sessions_key,
    server_sessions_key,
    session_facts_key,
    tenant_open_sessions_key,
    tenant_sessions_key,
    tombstone_key,
)
from toolcrew.contract.session_locations import (
    LOCATION_MARGIN_S,
    LocationState,
    SessionLocation,
    open_checkpoint,
    seal_checkpoint,
)
from toolcrew.contract.session_spec import DEFAULT_TTL_S
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.store.usage import CHANGE_STORED, USAGE_LUA, StoredChange

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

# Returns 1 if the session has ended. `prefix`, here and below: of the deployment's keys. `sessions`: of the tenant.
REMOVE_ENDED = Script(
    _HAS_ENDED
    + """
if not has_ended(prefix, location) then return 0 end
redis.call('SREM', sessions, session)
return 1
""",
    keys=("location", "sessions"),
    args=("prefix", "session"),
)

_OPEN = Script(
    _HAS_ROOM
    + """
local state = redis.call('HGET', location, 'state')
if state then return state == 'closed' and 'closed' or 'exists' end
if not has_room(sessions, prefix, tenant, 1, tonumber(limit)) then return 'full' end
if not has_room_for_starts(sessions, prefix, tenant, #start, #start) then return 'large' end
local life = math.ceil(tonumber(ttl_s)) + tonumber(margin_s)
local time = redis.call('TIME')
redis.call('HSET', location, 'state', 'open', 'queue', queue, 'fence', 1, 'start', start,
  'ttl_s', ttl_s, 'opened_at', time[1])
redis.call('EXPIRE', location, life)
redis.call('SADD', sessions, session)
if redis.call('TTL', sessions) < life then redis.call('EXPIRE', sessions, life) end
-- No process removes expired sessions from the lists. Each open checks three entries, so that expired ones stay few.
for _, member in ipairs(redis.call('ZRANDMEMBER', open_sessions, 3)) do
  local owner, name = string.match(member, '^(.-)|(.*)$')
  local key = session_key(prefix, owner, name)
  if redis.call('EXISTS', key .. ':place') == 0 then
    redis.call('ZREM', open_sessions, member)
    redis.call('ZREM', prefix .. 't:' .. owner .. ':open-sessions', name)
    redis.call('DEL', key .. ':facts')
  end
end
local at = time[1] .. string.format('%06d', time[2])
redis.call('ZADD', open_sessions, at, tenant .. '|' .. session)
redis.call('ZADD', tenant_open_sessions, at, session)
redis.call('ZADD', tenants, time[1], tenant)
redis.call('ZREMRANGEBYRANK', tenants, 0, -1 - max_tenants)
return 'open'
""",
    keys=("location", "sessions", "open_sessions", "tenant_open_sessions", "tenants"),
    args=("session", "queue", "start", "ttl_s", "margin_s", "limit", "tenant", "max_tenants", "prefix"),
)

# `new_keys`: location and facts of each new session. `starts`: name and start of each new session.
_FORK = Script(
    _HAS_ROOM
    + """
local parent = redis.call('HMGET', parent_location, 'state', 'queue', 'ttl_s', 'folder')
if parent[1] ~= 'open' or parent[2] ~= queue then return 'moved' end
local count = #starts / 2
if not has_room(sessions, prefix, tenant, count, tonumber(limit)) then return 'full' end
local bytes, largest = 0, 0
for i = 1, count do bytes, largest = bytes + #starts[2 * i], math.max(largest, #starts[2 * i]) end
if not has_room_for_starts(sessions, prefix, tenant, bytes, largest) then return 'large' end
local life = math.ceil(tonumber(parent[3])) + tonumber(margin_s)
local time = redis.call('TIME')
local at = time[1] .. string.format('%06d', time[2])
for i = 1, count do
  local location, name = new_keys[2 * i - 1], starts[2 * i - 1]
  redis.call('HSET', location, 'state', 'open', 'queue', queue, 'fence', 1, 'start', starts[2 * i],
    'ttl_s', parent[3], 'opened_at', time[1], 'folder', parent[4] or '')
  redis.call('EXPIRE', location, life)
  redis.call('SET', new_keys[2 * i], facts, 'EX', life + facts_margin_s)
  redis.call('SADD', sessions, name)
  redis.call('ZADD', open_sessions, at, tenant .. '|' .. name)
  redis.call('ZADD', tenant_open_sessions, at, name)
end
if redis.call('TTL', sessions) < life then redis.call('EXPIRE', sessions, life) end
return 'open'
""",
    keys=("parent_location", "sessions", "open_sessions", "tenant_open_sessions", "new_keys..."),
    args=("queue", "facts", "limit", "tenant", "prefix", "margin_s", "facts_margin_s", "starts..."),
)

# A session whose streams are its only use has no calls that extend its location.
_EXTEND = Script(
    """
local life = math.ceil(tonumber(redis.call('HGET', location, 'ttl_s') or 0)) + margin_s
for _, key in ipairs({location, sessions}) do
  if redis.call('TTL', key) < life then redis.call('EXPIRE', key, life) end
end
""",
    keys=("location", "sessions"),
    args=("margin_s",),
)

# Returns the new fence, or 0 if another process was first: `fence` and `state` are the expected ones. The state is
# compared too, because the end of a move does not change the fence.
_MOVE = Script(
    """
local present = redis.call('HMGET', location, 'fence', 'state', 'moving_until')
if present[1] ~= fence or present[2] ~= state then return 0 end
local now = tonumber(redis.call('TIME')[1])
if present[2] == 'moving' and tonumber(present[3] or '0') > now then return 0 end
redis.call('HSET', location, 'state', 'moving', 'queue', queue, 'moving_until', now + tonumber(move_s))
return redis.call('HINCRBY', location, 'fence', 1)
""",
    keys=("location",),
    args=("fence", "queue", "move_s", "state"),
)

# Returns 1 if the location still had that fence. `facts` '': keep the present ones.
_SETTLE = Script(
    """
if redis.call('HGET', location, 'fence') ~= fence then return 0 end
redis.call('HSET', location, 'state', state, 'moving_until', 0)
if facts ~= '' then redis.call('SET', facts_key, facts, 'EX', math.max(0, redis.call('TTL', location)) + margin_s) end
return 1
""",
    keys=("location", "facts_key"),
    args=("fence", "state", "facts", "margin_s"),
)

# Returns 1 if the options of the session are still `start`.
_SET_TTL = Script(
    """
if redis.call('HGET', location, 'start') ~= start then return 0 end
redis.call('HSET', location, 'ttl_s', ttl_s, 'start', new_start)
redis.call('EXPIRE', location, life_s)
if redis.call('TTL', sessions) < tonumber(life_s) then redis.call('EXPIRE', sessions, life_s) end
return 1
""",
    keys=("location", "sessions"),
    args=("start", "new_start", "ttl_s", "life_s"),
)

# Returns 1 if the session has MCP sessions. `default_ttl_s`: the time to live for a session without a location.
_CLOSE = Script(
    """
local ttl_s = redis.call('HGET', location, 'ttl_s') or default_ttl_s
redis.call('DEL', location)
redis.call('HSET', location, 'state', state, 'ttl_s', ttl_s)
redis.call('EXPIRE', location, math.ceil(tonumber(ttl_s)) + tonumber(margin_s))
redis.call('SREM', sessions, session)
redis.call('ZREM', open_sessions, tenant .. '|' .. session)
redis.call('ZREM', tenant_open_sessions, session)
redis.call('DEL', facts)
return redis.call('EXISTS', server_sessions)
""",
    keys=("location", "sessions", "open_sessions", "tenant_open_sessions", "facts", "server_sessions"),
    args=("session", "state", "margin_s", "default_ttl_s", "tenant"),
)

# --- Scripts of workers -----------------------------------------------------------------------------------------------

# `queue`, here and below: of this worker. `ended`: the queues whose workers have ended.
_ADOPT = Script(
    """
local present = redis.call('HMGET', location, 'state', 'queue', 'fence', 'held')
if not present[1] then return 'none' end
if present[1] == 'closed' then return 'closed' end
if present[2] == queue then return 'ours' end
if string.sub(present[2], 1, #host_prefix) ~= host_prefix then return 'elsewhere' end
local has_ended = redis.call('EXISTS', report_prefix .. present[2]) == 0
for _, ended_queue in ipairs(ended) do has_ended = has_ended or present[2] == ended_queue end
-- A killed drain has not moved the session.
if present[1] ~= 'open' and present[4] ~= present[3] or not has_ended then return 'held' end
redis.call('HSET', location, 'state', 'open', 'queue', queue, 'moving_until', 0)
redis.call('HINCRBY', location, 'fence', 1)
return 'adopted'
""",
    keys=("location",),
    args=("queue", "host_prefix", "report_prefix", "ended..."),
)

# Returns 0 if the session does not belong to this worker; otherwise the previous automatic checkpoint, or 1. `fence`:
# also of a hold; '' for any fence. `prefix`: of the tenant's days of usage.
_RECORD_CHECKPOINT = Script(
    USAGE_LUA
    + """
local present = redis.call('HMGET', location, 'queue', 'state', 'fence', 'automatic', 'checkpoint_at')
if present[1] ~= queue then return 0 end
if fence == '' and present[2] ~= 'open' or fence ~= '' and present[3] ~= fence then return 0 end
-- A slow checkpoint may be older than one that started later.
if tonumber(at) >= tonumber(present[5] or '0') then
  redis.call('HSET', location, 'checkpoint', checkpoint, 'checkpoint_at', at)
end
if is_automatic == '0' then return 1 end
-- If the client sends the command twice, the second one finds its own checkpoint.
if present[4] == checkpoint then return 1 end
redis.call('HSET', location, 'automatic', checkpoint)
count_usage(prefix, '', '', '', 0, change_stored(stored, file_ttl_s, file, file_bytes))
return present[4] and present[4] ~= '' and present[4] or 1
""",
    keys=("location", "stored"),
    args=("queue", "fence", "checkpoint", "at", "is_automatic", "prefix", "file_ttl_s", "file", "file_bytes"),
)

# Returns the new fence, or 0 if the session does not belong to this worker.
_HOLD = Script(
    """
local present = redis.call('HMGET', location, 'queue', 'state', 'fence')
if present[1] ~= queue or present[2] ~= 'open' or present[3] ~= fence then return 0 end
redis.call('HSET', location, 'state', 'moving', 'moving_until', redis.call('TIME')[1] + hold_s)
local new_fence = redis.call('HINCRBY', location, 'fence', 1)
redis.call('HSET', location, 'held', new_fence)
return new_fence
""",
    keys=("location",),
    args=("queue", "fence", "hold_s"),
)

# Returns 1 if the session was still held. `fence`: of the hold.
_END_HOLD = Script(
    """
local present = redis.call('HMGET', location, 'queue', 'state', 'fence')
if present[1] ~= queue or present[2] ~= 'moving' or present[3] ~= fence then return 0 end
redis.call('HSET', location, 'state', state, 'queue', next_queue, 'moving_until', 0)
return 1
""",
    keys=("location",),
    args=("queue", "fence", "state", "next_queue"),
)

# Returns 1 if the session belonged to this worker, its time to live is over, and its location was removed.
_FORGET = Script(
    """
local present = redis.call('HMGET', location, 'queue', 'state', 'ttl_s')
if present[1] ~= queue or present[2] ~= 'open' or tonumber(idle_s) < tonumber(present[3] or 0) then return 0 end
redis.call('SREM', sessions, session)
return redis.call('DEL', location)
""",
    keys=("location", "sessions"),
    args=("queue", "session", "idle_s"),
)


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

    async def open(
        self, tenant: str, session: str, queue: str, *, start: str, ttl_s: float, limit: int
    ) -> SessionAddress:
        """Create the location of a new session. Raises ToolFailure: QUOTA_EXCEEDED if the tenant has `limit` sessions
        or their arguments reach STARTS_BYTES, SESSION_NOT_FOUND if the session was closed before it was opened. Raises
        ValueError: a session with that name exists.
        """
        with broker_errors(_WHAT):
            reply = await _OPEN.run(
                self._client,
                location=location_key(self._deployment, tenant, session),
                tenants=active_tenants_key(self._deployment),
                session=session,
                queue=queue,
                start=start,
                ttl_s=ttl_s,
                margin_s=LOCATION_MARGIN_S,
                limit=limit,
                tenant=tenant,
                max_tenants=MAX_SEEN_TENANTS,
                prefix=deployment_key(self._deployment, ""),
                **self._lists(tenant),
            )
        result = _text(reply)
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
        new_keys = [key(self._deployment, tenant, name) for name in starts for key in (location_key, session_facts_key)]
        with broker_errors(_WHAT):
            reply = await _FORK.run(
                self._client,
                parent_location=location_key(self._deployment, tenant, parent),
                new_keys=new_keys,
                queue=queue,
                facts=facts,
                limit=limit,
                tenant=tenant,
                prefix=deployment_key(self._deployment, ""),
                margin_s=LOCATION_MARGIN_S,
                facts_margin_s=FACTS_MARGIN_S,
                starts=[text for pair in starts.items() for text in pair],
                **self._lists(tenant),
            )
        result = _text(reply)
        if result == "full":
            raise _full(tenant, limit)
        if result == "large":
            raise _too_large(tenant)
        if result == "moved":
            raise SandboxUnavailable("the session was moved or closed while it was forked: try again")

    async def extend(self, tenant: str, session: str) -> None:
        """Let the location of a session live as long as after a call."""
        with broker_errors(_WHAT):
            await _EXTEND.run(
                self._client,
                location=location_key(self._deployment, tenant, session),
                sessions=tenant_sessions_key(self._deployment, tenant),
                margin_s=LOCATION_MARGIN_S,
            )

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
        with broker_errors(_WHAT):
            fence = await _MOVE.run(
                self._client,
                location=location_key(self._deployment, tenant, session),
                fence=expected_fence,
                queue=queue,
                move_s=MOVE_S,
                state=expected_state.value,
            )
        return SessionAddress(queue, int(fence)) if fence else None

    async def settle(self, tenant: str, session: str, fence: int, state: LocationState, facts: str = "") -> bool:
        """End a move: the session is open on the new host, or (MOVING) any process may try again. `facts`: the report
        of the new host about the session, for programs that attach to the session later. Return False if the session
        has been moved again.
        """
        with broker_errors(_WHAT):
            is_settled = await _SETTLE.run(
                self._client,
                location=location_key(self._deployment, tenant, session),
                facts_key=session_facts_key(self._deployment, tenant, session),
                fence=fence,
                state=state.value,
                facts=facts,
                margin_s=FACTS_MARGIN_S,
            )
        return bool(is_settled)

    async def set_ttl(self, tenant: str, session: str, start: str, changed: str, *, ttl_s: float, life_s: int) -> bool:
        """Change the time to live, and the signed options from `start` to `changed`, and let the location live for
        `life_s`. Return False if the session is closed or its options are not `start`.
        """
        values: dict[str, str | float] = {"start": start, "new_start": changed, "ttl_s": ttl_s, "life_s": life_s}
        with broker_errors(_WHAT):
            is_set = await _SET_TTL.run(
                self._client,
                location=location_key(self._deployment, tenant, session),
                sessions=tenant_sessions_key(self._deployment, tenant),
                **values,
            )
        return bool(is_set)

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
        with broker_errors(_WHAT):
            has_server_sessions = await _CLOSE.run(
                self._client,
                location=location_key(self._deployment, tenant, session),
                facts=session_facts_key(self._deployment, tenant, session),
                server_sessions=server_sessions_key(self._deployment, tenant, session),
                session=session,
                state=CLOSED,
                margin_s=CLOSED_MARGIN_S,
                default_ttl_s=DEFAULT_TTL_S,
                tenant=tenant,
                **self._lists(tenant),
            )
        return bool(has_server_sessions)

    def _lists(self, tenant: str) -> dict[str, str]:
        """Return the keys of the lists that contain a session of the tenant, by their names in the scripts."""
        return {
            "sessions": tenant_sessions_key(self._deployment, tenant),
            "open_sessions": open_sessions_key(self._deployment),
            "tenant_open_sessions": tenant_open_sessions_key(self._deployment, tenant),
        }


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

    def adopt(self, names: Sequence[str], ended: Sequence[str] = ()) -> dict[str, AdoptionResult]:
        """Take over the sessions that earlier workers of this host served. `ended`: queues of the workers that have
        ended but whose reports have not expired.
        """
        with broker_errors(_WHAT), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                _ADOPT.add_to(
                    pipe,
                    location=self._key(name),
                    queue=self.queue,
                    host_prefix=self._prefix,
                    report_prefix=host_key(self._deployment, ""),
                    ended=ended,
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
        arguments = StoredChange(checkpoint, None).arguments(self._deployment, name.partition(":")[0])
        with broker_errors(_WHAT):
            CHANGE_STORED.run_blocking(self._client, **arguments)

    def hold(self, name: str, fence: int, seconds: float) -> int | None:
        """Prevent new calls of the session for `seconds`, while a drain moves it; callers wait. Return the fence of the
        session after this; None if the session no longer belongs to this worker.
        """
        with broker_errors(_WHAT):
            new_fence = _HOLD.run_blocking(
                self._client, location=self._key(name), queue=self.queue, fence=fence, hold_s=int(seconds)
            )
        return int(new_fence) or None

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

    def forget(self, idle: Mapping[str, float]) -> int:
        """Remove the locations of ended sessions whose time to live is over. `idle`: seconds since the last use, by
        name. Return how many were removed.
        """
        with broker_errors(_WHAT), self._client.pipeline(transaction=False) as pipe:
            for name, idle_s in idle.items():
                tenant, _, session = name.partition(":")
                _FORGET.add_to(
                    pipe,
                    location=self._key(name),
                    sessions=tenant_sessions_key(self._deployment, tenant),
                    queue=self.queue,
                    session=session,
                    idle_s=idle_s,
                )
            return sum(pipe.execute())

    def _is_elsewhere(self, queue: str | None) -> bool:
        return queue is not None and not queue.startswith(self._prefix)

    def _recorded(
        self, name: str, fence: str, checkpoint: str, checkpoint_at: float, automatic_bytes: int | None = None
    ) -> Any:
        tenant, _, session = name.partition(":")
        sealed = seal_checkpoint(self._keys, tenant, session, checkpoint)
        with broker_errors(_WHAT):
            return _RECORD_CHECKPOINT.run_blocking(
                self._client,
                location=self._key(name),
                queue=self.queue,
                fence=fence,
                checkpoint=sealed,
                at=checkpoint_at,
                is_automatic=int(automatic_bytes is not None),
                **StoredChange(checkpoint, automatic_bytes).arguments(self._deployment, tenant),
            )

    def _hold_ended(self, name: str, fence: int, state: LocationState, queue: str) -> bool:
        with broker_errors(_WHAT):
            was_held = _END_HOLD.run_blocking(
                self._client,
                location=self._key(name),
                queue=self.queue,
                fence=fence,
                state=state.value,
                next_queue=queue,
            )
        return bool(was_held)

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
