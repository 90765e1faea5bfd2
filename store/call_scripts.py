"""Scripts that change the records of calls in Redis. No other script changes the state of a call.

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
     |    '--cancel, refuse--> forbidden (the call never starts)
     '-- publish

    script          called by                                    state changes
    publish         orchestrator (call_messages.py)                  no record -> queued; queued by renew -> queued
    claim           worker, before it runs the call              queued -> running, or forbidden after its deadline
    confirm         worker, some seconds later                   queued -> running, if Redis lost its last second
    refuse          worker, for a call that it must not run      queued, or running by itself -> forbidden
    finish          worker, with the result                      running -> done
    cancel          orchestrator or worker for the caller;       queued -> forbidden
                    operator who kills the call                  queued -> forbidden; marks a call that runs or is lost
    lose            orchestrator that sees that a worker died;   queued, running -> lost
                    worker whose process died during the call
    reap            orchestrator, for the queue of a dead host   queued -> lost
    change          orchestrator                                 lost -> queued (renew), or unknown or lost (give up)
"""

from toolcrew.contract.session_locations import LOCATION_MARGIN_S
from toolcrew.store.audit import AUDIT_LUA
from toolcrew.store.call_records import CALL_TTL_S, CALLS_LISTED
from toolcrew.store.memory import MEMORY_LUA
from toolcrew.store.scripts import Script
from toolcrew.store.usage import USAGE_LUA

KILL_TTL_S = 60
MAX_KILLS = 1000

# --- Scripts of orchestrators -----------------------------------------------------------------------------------------

# Returns the outcome and Redis's time, in one line. `place`: for the call of a session, the keys of its location, of
# the host of the queue, and of the sessions of the tenant. `extra_s`: the seconds by which such a call may run longer
# than MAX_TIMEOUT_S.
PUBLISH = Script(
    MEMORY_LUA
    + """
local time = redis.call('TIME')
local function reply(outcome) return {ok = outcome .. ' ' .. time[1] .. ' ' .. time[2]} end
local record = redis.call('HMGET', call, 'state', 'attempt', 'nonce', 'is_counted')
-- A publish whose reply was lost is sent again. Its nonce shows that the first one succeeded.
if record[3] == nonce then return reply('sent') end
if slot ~= '' and redis.call('HEXISTS', slots, slot) == 0 then return reply('no_slot') end
local location
local location_key, host, sessions = unpack(place)
if location_key then
  location = redis.call('HMGET', location_key, 'state', 'queue', 'fence', 'ttl_s')
  local is_there = location[1] == 'open' or location[1] == 'moving'
  if not is_there or location[2] ~= queue or location[3] ~= fence then return reply('moved') end
  if redis.call('EXISTS', host) == 0 then return reply('host_lost') end
end
local first = attempt == '1'
-- Also after the call has ended: a second run could act twice.
if first and record[1] then return reply('duplicate') end
if not first then
  -- Only `renew` writes `queued` with an attempt that no nonce names. Otherwise another process sent or ended it.
  local was_sent = record[3] and string.match(record[3], '^%d+') == attempt
  if record[1] ~= 'queued' or record[2] ~= attempt or was_sent then return reply('duplicate') end
elseif tool ~= 'session.close' and not has_room(account, time[1], RUNNING_WORK, CALLS_SHARE) then
  return reply('memory')
end
add_bytes(account, time[1], first and RECORD_BYTES or 0, time[1] + CALL_TTL_S)
redis.call('LPUSH', queue, message)
redis.call('DEL', call)
redis.call('HSET', call, 'state', 'queued', 'attempt', attempt, 'tool', tool, 'session', session,
  'queue', queue, 'queued_at', time[1] .. '.' .. string.format('%06d', time[2]),
  'nonce', nonce, 'task', task, 'ticket', ticket)
if record[4] then redis.call('HSET', call, 'is_counted', record[4]) end  -- by an earlier attempt
if request_digest ~= '' then redis.call('HSET', call, 'request_digest', request_digest) end
redis.call('EXPIRE', call, CALL_TTL_S)
if first and not string.find(tool, '.', 1, true) then  -- no operation of a session, and no webhook
  redis.call('ZADD', calls, time[1] .. '.' .. string.format('%06d', time[2]), call_id)
  redis.call('ZREMRANGEBYRANK', calls, 0, -1 - CALLS_LISTED)
  redis.call('EXPIRE', calls, CALL_TTL_S)
end
if location then
  -- The location must live as long as this call, and as an earlier, longer one that still runs.
  local ttl_s = math.ceil(tonumber(location[4]) or 0) + LOCATION_MARGIN_S + tonumber(extra_s)
  if redis.call('TTL', location_key) < ttl_s then redis.call('EXPIRE', location_key, ttl_s) end
  if redis.call('TTL', sessions) < ttl_s then redis.call('EXPIRE', sessions, ttl_s) end
end
return reply('sent')
""".replace("CALL_TTL_S", str(CALL_TTL_S))
    .replace("LOCATION_MARGIN_S", str(LOCATION_MARGIN_S))
    .replace("CALLS_LISTED", str(CALLS_LISTED)),
    keys=("call", "queue", "slots", "calls", "account", "place..."),
    args=(
        "attempt",
        "nonce",
        "tool",
        "message",
        "task",
        "ticket",
        "slot",
        "call_id",
        "session",
        "fence",
        "extra_s",
        "request_digest",
    ),
)

