-- What a scrape wants to know of the deployment, in one look that changes nothing.
-- ARGV: prefix of the deployment, of admission, of slots, of the queue of runs; how many batches are looked at; whether tenants are wanted; queues (JSON).
-- Answer (JSON): now; queues: rows of messages, seconds of the oldest (-1: nobody knows), slots, in flight, waiting; tenants: rows of name, in flight, waiting;
-- registered: how many; runs: waiting, delayed, running; batches; approvals.

local deployment, admission, slots, runs = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most_batches, wants_tenants = tonumber(ARGV[5]), ARGV[6] == '1'
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local TAIL = 4096          -- bytes at the end of a message, in which its headers stand
local REMEMBERED_S = 86400 -- how long the ledger knows a call

local function finite(told)
  local value = tonumber(told or nil)
  return value and value >= 0 and value < 1e15 and value or 0
end

-- Whatever lies under a key: a number, or 0. What is of another type than we make it is somebody else's.
local function number(...)
  local told = redis.pcall(...)
  return type(told) ~= 'table' and finite(told) or 0
end

local function pair(key, one, other)
  local told = redis.pcall('HMGET', key, one, other)
  if told.err then return 0, 0 end
  return finite(told[1]), finite(told[2])
end

-- Seconds, by the ledger's record of the call in the oldest message; that one names it in its headers.
local function age_of_oldest(queue, length)
  if length == 0 then return 0 end
  local message = redis.pcall('LINDEX', queue, -1)
  if type(message) ~= 'string' then return -1 end
  local key = string.match(string.sub(message, -TAIL), '"call_key": ?"([^"\\]+)"')
  if not key or string.sub(key, 1, #deployment) ~= deployment then return -1 end
  local queued_at = number('HGET', key, 'queued_at')
  return queued_at > 0 and math.max(0, now - queued_at) or REMEMBERED_S
end

local queues = {}
for _, queue in ipairs(cjson.decode(ARGV[7])) do
  local length = number('LLEN', queue)
  local held, waiting = pair(admission .. 'queue:' .. queue, 'held', 'waiting')
  queues[#queues + 1] = {length, age_of_oldest(queue, length), number('GET', slots .. queue), held, waiting}
end

local registered = redis.call('HKEYS', deployment .. 'tenants')
local tenants, count = {}, 0
local seen = {default = true}
for _, name in ipairs(registered) do
  if string.sub(name, 1, 1) ~= '#' then
    seen[name] = true
    count = count + 1
  end
end
if wants_tenants then
  for _, name in ipairs(redis.call('ZRANGE', deployment .. 'seen-tenants', 0, -1)) do seen[name] = true end
  for name in pairs(seen) do
    local held, waiting = pair(admission .. 'tenant:' .. name, 'held', 'waiting')
    tenants[#tenants + 1] = {name, held, waiting}
  end
end

local waiting_runs = 0
for _, one in ipairs(redis.call('ZRANGE', runs .. 'batches', 0, most_batches - 1)) do
  local tenant, batch = string.match(one, '^([^|]+)|(.+)$')
  if tenant then waiting_runs = waiting_runs + number('ZCARD', deployment .. tenant .. ':batch:' .. batch .. ':waiting') end
end

return cjson.encode({
  now = now,
  queues = queues,
  tenants = tenants,
  registered = count,
  runs = {waiting_runs, number('ZCARD', runs .. 'delayed'), number('ZCARD', runs .. 'leases')},
  batches = number('ZCARD', runs .. 'batches'),
  approvals = number('ZCOUNT', deployment .. 'approvals', string.format('(%.0f', now * 1000), '+inf'),
})
