"""The records of calls in Redis: one hash for each call id. Every script that changes the state of a call is in this
file.

::

                        renew (attempt + 1)
          .---------------------------------------------.
          v                                             |
    --> queued --claim--> running --finish--> done      |
     ^    |                  |                          |
     |    |                  '--lose------> lost -------'
     |    |                                  |
     |    |--lose, reap--------------------> |--give up--> unknown (it may have acted) or lost
     |    |
     |    '--forbid, refuse, kill--> forbidden (it never starts)
     '-- publish

    script          called by                                    moves
    publish         orchestrator (publisher.py)                  no record -> queued; queued by renew -> queued
    claim           worker, before it runs the call              queued -> running, or forbidden after its deadline
    confirm         worker, some seconds later                   queued -> running, if Redis has lost its last second
    refuse          worker, for a call that it must not run      queued, or running by itself -> forbidden
    finish          worker, with the result                      running -> done
    forbid          orchestrator or worker that cancels          queued -> forbidden
    kill            operator                                     queued -> forbidden; marks a running call
    lose            orchestrator that sees that a worker died    queued, running -> lost
    reap            orchestrator, for the queue of a dead host   queued -> lost
    change          orchestrator                                 lost -> queued (renew), or unknown or lost (give up)

Invariant: a call begins at most once, and ends once. Every script reads the record's state and attempt and decides in
one atomic step. A repeated message, a worker that was taken for dead, and two orchestrators therefore cannot both win.
Redis may lose its last second (`appendfsync everysec`): then an earlier attempt's record is there again, and the
comments of `_GATE` say which message may still decide.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import Field, ValidationError

from contract.calls import Identifier, Record, ToolCall, ToolContext
from contract.errors import EnvelopeRefused, ErrorCode
from contract.hosts import HEARTBEAT_S, HOST_LOST_TYPE, HOST_TTL_S, TOMBSTONE_TTL_S
from contract.names import (
    audit_key,
    call_key,
    control_queue,
    host_key,
    hosts_key,
    kills_key,
    place_key,
    result_key,
    tombstone_key,
)
from contract.session_locations import LOCATION_MARGIN_S
from contract.signing import SigningKeys
from store.audit import AUDIT_LUA
from store.connection import RedisClient, SharedClock, SyncRedis, WorkerScript, broker_errors
from telemetry.logs import get_logger

CALL_TTL_S = 24 * 3600
"""How long a call id is remembered, and so cannot be used again."""
RESULT_TTL_S = 3600
"""How long a result waits in Redis for whoever awaits it."""
CALLS_LISTED = 1000
"""How many calls of a tenant are listed after they have ended."""
MAX_ATTEMPTS = 3
"""How often a call that is lost is sent: again only when nothing can have acted, or its tool is idempotent."""


class CallState(StrEnum):
    """The state of a call. QUEUED and RUNNING: no process has given it an end. LOST: it may be sent again."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    UNKNOWN = "unknown"
    FORBIDDEN = "forbidden"

    @property
    def has_ended(self) -> bool:
        """Return True for a state in which the call neither waits nor runs."""
        return self not in (CallState.QUEUED, CallState.RUNNING)

    @property
    def is_lost(self) -> bool:
        """Return True for a state in which no worker will finish this attempt at the call."""
        return self in (CallState.LOST, CallState.UNKNOWN)


class CallClaim(StrEnum):
    """What a worker is told that wants to start a call."""

    GRANTED = "granted"
    STARTED = "started"
    """It has been started, or forbidden, before: this message is a repetition, and nobody waits for its answer."""
    SUPERSEDED = "superseded"
    """A later attempt of the same call is on its way."""
    MOVED = "moved"
    """Its session lives on another host by now, or was closed."""
    EXPIRED = "expired"
    """Its deadline had passed; it is forbidden by now."""