# Counts a result that stays in Redis after its caller has received it.
KEEP_RESULT = Script(
    MEMORY_LUA
    + """
local now, life = tonumber(redis.call('TIME')[1]), redis.call('TTL', result)
if life > 0 then add_bytes(account, now, redis.call('STRLEN', result) + RECORD_BYTES, now + life) end
""",
    keys=("result", "account"),
)

# Returns the previous state of the call: `queued` if the call waited, or had no record, and now never starts. Without a
# record, the call may still be on its way. Returns `superseded` if another attempt decides. If Redis has lost the write
# that renewed the call, the record of an earlier attempt is there again. That attempt was given up, so this attempt
# decides, as in a claim. `given_attempt` '': any.
#
# `order`, `message`, `entry`: of an operator who kills the call; '' if its caller cancels it. `kill_keys`: the list of
# orders and the audit log. A killed call that runs or is lost is only marked. Only the sender knows a call without a
# record: the script returns '', and the sender reads the order from the list and sends it with `is_ours`.
CANCEL = Script(
    AUDIT_LUA
    + f"""
local record = redis.call('HMGET', call, 'state', 'attempt', 'killed')
local orders, audit_log = unpack(kill_keys)
local time, state = redis.call('TIME'), record[1]
local now = string.format('%d.%06d', time[1], time[2])
local function note()
  redis.call('ZADD', orders, now, order)
  redis.call('ZREMRANGEBYSCORE', orders, '-inf', now - {KILL_TTL_S})
  redis.call('ZREMRANGEBYRANK', orders, 0, {-1 - MAX_KILLS})
  redis.call('EXPIRE', orders, {2 * KILL_TTL_S})
end
if not state and orders and is_ours ~= '1' then
  note()
  return ''
end
local stored_attempt = tonumber(record[2] or '1') or 1e9
local attempt = tonumber(given_attempt) or stored_attempt
local is_forgotten = stored_attempt < attempt and (state == 'queued' or state == 'lost')
if state and not is_forgotten then
  if stored_attempt ~= attempt then return 'superseded' end
  if state ~= 'queued' then
    if orders and (state == 'running' or state == 'lost') and not record[3] then
      audit(audit_log, entry)
      redis.call('HSET', call, 'killed', message)
    end
    return state
  end
end
if orders then
  audit(audit_log, entry)
  redis.call('HSET', call, 'killed', message, 'code', 'CANCELLED')
  note()
end
redis.call('HSET', call, 'state', 'forbidden', 'attempt', given_attempt ~= '' and given_attempt or record[2] or 1,
  'ended_at', now)
redis.call('EXPIRE', call, {CALL_TTL_S})
return 'queued'
""",
    keys=("call", "kill_keys..."),
    args=("given_attempt", "order", "message", "entry", "is_ours"),
)

