-- The steps of the queue of runs. Redis executes each step completely or not at all.
-- Callers name the arguments of a step as its parameters (store/run_script.py). `deployment`, `runs`: the key prefixes of the deployment and of its queue.

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local stamp = string.format('%.6f', now)
-- The field `batch` of durable runs, which programs start one by one (durable_runs.lua).
local NO_BATCH = ''
-- Lifetimes after the end of a run, in seconds: of its events, of its log, and of its log if the run has kept states.
local EVENTS_TTL, LOG_TTL, STATES_TTL = 86400, 3600, 86400

local function split(text)
  local bar = string.find(text, '|', 1, true)
  return string.sub(text, 1, bar - 1), string.sub(text, bar + 1)
end

local function run_key(tenant, run) return deployment .. 't:' .. tenant .. ':run.' .. run end
-- Durable runs have the same keys as the runs of a batch, under another prefix and without a record.
local function batch_key(tenant, batch)
  if batch == NO_BATCH then return deployment .. 't:' .. tenant .. ':runs' end
  return deployment .. 't:' .. tenant .. ':batch.' .. batch
end
local function batches_key(tenant) return deployment .. 't:' .. tenant .. ':batch-ids' end
local function account_key(tenant) return deployment .. 't:' .. tenant .. ':memory' end

local ttls = {}
local function ttl_of(tenant, batch)
  local key = batch_key(tenant, batch)
  ttls[key] = ttls[key] or tonumber(redis.call('HGET', key, 'ttl_s')) or 2592000
  return ttls[key]
end

-- Durable runs are always open: only a batch can be cancelled, or wait for its own orchestrator.
local function state_of(tenant, batch)
  return batch == NO_BATCH and 'in_progress' or redis.call('HGET', batch_key(tenant, batch), 'state')
end

-- Extends the time to live of the keys of a batch. A step that changes a batch calls this function once.
local function extend_ttl(tenant, batch)
  local ttl = ttl_of(tenant, batch)
  local key = batch_key(tenant, batch)
  local parts = batch == NO_BATCH and {':index', ':sessions', ':succeeded', ':failed', ':cancelled'} or {':ended', ':items', ':events'}
  for _, part in ipairs({'', ':waiting', ':delayed', ':running', unpack(parts)}) do redis.call('EXPIRE', key .. part, ttl) end
  redis.call('EXPIRE', batches_key(tenant), ttl)
end

local function extend_run_ttl(tenant, batch, run) redis.call('EXPIRE', run_key(tenant, run), ttl_of(tenant, batch)) end

-- Counts the memory of a run in a field of its hash (store/memory.py): `run_bytes` for its texts, `log_bytes`, `artifact_bytes`, and `stream_bytes` for
-- its events.
local function count_run(tenant, run, field, bytes, ttl) set_bytes(account_key(tenant), now, run_key(tenant, run), field, bytes, now + ttl) end

-- The log of a run and the keys that belong to it (store/run_log.py).
local log_parts = {':log', ':sessions', ':artifacts'}
local function delete_log(tenant, run)
  for _, part in ipairs(log_parts) do redis.call('DEL', run_key(tenant, run) .. part) end
  for _, field in ipairs({'log_bytes', 'artifact_bytes'}) do count_run(tenant, run, field, 0, 0) end
end

-- Counts the texts of a run, which live as long as its batch.
local function count_texts(tenant, batch, run)
  local key, bytes = run_key(tenant, run), RECORD_BYTES + redis.call('STRLEN', run_key(tenant, run) .. ':transcript')
  for _, field in ipairs({'item', 'outcome', 'end', 'about', 'webhook'}) do bytes = bytes + redis.call('HSTRLEN', key, field) end
  count_run(tenant, run, 'run_bytes', bytes, ttl_of(tenant, batch))
end

-- Deletes a run, if it exists, with its log.
local function delete_run(tenant, batch, run)
  local key = run_key(tenant, run)
  delete_log(tenant, run)
  for _, field in ipairs({'run_bytes', 'stream_bytes'}) do count_run(tenant, run, field, 0, 0) end
  redis.call('DEL', key, key .. ':events', key .. ':transcript', key .. ':forks')
