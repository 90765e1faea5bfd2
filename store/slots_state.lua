-- One atomic step of admission: processes the operations of one orchestrator and grants the slots that become free. docs/design.md explains the state.
-- slots_reasons.lua uses the functions of this file without a step.
--
-- `at`: the present time; "" for Redis's clock. `operations_json`: a list of
--   ["enqueue", id, call, policy]   requests a slot for a call; repeatable, returns the state of the call
--   ["restore", id, call, policy]   restores the slot of a call after Redis has lost its data
--   ["release", id, used]           returns a slot after `used` seconds of run time (0: the call did not run), or stops waiting
--   ["renew", ids, ids]             renews the leases of the calls that have slots (first list) or wait (second list)
--   ["tick", queue, ...]            grants slots after the number of slots of these queues may have changed
-- Result (JSON): granted: ids of this orchestrator that have a slot now; refused: [id, retry after] of calls that may not wait; waiting: [id, reason] of
-- calls that this step has queued (reasons: WaitReason in slots.py); unknown: ids that Redis does not have; wake: seconds until the rate limit of a tenant
-- allows its next call. The script publishes the grants of other orchestrators by pub/sub.

local lease = tonumber(lease_s)
local now = tonumber(at)
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local LONG_S = 1           -- minimum run time of a long call
local TINY_S = 0.05        -- a shorter call ends before the next message arrives
local UNKNOWN_SLOTS = 4    -- capacity of a queue without reports from workers
local INTERACTIVE_RUN = 7  -- how many interactive calls in a row may overtake a batch call
local DECAY = 0.8          -- weight of a longer estimate after a shorter call
local IDLE_S, ESTIMATE_S = 600, 86400
local PAUSE_CHECK_S = 0.5  -- until a resumed tenant gets slots again
local SWEEP_AT_ONCE = 500
local LANES = {'interactive:short', 'interactive:long', 'batch:short', 'batch:long'}

local records, estimates, calls = {}, {}, {}
local granted, refused, unknown, queued = {}, {}, {}, {}

-- Hashes of numbers. A step reads each hash once and writes its changed fields once, at the end. A missing field is 0.

local ZERO = {__index = function() return 0 end}

local function load_record(key)
  local entry = records[key]
  if entry then return entry end
  entry = {key = prefix .. key, fields = setmetatable({}, ZERO), saved = {}}
  local flat = redis.call('HGETALL', entry.key)
  for at = 1, #flat, 2 do
    local number = tonumber(flat[at + 1])
    entry.fields[flat[at]], entry.saved[flat[at]] = number, number
  end
  entry.was_idle = #flat > 0 and entry.fields.held + entry.fields.waiting == 0
  records[key] = entry
  return entry
end