# Returns the resulting state of the record.
CHANGE = Script(
    """
local record = redis.call('HMGET', call, 'state', 'attempt', 'killed')
if not record[1] then return '' end
-- An operator has ended this call. Another attempt would run it in spite of that order.
if record[3] and state == 'queued' then return 'forbidden' end
local has_ended = record[1] == 'done' and state ~= 'queued'
if record[2] ~= attempt or record[1] == 'forbidden' or has_ended then return record[1] end
redis.call('HSET', call, 'state', state, 'attempt', new_attempt)
if state == 'queued' then
  redis.call('HDEL', call, 'ended_at', 'noticed_by', 'reason', 'code')
elseif code ~= '' then
  local time = redis.call('TIME')
  redis.call('HSET', call, 'code', code)
  redis.call('HSETNX', call, 'ended_at', string.format('%d.%06d', time[1], time[2]))
end
return state
""",
    keys=("call",),
    args=("attempt", "state", "new_attempt", "code"),
)

# Returns 1 if the attempt and the state were as expected.
LOSE = Script(
    """
-- The caller read the record before the reports. If the call has started or ended since, the conclusion is void.
local record = redis.call('HMGET', call, 'attempt', 'state')
if record[1] ~= attempt or record[2] ~= expected then return 0 end
local time = redis.call('TIME')
local ended_at = string.format('%d.%06d', time[1], time[2])
redis.call('HSET', call, 'state', state, 'ended_at', ended_at, 'noticed_by', noticed_by, 'reason', reason)
return 1
""",
    keys=("call",),
    args=("attempt", "expected", "state", "noticed_by", "reason"),
)

# Returns the number of removed messages; -1 if the host lives or its state is unknown. A script that waited while Redis
# was stopped would find every report expired, so the script does nothing after `act_until`. Calls that have started,
# have ended, or were sent again get no result here: their callers get it elsewhere. `before`, `after`: the result as
# text, without the task id between them. `forget_s`: age of a host to remove.
REAP = Script(
    """
local now = tonumber(redis.call('TIME')[1])
if redis.call('EXISTS', report) == 1 or now > tonumber(act_until) then return -1 end
-- The tombstone comes first: a worker that was only slow finds it, starts nothing more, and ends.
redis.call('SET', tombstone, '1', 'EX', tombstone_ttl_s)
redis.call('DEL', control)
local last = redis.call('ZSCORE', hosts, queue)
if last and tonumber(last) < now - tonumber(forget_s) then redis.call('ZREM', hosts, queue) end
local removed = 0
while removed < tonumber(batch) do
  local message = redis.call('RPOP', queue)
  if not message then break end
  removed = removed + 1
  -- Any process that can write to the queue chose this text. A message that cannot be read must not stop the script.
  local ok, fields = pcall(cjson.decode, message)
  if ok and type(fields) == 'table' and type(fields.headers) == 'table' and type(fields.headers.id) == 'string' then
    local call = type(fields.headers.call_key) == 'string' and fields.headers.call_key or ''
    local record = redis.pcall('HMGET', call, 'state', 'attempt')
    local is_other = record[2] and tonumber(record[2]) ~= fields.headers.call_attempt
    if not is_other and record[1] ~= 'running' and record[1] ~= 'done' then
      local key = result_prefix .. fields.headers.id
      local result = before .. cjson.encode(fields.headers.id) .. after
      redis.call('SET', key, result, 'EX', result_ttl_s)
      redis.call('PUBLISH', key, result)
      if record[1] == 'queued' then
        redis.call('HSET', call, 'state', 'lost', 'ended_at', now, 'noticed_by', noticed_by, 'reason', reason)
      end
    end
  end
end
return removed
""",
    keys=("report", "queue", "control", "tombstone", "hosts"),
    args=(
        "tombstone_ttl_s",
        "batch",
        "before",
        "after",
        "result_ttl_s",
        "result_prefix",
        "forget_s",
        "act_until",
        "noticed_by",
        "reason",
    ),
)

# --- Scripts of workers -----------------------------------------------------------------------------------------------

# In every script of a worker, `ttl_s` is the lifetime of the record, and `token` is a random token of this decision. A
# script whose first reply was lost is sent again and recognizes its own decision by the token. `verdict` says whether
# this message decides about the call:
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
local record = redis.call('HMGET', call, 'state', 'attempt', 'claim')
local state, stored_attempt, number = record[1], tonumber(record[2] or '1') or 1e9, tonumber(attempt)
local verdict = 'granted'
if state and stored_attempt > number then verdict = 'superseded'
elseif state and stored_attempt == number and state ~= 'queued' then verdict = 'started'
elseif state and stored_attempt < number and state ~= 'queued' and state ~= 'lost' then verdict = 'started' end
local function note(...)
  redis.call('HSET', call, 'attempt', attempt, 'claim', token, ...)
  -- With the ticket, the record proves that no worker has decided. From here on, a loss may be a loss of effects.
  redis.call('HDEL', call, 'ticket')
  redis.call('EXPIRE', call, ttl_s)