end

-- Returns whether the tenant may start new work. A step asks once for each tenant.
local tenant_rooms = {}
local function may_start(tenant)
  if tenant_rooms[tenant] == nil then tenant_rooms[tenant] = has_room(account_key(tenant), now, NEW_WORK) end
  return tenant_rooms[tenant]
end

-- The run with the lowest rank comes first: the highest priority, then the lowest line.
local function rank(priority, line) return -tonumber(priority) * 1e9 + tonumber(line) end

-- Returns the place of a batch of the tenant in the rotation: one turn of the tenant for each of its batches, so that many batches get no more runs than one.
-- The field '' has the turn that was served last; it begins at the time, where releases without turns left their batches.
local function next_turn(tenant)
  local turns = redis.call('HMGET', runs .. 'turns', '', tenant)
  local turn = string.format('%.6f', math.max(tonumber(turns[1] or now), tonumber(turns[2] or 0)) + 1)
  redis.call('HSET', runs .. 'turns', tenant, turn)
  return turn
end

local function join_rotation(tenant, batch)
  local member = tenant .. '|' .. batch
  if not redis.call('ZSCORE', runs .. 'batches', member) then redis.call('ZADD', runs .. 'batches', next_turn(tenant), member) end
end

local function enqueue(tenant, batch, run)
  local fields = redis.call('HMGET', run_key(tenant, run), 'priority', 'line')
  local waiting = batch_key(tenant, batch) .. ':waiting'
  redis.call('ZADD', waiting, rank(fields[1] or 0, fields[2] or 0), run)
  redis.call('EXPIRE', waiting, ttl_of(tenant, batch))
  join_rotation(tenant, batch)
end

local function start(tenant, batch, run, claim, owner, lease_s, how)
  local key = run_key(tenant, run)
  redis.call('HSET', key, 'state', 'running', 'claim', claim, 'owner', owner)
  redis.call('HDEL', key, 'asking', 'event_count')
  if how ~= 'resumed' then redis.call('HSET', key, 'started_at', stamp) end
  local running = batch_key(tenant, batch) .. ':running'
  redis.call('SADD', running, run)
  redis.call('EXPIRE', running, ttl_of(tenant, batch))
  redis.call('ZADD', runs .. 'leases', now + lease_s, tenant .. '|' .. run)
  extend_run_ttl(tenant, batch, run)
  count_texts(tenant, batch, run)
  return {tenant, run, claim, how}
end

-- Counts the workers that died with this run since the run's log last grew.
local function count_loss(tenant, run) redis.call('HINCRBY', run_key(tenant, run), 'losses', 1) end

