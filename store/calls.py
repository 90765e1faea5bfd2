"""Records of calls in Redis: one hash for each call id. This file contains every script that changes the state of a
call.

Invariant: a call starts at most once and ends once. Every script reads the state and the attempt of the record, and
decides in one atomic step. Two processes therefore cannot both decide: not after a repeated message, not when a worker
wrongly counts as dead, and not when two orchestrators act at once. Redis can lose its last second of writes
(`appendfsync everysec`). The record of an earlier attempt then reappears. The comment of `_GATE` says which message
may still decide.

::

                        renew (attempt + 1)
          .---------------------------------------------.
          v                                             |
    --> queued --claim--> running --finish--> done      |
     ^    |                  |                          |
     |    |                  '--lose------> lost -------'
     |    |                                  |
     |    |--lose, reap--------------------> |--give up--> unknown (the call may have acted) or lost
     |    |
     |    '--forbid, refuse, kill--> forbidden (the call never starts)
     '-- publish

    script          called by                                    state changes
    publish         orchestrator (call_messages.py)                  no record -> queued; queued by renew -> queued
    claim           worker, before it runs the call              queued -> running, or forbidden after its deadline
    confirm         worker, some seconds later                   queued -> running, if Redis lost its last second
    refuse          worker, for a call that it must not run      queued, or running by itself -> forbidden
    finish          worker, with the result                      running -> done
    forbid          orchestrator or worker that cancels          queued -> forbidden
    kill            operator                                     queued -> forbidden; marks a running call
    lose            orchestrator that sees that a worker died;   queued, running -> lost
                    worker whose process died during the call
    reap            orchestrator, for the queue of a dead host   queued -> lost
    change          orchestrator                                 lost -> queued (renew), or unknown or lost (give up)
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import Field, ValidationError

from toolcrew.contract.calls import MAX_TIMEOUT_S, Identifier, Record, ToolCall, ToolContext
from toolcrew.contract.errors import EnvelopeRefused, ErrorCode
from toolcrew.contract.hosts import HEARTBEAT_S, HOST_LOST_TYPE, HOST_TTL_S, TOMBSTONE_TTL_S
from toolcrew.contract.names import (
    audit_key,
    call_key,
    control_queue,
    host_key,
    hosts_key,
    kills_key,
    location_key,
    result_key,
    tombstone_key,
)
from toolcrew.contract.session_locations import LOCATION_MARGIN_S
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.audit import AUDIT_LUA
from toolcrew.store.connection import RedisClient, SharedClock, SyncRedis, WorkerScript, broker_errors
from toolcrew.store.memory import MEMORY_LUA
from toolcrew.store.usage import USAGE_LUA, CallEnding
from toolcrew.telemetry.logs import get_logger

CALL_TTL_S = 24 * 3600
"""Lifetime of a call's record, in seconds. Until then, the call id cannot be used again."""
RESULT_TTL_S = 3600
"""Lifetime of a result in Redis, in seconds. The caller must read the result within this time."""
CALLS_LISTED = 1000
"""Maximum number of calls in the list of a tenant, including calls that have ended."""
MAX_ATTEMPTS = 3
"""Maximum number of attempts at a call. A lost call is sent again only if it cannot have had effects, or if its tool is
idempotent.
"""


class CallState(StrEnum):
    """The state of a call. QUEUED and RUNNING: the call has not ended. LOST: its worker has died; the call may be sent
    again.
    """

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    UNKNOWN = "unknown"
    FORBIDDEN = "forbidden"

    @property
    def has_ended(self) -> bool:
        """Return whether the call neither waits nor runs in this state."""
        return self not in (CallState.QUEUED, CallState.RUNNING)

    @property
    def is_lost(self) -> bool:
        """Return whether no worker will finish this attempt at the call."""
        return self in (CallState.LOST, CallState.UNKNOWN)


class CallClaim(StrEnum):
    """The decision on a worker's request to start a call."""

    GRANTED = "granted"
    STARTED = "started"
    """The call has started or was forbidden before. The message is a repetition, and no process waits for its result.
    """
    SUPERSEDED = "superseded"
    """A later attempt at the same call exists."""
    MOVED = "moved"
    """The session of the call has moved to another host, or was closed."""
    EXPIRED = "expired"
    """The deadline of the call had passed. The claim has forbidden the call."""


