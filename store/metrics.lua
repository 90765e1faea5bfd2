-- The state of a deployment for one scrape. The script changes nothing. Redis serves no other client while the script runs. Callers with many rows
-- therefore split the rows between several executions.
-- `deployment`, `admission`, `slots`, `runs`: key prefixes. The subjects with their rows:
--   deployment: no rows. Result: runs: waiting, delayed, running; batches; approvals
--   tenants: names. Result: rows of in flight, waiting
--   queues: names. Result: rows of messages, age of the oldest in seconds (-1: unknown), slots, in flight, waiting, tenants whose calls wait for a slot
--   waits: rows of queue and tenants. Result: the waiting time of the oldest call of each row in seconds
-- Results are JSON.

local rows, max_batches = cjson.decode(rows_json), tonumber(batch_limit)
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local TAIL_BYTES = 4096    -- the end of a message, which contains its headers
local RECORD_TTL_S = 86400 -- time to live of the record of a call
local LANES = {'interactive:short', 'interactive:long', 'batch:short', 'batch:long'}

local function parse_number(text)
  local value = tonumber(text or nil)
  return value and value >= 0 and value < 1e15 and value or 0
end

-- Returns the number under a key, or 0. Another program may have written a value of another type.
local function read_number(...)
  local value = redis.pcall(...)
  return type(value) ~= 'table' and parse_number(value) or 0
end

local function read_pair(key, first, second)
  local values = redis.pcall('HMGET', key, first, second)
  if values.err then return 0, 0 end
  return parse_number(values[1]), parse_number(values[2])
end

local function read_list(...)
  local values = redis.pcall(...)
  return values.err and {} or values
end

-- Returns the age in seconds from the record of the call in the oldest message. The headers of the message contain the key of the record.
local function oldest_message_age(queue, length)
  if length == 0 then return 0 end
  local message = redis.pcall('LINDEX', queue, -1)
  if type(message) ~= 'string' then return -1 end
  -- A plain search is faster than a pattern, which Lua tries at every byte.
  local start = string.find(message, '"call_key":', math.max(1, #message - TAIL_BYTES + 1), true)
  local key = start and string.match(message, '^"call_key": ?"([^"\\]+)"', start)
  if not key or string.sub(key, 1, #deployment) ~= deployment then return -1 end
  local queued_at = read_number('HGET', key, 'queued_at')
  return queued_at > 0 and math.max(0, now - queued_at) or RECORD_TTL_S
end

-- Returns the tenants that their own limits do not block: admission ranks them, or holds back their long calls.
local function waiting_tenants(queue)
  local ready, tenants, seen = admission .. 'ready:' .. queue, {}, {}
  for _, names in ipairs({
    read_list('ZRANGE', ready .. ':short', 0, -1),
    read_list('ZRANGE', ready .. ':long', 0, -1),
    read_list('SMEMBERS', admission .. 'stuck:' .. queue),
  }) do
    for _, name in ipairs(names) do
      if not seen[name] then seen[name], tenants[#tenants + 1] = true, name end
    end
  end
  return tenants
end

-- Returns the sequence and the id of the call that has waited longest. Each lane is in the order in which its calls arrived.
local function find_first(name)
  local first, id = math.huge, nil
  local counts = read_list('HMGET', admission .. 'pair:' .. name, unpack(LANES))
  for at, lane in ipairs(LANES) do
    if counts[at] and counts[at] ~= '0' then
      local head = read_list('ZRANGE', admission .. 'lane:' .. name .. ':' .. lane, 0, 0, 'WITHSCORES')
      local sequence = tonumber(head[2])
      if sequence and sequence < first then first, id = sequence, head[1] end
    end
  end
  return first, id
end

local function call_age(id)
  local call = redis.pcall('HGET', admission .. 'waiting', id)
  local since = type(call) == 'string' and parse_number(string.match(call, '"since": ?([%d.eE+-]+)')) or 0
  return since > 0 and math.max(0, now - since) or 0
end

local read = {}

function read.queues()
  local result = {}
  for _, queue in ipairs(rows) do
    local length = read_number('LLEN', queue)
    local in_flight, waiting = read_pair(admission .. 'queue:' .. queue, 'held', 'waiting')
    local tenants = waiting > 0 and waiting_tenants(queue) or {}
    result[#result + 1] = {length, oldest_message_age(queue, length), read_number('GET', slots .. queue), in_flight, waiting, tenants}
  end
  return result
end

function read.waits()
  local result = {}
  for _, row in ipairs(rows) do
    local queue, first, oldest = row[1], math.huge, nil
    for _, name in ipairs(row[2]) do
      local sequence, id = find_first(queue .. '|' .. name)
      if sequence < first then first, oldest = sequence, id end
    end
    result[#result + 1] = oldest and call_age(oldest) or 0
  end
  return result
end

function read.tenants()
  local result = {}
  for _, name in ipairs(rows) do result[#result + 1] = {read_pair(admission .. 'tenant:' .. name, 'held', 'waiting')} end
  return result
end

function read.deployment()
  local waiting_runs = 0
  for _, member in ipairs(read_list('ZRANGE', runs .. 'batches', 0, max_batches - 1)) do
    local tenant, batch = string.match(member, '^([^|]+)|(.*)$')
    local part = batch == '' and ':runs' or ':batch.' .. (batch or '')
    if tenant then waiting_runs = waiting_runs + read_number('ZCARD', deployment .. 't:' .. tenant .. part .. ':waiting') end
  end
  return {
    runs = {waiting_runs, read_number('ZCARD', runs .. 'delayed'), read_number('ZCARD', runs .. 'leases')},
    batches = read_number('ZCARD', runs .. 'batches'),
    approvals = read_number('ZCOUNT', deployment .. 'approvals', string.format('(%.0f', now * 1000), '+inf'),
  }
end

return cjson.encode(read[subject]())