class CallRecord(Record):
    """The fields of the hash, all text in Redis; absent ones are not known. Instants in Unix seconds of the shared
    clock.

    `holder`: who runs it (contract/hosts.py: holder_name); `claim`: a word of the claim that started it, by which one
    that is sent again knows itself; `code`: the result's error code, "" when it succeeded; `nonce`: the attempt that
    was published last, and a random word; `task`: under which task id. `ticket`: signed by the sender, and removed by
    the worker that decides about the call: without it the call may have begun, whatever `state` says. `killed`: who
    ended it from outside and why, as a sentence; a call that has it is not sent again. `node`: the Celery name of the
    worker that runs it. `noticed_by`, `reason`: of a lost call, the process that noticed the loss and what it saw;
    `ended_at` is then the time of that.
    """

    state: CallState
    attempt: int = Field(default=1, ge=1)
    tool: str = ""
    session: str = ""
    queue: str = ""
    holder: str = ""
    claim: str = ""
    sandbox: str = ""
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    code: str = ""
    nonce: str = ""
    task: str = ""
    killed: str = ""
    ticket: str = ""
    node: str = ""
    noticed_by: str = ""
    reason: str = ""


def seal_ticket(keys: SigningKeys, tenant: str, call_id: str, attempt: int) -> str:
    """Return the ticket of an attempt that is about to be published.

    All other fields are written by scripts without a signature. A process without the secret that claims that a call's
    host was lost cannot make a ticket, so a call that runs is not sent again for such a claim.
    """
    return keys.seal(f"ticket {tenant} {call_id} {attempt}", "")


def has_ticket(keys: SigningKeys, tenant: str, call_id: str, record: CallRecord) -> bool:
    """Whether the record proves that no worker has begun this attempt of the call."""
    try:
        keys.unseal(f"ticket {tenant} {call_id} {record.attempt}", record.ticket)
    except EnvelopeRefused:
        return False
    return True