class CallRecord(Record):
    """The record of a call. Its hash in Redis contains only text. A missing field is unknown. Times are Unix seconds
    of the shared clock.

    - `holder`: the process that runs the call (contract/hosts.py: holder_name).
    - `claim`: the random token of the claim that started the call. By the token, a repeated claim recognizes that it
    has started the call itself.
    - `code`: the error code of the result; "" if the call succeeded.
    - `nonce`: the last published attempt and a random token.
    - `task`: the Celery task id of the attempt.
    - `ticket`: a signature by the sender. The worker that decides about the call removes the ticket. Without a ticket,
      the call may have started, even if `state` says otherwise.
    - `killed`: a sentence that says who ended the call from outside, and why. A killed call is not sent again.
    - `node`: the Celery name of the worker that runs the call.
    - `is_counted`: whether the call is in the usage of its tenant. An end of a later attempt does not count it again.
    - `noticed_by`, `reason`: for a lost call, the process that noticed the loss, and the cause. `ended_at` is then the
      time at which the loss was noticed.
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
    is_counted: bool = False
    noticed_by: str = ""
    reason: str = ""


def seal_ticket(keys: SigningKeys, tenant: str, call_id: str, attempt: int) -> str:
    """Return the ticket of an attempt that is about to be published.

    Scripts write all other fields without a signature. A process without the secret can falsely claim that the host of
    a call was lost. The process cannot create a ticket, so a running call is not sent again because of that claim.
    """
    return keys.seal(f"ticket {tenant} {call_id} {attempt}", "")


def has_ticket(keys: SigningKeys, tenant: str, call_id: str, record: CallRecord) -> bool:
    """Return whether the record proves that no worker has started this attempt at the call."""
    try:
        keys.unseal(f"ticket {tenant} {call_id} {record.attempt}", record.ticket)
    except EnvelopeRefused:
        return False
    return True


def parse_record(fields: Mapping[bytes, bytes]) -> CallRecord | None:
    """Return the record in a hash; None for an empty hash. Raises ValidationError: the hash is not a valid record."""
    if not fields:
        return None
    return CallRecord.model_validate(
        {name.decode(): value.decode(errors="replace") for name, value in fields.items()}, strict=False
    )


log = get_logger(__name__)

REAP_BATCH = 500
TRUSTED_S = int(HOST_TTL_S - 2 * HEARTBEAT_S)
"""When it is certain that Redis received workers' reports at some time, a missing report proves, for this many seconds
after that time, that the host of the report is lost.
"""
FORGET_S = 600
"""Seconds after the last report of a lost host during which its queue is still checked, because another process may
still have sent a message to the queue.
"""
READ_BATCH = 500
KILL_TTL_S = 60
_NO_DEADLINE = 1e12
MAX_KILLS = 1000
MAX_REASON_CHARS = 500

# --- Scripts of orchestrators -----------------------------------------------------------------------------------------

# KEYS: call, queue, held slots, calls of the tenant, memory of the tenant; for the call of a session also its location,
# the host of the queue, and the sessions of the tenant. ARGV: attempt, nonce, tool, message, task, ticket, slot, call
# id; for the call of a session also session, fence, and the seconds by which it may run longer than MAX_TIMEOUT_S.
# Returns the outcome and Redis's time, in one line.
PUBLISH = (
    MEMORY_LUA
    + """
local time = redis.call('TIME')
local function reply(outcome) return {ok = outcome .. ' ' .. time[1] .. ' ' .. time[2]} end
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'nonce')
-- A publish whose reply was lost is sent again. Its nonce shows that the first one succeeded.
if record[3] == ARGV[2] then return reply('sent') end
if ARGV[7] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[7]) == 0 then return reply('no_slot') end
local location
if KEYS[6] then
  location = redis.call('HMGET', KEYS[6], 'state', 'queue', 'fence', 'ttl_s')
  local is_there = location[1] == 'open' or location[1] == 'moving'
  if not is_there or location[2] ~= KEYS[2] or location[3] ~= ARGV[10] then return reply('moved') end
  if redis.call('EXISTS', KEYS[7]) == 0 then return reply('host_lost') end
end
local first = ARGV[1] == '1'
-- Also after the call has ended: a second run could act twice.
if first and record[1] then return reply('duplicate') end
if not first then
  -- Only `renew` writes `queued` with an attempt that no nonce names. Otherwise another process sent or ended it.
  local was_sent = record[3] and string.match(record[3], '^%d+') == ARGV[1]
  if record[1] ~= 'queued' or record[2] ~= ARGV[1] or was_sent then return reply('duplicate') end
