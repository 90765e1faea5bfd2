"""Gives up hosts that no longer report: their queue is taken away, and whatever waited in it is answered HOST_LOST."""

import json
from typing import Any

import redis.asyncio

from contract.hosts import HEARTBEAT_S, HOST_LOST_TYPE, HOST_TTL_S, TOMBSTONE_TTL_S
from contract.ledger import RESULT_TTL_S
from contract.names import control_queue, host_key, hosts_key, result_key, tombstone_key
from orchestrator.dispatch.task_messages import describe_sender
from telemetry.logs import get_logger

log = get_logger(__name__)

BATCH = 500
TRUSTED_S = int(HOST_TTL_S - 2 * HEARTBEAT_S)
"""How long after Redis was seen to answer regularly a missing report still says that its host is gone."""
FORGET_S = 600
"""How long after its last report a host's queue is looked at again: a message may have been on its way there."""

# KEYS: report, queue, its control list, tombstone, hosts. ARGV: queue, tombstone's life, batch, before the id, after the id, result's life, prefix of results,
# forget before, not after, the process that reaps, the reason. Gives how many messages were taken; -1 when the host lives, or nobody knows: a script that waited while Redis stood still finds
# every report expired. Who awaits a call that has started, has ended, or was sent again hears of that, and not from here.
_REAP = """
local now = tonumber(redis.call('TIME')[1])
if redis.call('EXISTS', KEYS[1]) == 1 or now > tonumber(ARGV[9]) then return -1 end
redis.call('SET', KEYS[4], '1', 'EX', ARGV[2])
redis.call('DEL', KEYS[3])
local last = redis.call('ZSCORE', KEYS[5], ARGV[1])
if last and tonumber(last) < now - tonumber(ARGV[8]) then redis.call('ZREM', KEYS[5], ARGV[1]) end
local taken = 0
while taken < tonumber(ARGV[3]) do
  local message = redis.call('RPOP', KEYS[2])
  if not message then break end
  taken = taken + 1
  local ok, fields = pcall(cjson.decode, message)
  if ok and type(fields) == 'table' and type(fields.headers) == 'table' and type(fields.headers.id) == 'string' then
    local call = type(fields.headers.call_key) == 'string' and fields.headers.call_key or ''
    local record = redis.pcall('HMGET', call, 'state', 'attempt')
    local is_other = record[2] and tonumber(record[2]) ~= fields.headers.call_attempt
    if not is_other and record[1] ~= 'running' and record[1] ~= 'done' then
      local key = ARGV[7] .. fields.headers.id
      local told = ARGV[4] .. cjson.encode(fields.headers.id) .. ARGV[5]
      redis.call('SET', key, told, 'EX', ARGV[6])
      redis.call('PUBLISH', key, told)
      if record[1] == 'queued' then
        redis.call('HSET', call, 'state', 'lost', 'ended_at', now, 'noticed_by', ARGV[10], 'reason', ARGV[11])
      end
    end
  end
end
return taken
"""


class Reaper:
    """Any orchestrator may reap; the script makes it one act. Raises RedisError and OSError."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._reap = client.register_script(_REAP)

    async def reap(self, queue: str, now: int) -> bool:
        """Give the incarnation up, unless it lives; whether it is gone. It can never go on under that name. `now`: Redis's time when reports were known to
        come in, TRUSTED_S ago at most when the script runs."""
        dep = self._deployment
        keys = [host_key(dep, queue), queue, control_queue(queue), tombstone_key(dep, queue), hosts_key(dep)]
        before, after = _lost_result(queue)
        arguments: list[str | int] = [queue, TOMBSTONE_TTL_S, BATCH, before, after, RESULT_TTL_S, result_key(""), FORGET_S, now + TRUSTED_S]
        arguments += [describe_sender(), _lost_words(queue)]
        total = 0
        while (taken := int(await self._reap(keys=keys, args=arguments))) > 0:
            total += taken
        if total:
            log.warning("host_reaped", queue=queue, messages=total)
        return taken == 0

    async def sweep(self, now: int) -> list[str]:
        """Reap every incarnation that has not reported for a while. Gives those that are gone."""
        names: Any = await self._client.zrangebyscore(hosts_key(self._deployment), "-inf", now - HOST_TTL_S)
        return [queue for queue in (name.decode() for name in names) if await self.reap(queue, now)]


def _lost_result(queue: str) -> tuple[str, str]:
    """The stored result of a call that was in a dead host's queue, around the task's id."""
    told = {"exc_type": HOST_LOST_TYPE, "exc_message": [_lost_words(queue)], "exc_module": "toolcrew"}
    fields = json.dumps({"status": "FAILURE", "result": told, "traceback": None, "children": []})
    return '{"task_id": ', ", " + fields[1:]


def _lost_words(queue: str) -> str:
    return f"the host {queue} stopped reporting while the call waited in its queue"
