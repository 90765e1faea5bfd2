-- The steps of the queue of runs; ARGV: prefix of the deployment, prefix of its queue, operation, its arguments. Each step is all or nothing.

local deployment, runs, operation = ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local stamp = string.format('%.6f', now)
-- The batch of the runs that programs start by themselves (hosted_runs.lua).
local HOSTED_BATCH = '@runs'

local function split(text)
  local at = string.find(text, '|', 1, true)
  return string.sub(text, 1, at - 1), string.sub(text, at + 1)
end

local function run_key(tenant, run) return deployment .. 't:' .. tenant .. ':run.' .. run end
local function batch_key(tenant, batch) return deployment .. 't:' .. tenant .. ':batch.' .. batch end
local function batches_key(tenant) return deployment .. 't:' .. tenant .. ':batch-ids' end

local ttls = {}
local function ttl_of(tenant, batch)
  local key = batch_key(tenant, batch)
  ttls[key] = ttls[key] or tonumber(redis.call('HGET', key, 'ttl_s')) or 2592000
  return ttls[key]
end

-- Something has happened in a batch: once a step, however many of its runs that was about.
local function keep(tenant, batch)
  local ttl = ttl_of(tenant, batch)
  local key = batch_key(tenant, batch)
  local parts = batch == HOSTED_BATCH and {':index', ':sessions', ':succeeded', ':failed', ':cancelled'} or {':ended', ':items', ':events'}
  for _, one in ipairs({'', ':waiting', ':delayed', ':running', unpack(parts)}) do redis.call('EXPIRE', key .. one, ttl) end
  redis.call('EXPIRE', batches_key(tenant), ttl)
end

local function keep_run(tenant, batch, run) redis.call('EXPIRE', run_key(tenant, run), ttl_of(tenant, batch)) end

-- Lower comes first: by priority, then in the order of the lines.
local function rank(priority, line) return -tonumber(priority) * 1e9 + tonumber(line) end

local function wait(tenant, batch, run)
  local told = redis.call('HMGET', run_key(tenant, run), 'priority', 'line')
  local waiting = batch_key(tenant, batch) .. ':waiting'
  redis.call('ZADD', waiting, rank(told[1] or 0, told[2] or 0), run)
  redis.call('EXPIRE', waiting, ttl_of(tenant, batch))
  redis.call('ZADD', runs .. 'batches', 'NX', stamp, tenant .. '|' .. batch)
end

local function begin(tenant, batch, run, claim, owner, lease_s, how)
  local key = run_key(tenant, run)
  redis.call('HSET', key, 'state', 'running', 'claim', claim, 'owner', owner)
  redis.call('HDEL', key, 'asking', 'told')
  if how ~= 'resumed' then redis.call('HSET', key, 'started_at', stamp) end
  local running = batch_key(tenant, batch) .. ':running'
  redis.call('SADD', running, run)
  redis.call('EXPIRE', running, ttl_of(tenant, batch))
  redis.call('ZADD', runs .. 'leases', now + lease_s, tenant .. '|' .. run)
  keep_run(tenant, batch, run)
  return {tenant, run, claim, how}
end

-- Its holder died: how often that was since the run's log last grew.
local function lose(tenant, run) redis.call('HINCRBY', run_key(tenant, run), 'losses', 1) end