def parse_record(fields: Mapping[bytes, bytes]) -> CallRecord | None:
    """The record of a hash; None for no hash. Raises ValidationError for one that is none of ours."""
    if not fields:
        return None
    return CallRecord.model_validate(
        {name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False
    )


log = get_logger(__name__)

REAP_BATCH = 500
TRUSTED_S = int(HOST_TTL_S - 2 * HEARTBEAT_S)
"""How long after Redis was seen to answer regularly a missing report still says that its host is lost."""
FORGET_S = 600
"""How long after its last report a host's queue is looked at again: a message may have been on its way there."""
READ_BATCH = 500
KILLS_KEPT_S = 60
MAX_KILLS_KEPT = 1000
MAX_REASON_CHARS = 500

# --- Scripts of orchestrators -----------------------------------------------------------------------------------------

# KEYS: call, queue, held slots, the tenant's calls; for a session's call also its location, the queue's host, and the
# tenant's sessions. ARGV: attempt, nonce, tool, message, task, ticket, slot, call id; for a session's call also session
# and fence. Returns what became of it, and Redis's time, in one line.
PUBLISH = (
    """
local time = redis.call('TIME')
local function answer(word) return {ok = word .. ' ' .. time[1] .. ' ' .. time[2]} end
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'nonce')
-- A publish whose answer was lost is repeated: its nonce says that it was done.
if record[3] == ARGV[2] then return answer('sent') end
if ARGV[7] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[7]) == 0 then return answer('no_slot') end
local place
if KEYS[5] then
  place = redis.call('HMGET', KEYS[5], 'state', 'queue', 'fence', 'ttl_s')
  local is_there = place[1] == 'open' or place[1] == 'moving'
  if not is_there or place[2] ~= KEYS[2] or place[3] ~= ARGV[10] then return answer('moved') end
  if redis.call('EXISTS', KEYS[6]) == 0 then return answer('host_lost') end
end
local first = ARGV[1] == '1'
if first and record[1] then return answer('duplicate') end
if not first then
  local was_sent = record[3] and string.match(record[3], '^%d+') == ARGV[1]
  if record[1] ~= 'queued' or record[2] ~= ARGV[1] or was_sent then return answer('duplicate') end
end
redis.call('LPUSH', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', ARGV[1], 'tool', ARGV[3], 'session', ARGV[9] or '',
  'queue', KEYS[2], 'queued_at', time[1] .. '.' .. string.format('%06d', time[2]),
  'nonce', ARGV[2], 'task', ARGV[5], 'ticket', ARGV[6])
redis.call('EXPIRE', KEYS[1], CALL_TTL_S)
if first and string.sub(ARGV[3], 1, 8) ~= 'session.' then
  redis.call('ZADD', KEYS[4], time[1] .. '.' .. string.format('%06d', time[2]), ARGV[8])
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - CALLS_LISTED)
  redis.call('EXPIRE', KEYS[4], CALL_TTL_S)
end
if place then
  local life = math.ceil(tonumber(place[4]) or 0) + LOCATION_MARGIN_S
  redis.call('EXPIRE', KEYS[5], life)
  if redis.call('TTL', KEYS[7]) < life then redis.call('EXPIRE', KEYS[7], life) end
end
return answer('sent')
""".replace("CALL_TTL_S", str(CALL_TTL_S))
    .replace("LOCATION_MARGIN_S", str(LOCATION_MARGIN_S))
    .replace("CALLS_LISTED", str(CALLS_LISTED))
)

# KEYS: call. ARGV: attempt, seconds that a call is remembered. Returns the state that the call was in; `superseded`
# when another attempt decides. An earlier attempt that was given up is there when Redis has lost what renewed it: as
# for a claim, ours decides.
_FORBID_ATTEMPT = """
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt')
local known, attempt = tonumber(record[2] or '1') or 1e9, tonumber(ARGV[1])
local is_forgotten = known < attempt and (record[1] == 'queued' or record[1] == 'lost')
if record[1] and not is_forgotten then
  if known ~= attempt then return 'superseded' end
  if record[1] ~= 'queued' then return record[1] end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'forbidden', 'attempt', ARGV[1], 'ended_at', time[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 'queued'
"""

# KEYS: call. ARGV: the attempt as known, the new state, the new attempt, the error code. Returns the state that the
# record has now.
_CHANGE = """
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'killed')
if not record[1] then return '' end
if record[3] and ARGV[2] == 'queued' then return 'forbidden' end
local has_ended = record[1] == 'done' and ARGV[2] ~= 'queued'
if record[2] ~= ARGV[1] or record[1] == 'forbidden' or has_ended then return record[1] end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'attempt', ARGV[3])
if ARGV[2] == 'queued' then
  redis.call('HDEL', KEYS[1], 'ended_at', 'noticed_by', 'reason', 'code')
elseif ARGV[4] ~= '' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'code', ARGV[4])
  redis.call('HSETNX', KEYS[1], 'ended_at', string.format('%d.%06d', time[1], time[2]))
end
return ARGV[2]
"""

# KEYS: call. ARGV: the attempt and the state as known, the new state, the process that noticed the loss, the reason.
# Returns 1 when it was so.
_LOSE = """
local record = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if record[1] ~= ARGV[1] or record[2] ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
local ended_at = string.format('%d.%06d', time[1], time[2])
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'ended_at', ended_at, 'noticed_by', ARGV[4], 'reason', ARGV[5])
return 1
"""

_KILL = (
    AUDIT_LUA
    + f"""
-- KEYS: call, orders, audit. ARGV: the order, what is noted in the call, the entry of the audit, '1' when the sender of
-- the call says so: then a call without a record waits for its slot. Returns the state that the call has then; '' when
-- nothing is known of it, and its sender is still to read the order.
local record = redis.call('HMGET', KEYS[1], 'state', 'killed')
local time, state = redis.call('TIME'), record[1]
local now = string.format('%d.%06d', time[1], time[2])
local function note()
  redis.call('ZADD', KEYS[2], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - {KILLS_KEPT_S})
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, {-1 - MAX_KILLS_KEPT})
  redis.call('EXPIRE', KEYS[2], {2 * KILLS_KEPT_S})
end
if not state and ARGV[4] ~= '1' then
  note()
  return ''
end
if not state or state == 'queued' then
  audit(KEYS[3], ARGV[3])
  redis.call('HSET', KEYS[1], 'state', 'forbidden', 'killed', ARGV[2], 'code', 'CANCELLED', 'ended_at', now)
  if not state then redis.call('HSET', KEYS[1], 'attempt', 1) end
  redis.call('EXPIRE', KEYS[1], {CALL_TTL_S})
  note()
  return 'forbidden'
end
if (state == 'running' or state == 'lost') and not record[2] then
  audit(KEYS[3], ARGV[3])
  redis.call('HSET', KEYS[1], 'killed', ARGV[2])
end
return state
"""
)

# KEYS: report, queue, its control list, tombstone, hosts. ARGV: queue, tombstone's life, batch, the result before the
# task's id, the result after it, the result's life, prefix of results, forget before, not after, the process that
# reaps, the reason. Returns how many messages were taken; -1 when the host lives, or that is not known: a script that
# waited while Redis stood still finds every report expired. The caller of a call that has started, has ended, or was
# sent again gets its answer elsewhere.
_REAP = """
local now = tonumber(redis.call('TIME')[1])
if redis.call('EXISTS', KEYS[1]) == 1 or now > tonumber(ARGV[9]) then return -1 end
redis.call('SET', KEYS[4], '1', 'EX', ARGV[2])
redis.call('DEL', KEYS[3])
local last = redis.call('ZSCORE', KEYS[5], ARGV[1])
if last and tonumber(last) < now - tonumber(ARGV[8]) then redis.call('ZREM', KEYS[5], ARGV[1]) end
local taken = 0
while taken < tonumber(ARGV[3]) do
  local message = redis.call('RPOP', KEYS[2])
  if not message then break end
  taken = taken + 1
  local ok, fields = pcall(cjson.decode, message)
  if ok and type(fields) == 'table' and type(fields.headers) == 'table' and type(fields.headers.id) == 'string' then
    local call = type(fields.headers.call_key) == 'string' and fields.headers.call_key or ''
    local record = redis.pcall('HMGET', call, 'state', 'attempt')
    local is_other = record[2] and tonumber(record[2]) ~= fields.headers.call_attempt
    if not is_other and record[1] ~= 'running' and record[1] ~= 'done' then
      local key = ARGV[7] .. fields.headers.id
      local result = ARGV[4] .. cjson.encode(fields.headers.id) .. ARGV[5]
      redis.call('SET', key, result, 'EX', ARGV[6])
      redis.call('PUBLISH', key, result)
      if record[1] == 'queued' then
        redis.call('HSET', call, 'state', 'lost', 'ended_at', now, 'noticed_by', ARGV[10], 'reason', ARGV[11])
      end
    end
  end
end
return taken
"""

# --- Scripts of workers -----------------------------------------------------------------------------------------------

# In every script of a worker: KEYS[1] the call; ARGV[1] its attempt, ARGV[2] seconds that it is remembered, ARGV[3] a
# random word of this decision, by which a script that is sent again, because the first answer was lost, recognises its
# own decision. `verdict` tells whether this message may decide about the call, "granted", or not:
#
#   no record                        decides: Redis lost its last second, or another program published the message
#   `queued`, attempt N              decides: the normal case
#   `queued` or `lost`, attempt < N  decides: Redis lost what renewed the call; the earlier attempt was given up
#   any other state, attempt < N     started: Redis lost what renewed the call; an earlier attempt may have acted
#   decided by this very message     the same decision again
#   any other state, attempt N       started: a repetition; or forbidden, given up, or lost with its host's queue
#   attempt > N                         superseded
_GATE = """
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'claim')
local state, known, attempt = record[1], tonumber(record[2] or '1') or 1e9, tonumber(ARGV[1])
local verdict = 'granted'
if state and known > attempt then verdict = 'superseded'
elseif state and known == attempt and state ~= 'queued' then verdict = 'started'
elseif state and known < attempt and state ~= 'queued' and state ~= 'lost' then verdict = 'started' end
local function note(...)
  redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'claim', ARGV[3], ...)
  redis.call('HDEL', KEYS[1], 'ticket')
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
local is_again = verdict == 'started' and record[3] == ARGV[3]
"""

# KEYS: call, location. ARGV: attempt, ttl, word, holder, deadline, fence, whether a session that moves will do, tool,
# session, node.
_CLAIM = (
    _GATE
    + """
if is_again and state == 'running' then return {'granted', now} end
if is_again and state == 'forbidden' then return {'expired', now} end
if verdict ~= 'granted' then return {verdict, now} end
if tonumber(now) > tonumber(ARGV[5]) then
  note('state', 'forbidden', 'ended_at', now)
  return {'expired', now}
end
if ARGV[6] ~= '' then
  local place = redis.call('HMGET', KEYS[2], 'fence', 'state')
  local may_run = place[2] == 'open' or (ARGV[7] == '1' and place[2] == 'moving')
  if place[1] ~= ARGV[6] or not may_run then return {'moved', now} end
end
note('state', 'running', 'holder', ARGV[4], 'started_at', now, 'tool', ARGV[8], 'session', ARGV[9], 'node', ARGV[10])
return {'granted', now}
"""
)

# KEYS: call. ARGV: attempt, ttl, word, holder, tool, session, node.
_CONFIRM = (
    _GATE
    + """
if verdict == 'granted' then
  note('state', 'running', 'holder', ARGV[4], 'started_at', now, 'tool', ARGV[5], 'session', ARGV[6], 'node', ARGV[7])
end
return {verdict, now}
"""
)

# ARGV: attempt, ttl, word, holder. A worker claims a call while it checks it: then the claim is taken back.
_REFUSE = (
    _GATE
    + """
if is_again and state == 'forbidden' then return {'granted', now} end
if verdict == 'started' and state == 'running' and redis.call('HGET', KEYS[1], 'holder') == ARGV[4] then
  redis.call('HDEL', KEYS[1], 'holder', 'started_at', 'node')
  verdict = 'granted'
end
if verdict == 'granted' then note('state', 'forbidden', 'ended_at', now) end
return {verdict, now}
"""
)

# KEYS: call. ARGV: ttl. A call that is not known yet may be on its way.
_FORBID = """
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'forbidden' then return 1 end
if state and state ~= 'queued' then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'forbidden', 'ended_at', string.format('%d.%06d', time[1], time[2]))
if not state then redis.call('HSET', KEYS[1], 'attempt', 1) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""

# KEYS: result, call. ARGV: the stored text, its ttl; attempt ("" when the call has not run), ttl of the call, code,
# sandbox. Returns 0 when a later attempt is on its way, whose result is waited for. An earlier attempt in the record is
# what is left when Redis has lost this one.
_FINISH = """
if ARGV[3] ~= '' then
  local known = redis.pcall('HMGET', KEYS[2], 'attempt', 'state')
  if not known.err then
    if (tonumber(known[1] or '0') or 0) > tonumber(ARGV[3]) then return 0 end
    if known[2] ~= 'forbidden' then
      local time = redis.call('TIME')
      redis.call('HSET', KEYS[2], 'state', 'done', 'attempt', ARGV[3], 'code', ARGV[5], 'sandbox', ARGV[6],
        'ended_at', string.format('%d.%06d', time[1], time[2]))
      redis.call('EXPIRE', KEYS[2], ARGV[4])
    end
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', KEYS[1], ARGV[1])
return 1
"""

# --- Orchestrators ----------------------------------------------------------------------------------------------------


class KillOrder(Record):
    """An order to end a call: who gives it, and why. `entry`: the entry of the audit, written by the process that
    carries the order out.
    """

    tenant: Identifier
    call: Identifier
    by: str = Field(max_length=128)
    reason: str = Field(default="", max_length=MAX_REASON_CHARS)
    entry: str = ""

    def describe(self) -> str:
        """Return the sentence that the call's caller reads."""
        return f"the call was killed by {self.by}" + (f": {self.reason}" if self.reason else "")


class CallStore:
    """The records of calls, for orchestrators. Every method raises BrokerUnavailable when Redis does not answer.
    `process`: the name of this one.
    """

    def __init__(self, client: RedisClient, deployment: str, process: str = "") -> None:
        self._client = client
        self._deployment = deployment
        self._process = process
        self._change = client.register_script(_CHANGE)
        self._lose = client.register_script(_LOSE)
        self._forbid = client.register_script(_FORBID_ATTEMPT)
        self._kill = client.register_script(_KILL)
        self._reap = client.register_script(_REAP)

    async def find(self, tenant: str, call_id: str) -> CallRecord | None:
        """Return the record of a call; None when there is none, or when this release cannot read it."""
        return (await self.find_all([(tenant, call_id)]))[0]

    async def find_all(self, calls: Sequence[tuple[str, str]]) -> list[CallRecord | None]:
        """Return the records of calls, named by tenant and id, in their order."""
        records: list[CallRecord | None] = []
        for at in range(0, len(calls), READ_BATCH):
            with broker_errors("the records of calls were not read"):
                async with self._client.pipeline(transaction=False) as pipe:
                    for tenant, call_id in calls[at : at + READ_BATCH]:
                        pipe.hgetall(call_key(self._deployment, tenant, call_id))
                    found = await pipe.execute()
            records += [
                _parse_record(call_id, fields)
                for (_, call_id), fields in zip(calls[at : at + READ_BATCH], found, strict=True)
            ]
        return records

    async def now(self) -> float:
        """Return Unix seconds by Redis's clock, by which the records expire."""
        with broker_errors("Redis's time was not read"):
            seconds, micros = await self._client.time()
        return float(seconds + micros / 1e6)

    async def forbid(self, tenant: str, call_id: str, attempt: int) -> str:
        """Forbid a call that no worker has taken. Return its state until now: `queued` when it was waiting and is
        forbidden now, `superseded` when the record is about another attempt."""
        with broker_errors("it is not known whether the call has started"):
            state = await self._forbid(keys=[call_key(self._deployment, tenant, call_id)], args=[attempt, CALL_TTL_S])
        return _text(state)

    async def lose(self, tenant: str, call_id: str, attempt: int, expected: CallState, reason: str) -> bool:
        """Mark the call as lost, with the time, this process and the reason. Return False if its state is not
        `expected`.
        """
        with broker_errors("the call was not marked as lost"):
            arguments = [attempt, expected.value, CallState.LOST.value, self._process, reason]
            return bool(await self._lose(keys=[call_key(self._deployment, tenant, call_id)], args=arguments))

    async def renew(self, tenant: str, call_id: str, attempt: int) -> bool:
        """Let a lost call be sent again as the next attempt: from then on its earlier worker can neither start nor
        finish it. This holds also for a call that has ended, but whose result was lost. Return False when it was
        forbidden, or sent again by another process."""
        return await self._set(tenant, call_id, attempt, CallState.QUEUED, attempt + 1) == CallState.QUEUED

    async def give_up(
        self, tenant: str, call_id: str, attempt: int, state: CallState, code: ErrorCode
    ) -> CallState | None:
        """Mark the call as ended with `code`: no process waits for it. Return its state, which is `done` if it ended
        normally meanwhile.
        """
        found = await self._set(tenant, call_id, attempt, state, attempt, code.value)
        return CallState(found) if found else None

    async def kill(self, order: KillOrder, *, is_ours: bool = False) -> CallState | None:
        """Note an order to end a call; it may be repeated. Return the state that the call has then: FORBIDDEN, when it
        never begins; None when nothing is known of it, so that only the program that makes it (`is_ours`), if there is
        one, can say so."""
        keys = [
            call_key(self._deployment, order.tenant, order.call),
            kills_key(self._deployment),
            audit_key(self._deployment),
        ]
        with broker_errors("the call was not killed"):
            state = await self._kill(
                keys=keys, args=[order.model_dump_json(), order.describe(), order.entry, int(is_ours)]
            )
        return CallState(_text(state)) if state else None

    async def recent_kills(self, after: float) -> list[tuple[float, KillOrder]]:
        """Return the orders of the last minute that were given after that instant, each with its own."""
        with broker_errors("it is not known which calls are to be ended"):
            rows: Any = await self._client.zrangebyscore(
                kills_key(self._deployment), f"({after!r}", "+inf", withscores=True
            )
        return [(float(at), order) for text, at in rows if (order := _parse_order(text)) is not None]

    async def kill_reason(self, tenant: str, call_id: str) -> tuple[str, bool]:
        """Return who killed a call and why, as a sentence ("" when it was not killed), and whether it never began."""
        with broker_errors("it is not known whether the call was killed"):
            fields: Any = await self._client.hmget(call_key(self._deployment, tenant, call_id), "killed", "state")
        reason, state = (field.decode(errors="replace") if isinstance(field, bytes) else "" for field in fields)
        return reason, state == CallState.FORBIDDEN

    async def reap(self, queue: str, now: int) -> bool:
        """Give up the incarnation `queue` unless it lives, and answer the calls in its queue. Return whether it is
        lost: it can never go on under that name.

        Any orchestrator may reap; the script makes it one act. `now`: Redis's time when reports were known to come in,
        at most TRUSTED_S ago when the script runs.
        """
        deployment = self._deployment
        keys = [
            host_key(deployment, queue),
            queue,
            control_queue(queue),
            tombstone_key(deployment, queue),
            hosts_key(deployment),
        ]
        before, after = _lost_result(queue)
        arguments: list[str | int] = [queue, TOMBSTONE_TTL_S, REAP_BATCH, before, after, RESULT_TTL_S, result_key("")]
        arguments += [FORGET_S, now + TRUSTED_S, self._process, _describe_lost_queue(queue)]
        total = 0
        with broker_errors("the queue of a lost host was not read"):
            while (taken := int(await self._reap(keys=keys, args=arguments))) > 0:
                total += taken
        if total:
            log.warning("host_reaped", queue=queue, messages=total)
        return taken == 0

    async def reap_all(self, now: int) -> list[str]:
        """Reap every incarnation that has not reported for a while. Return those that are lost."""
        with broker_errors("the hosts were not read"):
            names: Any = await self._client.zrangebyscore(hosts_key(self._deployment), "-inf", now - HOST_TTL_S)
        return [queue for queue in (name.decode() for name in names) if await self.reap(queue, now)]

    async def announce(self, channel: str, event: str) -> None:
        """Publish an event of Celery in place of a worker that is dead. `channel`: without the number of the Redis
        database, which kombu puts before it.
        """
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        with broker_errors("the event was not published"):
            await self._client.publish(f"/{database}.{channel}", event)

    async def _set(
        self, tenant: str, call_id: str, attempt: int, state: CallState, new_attempt: int, code: str = ""
    ) -> str:
        with broker_errors("the state of the call was not changed"):
            found = await self._change(
                keys=[call_key(self._deployment, tenant, call_id)], args=[attempt, state.value, new_attempt, code]
            )
        return _text(found)


def _lost_result(queue: str) -> tuple[str, str]:
    """Return the stored result of a call that was in a dead host's queue, as the texts before and after the task's
    id.
    """
    error = {"exc_type": HOST_LOST_TYPE, "exc_message": [_describe_lost_queue(queue)], "exc_module": "toolcrew"}
    fields = json.dumps({"status": "FAILURE", "result": error, "traceback": None, "children": []})
    return '{"task_id": ', ", " + fields[1:]


def _describe_lost_queue(queue: str) -> str:
    return f"the host {queue} stopped reporting while the call waited in its queue"


def _parse_order(text: bytes) -> KillOrder | None:
    try:
        return KillOrder.model_validate_json(text)
    except ValidationError as error:
        log.error("kill_order_unreadable", error=str(error.errors(include_url=False, include_input=False)[0]["msg"]))
        return None


def _parse_record(call_id: str, fields: Any) -> CallRecord | None:
    try:
        return parse_record(fields)
    except (ValidationError, UnicodeDecodeError) as error:
        log.error("call_record_unreadable", call=call_id, error=type(error).__name__)
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- Workers ----------------------------------------------------------------------------------------------------------


class WorkerCallStore:
    """The records of calls, for workers: a call is started once or refused once, whatever a queue repeats.

    Every answer tells the shared clock Redis's time. A repetition that Redis has forgotten altogether is caught before
    it comes here (workers/celery_edge/broker.py). `node`: the worker's name in Celery. Every method raises
    BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: SyncRedis, deployment: str, clock: SharedClock, node: str = "") -> None:
        self._deployment = deployment
        self._node = node
        self._client = client
        self._clock = clock
        self._claim = WorkerScript(client, _CLAIM)
        self._confirm = client.register_script(_CONFIRM)
        self._refuse = client.register_script(_REFUSE)
        self._forbid = client.register_script(_FORBID)

    def claim(
        self, call: ToolCall, context: ToolContext, holder: str, meanwhile: Callable[[], object] = lambda: None
    ) -> CallClaim:
        """Return whether the call may start now, on behalf of `holder`. After BrokerUnavailable it must not start.

        A claim past the call's deadline forbids the call: EXPIRED. A claim for a session that is elsewhere by now
        changes nothing: MOVED. `meanwhile` is called while Redis decides (WorkerScript).
        """
        key = self._key(context.tenant, call.id)
        fence = context.fence if context.session is not None and context.fence is not None else ""
        location = place_key(self._deployment, context.tenant, context.session) if fence and context.session else key
        may_move = int(call.name == "session.open")
        arguments = [holder, repr(context.deadline_at), fence, may_move, call.name, context.session or "", self._node]
        return self._decide(partial(self._claim, meanwhile=meanwhile), [key, location], context.attempt, arguments)

    def confirm(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        """Note again that a call runs which was granted here before: GRANTED when Redis had lost that, wherever its
        session is by now.
        """
        arguments = [holder, call.name, context.session or "", self._node]
        return self._decide(self._confirm, [self._key(context.tenant, call.id)], context.attempt, arguments)

    def refuse(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        """Return whether a refusal is the call's answer: GRANTED, and then it will never start. `holder`: takes back
        the claim that it was granted for this message.
        """
        return self._decide(self._refuse, [self._key(context.tenant, call.id)], context.attempt, [holder])

    def forbid(self, tenant: str, call_id: str) -> bool:
        """Forbid a call that may be on its way. Return False when it has started."""
        with broker_errors("the call was not cancelled"):
            return bool(self._forbid(keys=[self._key(tenant, call_id)], args=[CALL_TTL_S]))

    def holder(self, tenant: str, call_id: str) -> str | None:
        """Return who runs the call, as it named itself in its claim; None when it does not run."""
        with broker_errors("it is not known who runs the call"):
            state, holder = self._client.hmget(self._key(tenant, call_id), "state", "holder")
        return (
            holder.decode(errors="replace")
            if state == CallState.RUNNING.encode() and isinstance(holder, bytes)
            else None
        )

    def _key(self, tenant: str, call_id: str) -> str:
        return call_key(self._deployment, tenant, call_id)

    def _decide(self, script: Any, keys: list[str], attempt: int, arguments: list[Any]) -> CallClaim:
        with broker_errors("the call was not run, because its claim was not noted"):
            verdict, now = script(keys=keys, args=[attempt, CALL_TTL_S, secrets.token_hex(8), *arguments])
        self._clock.learn(float(now))
        return CallClaim(verdict.decode())


class FinishedCalls:
    """Stores the results of calls: one script stores and publishes a result and marks its call as done.

    It raises the Redis client's own errors: Celery's result backend, its caller, decides which of them to retry.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._finish = WorkerScript(client, _FINISH)

    def store(self, task_id: str, text: str, ttl_s: int, record: tuple[str, int, str, str] | None) -> bool:
        """Store a result. `record`: the key of the call's record, its attempt, the error code and the sandbox; None:
        the call was not run, and its record stays as it is. Return False when the call was sent again meanwhile: its
        caller waits for that attempt's result."""
        key = result_key(task_id)
        call, attempt, code, sandbox = record if record is not None else (key, "", "", "")
        return bool(self._finish(keys=[key, call], args=[text, ttl_s, attempt, CALL_TTL_S, code, sandbox]))
