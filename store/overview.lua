-- A look at a deployment's queues, tenants and batches, in one step; changes nothing. docs/design.md draws the state that it reads.
--
-- ARGV: prefix of the deployment, of admission, of slots, of runs, queues (JSON list), registered tenants (JSON list), how many batches to tell.
-- Answer (JSON): queues and tenants by name, batches as a list of lists, counts.

local deployment, admission, slots, runs = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most_batches = tonumber(ARGV[7])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local LANES = {'interactive:short', 'interactive:long', 'batch:short', 'batch:long'}
local MOST_RUNS = 2000  -- running ones that are asked for their batch
local MOST_LOOKS = 200  -- tenants whose calls are asked since when they wait
local told = {queues = {}, tenants = {}, batches = {}}

local function numbers(key, ...)
  local found = redis.call('HMGET', key, ...)
  for at = 1, #found do found[at] = tonumber(found[at] or nil) or 0 end
  return found
end

-- Tenants with calls are those that are registered, hold a slot, have a rank in a queue or are stopped by their rate: there is no list of the others.
local names = {}
for _, name in ipairs(cjson.decode(ARGV[6])) do names[name] = true end
local at, held = 1, redis.call('HVALS', admission .. 'held')
while held[at] do
  names[cjson.decode(held[at]).tenant] = true
  at = at + 1
end
for _, name in ipairs(redis.call('ZRANGE', admission .. 'wake', 0, -1)) do names[name] = true end

-- Since when the call waits that has waited longest for this queue, of those of a bounded number of tenants: Redis does nothing else meanwhile.
local looks = MOST_LOOKS
local function oldest_of(queue, tenants)
  local oldest = nil
  for tenant in pairs(tenants) do
    if looks == 0 then return oldest end
    looks = looks - 1
    local pair = queue .. '|' .. tenant
    for lane, waiting in ipairs(numbers(admission .. 'pair:' .. pair, unpack(LANES))) do
      local id = waiting > 0 and redis.call('ZRANGE', admission .. 'lane:' .. pair .. ':' .. LANES[lane], 0, 0)[1]
      local text = id and redis.call('HGET', admission .. 'waiting', id)
      local since = text and cjson.decode(text).since
      if since and (not oldest or since < oldest) then oldest = since end
    end
  end
  return oldest
end

for _, queue in ipairs(cjson.decode(ARGV[5])) do
  local key = admission .. 'queue:' .. queue
  local found = numbers(key, 'held', 'waiting')
  local tenants = {}
  for _, which in ipairs({':short', ':long'}) do
    for _, name in ipairs(redis.call('ZRANGE', admission .. 'ready:' .. queue .. which, 0, -1)) do tenants[name] = true end
  end
  for _, name in ipairs(redis.call('SMEMBERS', admission .. 'stuck:' .. queue)) do tenants[name] = true end
  for name in pairs(tenants) do names[name] = true end
  local since = found[2] > 0 and oldest_of(queue, tenants)
  told.queues[queue] = {
    length = redis.call('LLEN', queue),
    slots = tonumber(redis.call('GET', slots .. queue) or nil) or 0,
    held = found[1],
    waiting = found[2],
    oldest_s = since and math.max(0, now - since) or nil,
  }
end

for name in pairs(names) do
  local found = numbers(admission .. 'tenant:' .. name, 'held', 'waiting')
  if found[1] + found[2] > 0 then told.tenants[name] = found end
end

-- Batches that have something to do, and those of which something runs.

local seen, count = {}, 0
local function tell(tenant, batch)
  local member = tenant .. '|' .. batch
  if seen[member] then return end
  seen[member] = true
  local key = deployment .. 't:' .. tenant .. ':batch.' .. batch
  local fields = redis.call('HMGET', key, 'created_at', 'total', 'succeeded')
  if not fields[1] then return end
  count = count + 1
  if count > most_batches then return end
  local waiting = redis.call('ZCARD', key .. ':waiting') + redis.call('SCARD', key .. ':delayed')
  table.insert(told.batches, {
    tenant, batch, tonumber(fields[1] or nil) or 0, tonumber(fields[2] or nil) or 0, tonumber(fields[3] or nil) or 0,
    redis.call('ZCARD', key .. ':ended'), redis.call('SCARD', key .. ':running'), waiting,
  })
end

local function split(text)
  local bar = string.find(text, '|', 1, true)
  return string.sub(text, 1, bar - 1), string.sub(text, bar + 1)
end

for _, member in ipairs(redis.call('ZRANGE', runs .. 'batches', 0, -1)) do tell(split(member)) end
for _, member in ipairs(redis.call('ZRANGE', runs .. 'leases', 0, MOST_RUNS - 1)) do
  local tenant, run = split(member)
  local batch = redis.call('HGET', deployment .. 't:' .. tenant .. ':run.' .. run, 'batch')
  if batch then tell(tenant, batch) end
end

told.running = redis.call('ZCARD', runs .. 'leases')
told.approvals = redis.call('ZCOUNT', deployment .. 'approvals', string.format('(%.0f', now * 1000), '+inf')
return cjson.encode(told)
