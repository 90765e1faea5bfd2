"""Memory of Redis that each tenant uses: how many bytes its records take, and whether it may store more.

Invariant: the count of a tenant never drifts. Each byte is counted under the hour in which its record expires, and the
count of an hour is dropped when the hour is over. A record that is deleted or replaced earlier takes back exactly what
was counted for it: a field of the record's hash says how much, and under which hour.

A tenant may store more while its count is below a multiple of the free memory. One tenant can therefore use most of
Redis, and no tenant can use all of it: the more memory is in use, the smaller is the part of each tenant, and those
that use little can always continue.

::

    key of a tenant                 counted until                           other limit
    run.*, :transcript              deleted, 30 days                        50,000 items per batch, 100,000 durable runs
    run.*:log, :sessions            an hour after the end (see end_run)     -
    run.*:artifacts                 graded, an hour after the end           16 MiB per item
    run.*:events, batch.*:events    a day after the end; batch deleted      2 MiB per run, 8 MiB per batch
    batch.*                         deleted, 30 days                        -
    api:once:*                      a day                                   256 MiB per API key
    approval:*, :decision           answered or expired; a day              1,000 questions of 128 KiB
    session.*:state, :mcp           a day after the last use                1 MiB per session
    call.*                          a day (RECORD_BYTES each)               no call above CALLS_SHARE
    celery-task-meta-* of a call    an hour (call_scripts.py: KEEP_RESULT)  -
      whose id was chosen
    session-key.*                   a day after the first use               -
    skill-bundle.*, skills          removed                                 64 MiB
    blob-*                          not; limited by CALLS_SHARE             128 MiB for each kind of worker (blobs.py)
    queues, celery-task-meta-*,     not                                     1 MiB for each call that has a slot
    call.*:events, :answers
    web.*                           not; none above half of the memory      32 pages of 1 MiB (web_pages.py)
    audit                           not                                     5,000 entries
    session.*:place                 not                                     16 MiB of tool_config (sessions.py)
    usage.*, secrets, session.*,    not; small                              names that a policy limits, 100 secrets
    calls, places, batch-ids
"""

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure

USABLE_SHARE = 0.85
"""Share of `maxmemory`, 0 to 1, that the records of tenants may use. The rest is for queues, results and leases."""
NEW_WORK, RUNNING_WORK = 4, 8
"""Multiples of the free usable memory that a tenant may use. NEW_WORK: to start runs and to queue work. RUNNING_WORK:
for what started work stores. It is larger, so that runs that have started can end. With an otherwise empty Redis, these
are 68% and 76% of `maxmemory` for a single tenant.
"""
CALLS_SHARE = 0.95
"""Share of `maxmemory`, 0 to 1, that calls may use, with their contents. Calls are short, and running work needs
them.
"""
RECORD_BYTES = 1024
"""Memory that a record needs in addition to its texts, in bytes."""
ENTRY_BYTES = 64
"""Memory that an entry of a list or a stream needs in addition to its text, in bytes."""
_ACCOUNT_TTL_S = 62 * 24 * 3600

