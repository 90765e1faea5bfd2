-- The steps of durable runs, which programs start one by one.
-- This file continues runs.lua in the same script.

-- Publishes the last event of a run in the step that ends it, so that each subscriber receives it exactly once.
function publish_end(tenant, run, ended)
  local key = run_key(tenant, run)
  local id = redis.call('XADD', key .. ':events', '*', 'e', ended)
  redis.call('EXPIRE', key .. ':events', EVENTS_TTL)
  redis.call('ZREM', runs .. 'cancels', tenant .. '|' .. run)
  return id
end

-- Builds the last event of a run that ended without a worker.
function build_end_event(run, kind, code, message)
  local state = kind == 'cancelled' and 'cancelled' or 'failed'
  local failure = string.format('{"kind":%s,"code":%s,"message":%s}', cjson.encode(kind), cjson.encode(code), cjson.encode(message))
  return string.format('{"type":"RunEnded","run":%s,"at":%s,"state":"%s","failure":%s}', cjson.encode(run), stamp, state, failure)
end

-- `ended`: the last event of the run, nil for a run that did not start. `transcript`: '' for none.
function end_durable_run(tenant, run, failure, ended, transcript)
  local key = run_key(tenant, run)
  local sessions, session = batch_key(tenant, NO_BATCH) .. ':sessions', redis.call('HGET', key, 'session') or ''
  if redis.call('HGET', sessions, session) == run then redis.call('HDEL', sessions, session) end
  if transcript ~= '' then redis.call('SET', key .. ':transcript', transcript, 'EX', ttl_of(tenant, NO_BATCH)) end
  local state = (failure == '' and 'succeeded') or (failure == 'cancelled' and failure) or 'failed'
  redis.call('ZADD', batch_key(tenant, NO_BATCH) .. ':' .. state, redis.call('HGET', key, 'line') or '0', run)
  ended = ended or build_end_event(run, failure, 'CANCELLED', 'the run was cancelled')
  redis.call('HSET', key, 'end', ended, 'last_event', publish_end(tenant, run, ended))
  count_run(tenant, run, 'stream_bytes', counted_bytes(key, 'stream_bytes') + #ended + ENTRY_BYTES, EVENTS_TTL)
end

local function delete_oldest(tenant, max_count)
  local batch, parts = batch_key(tenant, NO_BATCH), {':succeeded', ':failed', ':cancelled'}
  local index = batch .. ':index'
  local function delete_ended_run(run)
    for _, part in ipairs({':index', unpack(parts)}) do redis.call('ZREM', batch .. part, run) end
    delete_run(tenant, NO_BATCH, run)
  end
  for _, run in ipairs(redis.call('ZRANGE', index, 0, 9)) do
    if redis.call('EXISTS', run_key(tenant, run)) == 0 then delete_ended_run(run) end
  end
  -- The index also contains runs that have not ended; only ended ones are deleted.
  for _ = 1, math.min(10, redis.call('ZCARD', index) - max_count) do
    local oldest, at
    for _, part in ipairs(parts) do
      local first = redis.call('ZRANGE', batch .. part, 0, 0, 'WITHSCORES')
      if first[1] and (not at or tonumber(first[2]) < at) then oldest, at = first[1], tonumber(first[2]) end
    end
    if not oldest then break end
    delete_ended_run(oldest)
  end
end

-- `digest`: of the request. `session`: '' for a new session. `webhook`: '' for none. `token`: claim of the process that executes the run itself, '' puts the
-- run into the queue. `parent`: run from which it is forked, '' for none; `step`: the number of shared steps.
-- Returns `started`, `known` (the id exists with the same request), `other` (the id exists with another request), `full`, `memory` (the tenant may store no more), or `busy` and the run that uses
-- the session.
function steps.start_run(tenant, run, item, digest, about, priority, session, max_waiting, max_listed, ttl_s, webhook, token, owner, lease_s, parent, step)
  local key, batch = run_key(tenant, run), batch_key(tenant, NO_BATCH)
  local existing = redis.call('HMGET', key, 'batch', 'digest')
  if existing[1] then return {existing[1] == NO_BATCH and existing[2] == digest and 'known' or 'other'} end
  if not may_start(tenant) then return {'memory'} end
  local waiting = redis.call('ZCARD', batch .. ':waiting') + redis.call('SCARD', batch .. ':delayed')
  if token == '' and waiting >= tonumber(max_waiting) then return {'full'} end
  if session ~= '' then
    local holder = redis.call('HGET', batch .. ':sessions', session)
    local state = holder and redis.call('HGET', run_key(tenant, holder), 'state')
    if state == 'queued' or state == 'running' then return {'busy', holder} end
    redis.call('HSET', batch .. ':sessions', session, run)
  end
  local index = batch .. ':index'
  local last = redis.call('ZREVRANGE', index, 0, 0, 'WITHSCORES')
  local line = (tonumber(last[2] or '0')) + 1
  redis.call('HSET', key, 'batch', NO_BATCH, 'item', item, 'digest', digest, 'about', about, 'priority', priority, 'session', session,
    'line', line, 'state', 'queued', 'attempt', 1, 'queued_at', stamp, 'created_at', stamp)
  redis.call('HSET', key, 'webhook', webhook, 'webhook_state', webhook ~= '' and 'pending' or '')
  count_texts(tenant, NO_BATCH, run)
  redis.call('ZADD', index, line, run)
  if parent ~= '' then
    local forks = run_key(tenant, parent) .. ':forks'
    redis.call('RPUSH', forks, step .. '|' .. run)
    redis.call('EXPIRE', forks, ttl_s)
  end
  delete_oldest(tenant, tonumber(max_listed))
  if token == '' then
    enqueue(tenant, NO_BATCH, run)
    extend_run_ttl(tenant, NO_BATCH, run)
  else
    start(tenant, NO_BATCH, run, token, owner, tonumber(lease_s), 'begun')
  end
  extend_ttl(tenant, NO_BATCH)
  return {'started'}
end

-- `audit_entry`: '' for none. Returns `unknown`, `ended` (the run had ended before), `cancelled` (now), or `cancelling`
-- (the worker that has the run will end it).
function steps.cancel_run(tenant, run, audit_log, audit_entry)
  local key, name = run_key(tenant, run), tenant .. '|' .. run
  local fields = redis.call('HMGET', key, 'batch', 'state')
  if fields[1] ~= NO_BATCH then return 'unknown' end
  if fields[2] == 'ended' then return 'ended' end
  audit(audit_log, audit_entry)
  local is_leased = fields[2] == 'running' and tonumber(redis.call('ZSCORE', runs .. 'leases', name) or '0') > now
  if not is_leased then
    extend_ttl(tenant, end_run(tenant, run, '', 'cancelled'))
    return 'cancelled'
  end
  redis.call('HSET', key, 'is_cancelled', '1')
  redis.call('ZADD', runs .. 'cancels', now, name)
  redis.call('ZREMRANGEBYSCORE', runs .. 'cancels', '-inf', now - 600)
  redis.call('EXPIRE', runs .. 'cancels', 3600)
  return 'cancelling'
end

-- Returns whether a run that has not ended is in the given state.
local function is_in_state(tenant, run, state)
  local fields = redis.call('HMGET', run_key(tenant, run), 'state', 'asking')
  local is_waiting_for_approval = fields[1] == 'running' and (fields[2] or '0') ~= '0'
  return (is_waiting_for_approval and 'waiting_for_approval' or fields[1]) == state
end

-- Returns {line, run} of the runs in the sets of their state, the newest first. Returns nil when these sets are so large that a scan of the index is faster.
local function list_live(tenant, key, state)
  local parts = {ZCARD = ':waiting', SCARD = ':delayed'}
  if state ~= 'queued' then parts = {SCARD = ':running'} end
  local count = 0
  for command, part in pairs(parts) do count = count + redis.call(command, key .. part) end
  if count > 1000 then return nil end
  local ids = state == 'queued' and redis.call('ZRANGE', key .. ':waiting', 0, -1) or redis.call('SMEMBERS', key .. ':running')
  if state == 'queued' then
    for _, run in ipairs(redis.call('SMEMBERS', key .. ':delayed')) do table.insert(ids, run) end
  end
  local rows = {}
  for _, run in ipairs(ids) do
    local line = redis.call('ZSCORE', key .. ':index', run)
    if line then table.insert(rows, {tonumber(line), run}) end
  end
  table.sort(rows, function(left, right) return left[1] > right[1] end)
  return rows
end

-- `before`: the line before which to start. `state`: '' for all. `max_checked`: how many runs to check at most.
-- Returns the last line that was checked (0 at the end of the list) and the runs, the newest first.
function steps.list_runs(tenant, before, max_count, state, max_checked)
  before, max_count, max_checked = tonumber(before), tonumber(max_count), tonumber(max_checked)
  local key, ids = batch_key(tenant, NO_BATCH), {}
  local is_live = state == 'queued' or state == 'running' or state == 'waiting_for_approval'
  local live_rows = is_live and list_live(tenant, key, state)
  if live_rows then
    for _, row in ipairs(live_rows) do
      if row[1] < before and is_in_state(tenant, row[2], state) then
        table.insert(ids, row[2])
        if #ids == max_count then return {row[1], ids} end
      end
    end
    return {0, ids}
  end
  local part = (state == '' or is_live) and 'index' or state
  local rows = redis.call('ZREVRANGEBYSCORE', key .. ':' .. part, '(' .. string.format('%.0f', before), '-inf', 'WITHSCORES', 'LIMIT', 0, max_checked)
  for at = 1, #rows, 2 do
    if not is_live or is_in_state(tenant, rows[at], state) then table.insert(ids, rows[at]) end
    if #ids == max_count then return {tonumber(rows[at + 1]), ids} end
  end
  return {#rows == 2 * max_checked and tonumber(rows[#rows]) or 0, ids}
end
