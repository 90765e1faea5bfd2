-- The operations of admission. slots_state.lua precedes this file in the same script.

-- Slots

local function leave_lane(id, call, queue, pair, tenant)
  redis.call('HDEL', prefix .. 'waiting', id)
  redis.call('ZREM', prefix .. 'lane:' .. pair.name .. ':' .. call.lane, id)
  calls[id], pair.heads = false, nil
  add(pair, call.lane, -1)
  add(pair, 'waiting', -1)
  add(queue, 'waiting', -1)
  add(tenant, 'waiting', -1)
end

local function hold(id, call, is_long, charge, queue, pair, tenant)
  call.granted, call.long, call.charge = now, is_long, charge
  redis.call('HSET', prefix .. 'held', id, cjson.encode(call))
  if is_long then
    add(queue, 'long', 1)
    add(pair, 'long', 1)
  else
    redis.call('ZADD', prefix .. 'young:' .. queue.name, string.format('%.17g', now), id)
  end
  add(queue, 'held', 1)
  add(pair, 'held', 1)
  add(tenant, 'held', 1)
  add(pair, 'charged', charge)
end

-- Returns the tenant with the lowest use per weight among the tenants whose next call fits, or nil.
local function choose_tenant(queue)
  local ready = prefix .. 'ready:' .. queue.name
  local short = redis.call('ZRANGE', ready .. ':short', 0, 0, 'WITHSCORES')
  local long = queue.fields.long < queue.slots and redis.call('ZRANGE', ready .. ':long', 0, 0, 'WITHSCORES') or {}
  if short[1] and long[1] then return tonumber(long[2]) < tonumber(short[2]) and long[1] or short[1] end
  return short[1] or long[1]
end

local function choose_call(queue, pair)
  local is_batch_turn = pair.fields.run >= INTERACTIVE_RUN
  local best, best_is_first
  for _, head in ipairs(heads_of(pair)) do
    if estimate(head.call) < LONG_S or (pair.fields.long < queue.long_each and queue.fields.long < queue.slots) then
      local is_first = head.call.batch == is_batch_turn
      if not best or (is_first and not best_is_first) or (is_first == best_is_first and head.call.seq < best.call.seq) then
        best, best_is_first = head, is_first
      end
    end
  end
  return best
end

local function grant_next(queue, pair, tenant)
  local head = choose_call(queue, pair)
  if not head then
    unrank(queue, pair)
    return refresh(queue, pair)
  end
  local call = head.call
  local overtakes = not call.batch and pair.fields['batch:short'] + pair.fields['batch:long'] > 0
  pair.fields.run = overtakes and pair.fields.run + 1 or 0
  leave_lane(head.id, call, queue, pair, tenant)
  if tenant.fields.rate > 0 then add(tenant, 'tokens', -1) end
  queue.fields.clock = math.max(queue.fields.clock, pair.fields.used)
  hold(head.id, call, estimate(call) >= LONG_S, estimate(call) / weight_of(tenant), queue, pair, tenant)
  add_grant(head.id)
  refresh(queue, pair)
end

-- Returns whether the next call is tiny. Only tiny calls may exceed the capacity of a queue.
local function is_tiny(queue, name)
  local head = choose_call(queue, pair_of(queue, name))
  return head and estimate(head.call) < TINY_S
end

local function grant(queue)
  while queue.fields.held < queue.tiny_capacity and queue.fields.waiting > 0 do
    local name = choose_tenant(queue)
    if not name or (queue.fields.held >= queue.capacity and not is_tiny(queue, name)) then return end
    local tenant, pair = tenant_of({tenant = name}), pair_of(queue, name)
    local until_at = limit_of(tenant)
    if until_at then
      -- Out of the ranks of this queue until the tenant may start calls again. Otherwise each step would choose it first.
      block(queue, pair, tenant, until_at)
    else
      -- An estimate may have changed since the tenant was ranked.
      refresh(queue, pair)
      grant_next(queue, pair, tenant)
    end
  end
end

-- Unblocks the queues of the tenant, the longest blocked first, while the tenant may start calls.
local function unblock(tenant)
  while tenant.fields.blocked > 0 do
    local until_at = limit_of(tenant)
    if until_at then
      schedule_wake(until_at, tenant)
      return
    end
    local name = redis.call('ZPOPMIN', prefix .. 'blocked:' .. tenant.name)[1]
    if not name then
      tenant.fields.blocked = 0
      return
    end
    local queue = queue_of(name)
    local pair = pair_of(queue, tenant.name)
    pair.fields.blocked = 0
    add(tenant, 'blocked', -1)
    refresh(queue, pair)
    grant(queue)
  end
end