elseif ARGV[3] ~= 'session.close' and not has_room(KEYS[5], time[1], RUNNING_WORK, CALLS_SHARE) then
  return reply('memory')
end
add_bytes(KEYS[5], time[1], first and RECORD_BYTES or 0, time[1] + CALL_TTL_S)
redis.call('LPUSH', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', ARGV[1], 'tool', ARGV[3], 'session', ARGV[9] or '',
  'queue', KEYS[2], 'queued_at', time[1] .. '.' .. string.format('%06d', time[2]),
  'nonce', ARGV[2], 'task', ARGV[5], 'ticket', ARGV[6])
redis.call('EXPIRE', KEYS[1], CALL_TTL_S)
if first and not string.find(ARGV[3], '.', 1, true) then  -- no operation of a session, and no webhook
  redis.call('ZADD', KEYS[4], time[1] .. '.' .. string.format('%06d', time[2]), ARGV[8])
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - CALLS_LISTED)
  redis.call('EXPIRE', KEYS[4], CALL_TTL_S)
end
if location then
  -- The location must live as long as this call, and as an earlier, longer one that still runs.
  local ttl_s = math.ceil(tonumber(location[4]) or 0) + LOCATION_MARGIN_S + tonumber(ARGV[11])
  if redis.call('TTL', KEYS[6]) < ttl_s then redis.call('EXPIRE', KEYS[6], ttl_s) end
  if redis.call('TTL', KEYS[8]) < ttl_s then redis.call('EXPIRE', KEYS[8], ttl_s) end
end
return reply('sent')
""".replace("CALL_TTL_S", str(CALL_TTL_S))
    .replace("LOCATION_MARGIN_S", str(LOCATION_MARGIN_S))
    .replace("CALLS_LISTED", str(CALLS_LISTED))
)

# KEYS: call. ARGV: attempt ('' for any), lifetime of the record in seconds. Returns the previous state of the call, or
# `queued` if there was no record: the call may still be on its way. Returns `superseded` if another attempt decides. If
# Redis has lost the write that renewed the call, the record of an earlier attempt is there again. That attempt was
# given up, so this attempt decides, as in a claim.
_FORBID = """
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt')
local stored_attempt = tonumber(record[2] or '1') or 1e9
local attempt = tonumber(ARGV[1]) or stored_attempt
local is_forgotten = stored_attempt < attempt and (record[1] == 'queued' or record[1] == 'lost')
if record[1] and not is_forgotten then
  if stored_attempt ~= attempt then return 'superseded' end
  if record[1] ~= 'queued' then return record[1] end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'forbidden', 'attempt', ARGV[1] ~= '' and ARGV[1] or record[2] or 1,
  'ended_at', string.format('%d.%06d', time[1], time[2]))
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 'queued'
"""

# KEYS: call. ARGV: the expected attempt, the new state, the new attempt, the error code. Returns the resulting state
# of the record.
_CHANGE = """
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'killed')
if not record[1] then return '' end
-- An operator has ended this call. Another attempt would run it in spite of that order.
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

