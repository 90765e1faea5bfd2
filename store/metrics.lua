-- The state of a deployment for one scrape. The script changes nothing. Redis serves no other client while it runs, so that callers with many rows run it for
-- some of them at a time.
-- ARGV: what is read; its rows (JSON); prefix of the deployment, of admission, of slots, of the queue of runs; how many batches are read at most.
--   deployment: no rows. Result: runs: waiting, delayed, running; batches; approvals
--   tenants: names. Result: rows of in flight, waiting
--   queues: names. Result: rows of messages, age of the oldest in seconds (-1: unknown), slots, in flight, waiting, tenants whose calls wait for a slot
--   waits: rows of queue and tenants. Result: for how many seconds the oldest call of each row has waited
-- Results are JSON.

local what, rows = ARGV[1], cjson.decode(ARGV[2])
local deployment, admission, slots, runs, most_batches = ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local TAIL = 4096          -- bytes at the end of a message, which contain its headers
local REMEMBERED_S = 86400 -- how long the record of a call is kept
local LANES = {'interactive:short', 'interactive:long', 'batch:short', 'batch:long'}

local function finite(text)
  local value = tonumber(text or nil)
  return value and value >= 0 and value < 1e15 and value or 0
end

-- The number under a key, or 0. A value of another type was written by another program.
local function number(...)
  local value = redis.pcall(...)
  return type(value) ~= 'table' and finite(value) or 0
end

local function pair(key, one, other)
  local values = redis.pcall('HMGET', key, one, other)
  if values.err then return 0, 0 end
  return finite(values[1]), finite(values[2])
end

local function list(...)
  local values = redis.pcall(...)
  return values.err and {} or values
end

-- Seconds, by the record of the call in the oldest message; the headers of the message name the record.
local function age_of_oldest(queue, length)
  if length == 0 then return 0 end
  local message = redis.pcall('LINDEX', queue, -1)
  if type(message) ~= 'string' then return -1 end
  -- A pattern is tried at every byte; plain text is not.
  local at = string.find(message, '"call_key":', math.max(1, #message - TAIL + 1), true)
  local key = at and string.match(message, '^"call_key": ?"([^"\\]+)"', at)
  if not key or string.sub(key, 1, #deployment) ~= deployment then return -1 end
  local queued_at = number('HGET', key, 'queued_at')
  return queued_at > 0 and math.max(0, now - queued_at) or REMEMBERED_S
end

-- Tenants that no limit of their own stops: admission ranks them, or sets them aside for their long calls.
local function waiting_tenants(queue)
  local ready, found, seen = admission .. 'ready:' .. queue, {}, {}
  for _, names in ipairs({
    list('ZRANGE', ready .. ':short', 0, -1),
    list('ZRANGE', ready .. ':long', 0, -1),
    list('SMEMBERS', admission .. 'stuck:' .. queue),
  }) do
    for _, name in ipairs(names) do
      if not seen[name] then seen[name], found[#found + 1] = true, name end
    end
  end
  return found
end

-- The sequence and the id of the call that has waited longest: lanes are in the order in which calls came to the queue.
local function first_of(name)
  local first, id = math.huge, nil
  local counts = list('HMGET', admission .. 'pair:' .. name, unpack(LANES))
  for at, lane in ipairs(LANES) do
    if counts[at] and counts[at] ~= '0' then
      local head = list('ZRANGE', admission .. 'lane:' .. name .. ':' .. lane, 0, 0, 'WITHSCORES')
      local sequence = tonumber(head[2])
      if sequence and sequence < first then first, id = sequence, head[1] end
    end
  end
  return first, id
end

local function age_of_call(id)
  local call = redis.pcall('HGET', admission .. 'waiting', id)
  local since = type(call) == 'string' and finite(string.match(call, '"since": ?([%d.eE+-]+)')) or 0
  return since > 0 and math.max(0, now - since) or 0
end

local look = {}

function look.queues()
  local found = {}
  for _, queue in ipairs(rows) do
    local length = number('LLEN', queue)
    local held, waiting = pair(admission .. 'queue:' .. queue, 'held', 'waiting')
    local tenants = waiting > 0 and waiting_tenants(queue) or {}
    found[#found + 1] = {length, age_of_oldest(queue, length), number('GET', slots .. queue), held, waiting, tenants}
  end
  return found
end

function look.waits()
  local found = {}
  for _, row in ipairs(rows) do
    local queue, first, oldest = row[1], math.huge, nil
    for _, name in ipairs(row[2]) do
      local sequence, id = first_of(queue .. '|' .. name)
      if sequence < first then first, oldest = sequence, id end
    end
    found[#found + 1] = oldest and age_of_call(oldest) or 0
  end
  return found
end

function look.tenants()
  local found = {}
  for _, name in ipairs(rows) do found[#found + 1] = {pair(admission .. 'tenant:' .. name, 'held', 'waiting')} end
  return found
end

function look.deployment()
  local waiting_runs = 0
  for _, one in ipairs(list('ZRANGE', runs .. 'batches', 0, most_batches - 1)) do
    local tenant, batch = string.match(one, '^([^|]+)|(.+)$')
    if tenant then waiting_runs = waiting_runs + number('ZCARD', deployment .. 't:' .. tenant .. ':batch.' .. batch .. ':waiting') end
  end
  return {
    runs = {waiting_runs, number('ZCARD', runs .. 'delayed'), number('ZCARD', runs .. 'leases')},
    batches = number('ZCARD', runs .. 'batches'),
    approvals = number('ZCOUNT', deployment .. 'approvals', string.format('(%.0f', now * 1000), '+inf'),
  }
end

return cjson.encode(look[what]())
