-- The steps of runs that programs start by themselves: items of a batch that never ends, one a tenant. Goes on from runs.lua, in the same script.

-- The last of a run's events, in the step that ends it: whoever follows it hears that once.
function tell_end(tenant, run, ended)
  local key = run_key(tenant, run)
  local id = redis.call('XADD', key .. ':events', '*', 'e', ended)
  redis.call('EXPIRE', key .. ':events', 86400)
  redis.call('ZREM', runs .. 'cancels', tenant .. '|' .. run)
  return id
end

-- For runs that nobody worked to an end.
function build_end(run, kind, code, message)
  local state = kind == 'cancelled' and 'cancelled' or 'failed'
  local failure = string.format('{"kind":%s,"code":%s,"message":%s}', cjson.encode(kind), cjson.encode(code), cjson.encode(message))
  return string.format('{"type":"RunEnded","run":%s,"at":%s,"state":"%s","failure":%s}', cjson.encode(run), stamp, state, failure)
end

-- `ended`: its last event; nil for one that was not begun. `transcript`: '' for none.
function finish_hosted(tenant, run, failure, ended, transcript)
  local key = run_key(tenant, run)
  local sessions, session = batch_key(tenant, HOSTED_BATCH) .. ':sessions', redis.call('HGET', key, 'session') or ''
  if redis.call('HGET', sessions, session) == run then redis.call('HDEL', sessions, session) end
  if transcript ~= '' then redis.call('SET', key .. ':transcript', transcript, 'EX', ttl_of(tenant, HOSTED_BATCH)) end
  local state = (failure == '' and 'succeeded') or (failure == 'cancelled' and failure) or 'failed'
  redis.call('ZADD', batch_key(tenant, HOSTED_BATCH) .. ':' .. state, redis.call('HGET', key, 'line') or '0', run)
  ended = ended or build_end(run, failure, 'CANCELLED', 'the run was cancelled')
  redis.call('HSET', key, 'end', ended, 'last_event', tell_end(tenant, run, ended))
end

local function forget_oldest(tenant, most)
  local batch, parts = batch_key(tenant, HOSTED_BATCH), {':succeeded', ':failed', ':cancelled'}
  local index = batch .. ':index'
  local function forget_run(run)
    for _, part in ipairs({':index', unpack(parts)}) do redis.call('ZREM', batch .. part, run) end
    local key = run_key(tenant, run)
    redis.call('DEL', key, key .. ':log', key .. ':parts', key .. ':events', key .. ':transcript')
  end
  for _, run in ipairs(redis.call('ZRANGE', index, 0, 9)) do
    if redis.call('EXISTS', run_key(tenant, run)) == 0 then forget_run(run) end
  end
  -- However many stand before them that have not ended.
  for _ = 1, math.min(10, redis.call('ZCARD', index) - most) do
    local oldest, at
    for _, part in ipairs(parts) do
      local first = redis.call('ZRANGE', batch .. part, 0, 0, 'WITHSCORES')
      if first[1] and (not at or tonumber(first[2]) < at) then oldest, at = first[1], tonumber(first[2]) end
    end
    if not oldest then break end
    forget_run(oldest)
  end
end

-- tenant, run, item, digest of the request, about, priority, session ('' for one of its own), defaults, how many may wait, how many are listed, time to
-- live, webhook ('' for none), claim token of the process that executes the run itself ('' puts the run into the queue), its owner, seconds of the lease.
-- Gives `started`, `known` (the same request under that id), `other` (another one), `full`, or `busy` and the run that works in the session.
function steps.start_run()
  local tenant, run, digest, session = ARGV[4], ARGV[5], ARGV[7], ARGV[10]
  local key, batch = run_key(tenant, run), batch_key(tenant, HOSTED_BATCH)
  local known = redis.call('HMGET', key, 'batch', 'digest')
  if known[1] then return {known[1] == HOSTED_BATCH and known[2] == digest and 'known' or 'other'} end
  local token = ARGV[16]
  local waiting = redis.call('ZCARD', batch .. ':waiting') + redis.call('SCARD', batch .. ':delayed')
  if token == '' and waiting >= tonumber(ARGV[12]) then return {'full'} end
  if session ~= '' then
    local holder = redis.call('HGET', batch .. ':sessions', session)
    local state = holder and redis.call('HGET', run_key(tenant, holder), 'state')
    if state == 'queued' or state == 'running' then return {'busy', holder} end
    redis.call('HSET', batch .. ':sessions', session, run)
  end
  local fields = {state = 'in_progress', total = '1000000000000000', sha256 = '', concurrency = '1000000', defaults = ARGV[11],
    created_at = stamp, name = '', is_detached = '1', ttl_s = ARGV[14]}
  for name, value in pairs(fields) do redis.call('HSETNX', batch, name, value) end
  local index = batch .. ':index'
  local last = redis.call('ZREVRANGE', index, 0, 0, 'WITHSCORES')
  local line = (tonumber(last[2] or '0')) + 1
  redis.call('HSET', key, 'batch', HOSTED_BATCH, 'item', ARGV[6], 'digest', digest, 'about', ARGV[8], 'priority', ARGV[9], 'session', session,
    'line', line, 'state', 'queued', 'attempt', 1, 'queued_at', stamp, 'created_at', stamp)
  redis.call('HSET', key, 'webhook', ARGV[15])
  redis.call('ZADD', index, line, run)
  forget_oldest(tenant, tonumber(ARGV[13]))
  if token == '' then
    wait(tenant, HOSTED_BATCH, run)
    keep_run(tenant, HOSTED_BATCH, run)
  else
    begin(tenant, HOSTED_BATCH, run, token, ARGV[17], tonumber(ARGV[18]), 'begun')
  end
  keep(tenant, HOSTED_BATCH)
  return {'started'}