# KEYS: call. ARGV: the expected attempt and state, the new state, the process that noticed the loss, the reason.
# Returns 1 if the attempt and the state were as expected.
_LOSE = """
-- The caller read the record before the reports. If the call has started or ended since, the conclusion is void.
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
-- KEYS: call, orders, audit. ARGV: the order, the note for the call, the audit entry, '1' if the sender of the call
-- sends the order: a call without a record then waits for its slot. Returns the resulting state of the call; '' if the
-- call has no record, so that its sender must read the order.
local record = redis.call('HMGET', KEYS[1], 'state', 'killed')
local time, state = redis.call('TIME'), record[1]
local now = string.format('%d.%06d', time[1], time[2])
local function note()
  redis.call('ZADD', KEYS[2], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - {KILL_TTL_S})
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, {-1 - MAX_KILLS})
  redis.call('EXPIRE', KEYS[2], {2 * KILL_TTL_S})
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

# KEYS: report, queue, its control list, tombstone, hosts. ARGV: queue, lifetime of the tombstone, batch size, the
# result before and after the task id, lifetime of the result, prefix of results, age of a host to remove, time after
# which the script must not act, the process that reaps, the reason. Returns the number of removed messages; -1 if the
# host lives or its state is unknown. A script that waited while Redis was stopped would find every report expired, so
# the script does nothing after that time. Calls that have started, have ended, or were sent again get no result here:
# their callers get it elsewhere.
_REAP = """
local now = tonumber(redis.call('TIME')[1])
if redis.call('EXISTS', KEYS[1]) == 1 or now > tonumber(ARGV[9]) then return -1 end
-- The tombstone comes first: a worker that was only slow finds it, starts nothing more, and ends.
redis.call('SET', KEYS[4], '1', 'EX', ARGV[2])
redis.call('DEL', KEYS[3])
local last = redis.call('ZSCORE', KEYS[5], ARGV[1])
if last and tonumber(last) < now - tonumber(ARGV[8]) then redis.call('ZREM', KEYS[5], ARGV[1]) end
local removed = 0
while removed < tonumber(ARGV[3]) do
  local message = redis.call('RPOP', KEYS[2])
  if not message then break end
  removed = removed + 1
  -- Any process that can write to the queue chose this text. A message that cannot be read must not stop the script.
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
return removed
"""

# --- Scripts of workers -----------------------------------------------------------------------------------------------

# In every script of a worker: KEYS[1] is the call, ARGV[1] its attempt, ARGV[2] the lifetime of the record in seconds.
# ARGV[3] is a random token of this decision. A script whose first reply was lost is sent again and recognizes its own
# decision by the token. `verdict` says whether this message decides about the call:
#
#   no record                        decides: Redis lost its last second, or another program published the message
#   `queued`, attempt N              decides: the normal case
#   `queued` or `lost`, attempt < N  decides: Redis lost the renewal of the call; the earlier attempt was given up
#   any other state, attempt < N     started: Redis lost the renewal of the call; an earlier attempt may have acted
#   decided by this same message     the same decision again
#   any other state, attempt N       started: a repetition; or forbidden, given up, or lost with the queue of its host
#   attempt > N                      superseded
_GATE = """
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'claim')
local state, stored_attempt, attempt = record[1], tonumber(record[2] or '1') or 1e9, tonumber(ARGV[1])
local verdict = 'granted'
if state and stored_attempt > attempt then verdict = 'superseded'
elseif state and stored_attempt == attempt and state ~= 'queued' then verdict = 'started'
elseif state and stored_attempt < attempt and state ~= 'queued' and state ~= 'lost' then verdict = 'started' end
local function note(...)
  redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'claim', ARGV[3], ...)
  -- With the ticket, the record proves that no worker has decided. From here on, a loss may be a loss of effects.
  redis.call('HDEL', KEYS[1], 'ticket')
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
local is_again = verdict == 'started' and record[3] == ARGV[3]
"""

# KEYS: call, location. ARGV: attempt, lifetime, token, holder, deadline, fence, whether the session may be moving,
# tool, session, node.
_CLAIM = (
    _GATE
    + """
if is_again and state == 'running' then return {'granted', now} end
if is_again and state == 'forbidden' then return {'expired', now} end
if verdict ~= 'granted' then return {verdict, now} end
-- The deadline is compared here, not in the worker: the sender forbids the call by the same clock.
if tonumber(now) > tonumber(ARGV[5]) then
  note('state', 'forbidden', 'ended_at', now)
  return {'expired', now}
end
if ARGV[6] ~= '' then
  local place = redis.call('HMGET', KEYS[2], 'fence', 'state')
  local may_run = place[2] == 'open' or (ARGV[7] == '1' and place[2] == 'moving')
  -- The record stays `queued`: the call has not begun, and its sender sends it to the present host of the session.
  if place[1] ~= ARGV[6] or not may_run then return {'moved', now} end
end
note('state', 'running', 'holder', ARGV[4], 'started_at', now, 'tool', ARGV[8], 'session', ARGV[9], 'node', ARGV[10])
return {'granted', now}
"""
)

# ARGV: attempt, lifetime, token, holder. A worker may claim a call while it still checks the call. A refusal by the
# same holder therefore reverts the claim.
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

# KEYS: result, call, usage of the session, records of stored files, location. ARGV: stored text, its lifetime; attempt
# ("" if the call has not run), lifetime of the record, error code, sandbox, prefix of the tenant's days, meter ("" for
# none), its totals; lifetime, id ("" for none) and bytes of a stored file; the session's folder or "". Returns 0 if a
# later attempt exists, for which the caller waits. An earlier one means that Redis has lost the write of this attempt.
_FINISH = (
    USAGE_LUA
    + """