local function stop_waiting(id, call)
  local queue, tenant = queue_of(call.queue), tenant_of(call)
  local pair = pair_of(queue, call.tenant)
  leave_lane(id, call, queue, pair, tenant)
  if pair.fields.waiting == 0 and pair.fields.blocked == 1 then
    redis.call('ZREM', prefix .. 'blocked:' .. tenant.name, queue.name)
    pair.fields.blocked = 0
    add(tenant, 'blocked', -1)
  end
  refresh(queue, pair)
  grant(queue)
end

local function return_slot(id, text, used)
  redis.call('HDEL', prefix .. 'held', id)
  -- The call is removed first, so that `queue_of` does not count it as long.
  local call = cjson.decode(text)
  if not call.long then redis.call('ZREM', prefix .. 'young:' .. call.queue, id) end
  local queue, tenant = queue_of(call.queue), tenant_of(call)
  local pair, fields = pair_of(queue, call.tenant), pair_of(queue, call.tenant).fields
  for _, entry in ipairs({queue, tenant, pair}) do add(entry, 'held', -1) end
  if call.long then
    add(queue, 'long', -1)
    add(pair, 'long', -1)
  end
  local run_s = math.max(0, math.min(used or math.huge, now - call.granted))
  -- Zero without held calls: rounding errors must not add up over the days.
  fields.charged = fields.held == 0 and 0 or math.max(0, fields.charged - call.charge)
  fields.used = fields.used + run_s / weight_of(tenant)
  if used and used > 0 then
    update_estimate(call, run_s, true)
    pair.heads = nil
  end
  refresh(queue, pair)
  unblock(tenant)
  grant(queue)
end

-- Removes a call that has a slot or waits for one. Ignores an unknown id.
local function drop(id, used)
  redis.call('ZREM', prefix .. 'expiry', id)
  local held = redis.call('HGET', prefix .. 'held', id)
  if held then return return_slot(id, held, used) end
  local call = waiting_call(id)
  if call then stop_waiting(id, call) end
end

-- Operations

local operations = {}

local function store_policy(tenant, policy)
  for name, value in pairs(policy) do tenant.fields[name] = value end
end

local function renew_lease(id)
  redis.call('ZADD', prefix .. 'expiry', string.format('%.17g', now + lease), id)
end

local function retry_after(call, tenant, pair)
  local expected_s = estimates[call.tenant .. '|' .. call.tool] and estimate(call) or 1
  local by_rate = tenant.fields.rate > 0 and 1 / tenant.fields.rate or 0
  return math.max(0.1, math.min(60, math.max(by_rate, expected_s / math.max(1, pair.fields.held))))
end

-- Grants a slot directly when no call waits in the queue, with the same result as through a lane. Returns whether the call has a slot.
local function grant_at_once(id, call, queue, pair, tenant)
  local seconds = estimate(call)
  local is_long, fields = seconds >= LONG_S, pair.fields
  if queue.fields.waiting > 0 or tenant.fields.blocked > 0 then return false end
  if queue.fields.held >= (seconds < TINY_S and queue.tiny_capacity or queue.capacity) then return false end
  if is_long and (fields.long >= queue.long_each or queue.fields.long >= queue.slots) then return false end
  if limit_of(tenant) then return false end
  if tenant.fields.rate > 0 then add(tenant, 'tokens', -1) end
  fields.run = 0
  fields.used = math.max(fields.used, queue.fields.clock)
  queue.fields.clock = fields.used
  renew_lease(id)
  hold(id, call, is_long, seconds / weight_of(tenant), queue, pair, tenant)
  refresh(queue, pair)
  add_grant(id)
  return true
end

