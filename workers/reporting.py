"""A worker's report in Redis: given under its name while the name is its own, and taken away at its end."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import redis
from pydantic import ValidationError

from contract.clock import SharedClock
from contract.hosts import HOST_TTL_S, RESTART_GRACE_S, HostReport
from contract.names import host_key, host_prefix, hosts_key, slots_key, tombstone_key, worker_slots_key

How = Literal["drained", "parted", "gone"]
"""How a worker ends: nothing is left to do for its queue; its next process is awaited; or somebody must look after what is left in its queue."""

_LUA = """
local function worker_of(report)
  local is_json, fields = pcall(cjson.decode, report)
  return is_json and type(fields) == 'table' and type(fields['worker']) == 'string' and fields['worker'] or ''
end
-- Note or forget (slots nil) what `worker` serves of a queue, and count what its living workers serve together.
local function count(workers, total, worker, slots, now, ttl)
  if slots then redis.call('HSET', workers, worker, slots .. ' ' .. (now + ttl)) else redis.call('HDEL', workers, worker) end
  local sum, told = 0, redis.call('HGETALL', workers)
  for i = 1, #told, 2 do
    local serves, until_ = string.match(told[i + 1], '^(%d+) (%d+)$')
    if serves and tonumber(until_) > now then sum = sum + tonumber(serves) else redis.call('HDEL', workers, told[i]) end
  end
  if sum > 0 then redis.call('SET', total, sum, 'EX', ttl) else redis.call('DEL', total) end
  redis.call('EXPIRE', workers, ttl)
end
"""

# KEYS: report, all hosts, tombstone, then the workers and the total of each queue. ARGV: report, queue, worker, seconds it lives, whether it is the
# first, then the slots of each queue, '' for one that is not served any more.
_REPORT = (
    _LUA
    + """
local time = redis.call('TIME')
if redis.call('EXISTS', KEYS[3]) == 1 then return {'given_up', time[1], time[2]} end
local last = redis.call('GET', KEYS[1])
if last and worker_of(last) ~= ARGV[3] or ARGV[5] == '1' and redis.call('ZSCORE', KEYS[2], ARGV[2]) then
  return {'replaced', time[1], time[2]}
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[4])
redis.call('ZADD', KEYS[2], time[1], ARGV[2])
for i = 4, #KEYS, 2 do
  local slots = ARGV[6 + (i - 4) / 2]
  count(KEYS[i], KEYS[i + 1], ARGV[2], slots ~= '' and slots or nil, tonumber(time[1]), tonumber(ARGV[4]))
end
return {'kept', time[1], time[2]}
"""
)

# KEYS: report, all hosts, queue, then the workers and the total of each queue. ARGV: queue, worker, how, last report, seconds that lives, seconds of slots.
_LEAVE = (
    _LUA
    + """
local last = redis.call('GET', KEYS[1])
if last and worker_of(last) ~= ARGV[2] then return 'replaced' end
if ARGV[3] == 'drained' and redis.call('LLEN', KEYS[3]) > 0 then return 'busy' end
local now = tonumber(redis.call('TIME')[1])
for i = 4, #KEYS, 2 do count(KEYS[i], KEYS[i + 1], ARGV[1], nil, now, tonumber(ARGV[6])) end
if ARGV[3] == 'parted' then redis.call('SET', KEYS[1], ARGV[4], 'EX', ARGV[5]) else redis.call('DEL', KEYS[1]) end
if ARGV[3] == 'drained' then redis.call('ZREM', KEYS[2], ARGV[1]) end
-- As if it had not reported for long: whoever looks after lost hosts does so now.
if ARGV[3] == 'gone' then redis.call('ZADD', KEYS[2], now - ARGV[6] - 1, ARGV[1]) end
return 'left'
"""
)

# KEYS: report, all hosts. ARGV: its worker, its queue, seconds that reports live. Removes the report of a worker that is known to be gone, unless another reports by now.
_DISMISS = (
    _LUA
    + """