if ARGV[3] ~= '' then
  -- `pcall`: the key may have another type, and the caller must get its result all the same.
  local record = redis.pcall('HMGET', KEYS[2], 'attempt', 'state', 'is_counted', 'tool')
  local is_late = not record.err and (tonumber(record[1] or '0') or 0) > tonumber(ARGV[3])
  local is_first = not record.err and not is_late and record[2] ~= 'done'
  -- The usage of a lost attempt counts too: its sandbox did the work. The call counts once, even if its effects were
  -- lost and its record was renewed.
  local calls = is_first and not record[3] and not string.find(record[4] or '', '.', 1, true) and 1 or 0
  count_usage(ARGV[7], KEYS[3], ARGV[8], ARGV[9], calls, change_stored(KEYS[4], ARGV[10], ARGV[11], ARGV[12]))
  if is_late then return 0 end
  if not record.err and record[2] ~= 'forbidden' then
    redis.call('HSET', KEYS[2], 'state', 'done', 'attempt', ARGV[3], 'code', ARGV[5], 'sandbox', ARGV[6],
      'is_counted', 1, 'ended_at', string.format('%d.%06d', usage_time[1], usage_time[2]))
    redis.call('EXPIRE', KEYS[2], ARGV[4])
  end
  local is_open = ARGV[13] ~= '' and redis.call('HGET', KEYS[5], 'state') == 'open'
  if is_open then redis.call('HSET', KEYS[5], 'folder', ARGV[13]) end