end
local is_again = verdict == 'started' and record[3] == token
"""

CLAIM = Script(
    _GATE
    + """
if is_again and state == 'running' then return {'granted', now} end
if is_again and state == 'forbidden' then return {'expired', now} end
if verdict ~= 'granted' then return {verdict, now} end
-- The deadline is compared here, not in the worker: the sender forbids the call by the same clock.
if tonumber(now) > tonumber(deadline) then
  note('state', 'forbidden', 'ended_at', now)
  return {'expired', now}
end
if fence ~= '' then
  local place = redis.call('HMGET', location, 'fence', 'state')
  local may_run = place[2] == 'open' or (may_move == '1' and place[2] == 'moving')
  -- The record stays `queued`: the call has not begun, and its sender sends it to the present host of the session.
  if place[1] ~= fence or not may_run then return {'moved', now} end
end
note('state', 'running', 'holder', holder, 'started_at', now, 'tool', tool, 'session', session, 'node', node)
return {'granted', now}
""",
    keys=("call", "location"),
    args=("attempt", "ttl_s", "token", "holder", "deadline", "fence", "may_move", "tool", "session", "node"),
)

# A worker may claim a call while it still checks the call. A refusal by the
# same holder therefore reverts the claim.
REFUSE = Script(
    _GATE
    + """
if is_again and state == 'forbidden' then return {'granted', now} end
if verdict == 'started' and state == 'running' and redis.call('HGET', call, 'holder') == holder then
  redis.call('HDEL', call, 'holder', 'started_at', 'node')
  verdict = 'granted'
end
if verdict == 'granted' then note('state', 'forbidden', 'ended_at', now) end
return {verdict, now}
""",
    keys=("call",),
    args=("attempt", "ttl_s", "token", "holder"),
)

_STORE_LUA = """
-- Stored before it is published, in one step: a caller that missed the message finds the key at its next sweep.
redis.call('SET', result, text, 'EX', result_ttl_s)
redis.call('PUBLISH', result, text)
return 1
"""
STORE = Script(_STORE_LUA, keys=("result",), args=("text", "result_ttl_s"))

# Returns 0 if a later attempt exists, for which the caller waits. An earlier one means that Redis has lost the write of
# this attempt. `prefix`: of the tenant's days of usage. `meter`, `file`, `folder` '': none.
FINISH = Script(
    USAGE_LUA
    + """
-- `pcall`: the key may have another type, and the caller must get its result all the same.
local record = redis.pcall('HMGET', call, 'attempt', 'state', 'is_counted', 'tool')
local is_late = not record.err and (tonumber(record[1] or '0') or 0) > tonumber(attempt)
local is_first = not record.err and not is_late and record[2] ~= 'done'
-- The usage of a lost attempt counts too: its sandbox did the work. The call counts once, even if its effects were
-- lost and its record was renewed.
local calls = is_first and not record[3] and not string.find(record[4] or '', '.', 1, true) and 1 or 0
count_usage(prefix, session_usage, meter, totals, calls, change_stored(stored, file_ttl_s, file, file_bytes))
if is_late then return 0 end
if not record.err and record[2] ~= 'forbidden' then
  redis.call('HSET', call, 'state', 'done', 'attempt', attempt, 'code', code, 'sandbox', sandbox,
    'is_counted', 1, 'ended_at', string.format('%d.%06d', usage_time[1], usage_time[2]))
  redis.call('EXPIRE', call, ttl_s)
end
if folder ~= '' then
  -- The session may have moved while the call ran. The shell of its present host may be in another folder.
  local place = redis.call('HMGET', location, 'state', 'fence')
  if place[1] == 'open' and place[2] == fence then redis.call('HSET', location, 'folder', folder) end
end
"""
    + _STORE_LUA,
    keys=("result", "call", "session_usage", "stored", "location"),
    args=(
        "text",
        "result_ttl_s",
        "attempt",
        "ttl_s",
        "code",
        "sandbox",
        "prefix",
        "meter",
        "totals",
        "file_ttl_s",
        "file",
        "file_bytes",
        "folder",
        "fence",
    ),
)