local last = redis.call('GET', KEYS[1])
if not last or worker_of(last) ~= ARGV[1] then return 0 end
redis.call('ZADD', KEYS[2], redis.call('TIME')[1] - ARGV[3] - 1, ARGV[2])
return redis.call('DEL', KEYS[1])
"""
)


class Verdict(StrEnum):
    """What a worker is told that reports."""

    KEPT = "kept"
    GIVEN_UP = "given_up"
    """The incarnation was taken for lost, and its calls were answered: it must not go on under its name."""
    REPLACED = "replaced"
    """The name is another worker's."""


class Reporter:
    """Reports of one incarnation, `queue`, by one process, `worker`. Every method raises redis.RedisError."""

    def __init__(self, client: "redis.Redis", deployment: str, queue: str, worker: str, pools: Sequence[str], clock: SharedClock) -> None:
        self.queue = queue
        self.worker = worker
        self.pools = tuple(pools)
        self._client = client
        self._deployment = deployment
        self._clock = clock
        self._report = client.register_script(_REPORT)
        self._leave = client.register_script(_LEAVE)

    def report(self, report: HostReport, *, is_first: bool = False, ttl_s: int = HOST_TTL_S) -> Verdict:
        """Tell that the worker lives; learns what time it is. `is_first`: only under a name that nobody has had."""
        report = report.model_copy(update={"reported_at": self._clock()})
        own = report.slots if report.kind == "sandbox" else ""
        shared = report.slots if not report.draining else ""
        keys = [self._key(), hosts_key(self._deployment), tombstone_key(self._deployment, self.queue), *self._slot_keys()]
        told: Any = self._report(
            keys=keys,
            args=[report.model_dump_json(), self.queue, self.worker, ttl_s, int(is_first), own, *[shared for _ in self.pools]],
        )
        self._clock.learn(int(told[1]) + int(told[2]) / 1_000_000)
        return Verdict(told[0].decode())

    def leave(self, how: How, last: HostReport) -> bool:
        """Take the report away, or with `parted` leave it for a while to wait for the next process. False: with `drained`, when calls came to the queue."""
        parting = last.model_copy(update={"worker": "", "draining": True, "busy": 0, "reported_at": self._clock()})
        keys = [self._key(), hosts_key(self._deployment), self.queue, *self._slot_keys()]
        told: Any = self._leave(keys=keys, args=[self.queue, self.worker, how, parting.model_dump_json(), RESTART_GRACE_S, HOST_TTL_S])
        return bool(told != b"busy")

    def seen(self) -> HostReport | None:
        """The last report under the name, whoever gave it; None for none, and for one of another release."""
        return _parsed(self._client.get(self._key()))

    def _key(self) -> str:
        return host_key(self._deployment, self.queue)

    def _slot_keys(self) -> list[str]:
        queues = (self.queue, *self.pools)
        return [key for queue in queues for key in (worker_slots_key(self._deployment, queue), slots_key(self._deployment, queue))]


class Incarnations:
    """What is reported of all incarnations of a host. Every method raises redis.RedisError."""

    def __init__(self, client: "redis.Redis", deployment: str, host: str) -> None:
        self._client = client
        self._deployment = deployment
        self._prefix = host_prefix(host)
        self._dismiss = client.register_script(_DISMISS)

    def reports(self) -> list[HostReport]:
        """Of those that count as alive."""
        told: Any = self._client.zrange(hosts_key(self._deployment), 0, -1)
        queues = [name for name in (item.decode() for item in told) if name.startswith(self._prefix)]
        found = [_parsed(self._client.get(host_key(self._deployment, queue))) for queue in queues]
        return [report for report in found if report is not None]

    def dismiss(self, report: HostReport) -> None:
        """It is gone: have what is left in its queue looked after now."""
        keys = [host_key(self._deployment, report.queue), hosts_key(self._deployment)]
        self._dismiss(keys=keys, args=[report.worker, report.queue, HOST_TTL_S])


def _parsed(data: Any) -> HostReport | None:
    try:
        return HostReport.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None