MEMORY_LUA = f"""
-- store/memory.py. `account`: key of the hash of a tenant (account_key). Fields: `total`, `hour` (the last hour whose
-- end was handled), and the bytes that expire in each hour, by its number since 1970; 0 for bytes that do not expire.
-- Times are Unix seconds.
local NEW_WORK, RUNNING_WORK, CALLS_SHARE = {NEW_WORK}, {RUNNING_WORK}, {CALLS_SHARE}
local RECORD_BYTES, ENTRY_BYTES = {RECORD_BYTES}, {ENTRY_BYTES}

local function add_bytes_of_hour(account, now, bytes, hour)
  if bytes == 0 or (hour ~= 0 and hour <= math.floor(now / 3600)) then return end
  redis.call('HINCRBY', account, 'total', bytes)
  redis.call('HINCRBY', account, hour, bytes)
  if redis.call('HEXISTS', account, '0') == 0 then
    redis.call('EXPIRE', account, {_ACCOUNT_TTL_S})
  else
    redis.call('PERSIST', account)
  end
end

-- Counts bytes that expire at a time and are never deleted earlier. `expires_at` nil: they do not expire.
local function add_bytes(account, now, bytes, expires_at)
  add_bytes_of_hour(account, now, bytes, expires_at and math.ceil(expires_at / 3600) or 0)
end

-- Returns what the field of the record counts: bytes and hour.
local function counted_bytes(key, field)
  local bytes, hour = string.match(redis.call('HGET', key, field) or '', '^(%d+) (%d+)$')
  return tonumber(bytes or 0), tonumber(hour or 0)
end

-- Sets how many bytes a record takes and when it expires. `field` of the hash `key` stores the count. The hash must
-- exist, unless it is deleted with the record.
local function set_bytes(account, now, key, field, bytes, expires_at)
  local earlier, earlier_hour = counted_bytes(key, field)
  local hour = expires_at and math.ceil(expires_at / 3600) or 0
  if earlier == bytes and earlier_hour == hour then return end
  add_bytes_of_hour(account, now, -earlier, earlier_hour)
  add_bytes_of_hour(account, now, bytes, hour)
  if bytes > 0 then
    redis.call('HSET', key, field, string.format('%d %d', bytes, hour))
  else
    redis.call('HDEL', key, field)
  end
end

local function grow_bytes(account, now, key, field, bytes, expires_at)
  set_bytes(account, now, key, field, counted_bytes(key, field) + bytes, expires_at)
end

-- Returns the bytes that the tenant uses now. Drops the counts of the hours that are over.
local function used_bytes(account, now)
  local hour, total = math.floor(now / 3600), redis.call('HMGET', account, 'total', 'hour')
  local bytes = tonumber(total[1] or 0)
  if total[1] and total[2] ~= tostring(hour) then
    for _, field in ipairs(redis.call('HKEYS', account)) do
      local expired = tonumber(field)
      if expired and expired ~= 0 and expired <= hour then
        bytes = bytes - tonumber(redis.call('HGET', account, field))
        redis.call('HDEL', account, field)
      end
    end
    redis.call('HSET', account, 'total', bytes, 'hour', hour)
  end
  return math.max(0, bytes)
end

-- Returns how much of a share of the memory is free; nil if Redis has no limit, or does not report it.
local function free_bytes(share)
  local memory = redis.call('INFO', 'memory')
  local limit = tonumber(string.match(memory, '\\nmaxmemory:(%d+)') or 0)
  local used = tonumber(string.match(memory, '\\nused_memory:(%d+)'))
  return limit > 0 and used and share * limit - used or nil
end

-- Returns whether the tenant may store more. `factor`: NEW_WORK or RUNNING_WORK. `share`: usable share of the memory.
local function has_room(account, now, factor, share)
  local free = free_bytes(share or {USABLE_SHARE})
  return not free or used_bytes(account, now) < factor * free
end

local function read_time()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end
"""
"""Lua functions for scripts that store something for a tenant."""


class TenantMemoryUsed(OperatorError):
    """Raised when a running run may store no more, because its tenant uses its part of Redis's memory."""

    code = ErrorCode.QUOTA_EXCEEDED


def no_memory(what: str) -> ToolFailure:
    """Return the error for a request that would store more than the tenant's part of Redis. `what`: a clause that says
    what was not done.
    """
    return ToolFailure(ErrorCode.QUOTA_EXCEEDED, describe_no_memory(what))


def describe_no_memory(what: str) -> str:
    """Return the message for a tenant that may store no more."""
    return (
        f"{what}: the tenant's part of the memory of Redis is used up, or Redis is nearly full. Delete ended batches "
        "with `toolcrew batches delete ID`, wait until logs of ended runs expire (an hour), or ask the operator to "
        "raise `maxmemory`"
    )