-- Puts the run back into the waiting queue and removes its claim and lease.
local function requeue(tenant, batch, run)
  redis.call('HSET', run_key(tenant, run), 'state', 'queued', 'claim', '')
  redis.call('SREM', batch_key(tenant, batch) .. ':running', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  enqueue(tenant, batch, run)
end

local function remove_delay(tenant, batch, run)
  redis.call('ZREM', runs .. 'delayed', tenant .. '|' .. run)
  redis.call('SREM', batch_key(tenant, batch) .. ':delayed', run)
end

-- The notices of webhooks that one tenant has to get: `kind|name`, by the time of the next try.
local function notices_key(tenant) return runs .. 'webhooks:' .. tenant end

-- Sets the tenant's place in the round of tenants with notices: the time of its next try, but not before `earliest`, when others have their turn.
local function place_notices(tenant, earliest)
  local first = redis.call('ZRANGE', notices_key(tenant), 0, 0, 'WITHSCORES')
  if not first[1] then return redis.call('ZREM', runs .. 'webhook-tenants', tenant) end
  return redis.call('ZADD', runs .. 'webhook-tenants', string.format('%.6f', math.max(tonumber(first[2]), earliest)), tenant)
end

-- Queues the webhook notice of a run or batch in the step that ends it, so that no process can lose the notice (store/webhooks.py).
local function queue_notice(tenant, kind, name, key)
  if (redis.call('HGET', key, 'webhook') or '') == '' then return end
  redis.call('HSET', key, 'webhook_tries', 0, 'webhook_notice', stamp, 'webhook_state', 'pending', 'webhook_error', '')
  redis.call('ZADD', notices_key(tenant), stamp, kind .. '|' .. name)
  local place = redis.call('ZSCORE', runs .. 'webhook-tenants', tenant)
  if not place or tonumber(place) > now then redis.call('ZADD', runs .. 'webhook-tenants', stamp, tenant) end
end

-- A batch that is being cancelled accepts no new items. Only the items that were added count, because the others never end.
local function end_batch_if_complete(tenant, batch)
  if batch == NO_BATCH then return end
  local key = batch_key(tenant, batch)
  local fields = redis.call('HMGET', key, 'total', 'state')
  local is_cancelled, all = fields[2] == 'cancelling', tonumber(fields[1] or '0')
  if is_cancelled then all = redis.call('LLEN', key .. ':items') elseif fields[2] ~= 'in_progress' then return end
  if redis.call('ZCARD', key .. ':ended') < all then return end
  redis.call('ZREM', runs .. 'batches', tenant .. '|' .. batch)
  redis.call('HSET', key, 'state', is_cancelled and 'cancelled' or 'completed', 'ended_at', stamp)
  queue_notice(tenant, 'batch', batch, key)
end

-- Defined in durable_runs.lua.
local publish_end, build_end_event, end_durable_run

-- Removes a run whose record Redis has lost. No process can execute it, and the batch ends without it.
local function remove_lost_run(tenant, batch, run)
  local key = batch_key(tenant, batch)
  count_run(tenant, run, 'run_bytes', 0, 0)
  redis.call('DEL', run_key(tenant, run))
  redis.call('SREM', key .. ':running', run)
  redis.call('ZREM', key .. ':waiting', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  remove_delay(tenant, batch, run)
  if batch == NO_BATCH then
    local message = 'Redis has lost the record of the run. Check that Redis evicts no keys, then start the run again.'
    publish_end(tenant, run, build_end_event(run, 'infrastructure', 'run_lost', message))
  else
    redis.call('ZADD', key .. ':ended', redis.call('HINCRBY', key, 'ends', 1), run)
    redis.call('HINCRBY', key, 'failed:infrastructure', 1)
  end
  extend_ttl(tenant, batch)
  end_batch_if_complete(tenant, batch)
end

local function end_run(tenant, run, outcome, failure, ended, transcript)
  local key = run_key(tenant, run)
  local batch = redis.call('HGET', key, 'batch')
  redis.call('HSET', key, 'state', 'ended', 'claim', '', 'outcome', outcome, 'failure', failure, 'ended_at', stamp)
  local batch_at = batch_key(tenant, batch)
  redis.call('SREM', batch_at .. ':running', run)
  redis.call('ZREM', batch_at .. ':waiting', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  remove_delay(tenant, batch, run)
  if batch == NO_BATCH then
    end_durable_run(tenant, run, failure, ended, transcript or '')
    queue_notice(tenant, 'run', run, key)
  else
    redis.call('ZADD', batch_at .. ':ended', redis.call('HINCRBY', batch_at, 'ends', 1), run)
    redis.call('HINCRBY', batch_at, failure == '' and 'succeeded' or 'failed:' .. failure, 1)
  end
  extend_run_ttl(tenant, batch, run)
  count_texts(tenant, batch, run)
  -- Without a transcript, readers take the replies of a durable run from its log. The log of a run with kept states lives as long as these may.
  local has_states = redis.call('HEXISTS', key, 'has_states') == 1
  local log_ttl = batch == NO_BATCH and (transcript or '') == '' and ttl_of(tenant, batch) or has_states and STATES_TTL or LOG_TTL
  for _, part in ipairs(log_parts) do redis.call('EXPIRE', key .. part, log_ttl) end
  for _, field in ipairs({'log_bytes', 'artifact_bytes'}) do count_run(tenant, run, field, counted_bytes(key, field), log_ttl) end
  end_batch_if_complete(tenant, batch)
  return batch
end

local steps = {}

-- `...`: tenants and how many of their notices the sender has. Claims notices that are due; no other process
-- receives them for these seconds. Returns {tenant, kind, name, webhook, tries, time of the end} for each.
-- The tenants have turns, so that a tenant with many notices delays no other.
function steps.claim_webhooks(max_claims, lease_s, max_of_tenant, ...)
  local counts, limit, lease_ends, notices = {...}, tonumber(max_claims), now + tonumber(lease_s), {}
  local busy, due, tenants = {}, {}, {}
  for at = 1, #counts, 2 do busy[counts[at]] = tonumber(counts[at + 1]) end
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', runs .. 'webhook-tenants', '-inf', now, 'LIMIT', 0, limit + #counts / 2)) do
    local free = math.min(limit, tonumber(max_of_tenant) - (busy[tenant] or 0))
    if free > 0 then
      due[tenant] = redis.call('ZRANGEBYSCORE', notices_key(tenant), '-inf', now, 'LIMIT', 0, free)
      table.insert(tenants, tenant)
    end
  end
  local looks, round = 0, 1
  local has_more = true
  while has_more and looks < limit do
    has_more = false
    for _, tenant in ipairs(tenants) do
      local member = due[tenant][round]
      if member and looks < limit then
        looks, has_more = looks + 1, true
        local kind, name = split(member)
        local key = kind == 'run' and run_key(tenant, name) or batch_key(tenant, name)
        local fields = redis.call('HMGET', key, 'webhook', 'webhook_notice')
        if fields[1] and fields[2] then
          redis.call('ZADD', notices_key(tenant), lease_ends, member)
          table.insert(notices, {tenant, kind, name, fields[1], redis.call('HINCRBY', key, 'webhook_tries', 1), fields[2]})
        else
          redis.call('ZREM', notices_key(tenant), member)
        end
        place_notices(tenant, now)
      end
    end
    round = round + 1
  end
  for _, tenant in ipairs(tenants) do
    if #due[tenant] == 0 then place_notices(tenant, now) end
  end
  return notices
end

-- `ended`: the time of the end. `retry_s`: seconds until the next try, '' for none. `failure`: the error of the webhook. A batch that was reopened and ends again
-- has a separate notice.
function steps.settle_webhook(tenant, kind, name, ended, retry_s, state, failure)
  local key = kind == 'run' and run_key(tenant, name) or batch_key(tenant, name)
  if redis.call('HGET', key, 'webhook_notice') ~= ended then return 0 end
  redis.call('HSET', key, 'webhook_state', state, 'webhook_error', failure)
  local member, settled = kind .. '|' .. name, 0
  if retry_s == '' then
    settled = redis.call('ZREM', notices_key(tenant), member)
  else
    settled = redis.call('ZADD', notices_key(tenant), 'XX', 'CH', now + tonumber(retry_s), member)
  end
  place_notices(tenant, now)
  return settled
end

-- Returns whether the batch exists or Redis has room for one more.
function steps.has_room(tenant, batch) return redis.call('EXISTS', batch_key(tenant, batch)) == 1 or may_start(tenant) end

-- Counts the texts of the batch.
function steps.count_batch(tenant, batch)
  local key, bytes = batch_key(tenant, batch), RECORD_BYTES
  for _, field in ipairs({'defaults', 'name', 'webhook', 'rows'}) do bytes = bytes + redis.call('HSTRLEN', key, field) end
  set_bytes(account_key(tenant), now, key, 'batch_bytes', bytes, now + ttl_of(tenant, batch))
end

-- `...`: for each item its run, item (JSON), priority and line. Returns the number of new items. Returns -1 and adds nothing when the batch is cancelled or
-- deleted, -2 when the tenant may store no more.
function steps.add(tenant, batch, ...)
  local items, added = {...}, 0
  local key = batch_key(tenant, batch)
  local state = redis.call('HGET', key, 'state')
  if state == 'cancelling' or state == 'cancelled' or state == 'deleting' then return -1 end
  for at = 1, #items, 4 do
    local run = items[at]
    if redis.call('EXISTS', run_key(tenant, run)) == 0 then
      if added == 0 and not may_start(tenant) then return -2 end
      redis.call('HSET', run_key(tenant, run), 'batch', batch, 'item', items[at + 1], 'priority', items[at + 2], 'line', items[at + 3],
        'state', 'queued', 'attempt', 1, 'queued_at', stamp)
      if redis.call('ZREM', key .. ':ended', run) == 1 then
        -- The run was removed because its record was lost. It is now added again.
        redis.call('HINCRBY', key, 'failed:infrastructure', -1)
      else
        redis.call('RPUSH', key .. ':items', run)
      end
      enqueue(tenant, batch, run)
      extend_run_ttl(tenant, batch, run)
      count_texts(tenant, batch, run)
      added = added + 1
    end
  end
  extend_ttl(tenant, batch)
  return added
end

-- `only_batch`: tenant|batch, '' for all detached batches. `tenants`: ',a,b,', '' for all. `...`: one claim id for each run.
-- Returns {tenant, run, claim, how} for each claimed run, and {tenant, batch, run} for each run that a dead worker left in a cancelled batch. The caller
-- ends these runs; of a durable run, which has ended already, the caller only closes the session. Also returns the tenants whose new runs wait, because the
-- tenant may not store more; their runs that have begun continue.
function steps.claim(owner, max_claims, lease_s, only_batch, tenants, ...)
  local tokens, claims, abandoned, full_tenants = {...}, {}, {}, {}
  max_claims, lease_s = tonumber(max_claims), tonumber(lease_s)
  local function is_eligible(tenant, batch)
    if is_paused(deployment .. 'tenants', tenant) then return false end
    if only_batch ~= '' then return only_batch == tenant .. '|' .. batch end
    if tenants ~= '' and not string.find(tenants, ',' .. tenant .. ',', 1, true) then return false end
    return batch == NO_BATCH or redis.call('HGET', batch_key(tenant, batch), 'is_detached') == '1'
  end
  local function claim_run(tenant, batch, run, how)
    table.insert(claims, start(tenant, batch, run, tokens[#claims + 1], owner, lease_s, how))
  end
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', runs .. 'leases', '-inf', now, 'LIMIT', 0, 1000)) do
    local tenant, run = split(member)
    local fields = redis.call('HMGET', run_key(tenant, run), 'batch', 'is_cancelled')
    local batch = fields[1]
    if not batch then
      redis.call('ZREM', runs .. 'leases', member)
    elseif fields[2] then
      -- Only this run was cancelled. Its batch continues and would hand the run to another worker.
      extend_ttl(tenant, end_run(tenant, run, '', 'cancelled'))
      if #abandoned < 200 then table.insert(abandoned, {tenant, batch, run}) end
    elseif state_of(tenant, batch) ~= 'in_progress' then
      requeue(tenant, batch, run)
      -- The lease brings the run back here if the process that ends it dies.
      redis.call('ZADD', runs .. 'leases', now + lease_s, member)
      if #abandoned < 200 then table.insert(abandoned, {tenant, batch, run}) end
    elseif is_eligible(tenant, batch) then
      if #claims < max_claims then
        count_loss(tenant, run)
        claim_run(tenant, batch, run, 'resumed')
      end
    else
      -- The run belongs to other workers, which may never come. It waits in their queue and does not block this one.
      count_loss(tenant, run)
      requeue(tenant, batch, run)
    end
  end
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', runs .. 'delayed', '-inf', now, 'LIMIT', 0, 1000)) do
    local tenant, run = split(member)
    local batch = redis.call('HGET', run_key(tenant, run), 'batch')
    redis.call('ZREM', runs .. 'delayed', member)
    if batch then
      remove_delay(tenant, batch, run)
      enqueue(tenant, batch, run)
    end
  end
  -- Takes one run of each tenant in turn, and of each batch of a tenant in turn. Each step checks a limited number of batches without eligible runs.
  local skipped, checked = 0, 0
  while #claims < max_claims and checked < 500 + max_claims do
    checked = checked + 1
    local member = redis.call('ZRANGE', runs .. 'batches', skipped, skipped)[1]
    if only_batch ~= '' then member = skipped == 0 and redis.call('ZSCORE', runs .. 'batches', only_batch) and only_batch end
    if not member then break end
    local tenant, batch = split(member)
    local key = batch_key(tenant, batch)
    local is_full = batch ~= NO_BATCH
      and redis.call('SCARD', key .. ':running') >= tonumber(redis.call('HGET', key, 'concurrency') or '0')
    local is_open = not is_full and state_of(tenant, batch) == 'in_progress' and is_eligible(tenant, batch)
    local first = is_open and redis.call('ZRANGE', key .. ':waiting', 0, 0)[1]
    local is_logged = first and redis.call('EXISTS', run_key(tenant, first) .. ':log') == 1
    if first and not is_logged and not may_start(tenant) then
      full_tenants[tenant], is_open = true, false
    end
    local run = is_open and redis.call('ZPOPMIN', key .. ':waiting')[1]
    if run and redis.call('HEXISTS', run_key(tenant, run), 'item') == 0 then
      remove_lost_run(tenant, batch, run)
    elseif run then
      claim_run(tenant, batch, run, is_logged and 'resumed' or 'begun')
      local served = tonumber(redis.call('ZSCORE', runs .. 'batches', member))
      if only_batch == '' and served > tonumber(redis.call('HGET', runs .. 'turns', '') or 0) then
        redis.call('HSET', runs .. 'turns', '', string.format('%.6f', served))
      end
      redis.call('ZADD', runs .. 'batches', next_turn(tenant), member)
    elseif redis.call('EXISTS', key .. ':waiting') == 0 then
      redis.call('ZREM', runs .. 'batches', member)
    else
      skipped = skipped + 1
    end
  end
  if skipped > 0 and checked >= 500 + max_claims then
    for _, member in ipairs(redis.call('ZRANGE', runs .. 'batches', 0, skipped - 1)) do
      redis.call('ZADD', runs .. 'batches', next_turn((split(member))), member)
    end
  end
  local full_names = {}
  for tenant in pairs(full_tenants) do table.insert(full_names, tenant) end
  return {claims, abandoned, full_names}
end

-- `...`: tenant|run and claim of each run. Returns the runs that the worker must stop: lost ones, and cancelled ones.
function steps.renew(lease_s, ...)
  local held, lost, cancelled = {...}, {}, {}
  for at = 1, #held, 2 do
    local tenant, run = split(held[at])
    local fields = redis.call('HMGET', run_key(tenant, run), 'claim', 'batch', 'is_cancelled')
    if fields[1] ~= held[at + 1] then
      table.insert(lost, held[at])
    else
      redis.call('ZADD', runs .. 'leases', now + tonumber(lease_s), held[at])
      local state = state_of(tenant, fields[2])
      if fields[3] or state == 'cancelling' or state == 'cancelled' then table.insert(cancelled, held[at]) end
    end
  end
  return {lost, cancelled}
end

-- `failure`: its kind. `ended`, `transcript`: the last event and the transcript of a durable run, '' for an item of a batch.
-- Returns 1 when the run has this outcome, 0 when another process has the claim.
function steps.finish(tenant, run, claim, outcome, failure, ended, transcript)
  local fields = redis.call('HMGET', run_key(tenant, run), 'claim', 'state', 'outcome')
  if fields[2] == 'ended' and fields[3] == outcome then return 1 end
  if fields[1] ~= claim then return 0 end
  extend_ttl(tenant, end_run(tenant, run, outcome, failure, ended, transcript))
  return 1
end

-- `is_new`: '1' to restart from the beginning. `is_denied`: '1' if the model denied its process. Returns the run to the queue, now or after these seconds.
-- Returns 0 when another process has the claim. Returns 2 and changes nothing when the run or its batch is cancelled.
function steps.give_back(tenant, run, claim, after_s, is_new, is_denied)
  after_s = tonumber(after_s)
  local key = run_key(tenant, run)
  local fields = redis.call('HMGET', key, 'claim', 'batch', 'is_cancelled')
  if fields[1] ~= claim then return 0 end
  local state = state_of(tenant, fields[2])
  if fields[3] or state == 'cancelling' or state == 'cancelled' then return 2 end
  redis.call('HSET', key, 'state', 'queued', 'claim', '', 'queued_at', stamp)
  if is_denied == '1' then redis.call('HINCRBY', key, 'denials', 1) end
  if is_new == '1' then
    redis.call('HINCRBY', key, 'attempt', 1)
    redis.call('HDEL', key, 'losses', 'denials', 'published_step', 'has_states')
    delete_log(tenant, run)
  end
  redis.call('SREM', batch_key(tenant, fields[2]) .. ':running', run)
  redis.call('ZREM', runs .. 'leases', tenant .. '|' .. run)
  if after_s > 0 then
    redis.call('ZADD', runs .. 'delayed', now + after_s, tenant .. '|' .. run)
    redis.call('SADD', batch_key(tenant, fields[2]) .. ':delayed', run)
    extend_ttl(tenant, fields[2])
  else
    enqueue(tenant, fields[2], run)
  end
  return 1
end

-- Stops the batch from starting runs. Returns some of the waiting runs for the caller to end; an empty list when none wait.
function steps.cancel(tenant, batch, max_count)
  local waiting_runs = {}
  local key = batch_key(tenant, batch)
  local state = redis.call('HGET', key, 'state')
  if state == 'in_progress' then redis.call('HSET', key, 'state', 'cancelling') end
  if state ~= 'in_progress' and state ~= 'cancelling' then return {} end
  -- Delayed runs join the waiting ones. When no run waits, the runs with an expired lease join too.
  for _, run in ipairs(redis.call('SRANDMEMBER', key .. ':delayed', 1000)) do
    remove_delay(tenant, batch, run)
    enqueue(tenant, batch, run)
  end
  if redis.call('EXISTS', key .. ':waiting') == 0 then
    local remaining = 1000
    for _, run in ipairs(redis.call('SMEMBERS', key .. ':running')) do
      local lease_ends = tonumber(redis.call('ZSCORE', runs .. 'leases', tenant .. '|' .. run) or '0')
      if lease_ends <= now and remaining > 0 then
        requeue(tenant, batch, run)
        remaining = remaining - 1
      end
    end
  end
  while #waiting_runs == 0 and redis.call('EXISTS', key .. ':waiting') == 1 do
    for _, run in ipairs(redis.call('ZRANGE', key .. ':waiting', 0, tonumber(max_count) - 1)) do
      if redis.call('HEXISTS', run_key(tenant, run), 'item') == 0 then
        remove_lost_run(tenant, batch, run)
      elseif redis.call('HGET', run_key(tenant, run), 'state') == 'queued' then
        table.insert(waiting_runs, run)
      else
        -- The run is running or has ended. Its entry here is stale.
        redis.call('ZREM', key .. ':waiting', run)
      end
    end
  end
  if #waiting_runs == 0 then end_batch_if_complete(tenant, batch) end
  return waiting_runs
end

-- `last_at`, `last_batch`: creation time and id of the last batch of the previous page, '' for none. `max_count` -1: all.
-- Returns the number of batches after this page, and the batches with their creation times, the newest first. The page starts after the given batch or,
-- when that batch has expired, after its creation time.
function steps.list_batches(tenant, last_at, last_batch, max_count)
  local key, offset = batches_key(tenant), 0
  max_count = tonumber(max_count)
  if last_batch ~= '' then
    local previous_rank = redis.call('ZREVRANK', key, last_batch)
    offset = previous_rank and previous_rank + 1 or redis.call('ZCOUNT', key, '(' .. last_at, '+inf')
  end
  local rows = redis.call('ZREVRANGE', key, offset, max_count < 0 and -1 or offset + max_count - 1, 'WITHSCORES')
  return {math.max(0, redis.call('ZCARD', key) - offset - #rows / 2), rows}
end

-- Continues a batch that was cancelled or has completed, when runs wait or items are missing. Returns 1 when the batch continues.
function steps.reopen(tenant, batch)
  local key = batch_key(tenant, batch)
  local fields = redis.call('HMGET', key, 'total', 'state')
  local is_waiting = redis.call('EXISTS', key .. ':waiting') == 1
  local has_more = is_waiting or redis.call('LLEN', key .. ':items') < tonumber(fields[1] or '0')
  if not fields[2] or fields[2] == 'in_progress' or fields[2] == 'deleting' or not has_more then return 0 end
  redis.call('HSET', key, 'state', 'in_progress', 'ended_at', '0')
  if is_waiting then join_rotation(tenant, batch) end
  return 1
end

-- `...`: run, outcome and kind of failure of each. Ends the runs that still wait and returns them.
function steps.settle(tenant, batch, ...)
  local outcomes, settled = {...}, {}
  for at = 1, #outcomes, 3 do
    local run = outcomes[at]
    if redis.call('HGET', run_key(tenant, run), 'state') == 'queued' then
      end_run(tenant, run, outcomes[at + 1], outcomes[at + 2])
      table.insert(settled, run)
    end
  end
  extend_ttl(tenant, batch)
  return settled
end

-- `audit_entry`: '' for none. `kinds`: kinds of failure, ',a,b,'. `...`: runs.
-- Queues the runs that failed with one of these kinds again, from the beginning, and returns them.
function steps.retry(tenant, batch, audit_log, audit_entry, kinds, ...)
  local batch_at, requeued = batch_key(tenant, batch), {}
  if redis.call('HGET', batch_at, 'state') == 'deleting' then return {} end
  for _, run in ipairs({...}) do
    local key = run_key(tenant, run)
    local failure = redis.call('HGET', key, 'failure')
    if failure and failure ~= '' and string.find(kinds, ',' .. failure .. ',', 1, true) then
      if #requeued == 0 then audit(audit_log, audit_entry) end
      redis.call('HSET', key, 'state', 'queued', 'outcome', '', 'failure', '', 'queued_at', stamp)
      redis.call('HSET', key, 'first_attempt', redis.call('HINCRBY', key, 'attempt', 1))
      redis.call('HDEL', key, 'losses', 'denials', 'has_states')
      delete_log(tenant, run)
      redis.call('ZREM', batch_at .. ':ended', run)
      redis.call('HINCRBY', batch_at, 'failed:' .. failure, -1)
      enqueue(tenant, batch, run)
      extend_run_ttl(tenant, batch, run)
      count_texts(tenant, batch, run)
      table.insert(requeued, run)
    end
  end
  extend_ttl(tenant, batch)
  if #requeued > 0 then redis.call('HSET', batch_at, 'state', 'in_progress', 'ended_at', '0') end
  return requeued
end

-- `audit_entry`: '' for none. Deletes an ended batch and its runs, at most that many in one step. Returns
-- `unknown`, `open` (the batch has not ended), `deleting` (runs remain) or `deleted`. From the first step on no reader finds the batch.
function steps.delete_batch(tenant, batch, audit_log, audit_entry, max_count)
  local key = batch_key(tenant, batch)
  local state = redis.call('HGET', key, 'state')
  if not state then return 'unknown' end
  if state ~= 'deleting' then
    if state ~= 'completed' and state ~= 'cancelled' then return 'open' end
    audit(audit_log, audit_entry)
    redis.call('HSET', key, 'state', 'deleting')
    redis.call('HDEL', key, 'webhook')
    redis.call('ZREM', batches_key(tenant), batch)
  end
  for _, run in ipairs(redis.call('LPOP', key .. ':items', tonumber(max_count)) or {}) do delete_run(tenant, batch, run) end
  if redis.call('EXISTS', key .. ':items') == 1 then return 'deleting' end
  for _, field in ipairs({'batch_bytes', 'stream_bytes'}) do set_bytes(account_key(tenant), now, key, field, 0, now) end
  for _, part in ipairs({'', ':waiting', ':delayed', ':running', ':ended', ':events'}) do redis.call('DEL', key .. part) end
  return 'deleted'
end
