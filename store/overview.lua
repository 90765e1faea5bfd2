-- Reads the queues, tenants and batches of a deployment in one step. The script changes nothing. docs/design.md shows the state that it reads.
--
-- `deployment`, `admission`, `slots`, `runs`: key prefixes.
-- Result (JSON): queues and tenants by name, batches as a list of lists, counts.

local max_batches = tonumber(batch_limit)
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local LANES = {'interactive:short', 'interactive:long', 'batch:short', 'batch:long'}
local MAX_RUNS = 2000  -- running runs whose batch is read
local MAX_TENANTS = 200  -- tenants whose oldest waiting call is read
local result = {queues = {}, tenants = {}, batches = {}}

local function read_numbers(key, ...)
  local values = redis.call('HMGET', key, ...)
  for at = 1, #values do values[at] = tonumber(values[at] or nil) or 0 end
  return values
end

-- Redis has no list of tenants with calls. They are registered, have a slot, have a rank in a queue, or are blocked by their rate limit.
local names = {}
for _, name in ipairs(cjson.decode(tenants_json)) do names[name] = true end
local at, held = 1, redis.call('HVALS', admission .. 'held')
while held[at] do
  names[cjson.decode(held[at]).tenant] = true
  at = at + 1
end
for _, name in ipairs(redis.call('ZRANGE', admission .. 'wake', 0, -1)) do names[name] = true end

-- Returns the time since which the oldest call of a queue waits, counted from its request for a slot. A call also waits while a limit of its tenant blocks
-- it; the queue does not list such tenants, so all names are read after `tenants`. The number of tenants is bounded, because Redis serves no other client meanwhile.
local remaining_tenants = MAX_TENANTS
local function oldest_of(queue, tenants)
  local oldest, ordered = nil, {}
  for tenant in pairs(tenants) do table.insert(ordered, tenant) end
  for tenant in pairs(names) do
    if not tenants[tenant] then table.insert(ordered, tenant) end
  end
  for _, tenant in ipairs(ordered) do
    if remaining_tenants == 0 then return oldest end
    remaining_tenants = remaining_tenants - 1
    local pair = queue .. '|' .. tenant
    for lane, waiting in ipairs(read_numbers(admission .. 'pair:' .. pair, unpack(LANES))) do
      local id = waiting > 0 and redis.call('ZRANGE', admission .. 'lane:' .. pair .. ':' .. LANES[lane], 0, 0)[1]
      local text = id and redis.call('HGET', admission .. 'waiting', id)
      local since = text and cjson.decode(text).since
      if since and (not oldest or since < oldest) then oldest = since end
    end
  end
  return oldest
end

for _, queue in ipairs(cjson.decode(queues_json)) do
  local key = admission .. 'queue:' .. queue
  local counts = read_numbers(key, 'held', 'waiting')
  local tenants = {}
  for _, which in ipairs({':short', ':long'}) do
    for _, name in ipairs(redis.call('ZRANGE', admission .. 'ready:' .. queue .. which, 0, -1)) do tenants[name] = true end
  end
  for _, name in ipairs(redis.call('SMEMBERS', admission .. 'stuck:' .. queue)) do tenants[name] = true end
  for name in pairs(tenants) do names[name] = true end
  local since = counts[2] > 0 and oldest_of(queue, tenants)
  result.queues[queue] = {
    length = redis.call('LLEN', queue),
    slots = tonumber(redis.call('GET', slots .. queue) or nil) or 0,
    held = counts[1],
    waiting = counts[2],
    oldest_s = since and math.max(0, now - since) or nil,
  }
end

for name in pairs(names) do
  local counts = read_numbers(admission .. 'tenant:' .. name, 'held', 'waiting')
  if counts[1] + counts[2] > 0 then result.tenants[name] = counts end
end

-- Batches with runs that wait or are in progress.

local added, count = {}, 0
local function add_batch(tenant, batch)
  local member = tenant .. '|' .. batch
  if added[member] then return end
  added[member] = true
  local key = deployment .. 't:' .. tenant .. ':batch.' .. batch
  local fields = redis.call('HMGET', key, 'created_at', 'total', 'succeeded')
  if not fields[1] then return end
  count = count + 1
  if count > max_batches then return end
  local waiting = redis.call('ZCARD', key .. ':waiting') + redis.call('SCARD', key .. ':delayed')
  table.insert(result.batches, {
    tenant, batch, tonumber(fields[1] or nil) or 0, tonumber(fields[2] or nil) or 0, tonumber(fields[3] or nil) or 0,
    redis.call('ZCARD', key .. ':ended'), redis.call('SCARD', key .. ':running'), waiting,
  })
end

local function split(text)
  local bar = string.find(text, '|', 1, true)
  return string.sub(text, 1, bar - 1), string.sub(text, bar + 1)
end

-- One tenant may have any number of batches.
for _, member in ipairs(redis.call('ZRANGE', runs .. 'batches', 0, max_batches - 1)) do add_batch(split(member)) end
-- Durable runs belong to no batch.
local own, counted = 0, {}
for _, member in ipairs(redis.call('ZRANGE', runs .. 'leases', 0, MAX_RUNS - 1)) do
  local tenant, run = split(member)
  if not counted[tenant] then
    counted[tenant] = true
    own = own + redis.call('SCARD', deployment .. 't:' .. tenant .. ':runs:running')
  end
  local batch = redis.call('HGET', deployment .. 't:' .. tenant .. ':run.' .. run, 'batch')
  if batch then add_batch(tenant, batch) end
end

result.runs = own
result.items = math.max(0, redis.call('ZCARD', runs .. 'leases') - own)
result.approvals = redis.call('ZCOUNT', deployment .. 'approvals', string.format('(%.0f', now * 1000), '+inf')
return cjson.encode(result)