local function save_record(entry)
  local changes, fields = {}, entry.fields
  for name, value in pairs(fields) do
    if entry.saved[name] ~= value then changes[#changes + 1], changes[#changes + 2] = name, string.format('%.17g', value) end
  end
  if #changes > 0 then redis.call('HSET', entry.key, unpack(changes)) end
  if next(fields) == nil then return end
  if fields.held + fields.waiting == 0 then
    local refill_s = fields.rate > 0 and math.min(604800, fields.burst / fields.rate) or 0
    redis.call('EXPIRE', entry.key, math.ceil(math.max(IDLE_S, refill_s)))
  elseif entry.was_idle then
    redis.call('PERSIST', entry.key)
  end
end

local function add(entry, field, by)
  entry.fields[field] = entry.fields[field] + by
end

local function tenant_of(call)
  local entry = load_record('tenant:' .. call.tenant)
  entry.name = call.tenant
  return entry
end

local function weight_of(tenant)
  return tenant.fields.weight > 0 and tenant.fields.weight or 1
end

local function pair_of(queue, tenant_name)
  local name = queue.name .. '|' .. tenant_name
  local entry = load_record('pair:' .. name)
  entry.name, entry.tenant = name, tenant_name
  return entry
end

-- Calls

local function waiting_call(id)
  if calls[id] == nil then
    local text = redis.call('HGET', prefix .. 'waiting', id)
    calls[id] = text and cjson.decode(text)
  end
  return calls[id]
end

local function estimate(call)
  local name = call.tenant .. '|' .. call.tool
  if estimates[name] == nil then
    estimates[name] = tonumber(redis.call('HGET', prefix .. 'estimates:' .. call.tenant, call.tool) or nil) or false
  end
  return math.min(estimates[name] or call.limit, call.limit)
end

local function update_estimate(call, used, is_over)
  local name, key = call.tenant .. '|' .. call.tool, prefix .. 'estimates:' .. call.tenant
  local before = tonumber(redis.call('HGET', key, call.tool) or nil)
  local after = math.max(used, before and (is_over and before * DECAY + used * (1 - DECAY) or before) or 0)
  after = tonumber(string.format('%.9g', after))
  if before ~= after then
    redis.call('HSET', key, call.tool, string.format('%.9g', after))
    redis.call('EXPIRE', key, ESTIMATE_S)
  end
  estimates[name] = after
end

local function add_grant(id)
  local orchestrator = id:match('^[^.]+')
  granted[orchestrator] = granted[orchestrator] or {}
  table.insert(granted[orchestrator], id)
end

-- Ranks of tenants in queues

local function heads_of(pair)
  if not pair.heads then
    pair.heads = {}
    for _, lane in ipairs(LANES) do
      if pair.fields[lane] > 0 then
        local id = redis.call('ZRANGE', prefix .. 'lane:' .. pair.name .. ':' .. lane, 0, 0)[1]
        local call = id and waiting_call(id)
        if call then
          table.insert(pair.heads, {id = id, call = call})
        end
      end
    end
  end
  return pair.heads
end

local function set_ready(queue, pair, which, is_ready, score)
  local key, field = prefix .. 'ready:' .. queue.name .. ':' .. which, 'ready_' .. which
  if is_ready then
    if pair.fields[field] == 0 or pair.fields.score ~= score then redis.call('ZADD', key, string.format('%.17g', score), pair.tenant) end
  elseif pair.fields[field] == 1 then
    redis.call('ZREM', key, pair.tenant)
  end
  pair.fields[field] = is_ready and 1 or 0
end

-- Removes the tenant from both ranks, independent of its record. A tenant that was chosen and cannot be served must not be chosen again in this step.
local function unrank(queue, pair)
  for _, which in ipairs({'short', 'long'}) do
    redis.call('ZREM', prefix .. 'ready:' .. queue.name .. ':' .. which, pair.tenant)
    pair.fields['ready_' .. which] = 0
  end
end

local function set_stuck(queue, pair, is_stuck)
  if is_stuck ~= (pair.fields.stuck == 1) then
    redis.call(is_stuck and 'SADD' or 'SREM', prefix .. 'stuck:' .. queue.name, pair.tenant)
    pair.fields.stuck = is_stuck and 1 or 0
  end
end

-- Updates the ranks of the tenant in the queue after a change.
local function refresh(queue, pair)
  local fields, short, long, stuck = pair.fields, false, false, false
  if fields.waiting > 0 and fields.blocked == 0 then
    for _, head in ipairs(heads_of(pair)) do
      if estimate(head.call) < LONG_S then short = true
      elseif fields.long < queue.long_each then long = true
      else stuck = true end
    end
  end
  local was_ready = fields.ready_short + fields.ready_long > 0
  -- A tenant does not save up its share while it has no ready call.
  if (short or long) and not was_ready then fields.used = math.max(fields.used, queue.fields.clock) end
  local score = fields.used + fields.charged
  set_ready(queue, pair, 'short', short, score)
  set_ready(queue, pair, 'long', long, score)
  fields.score = score
  set_stuck(queue, pair, stuck)
end

-- Counts running calls as long once they have run for LONG_S.
local function promote(queue)
  if queue.fields.held <= queue.fields.long then return end
  local key = prefix .. 'young:' .. queue.name
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', string.format('%.17g', now - LONG_S))) do
    redis.call('ZREM', key, id)
    local text = redis.call('HGET', prefix .. 'held', id)
    if text then
      local call = cjson.decode(text)
      call.long = true
      redis.call('HSET', prefix .. 'held', id, cjson.encode(call))
      add(queue, 'long', 1)
      add(pair_of(queue, call.tenant), 'long', 1)
      update_estimate(call, now - call.granted, false)
    end
  end
end

local function queue_of(name)
  local queue = load_record('queue:' .. name)
  if queue.slots then return queue end
  local number = tonumber(redis.call('GET', slots_prefix .. name) or nil)
  local is_known = number ~= nil and number >= 1
  queue.name = name
  queue.slots = is_known and math.floor(number) or UNKNOWN_SLOTS
  queue.capacity = is_known and math.max(queue.slots + 1, math.floor(queue.slots * 3 / 2)) or UNKNOWN_SLOTS
  -- Delivery of a message takes some milliseconds, which is most of the time of a tiny call.
  queue.tiny_capacity = is_known and math.max(queue.slots + 4, queue.slots * 2) or UNKNOWN_SLOTS
  queue.long_each = math.max(1, math.floor(queue.slots * 9 / 10))
  promote(queue)
  if queue.fields.slots ~= queue.slots then
    queue.fields.slots = queue.slots
    for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'stuck:' .. name)) do refresh(queue, pair_of(queue, tenant)) end
  end
  return queue
end

-- Returns nil when the tenant may start a call, the time at which its rate limit allows the call or a pause is checked again, or math.huge when it must
-- return a slot first.
local function limit_of(tenant)
  local fields = tenant.fields
  if is_paused(tenants, tenant.name) then return now + PAUSE_CHECK_S end
  if fields.held >= fields.in_flight then return math.huge end
  if fields.rate > 0 then
    if fields.tokens_at == 0 then fields.tokens, fields.tokens_at = fields.burst, now end
    fields.tokens = math.min(fields.burst, fields.tokens + math.max(0, now - fields.tokens_at) * fields.rate)
    fields.tokens_at = now
    if fields.tokens < 0.999999 then return now + (1 - fields.tokens) / fields.rate end
  end
  return nil
end

local wakes_changed = false

local function schedule_wake(until_at, tenant)
  if until_at < math.huge then
    redis.call('ZADD', prefix .. 'wake', string.format('%.17g', until_at), tenant.name)
    wakes_changed = true
  end
end

local function block(queue, pair, tenant, until_at)
  add(tenant, 'turn', 1)
  redis.call('ZADD', prefix .. 'blocked:' .. tenant.name, tenant.fields.turn, queue.name)
  schedule_wake(until_at, tenant)
  pair.fields.blocked = 1
  add(tenant, 'blocked', 1)
  unrank(queue, pair)
  refresh(queue, pair)
end

-- Returns why a waiting call has no slot yet (WaitReason in slots.py).
local function waiting_reason(call)
  if is_paused(tenants, call.tenant) then return 'paused' end
  local until_at = limit_of(tenant_of(call))
  return until_at == math.huge and 'in_flight' or until_at and 'rate' or 'slots'
end
