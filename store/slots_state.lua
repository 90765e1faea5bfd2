-- One step of admission, whole or not at all: what one orchestrator asks for, and what follows from it for everybody.
-- docs/design.md draws the state and says why it is so.
--
-- ARGV: prefix of the keys, prefix of the keys of slots, this orchestrator, seconds of a lease, the instant ("" for Redis's own), operations (JSON):
--   ["enqueue", id, call, policy]   a call that wants a slot; once more: tells its state
--   ["restore", id, call, policy]   it has a slot, which Redis has lost
--   ["release", id, used]           a slot given back after so many seconds of use (0: it did not run), or a wait given up
--   ["renew", ids, ids]             these hold slots, those wait
--   ["tick", queue, ...]            look whether the queues' slots have changed
-- Answer (JSON): granted: ids of this orchestrator that have a slot now; refused: [id, retry after] of those that may not wait;
-- waiting: [id, reason] of those that were queued in this step and wait (reasons: waiting.py); unknown: ids that Redis does not know; wake: seconds until a tenant's rate allows its next call. Other orchestrators are told by pub/sub.

local prefix, slots_prefix, me, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local now = tonumber(ARGV[5])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local LONG_S = 1           -- a call of so many seconds is long
local TINY_S = 0.05        -- one of less is over before the next message is there
local UNKNOWN_SLOTS = 4    -- capacity of a queue whose workers nobody knows
local INTERACTIVE_RUN = 7  -- so many interactive calls in a row may pass one of a batch
local FADE = 0.8           -- what is left of a longer estimate after a shorter call
local IDLE_S, ESTIMATE_S = 600, 86400
local SWEEP_AT_ONCE = 500
local LANES = {'interactive:short', 'interactive:long', 'batch:short', 'batch:long'}

local records, estimates, calls = {}, {}, {}
local told, refused, unknown, queued = {}, {}, {}, {}

-- Hashes of numbers, read once in a step. What has changed is written once at its end. A field that is not there is 0.

local ZERO = {__index = function() return 0 end}

local function record(key)
  local found = records[key]
  if found then return found end
  found = {key = prefix .. key, fields = setmetatable({}, ZERO), saved = {}}
  local flat = redis.call('HGETALL', found.key)
  for at = 1, #flat, 2 do
    local number = tonumber(flat[at + 1])
    found.fields[flat[at]], found.saved[flat[at]] = number, number
  end
  found.was_idle = #flat > 0 and found.fields.held + found.fields.waiting == 0
  records[key] = found
  return found
end

local function save(one)
  local flat, fields = {}, one.fields
  for name, value in pairs(fields) do
    if one.saved[name] ~= value then flat[#flat + 1], flat[#flat + 2] = name, string.format('%.17g', value) end
  end
  if #flat > 0 then redis.call('HSET', one.key, unpack(flat)) end
  if next(fields) == nil then return end
  if fields.held + fields.waiting == 0 then
    local keep = fields.rate > 0 and math.min(604800, fields.burst / fields.rate) or 0
    redis.call('EXPIRE', one.key, math.ceil(math.max(IDLE_S, keep)))
  elseif one.was_idle then
    redis.call('PERSIST', one.key)
  end
end

local function count(one, what, by)
  one.fields[what] = one.fields[what] + by
end

local function tenant_of(call)
  local found = record('tenant:' .. call.tenant)
  found.name = call.tenant
  return found
end

local function weight_of(tenant)
  return tenant.fields.weight > 0 and tenant.fields.weight or 1
end

local function pair_of(queue, tenant_name)
  local name = queue.name .. '|' .. tenant_name
  local found = record('pair:' .. name)
  found.name, found.tenant = name, tenant_name
  return found
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

local function learn(call, used, is_over)
  local name, key = call.tenant .. '|' .. call.tool, prefix .. 'estimates:' .. call.tenant
  local before = tonumber(redis.call('HGET', key, call.tool) or nil)
  local after = math.max(used, before and (is_over and before * FADE + used * (1 - FADE) or before) or 0)
  after = tonumber(string.format('%.9g', after))
  if before ~= after then
    redis.call('HSET', key, call.tool, string.format('%.9g', after))
    redis.call('EXPIRE', key, ESTIMATE_S)
  end
  estimates[name] = after
end

local function tell(id)
  local orchestrator = id:match('^[^.]+')
  told[orchestrator] = told[orchestrator] or {}
  table.insert(told[orchestrator], id)
end

-- What may go next

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

-- Out of both ranks, whatever its record says: what is picked and cannot be served must not be picked again in this step.
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

-- Where the tenant stands in the queue after anything about it has changed.
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
  -- Who was not able to use its share meanwhile has saved none up.
  if (short or long) and not was_ready then fields.used = math.max(fields.used, queue.fields.clock) end
  local score = fields.used + fields.charged
  set_ready(queue, pair, 'short', short, score)
  set_ready(queue, pair, 'long', long, score)
  fields.score = score
  set_stuck(queue, pair, stuck)
end

-- The held calls that have turned out long.
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
      count(queue, 'long', 1)
      count(pair_of(queue, call.tenant), 'long', 1)
      learn(call, now - call.granted, false)
    end
  end
end

local function queue_of(name)
  local queue = record('queue:' .. name)
  if queue.slots then return queue end
  local number = tonumber(redis.call('GET', slots_prefix .. name) or nil)
  local is_known = number ~= nil and number >= 1
  queue.name = name
  queue.slots = is_known and math.floor(number) or UNKNOWN_SLOTS
  queue.capacity = is_known and math.max(queue.slots + 1, math.floor(queue.slots * 3 / 2)) or UNKNOWN_SLOTS
  -- On its way a call is for some milliseconds, whatever it does: for tiny ones that is most of the time.
  queue.tiny_capacity = is_known and math.max(queue.slots + 4, queue.slots * 2) or UNKNOWN_SLOTS
  queue.long_each = math.max(1, math.floor(queue.slots * 9 / 10))
  promote(queue)
  if queue.fields.slots ~= queue.slots then
    queue.fields.slots = queue.slots
    for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'stuck:' .. name)) do refresh(queue, pair_of(queue, tenant)) end
  end
  return queue
end

-- nil when the tenant may begin a call; else the instant from which its rate allows it, math.huge when it must give a slot back first.
local function limit_of(tenant)
  local fields = tenant.fields
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

local function wake_at(until_at, tenant)
  if until_at < math.huge then
    redis.call('ZADD', prefix .. 'wake', string.format('%.17g', until_at), tenant.name)
    wakes_changed = true
  end
end

local function block(queue, pair, tenant, until_at)
  count(tenant, 'turn', 1)
  redis.call('ZADD', prefix .. 'blocked:' .. tenant.name, tenant.fields.turn, queue.name)
  wake_at(until_at, tenant)
  pair.fields.blocked = 1
  count(tenant, 'blocked', 1)
  unrank(queue, pair)
  refresh(queue, pair)
end