end
-- Stored before it is published, in one step: a caller that missed the message finds the key at its next sweep.
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('PUBLISH', KEYS[1], ARGV[1])
return 1
"""
)

# --- Orchestrators ----------------------------------------------------------------------------------------------------


class KillOrder(Record):
    """An order to kill a call, with its author and reason. `entry`: the entry for the audit log. The process that
    executes the order writes the entry.
    """

    tenant: Identifier
    call: Identifier
    by: str = Field(max_length=128)
    reason: str = Field(default="", max_length=MAX_REASON_CHARS)
    entry: str = ""

    def describe(self) -> str:
        """Return the message for the caller of the call."""
        return f"the call was killed by {self.by}" + (f": {self.reason}" if self.reason else "")


class CallStore:
    """Records of calls, for orchestrators. Every method raises BrokerUnavailable when Redis does not answer.
    `process`: the name of this process.
    """

    def __init__(self, client: RedisClient, deployment: str, process: str = "") -> None:
        self._client = client
        self._deployment = deployment
        self._process = process
        self._change = client.register_script(_CHANGE)
        self._lose = client.register_script(_LOSE)
        self._forbid = client.register_script(_FORBID)
        self._kill = client.register_script(_KILL)
        self._reap = client.register_script(_REAP)

    async def find(self, tenant: str, call_id: str) -> CallRecord | None:
        """Return the record of a call; None if there is no record, or if this release cannot read the record."""
        return (await self.find_all([(tenant, call_id)]))[0]

    async def find_all(self, calls: Sequence[tuple[str, str]]) -> list[CallRecord | None]:
        """Return the records of calls in the given order. Each call is a pair of tenant and call id."""
        records: list[CallRecord | None] = []
        for at in range(0, len(calls), READ_BATCH):
            with broker_errors("the records of calls were not read"):
                async with self._client.pipeline(transaction=False) as pipe:
                    for tenant, call_id in calls[at : at + READ_BATCH]:
                        pipe.hgetall(call_key(self._deployment, tenant, call_id))
                    replies = await pipe.execute()
            records += [
                _parse_record(call_id, fields)
                for (_, call_id), fields in zip(calls[at : at + READ_BATCH], replies, strict=True)
            ]
        return records

    async def now(self) -> float:
        """Return the time of Redis in Unix seconds. The records expire by this clock."""
        with broker_errors("Redis's time was not read"):
            seconds, micros = await self._client.time()
        return float(seconds + micros / 1e6)

    async def forbid(self, tenant: str, call_id: str, attempt: int) -> str:
        """Forbid a call that no worker has claimed. Return the previous state: `queued` if the call waited and is now
        forbidden, `superseded` if the record belongs to another attempt.
        """
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
        """Prepare a lost call for its next attempt. The earlier worker can then neither start nor finish the call.
        Also works for a call that has ended and whose result was lost. Return False if the call is forbidden, or if
        another process has sent it again.
        """
        return await self._set(tenant, call_id, attempt, CallState.QUEUED, attempt + 1) == CallState.QUEUED

    async def give_up(
        self, tenant: str, call_id: str, attempt: int, state: CallState, code: ErrorCode
    ) -> CallState | None:
        """Mark the call as ended with `code`, because no process waits for it any longer. Return the resulting state:
        `done` if the call has ended normally.
        """
        record = await self._set(tenant, call_id, attempt, state, attempt, code.value)
        return CallState(record) if record else None

    async def kill(self, order: KillOrder, *, is_ours: bool = False) -> CallState | None:
        """Store an order to kill a call; repeatable. Return the resulting state of the call: FORBIDDEN if the call will
        never start. Return None for a call without a record: only the program that makes the call knows its state.
        `is_ours`: this process makes the call.
        """
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
        """Return the orders of the last minute that were given after `after`, each with its time."""
        with broker_errors("it is not known which calls are to be ended"):
            rows: Any = await self._client.zrangebyscore(
                kills_key(self._deployment), f"({after!r}", "+inf", withscores=True
            )
        return [(float(at), order) for text, at in rows if (order := _parse_order(text)) is not None]

    async def kill_reason(self, tenant: str, call_id: str) -> tuple[str, bool]:
        """Return the message that says who killed a call and why ("" if the call was not killed), and whether the call
        never started.
        """
        with broker_errors("it is not known whether the call was killed"):
            fields: Any = await self._client.hmget(call_key(self._deployment, tenant, call_id), "killed", "state")
        reason, state = (field.decode(errors="replace") if isinstance(field, bytes) else "" for field in fields)
        return reason, state == CallState.FORBIDDEN

    async def reap(self, queue: str, now: int) -> bool:
        """Unless the host instance `queue` reports, declare it lost, and answer the calls in its queue with an error.
        Return whether the instance is lost. A lost instance can never continue under that name.

        Any orchestrator may call this method, because the script is atomic. `now`: a time of Redis at which reports
        certainly arrived, at most TRUSTED_S before the script runs.
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
            # Remove the messages in small batches, because a script blocks Redis while it runs.
            while (count := int(await self._reap(keys=keys, args=arguments))) > 0:
                total += count
        if total:
            log.warning("host_reaped", queue=queue, messages=total)
        return count == 0

    async def reap_all(self, now: int) -> list[str]:
        """Reap every host instance that has not reported for HOST_TTL_S. Return the queues of the lost instances."""
        with broker_errors("the hosts were not read"):
            names: Any = await self._client.zrangebyscore(hosts_key(self._deployment), "-inf", now - HOST_TTL_S)
        return [queue for queue in (name.decode() for name in names) if await self.reap(queue, now)]

    async def announce(self, channel: str, event: str) -> None:
        """Publish the Celery event that a dead worker can no longer send. `channel`: the name of the pub/sub channel,
        without the number of the Redis database that kombu puts before it.
        """
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        with broker_errors("the event was not published"):
            await self._client.publish(f"/{database}.{channel}", event)

    async def _set(
        self, tenant: str, call_id: str, attempt: int, state: CallState, new_attempt: int, code: str = ""
    ) -> str:
        with broker_errors("the state of the call was not changed"):
            reply = await self._change(
                keys=[call_key(self._deployment, tenant, call_id)], args=[attempt, state.value, new_attempt, code]
            )
        return _text(reply)


