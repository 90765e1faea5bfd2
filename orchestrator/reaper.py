"""Gives up hosts that no longer report: their queue is taken away, and whatever waited in it is answered HOST_LOST."""

import json
from typing import Any

import redis.asyncio

from contract.hosts import HOST_LOST_TYPE, HOST_TTL_S, TOMBSTONE_TTL_S
from contract.ledger import RESULT_TTL_S
from contract.names import control_queue, host_key, hosts_key, result_key, tombstone_key
from orchestrator.logs import get_logger

log = get_logger(__name__)

BATCH = 500
FORGET_S = 600
"""How long after its last report a host's queue is looked at again: a message may have been on its way there."""

# KEYS: report, queue, its control list, tombstone, hosts. ARGV: queue, tombstone's life, batch, before the id, after the id, result's life, prefix of results,
# forget before. Gives how many messages were answered; -1 when the host lives.
_REAP = """
if redis.call('EXISTS', KEYS[1]) == 1 then return -1 end
redis.call('SET', KEYS[4], '1', 'EX', ARGV[2])
redis.call('DEL', KEYS[3])
local last = redis.call('ZSCORE', KEYS[5], ARGV[1])
if last and tonumber(last) < tonumber(redis.call('TIME')[1]) - tonumber(ARGV[8]) then redis.call('ZREM', KEYS[5], ARGV[1]) end
local answered = 0
while answered < tonumber(ARGV[3]) do
  local message = redis.call('RPOP', KEYS[2])
  if not message then break end
  answered = answered + 1
  local ok, fields = pcall(cjson.decode, message)
  if ok and type(fields) == 'table' and type(fields.headers) == 'table' and type(fields.headers.id) == 'string' then
    local key = ARGV[7] .. fields.headers.id
    local told = ARGV[4] .. cjson.encode(fields.headers.id) .. ARGV[5]
    redis.call('SET', key, told, 'EX', ARGV[6])
    redis.call('PUBLISH', key, told)
    local call = fields.headers.call_key
    if type(call) == 'string' and redis.call('HGET', call, 'state') == 'queued' then redis.call('HSET', call, 'state', 'lost') end
  end
end
return answered
"""


class Reaper:
    """Any orchestrator may reap; the script makes it one act. Raises RedisError and OSError."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._reap = client.register_script(_REAP)

    async def reap(self, queue: str) -> bool:
        """Give the incarnation up, unless it lives; whether it is gone. It can never go on under that name."""
        dep = self._deployment
        keys = [host_key(dep, queue), queue, control_queue(queue), tombstone_key(dep, queue), hosts_key(dep)]
        before, after = _lost_result(queue)
        arguments: list[str | int] = [queue, TOMBSTONE_TTL_S, BATCH, before, after, RESULT_TTL_S, result_key(""), FORGET_S]
        total = 0
        while (answered := int(await self._reap(keys=keys, args=arguments))) > 0:
            total += answered
        if total:
            log.warning("host_reaped", queue=queue, answered=total)
        return answered == 0

    async def sweep(self) -> list[str]:
        """Reap every incarnation that has not reported for a while. Gives those that are gone."""
        seconds, _ = await self._client.time()
        names: Any = await self._client.zrangebyscore(hosts_key(self._deployment), "-inf", seconds - HOST_TTL_S)
        return [queue for queue in (name.decode() for name in names) if await self.reap(queue)]


def _lost_result(queue: str) -> tuple[str, str]:
    """The stored result of a call that was in a dead host's queue, around the task's id."""
    words = f"the host {queue} no longer reports, and the call waited in its queue"
    told = {"exc_type": HOST_LOST_TYPE, "exc_message": [words], "exc_module": "toolcrew"}
    fields = json.dumps({"status": "FAILURE", "result": told, "traceback": None, "children": []})
    return '{"task_id": ', ", " + fields[1:]