function operations.enqueue(id, call, policy)
  -- The step may be a repetition, or the request may follow a loss that Redis did not have. A second slot would never be
  -- returned.
  if redis.call('HEXISTS', prefix .. 'held', id) == 1 then return add_grant(id) end
  if waiting_call(id) then return end
  local queue, tenant = queue_of(call.queue), tenant_of(call)
  local pair = pair_of(queue, call.tenant)
  store_policy(tenant, policy)
  if call.urgent then
    renew_lease(id)
    hold(id, call, false, 0, queue, pair, tenant)
    return add_grant(id)
  end
  local is_long = estimate(call) >= LONG_S
  -- Before the grant: a tenant at its limit must not get ahead of its own calls that wait.
  if tenant.fields.waiting >= tenant.fields.queued then
    table.insert(refused, {id, retry_after(call, tenant, pair)})
    return
  end
  if grant_at_once(id, call, queue, pair, tenant) then return end
  add(queue, 'sequence', 1)
  call.seq, call.lane = queue.fields.sequence, (call.batch and 'batch:' or 'interactive:') .. (is_long and 'long' or 'short')
  call.since = now  -- for reports of waiting times
  calls[id] = call
  redis.call('HSET', prefix .. 'waiting', id, cjson.encode(call))
  redis.call('ZADD', prefix .. 'lane:' .. pair.name .. ':' .. call.lane, call.seq, id)
  renew_lease(id)
  add(pair, call.lane, 1)
  for _, entry in ipairs({queue, tenant, pair}) do add(entry, 'waiting', 1) end
  if pair.fields[call.lane] == 1 then pair.heads = nil end
  queued[#queued + 1] = id
  refresh(queue, pair)
  unblock(tenant)
  grant(queue)
end

function operations.restore(id, call, policy)
  if redis.call('HEXISTS', prefix .. 'held', id) == 1 then return end
  -- Redis may still have the call as waiting, from before its grant. Limits do not count: the call runs already.
  drop(id, 0)
  local queue, tenant = queue_of(call.queue), tenant_of(call)
  store_policy(tenant, policy)
  renew_lease(id)
  hold(id, call, estimate(call) >= LONG_S, 0, queue, pair_of(queue, call.tenant), tenant)
end

function operations.release(id, used)
  drop(id, used)
end

local function renew(ids, hash, on_missing)
  if #ids == 0 then return end
  local leases, calls_by_position = {}, redis.call('HMGET', prefix .. hash, unpack(ids))
  for at, id in ipairs(ids) do
    if calls_by_position[at] then
      leases[#leases + 1], leases[#leases + 2] = string.format('%.17g', now + lease), id
    else
      on_missing(id)
    end
  end
  if #leases > 0 then redis.call('ZADD', prefix .. 'expiry', unpack(leases)) end
end

function operations.renew(held, waiting)
  local function report_unknown(id) table.insert(unknown, id) end
  renew(held, 'held', report_unknown)
  renew(waiting, 'waiting', function(id)
    if redis.call('HEXISTS', prefix .. 'held', id) == 0 then return report_unknown(id) end
    -- The orchestrator believes that this call waits: the message with its grant was lost.
    renew_lease(id)
    add_grant(id)
  end)
end

function operations.tick(...)
  for _, name in ipairs({...}) do grant(queue_of(name)) end
end

-- Ends the leases of orchestrators that have died. After an outage of Redis or of all orchestrators, live orchestrators get time to renew first.
-- The field `seen` is the time of a step at most a twentieth of a lease ago, so that most steps do not write the field.
local function end_expired_leases()
  local clock = redis.call('HMGET', prefix .. 'clock', 'seen', 'sweep_from')
  local last_step_at, sweep_from = tonumber(clock[1] or nil), tonumber(clock[2] or nil) or 0
  local was_silent = last_step_at and now - last_step_at > lease / 2
  if was_silent then sweep_from = now + lease / 2 end
  if not last_step_at or was_silent or now < last_step_at or now - last_step_at > lease / 20 then
    redis.call('HSET', prefix .. 'clock', 'seen', string.format('%.17g', now), 'sweep_from', string.format('%.17g', sweep_from))
  end
  if now >= sweep_from then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'expiry', '-inf', string.format('%.17g', now), 'LIMIT', 0, SWEEP_AT_ONCE)) do drop(id) end
  end
end

local function first_wake()
  wakes_changed = false
  return redis.call('ZRANGE', prefix .. 'wake', 0, 0, 'WITHSCORES')[2]
end

end_expired_leases()
local wake = first_wake()
for _, name in ipairs(wake and tonumber(wake) <= now and redis.call('ZRANGEBYSCORE', prefix .. 'wake', '-inf', string.format('%.17g', now), 'LIMIT', 0, SWEEP_AT_ONCE) or {}) do
  redis.call('ZREM', prefix .. 'wake', name)
  wakes_changed = true
  unblock(tenant_of({tenant = name}))
end
for _, operation in ipairs(cjson.decode(operations_json)) do
  operations[operation[1]](unpack(operation, 2))
end

local waiting = {}
for _, id in ipairs(queued) do
  local call = waiting_call(id)
  if call then waiting[#waiting + 1] = {id, waiting_reason(call)} end
end

for _, entry in pairs(records) do save_record(entry) end
for orchestrator, ids in pairs(granted) do
  if orchestrator ~= this_orchestrator then redis.call('PUBLISH', prefix .. 'grants:' .. orchestrator, cjson.encode(ids)) end
end
if wakes_changed then wake = first_wake() end
return cjson.encode({granted = granted[this_orchestrator] or {}, refused = refused, waiting = waiting, unknown = unknown, wake = wake and math.max(0, tonumber(wake) - now) or nil})