def _lost_result(queue: str) -> tuple[str, str]:
    """Return the error result for calls that are left in a dead host's queue, as two texts: what comes before and what
    comes after the task id.
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
        log.error("kill_order_unreadable", error=type(error).__name__)
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
    """Records of calls, for workers. A call is started once or refused once, however often a queue repeats its
    message.

    Every reply updates the shared clock with Redis's time. If Redis has lost a record completely,
    workers/celery_edge/broker.py detects the repetition before this class is used. `node`: the Celery name of the
    worker. Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: SyncRedis, deployment: str, clock: SharedClock, node: str = "") -> None:
        self._deployment = deployment
        self._node = node
        self._client = client
        self._clock = clock
        self._claim = WorkerScript(client, _CLAIM)
        self._refuse = client.register_script(_REFUSE)
        self._forbid = client.register_script(_FORBID)

    def claim(
        self, call: ToolCall, context: ToolContext, holder: str, meanwhile: Callable[[], object] = lambda: None
    ) -> CallClaim:
        """Decide whether the call may start now, on behalf of `holder`. After BrokerUnavailable, the call must not
        start.

        A claim after the deadline forbids the call: EXPIRED. A claim for a session that has moved changes nothing:
        MOVED. `meanwhile` runs while Redis decides (WorkerScript).
        """
        key = self._key(context.tenant, call.id)
        fence = context.fence if context.session is not None and context.fence is not None else ""
        location = location_key(self._deployment, context.tenant, context.session) if fence and context.session else key
        may_move = int(call.name == "session.open")
        arguments = [holder, repr(context.deadline_at), fence, may_move, call.name, context.session or "", self._node]
        return self._decide(partial(self._claim, meanwhile=meanwhile), [key, location], context, arguments)

    def confirm(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        """Store again that a call runs, after this worker has claimed it. Return GRANTED if Redis had lost the claim,
        even if the session has moved.
        """
        # The call runs already, and the record must say so, whatever its deadline and its session's location are.
        return self.claim(call, context.model_copy(update={"deadline_at": _NO_DEADLINE, "fence": None}), holder)

    def refuse(self, call: ToolCall, context: ToolContext, holder: str) -> CallClaim:
        """Refuse a call. Return GRANTED if the refusal is the final result of the call; the call then never starts.
        `holder`: if this holder has claimed the call for this message, the refusal reverts the claim.
        """
        return self._decide(self._refuse, [self._key(context.tenant, call.id)], context, [holder])

    def forbid(self, tenant: str, call_id: str) -> bool:
        """Forbid a call that may be on its way. Return False if the call has started."""
        with broker_errors("the call was not cancelled"):
            state = _text(self._forbid(keys=[self._key(tenant, call_id)], args=["", CALL_TTL_S]))
        return state in (CallState.QUEUED, CallState.FORBIDDEN)

    def holder(self, tenant: str, call_id: str) -> str | None:
        """Return the name under which a worker has claimed the running call; None if the call does not run."""
        with broker_errors("it is not known who runs the call"):
            state, holder = self._client.hmget(self._key(tenant, call_id), "state", "holder")
        is_running = state == CallState.RUNNING.encode()
        return holder.decode(errors="replace") if is_running and isinstance(holder, bytes) else None

    def _key(self, tenant: str, call_id: str) -> str:
        return call_key(self._deployment, tenant, call_id)

    def _decide(self, script: Any, keys: list[str], context: ToolContext, arguments: list[Any]) -> CallClaim:
        ttl_s = CALL_TTL_S + max(0, math.ceil(context.timeout_s - MAX_TIMEOUT_S))  # `finish` sets CALL_TTL_S again
        with broker_errors("the call was not run, because its claim was not recorded"):
            # A token for each decision: with one per call, a repeated message would pass as the first one.
            verdict, now = script(keys=keys, args=[context.attempt, ttl_s, secrets.token_hex(8), *arguments])
        self._clock.learn(float(now))
        return CallClaim(verdict.decode())


class FinishedCalls:
    """Stores the results of calls. One script stores and publishes a result, marks its call as done, and counts what
    the call and its session used.

    Raises the errors of the Redis client: its caller, Celery's result backend, decides which errors to retry.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._finish = WorkerScript(client, _FINISH)
        self._lose = client.register_script(_LOSE)

    def store(self, task_id: str, text: str, ttl_s: int, ending: CallEnding | None) -> bool:
        """Store a result. `ending` None: the call was not run, and its record does not change. Return False if the
        call was sent again: its caller waits for the result of that attempt.
        """
        key = result_key(task_id)
        if ending is None:
            return bool(self._finish(keys=[key] * 5, args=[text, ttl_s, ""]))
        call = call_key(ending.deployment, ending.tenant, ending.call)
        record: list[str | int] = [ending.attempt, CALL_TTL_S, ending.code, ending.sandbox]
        keys = [key, call, ending.session_key, ending.stored_key, ending.location_key or key]
        return bool(self._finish(keys=keys, args=[text, ttl_s, *record, *ending.amounts(), ending.folder]))

    def lose(self, call: str, attempt: int, node: str, reason: str) -> None:
        """Mark a running call as lost, because the process that ran it has died. `call`: the Redis key of its record.
        `node`: the Celery name of its worker.
        """
        self._lose(keys=[call], args=[attempt, CallState.RUNNING.value, CallState.LOST.value, node, reason])