-- Waiting again, whoever had it or meant to come back to it.
local function requeue(tenant, batch, run)
  redis.call('HSET', run_key(tenant, run), 'state', 'queued', 'claim', '')
  redis.call('SREM', batch_key(tenant, batch) .. ':running', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  wait(tenant, batch, run)
end

local function undelay(tenant, batch, run)
  redis.call('ZREM', runs .. 'delayed', tenant .. '|' .. run)
  redis.call('SREM', batch_key(tenant, batch) .. ':delayed', run)
end

-- The end of a run or batch is to be announced: in the step that ends it, so that no process can lose it (store/webhooks.py).
local function announce(tenant, kind, name, key)
  if (redis.call('HGET', key, 'webhook') or '') == '' then return end
  redis.call('HSET', key, 'webhook_tries', 0, 'webhook_notice', stamp)
  redis.call('ZADD', runs .. 'webhooks', stamp, tenant .. '|' .. kind .. '|' .. name)
end

-- Of a batch that is being cancelled nothing is added any more: what was not submitted by then never ends.
local function settle(tenant, batch)
  local key = batch_key(tenant, batch)
  local told = redis.call('HMGET', key, 'total', 'state')
  local is_cancelled, all = told[2] == 'cancelling', tonumber(told[1] or '0')
  if is_cancelled then all = redis.call('LLEN', key .. ':items') elseif told[2] ~= 'in_progress' then return end
  if redis.call('ZCARD', key .. ':ended') < all then return end
  redis.call('ZREM', runs .. 'batches', tenant .. '|' .. batch)
  redis.call('HSET', key, 'state', is_cancelled and 'cancelled' or 'completed', 'ended_at', stamp)
  announce(tenant, 'batch', batch, key)
end

-- Of the runs that programs start (hosted_runs.lua).
local tell_end, build_end, finish_hosted

-- A run whose record Redis has lost: nobody can work it, and its batch ends without it.
local function forget(tenant, batch, run)
  local key = batch_key(tenant, batch)
  redis.call('DEL', run_key(tenant, run))
  redis.call('SREM', key .. ':running', run)
  redis.call('ZREM', key .. ':waiting', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  undelay(tenant, batch, run)
  if batch == HOSTED_BATCH then
    tell_end(tenant, run, build_end(run, 'infrastructure', 'run_lost', 'Redis has lost the record of the run: see that it evicts nothing, then start the run again'))
  else
    redis.call('ZADD', key .. ':ended', redis.call('HINCRBY', key, 'ends', 1), run)
  end
  redis.call('HINCRBY', key, 'failed:infrastructure', 1)
  keep(tenant, batch)
  settle(tenant, batch)
end

local function finish(tenant, run, outcome, failure, ended, transcript)
  local key = run_key(tenant, run)
  local batch = redis.call('HGET', key, 'batch')
  redis.call('HSET', key, 'state', 'ended', 'claim', '', 'outcome', outcome, 'failure', failure, 'ended_at', stamp)
  local batch_at = batch_key(tenant, batch)
  redis.call('SREM', batch_at .. ':running', run)
  redis.call('ZREM', batch_at .. ':waiting', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  undelay(tenant, batch, run)
  if batch == HOSTED_BATCH then
    finish_hosted(tenant, run, failure, ended, transcript or '')
    announce(tenant, 'run', run, key)
  else
    redis.call('ZADD', batch_at .. ':ended', redis.call('HINCRBY', batch_at, 'ends', 1), run)
  end
  redis.call('HINCRBY', batch_at, failure == '' and 'succeeded' or 'failed:' .. failure, 1)
  keep_run(tenant, batch, run)
  -- What a program's run said is read out of its log when there is no transcript.
  local log_ttl = batch == HOSTED_BATCH and (transcript or '') == '' and ttl_of(tenant, batch) or 3600
  redis.call('EXPIRE', key .. ':log', log_ttl)
  redis.call('EXPIRE', key .. ':parts', log_ttl)
  settle(tenant, batch)
  return batch
end

-- Whether nothing of the tenant is to be begun, by its policy (contract/tenancy.py): read once a step.
local pauses = {}
local function is_paused(tenant)
  if pauses[tenant] == nil then
    local key = deployment .. 'tenants'
    local told = redis.call('HMGET', key, tenant, 'default', '#version')
    local is_open = redis.call('HLEN', key) == (told[2] and 1 or 0) + (told[3] and 1 or 0)
    local policy = unsealed(told[1] or is_open and told[2] or '')
    -- Most have nothing to say of it, and are not read for that.
    local is_told = string.find(policy, 'is_paused', 1, true)
    local is_json, fields = pcall(cjson.decode, is_told and policy or '{}')
    pauses[tenant] = is_json and type(fields) == 'table' and fields.is_paused == true
  end
  return pauses[tenant]
end

local steps = {}

-- how many, seconds. Notices that are due; nobody else gets them for so long. Gives {tenant, kind, name, webhook, tries, instant of the end} of each.
function steps.claim_webhooks()
  local given = {}
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', runs .. 'webhooks', '-inf', now, 'LIMIT', 0, tonumber(ARGV[4]))) do
    local tenant, rest = split(one)
    local kind, name = split(rest)
    local key = kind == 'run' and run_key(tenant, name) or batch_key(tenant, name)
    local told = redis.call('HMGET', key, 'webhook', 'webhook_notice')
    if told[1] and told[2] then
      redis.call('ZADD', runs .. 'webhooks', now + tonumber(ARGV[5]), one)
      table.insert(given, {tenant, kind, name, told[1], redis.call('HINCRBY', key, 'webhook_tries', 1), told[2]})
    else
      redis.call('ZREM', runs .. 'webhooks', one)
    end
  end
  return given
end

-- tenant, kind, name, instant of the end, seconds until the next try ('' for none). A later end of a batch that went on is a notice of its own.
function steps.settle_webhook()
  local tenant, kind, name = ARGV[4], ARGV[5], ARGV[6]
  local key = kind == 'run' and run_key(tenant, name) or batch_key(tenant, name)
  if redis.call('HGET', key, 'webhook_notice') ~= ARGV[7] then return 0 end
  local one = tenant .. '|' .. kind .. '|' .. name
  if ARGV[8] == '' then return redis.call('ZREM', runs .. 'webhooks', one) end
  return redis.call('ZADD', runs .. 'webhooks', 'XX', 'CH', now + tonumber(ARGV[8]), one)
end

-- tenant, batch, then for each item: run, item (JSON), priority, line. Gives how many are new; -1, and nothing done, when the batch is cancelled.
function steps.add()
  local tenant, batch, added = ARGV[4], ARGV[5], 0
  local key = batch_key(tenant, batch)
  local state = redis.call('HGET', key, 'state')
  if state == 'cancelling' or state == 'cancelled' then return -1 end
  for at = 6, #ARGV, 4 do
    local run = ARGV[at]
    if redis.call('EXISTS', run_key(tenant, run)) == 0 then
      redis.call('HSET', run_key(tenant, run), 'batch', batch, 'item', ARGV[at + 1], 'priority', ARGV[at + 2], 'line', ARGV[at + 3],
        'state', 'queued', 'attempt', 1, 'queued_at', stamp)
      if redis.call('ZREM', key .. ':ended', run) == 1 then
        -- It was forgotten, and is there again.
        redis.call('HINCRBY', key, 'failed:infrastructure', -1)
      else
        redis.call('RPUSH', key .. ':items', run)
      end
      wait(tenant, batch, run)
      keep_run(tenant, batch, run)
      added = added + 1
    end
  end
  keep(tenant, batch)
  return added
end

-- owner, how many, lease, tenant|batch whose runs are wanted, tenants, then as many words for claims. Gives {tenant, run, claim, how} of each, and
-- {tenant, batch, run} of those that were left behind in a batch that is cancelled: they wait, to be ended. Of a program's only the session is to be.
-- Without a tenant|batch: of all that are detached, of those tenants (',a,b,'; '' for all).
function steps.claim()
  local owner, most, lease_s, only, tenants = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8]
  local given, left, word = {}, {}, 9
  local function is_wanted(tenant, batch)
    if is_paused(tenant) then return false end
    if only ~= '' then return only == tenant .. '|' .. batch end
    if tenants ~= '' and not string.find(tenants, ',' .. tenant .. ',', 1, true) then return false end
    return redis.call('HGET', batch_key(tenant, batch), 'is_detached') == '1'
  end
  local function take(tenant, batch, run, how)
    table.insert(given, begin(tenant, batch, run, ARGV[word], owner, lease_s, how))
    word = word + 1
  end
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', runs .. 'leases', '-inf', now, 'LIMIT', 0, 1000)) do
    local tenant, run = split(one)
    local told = redis.call('HMGET', run_key(tenant, run), 'batch', 'is_cancelled')
    local batch = told[1]
    if not batch then
      redis.call('ZREM', runs .. 'leases', one)
    elseif told[2] then
      -- It alone was cancelled: its batch goes on, and would give it to somebody.
      keep(tenant, finish(tenant, run, '', 'cancelled'))
      if #left < 200 then table.insert(left, {tenant, batch, run}) end
    elseif redis.call('HGET', batch_key(tenant, batch), 'state') ~= 'in_progress' then
      requeue(tenant, batch, run)
      -- Until it has ended it is found here again, should whoever ends it die.
      redis.call('ZADD', runs .. 'leases', now + lease_s, one)
      if #left < 200 then table.insert(left, {tenant, batch, run}) end
    elseif is_wanted(tenant, batch) then
      if #given < most then
        lose(tenant, run)
        take(tenant, batch, run, 'resumed')
      end
    else
      -- Somebody else's, who may never come: it waits for him there, and not before what is ours.
      lose(tenant, run)
      requeue(tenant, batch, run)
    end
  end
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', runs .. 'delayed', '-inf', now, 'LIMIT', 0, 1000)) do
    local tenant, run = split(one)
    local batch = redis.call('HGET', run_key(tenant, run), 'batch')
    redis.call('ZREM', runs .. 'delayed', one)
    if batch then
      undelay(tenant, batch, run)
      wait(tenant, batch, run)
    end
  end
  -- One of each batch in turn, the one that was served longest ago first. Of very many that have nothing to give some are looked at each time.
  local idle, looks = 0, 0
  while #given < most and looks < 500 + most do
    looks = looks + 1
    local one = redis.call('ZRANGE', runs .. 'batches', idle, idle)[1]
    if only ~= '' then one = idle == 0 and redis.call('ZSCORE', runs .. 'batches', only) and only end
    if not one then break end
    local tenant, batch = split(one)
    local key = batch_key(tenant, batch)
    local told = redis.call('HMGET', key, 'concurrency', 'state')
    local is_full = redis.call('SCARD', key .. ':running') >= tonumber(told[1] or '0')
    local is_open = not is_full and told[2] == 'in_progress' and is_wanted(tenant, batch)
    local run = is_open and redis.call('ZPOPMIN', key .. ':waiting')[1]
    if run and redis.call('HEXISTS', run_key(tenant, run), 'item') == 0 then
      forget(tenant, batch, run)
    elseif run then
      local is_logged = redis.call('EXISTS', run_key(tenant, run) .. ':log') == 1
      take(tenant, batch, run, is_logged and 'resumed' or 'begun')
      redis.call('ZADD', runs .. 'batches', now + #given * 1e-6, one)
    elseif redis.call('EXISTS', key .. ':waiting') == 0 then
      redis.call('ZREM', runs .. 'batches', one)
    else
      idle = idle + 1
    end
  end
  if idle > 0 and looks >= 500 + most then
    for _, one in ipairs(redis.call('ZRANGE', runs .. 'batches', 0, idle - 1)) do redis.call('ZADD', runs .. 'batches', stamp, one) end
  end
  return {given, left}
end

-- lease, then {tenant|run, claim} of each. Gives those that are to be given up: lost, or of a batch that is being cancelled.
function steps.renew()
  local lost, cancelled = {}, {}
  for at = 5, #ARGV, 2 do
    local tenant, run = split(ARGV[at])
    local told = redis.call('HMGET', run_key(tenant, run), 'claim', 'batch', 'is_cancelled')
    if told[1] ~= ARGV[at + 1] then
      table.insert(lost, ARGV[at])
    else
      redis.call('ZADD', runs .. 'leases', now + tonumber(ARGV[4]), ARGV[at])
      local state = redis.call('HGET', batch_key(tenant, told[2]), 'state')
      if told[3] or state == 'cancelling' or state == 'cancelled' then table.insert(cancelled, ARGV[at]) end
    end
  end
  return {lost, cancelled}
end

-- tenant, run, claim, outcome, kind of failure; of a program's run its last event, its transcript. 1 when that is its outcome; 0: another process has it.
function steps.finish()
  local told = redis.call('HMGET', run_key(ARGV[4], ARGV[5]), 'claim', 'state', 'outcome')
  if told[2] == 'ended' and told[3] == ARGV[7] then return 1 end
  if told[1] ~= ARGV[6] then return 0 end
  keep(ARGV[4], finish(ARGV[4], ARGV[5], ARGV[7], ARGV[8], ARGV[9], ARGV[10]))
  return 1
end

-- tenant, run, claim, seconds, '1' when it is begun anew. Back into the queue, now or later. 2, and nothing done, when nobody would go on with it.
function steps.give_back()
  local tenant, run, after_s = ARGV[4], ARGV[5], tonumber(ARGV[7])
  local key = run_key(tenant, run)
  local told = redis.call('HMGET', key, 'claim', 'batch', 'is_cancelled')
  if told[1] ~= ARGV[6] then return 0 end
  local state = redis.call('HGET', batch_key(tenant, told[2]), 'state')
  if told[3] or state == 'cancelling' or state == 'cancelled' then return 2 end
  redis.call('HSET', key, 'state', 'queued', 'claim', '', 'queued_at', stamp)
  if ARGV[8] == '1' then
    redis.call('HINCRBY', key, 'attempt', 1)
    redis.call('HDEL', key, 'losses', 'told_step')
    redis.call('DEL', key .. ':log', key .. ':parts')
  end
  redis.call('SREM', batch_key(tenant, told[2]) .. ':running', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  if after_s > 0 then
    redis.call('ZADD', runs .. 'delayed', now + after_s, tenant .. '|' .. run)
    redis.call('SADD', batch_key(tenant, told[2]) .. ':delayed', run)
    keep(tenant, told[2])
  else
    wait(tenant, told[2], run)
  end
  return 1
end

-- tenant, batch, how many. Nothing of the batch is begun any more; gives some of the runs that wait, to be dropped; none: those were all.
function steps.cancel()
  local tenant, batch, given = ARGV[4], ARGV[5], {}
  local key = batch_key(tenant, batch)
  local state = redis.call('HGET', key, 'state')
  if state == 'in_progress' then redis.call('HSET', key, 'state', 'cancelling') end
  if state ~= 'in_progress' and state ~= 'cancelling' then return {} end
  -- What is to be tried again later waits like the rest, and so does, when nothing else waits, what nobody works any more.
  for _, run in ipairs(redis.call('SRANDMEMBER', key .. ':delayed', 1000)) do
    undelay(tenant, batch, run)
    wait(tenant, batch, run)
  end
  if redis.call('EXISTS', key .. ':waiting') == 0 then
    local room = 1000
    for _, run in ipairs(redis.call('SMEMBERS', key .. ':running')) do
      local lease_ends = tonumber(redis.call('ZSCORE', runs .. 'leases', tenant .. '|' .. run) or '0')
      if lease_ends <= now and room > 0 then
        requeue(tenant, batch, run)
        room = room - 1
      end
    end
  end
  while #given == 0 and redis.call('EXISTS', key .. ':waiting') == 1 do
    for _, run in ipairs(redis.call('ZRANGE', key .. ':waiting', 0, tonumber(ARGV[6]) - 1)) do
      if redis.call('HEXISTS', run_key(tenant, run), 'item') == 0 then
        forget(tenant, batch, run)
      elseif redis.call('HGET', run_key(tenant, run), 'state') == 'queued' then
        table.insert(given, run)
      else
        -- It runs, or has ended: it was never to wait.
        redis.call('ZREM', key .. ':waiting', run)
      end
    end
  end
  if #given == 0 then settle(tenant, batch) end
  return given
end

-- tenant, the instant and the id of the batch that stood last in the page before ('' for none), how many (-1: all). Gives how many come after those, and the
-- batches with the instants at which they were made, the newest first: what follows that batch, or, when that is forgotten, its instant.
function steps.list_batches()
  local key, at, most = batches_key(ARGV[4]), 0, tonumber(ARGV[7])
  if ARGV[6] ~= '' then
    local rank = redis.call('ZREVRANK', key, ARGV[6])
    at = rank and rank + 1 or redis.call('ZCOUNT', key, '(' .. ARGV[5], '+inf')
  end
  local found = redis.call('ZREVRANGE', key, at, most < 0 and -1 or at + most - 1, 'WITHSCORES')
  return {math.max(0, redis.call('ZCARD', key) - at - #found / 2), found}
end

-- tenant, batch. It goes on, when something of it waits or is still to be added, whether it was cancelled or not.
function steps.reopen()
  local tenant, batch = ARGV[4], ARGV[5]
  local key = batch_key(tenant, batch)
  local told = redis.call('HMGET', key, 'total', 'state')
  local is_waiting = redis.call('EXISTS', key .. ':waiting') == 1
  local is_more = is_waiting or redis.call('LLEN', key .. ':items') < tonumber(told[1] or '0')
  if not told[2] or told[2] == 'in_progress' or not is_more then return 0 end
  redis.call('HSET', key, 'state', 'in_progress', 'ended_at', '0')
  if is_waiting then redis.call('ZADD', runs .. 'batches', 'NX', stamp, tenant .. '|' .. batch) end
  return 1
end

-- tenant, batch, then {run, outcome, kind of failure} of each: those that still wait end so. Gives them.
function steps.settle()
  local tenant, batch, settled = ARGV[4], ARGV[5], {}
  for at = 6, #ARGV, 3 do
    if redis.call('HGET', run_key(tenant, ARGV[at]), 'state') == 'queued' then
      finish(tenant, ARGV[at], ARGV[at + 1], ARGV[at + 2])
      table.insert(settled, ARGV[at])
    end
  end
  keep(tenant, batch)
  return settled
end

-- tenant, batch, key of the audit, its entry ('' for none), number of kinds, kinds of failure, runs. Those that ended so are queued again, from their
-- beginning; gives them.
function steps.retry()
  local tenant, batch, again, kinds = ARGV[4], ARGV[5], {}, {}
  local key, count = batch_key(tenant, batch), tonumber(ARGV[8])
  for at = 9, 8 + count do kinds[ARGV[at]] = true end
  for at = 9 + count, #ARGV do
    local run = ARGV[at]
    local record = run_key(tenant, run)
    local failure = redis.call('HGET', record, 'failure')
    if failure and kinds[failure] then
      if #again == 0 then audit(ARGV[6], ARGV[7]) end
      redis.call('HSET', record, 'state', 'queued', 'outcome', '', 'failure', '', 'queued_at', stamp)
      redis.call('HSET', record, 'first_attempt', redis.call('HINCRBY', record, 'attempt', 1))
      redis.call('HDEL', record, 'losses')
      redis.call('DEL', record .. ':log', record .. ':parts')
      redis.call('ZREM', key .. ':ended', run)
      redis.call('HINCRBY', key, 'failed:' .. failure, -1)
      wait(tenant, batch, run)
      keep_run(tenant, batch, run)
      table.insert(again, run)
    end
  end
  keep(tenant, batch)
  if #again > 0 then redis.call('HSET', key, 'state', 'in_progress', 'ended_at', '0') end
  return again
end