end

-- tenant, run, key of the audit, its entry ('' for none). Gives `unknown`, `ended` (before), `cancelled` (now), or `cancelling`: whoever works it ends it.
function steps.cancel_run()
  local tenant, run = ARGV[4], ARGV[5]
  local key, name = run_key(tenant, run), tenant .. '|' .. run
  local told = redis.call('HMGET', key, 'batch', 'state')
  if told[1] ~= HOSTED_BATCH then return 'unknown' end
  if told[2] == 'ended' then return 'ended' end
  audit(ARGV[6], ARGV[7])
  local is_worked = told[2] == 'running' and tonumber(redis.call('ZSCORE', runs .. 'leases', name) or '0') > now
  if not is_worked then
    keep(tenant, finish(tenant, run, '', 'cancelled'))
    return 'cancelled'
  end
  redis.call('HSET', key, 'is_cancelled', '1')
  redis.call('ZADD', runs .. 'cancels', now, name)
  redis.call('ZREMRANGEBYSCORE', runs .. 'cancels', '-inf', now - 600)
  redis.call('EXPIRE', runs .. 'cancels', 3600)
  return 'cancelling'
end

-- Whether a run that has not ended is in that state.
local function is_in_state(tenant, run, wanted)
  local told = redis.call('HMGET', run_key(tenant, run), 'state', 'asking')
  local is_asking = told[1] == 'running' and (told[2] or '0') ~= '0'
  return (is_asking and 'waiting_for_approval' or told[1]) == wanted
end

-- Those that have not ended, by what they wait in; nil when they are so many that those at hand are found sooner by looking at all.
local function find_live(tenant, key, wanted)
  local parts = {ZCARD = ':waiting', SCARD = ':delayed'}
  if wanted ~= 'queued' then parts = {SCARD = ':running'} end
  local count = 0
  for command, part in pairs(parts) do count = count + redis.call(command, key .. part) end
  if count > 1000 then return nil end
  local names = wanted == 'queued' and redis.call('ZRANGE', key .. ':waiting', 0, -1) or redis.call('SMEMBERS', key .. ':running')
  if wanted == 'queued' then
    for _, run in ipairs(redis.call('SMEMBERS', key .. ':delayed')) do table.insert(names, run) end
  end
  local found = {}
  for _, run in ipairs(names) do
    local line = redis.call('ZSCORE', key .. ':index', run)
    if line then table.insert(found, {tonumber(line), run}) end
  end
  table.sort(found, function(one, other) return one[1] > other[1] end)
  return found
end

-- tenant, the place before which to begin, how many, state ('' for all), how many are looked at. Gives the place up to which it has looked, 0 when those
-- were all, and the runs, the newest first.
function steps.list_runs()
  local tenant, before, most, wanted, looks = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
  local key, given = batch_key(tenant, HOSTED_BATCH), {}
  local is_live = wanted == 'queued' or wanted == 'running' or wanted == 'waiting_for_approval'
  local live = is_live and find_live(tenant, key, wanted)
  if live then
    for _, one in ipairs(live) do
      if one[1] < before and is_in_state(tenant, one[2], wanted) then
        table.insert(given, one[2])
        if #given == most then return {one[1], given} end
      end
    end
    return {0, given}
  end
  local part = (wanted == '' or is_live) and 'index' or wanted
  local found = redis.call('ZREVRANGEBYSCORE', key .. ':' .. part, '(' .. ARGV[5], '-inf', 'WITHSCORES', 'LIMIT', 0, looks)
  for at = 1, #found, 2 do
    if not is_live or is_in_state(tenant, found[at], wanted) then table.insert(given, found[at]) end
    if #given == most then return {tonumber(found[at + 1]), given} end
  end
  return {#found == 2 * looks and tonumber(found[#found]) or 0, given}
end
