"""What becomes of calls in the ledger when their worker is gone: sent again, or given up."""

from typing import Any

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ErrorCode
from contract.ledger import CallRecord, CallState, parse_record
from contract.names import call_key
from orchestrator.dispatch.task_messages import describe_sender
from telemetry.logs import get_logger

log = get_logger(__name__)

# KEYS: call. ARGV: the attempt as known, the new state, the new attempt, the error code. Gives the state that the record has now.
_CHANGE = """
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'killed')
if not record[1] then return '' end
if record[3] and ARGV[2] == 'queued' then return 'forbidden' end
local has_ended = record[1] == 'done' and ARGV[2] ~= 'queued'
if record[2] ~= ARGV[1] or record[1] == 'forbidden' or has_ended then return record[1] end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'attempt', ARGV[3])
if ARGV[2] == 'queued' then
  redis.call('HDEL', KEYS[1], 'ended_at', 'noticed_by', 'reason', 'code')
elseif ARGV[4] ~= '' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'code', ARGV[4])
  redis.call('HSETNX', KEYS[1], 'ended_at', string.format('%d.%06d', time[1], time[2]))
end
return ARGV[2]
"""

# KEYS: call. ARGV: the attempt and the state as known, the new state, the process that noticed the loss, the reason. 1 when it was so.
_LOSE = """
local record = redis.call('HMGET', KEYS[1], 'attempt', 'state')
if record[1] ~= ARGV[1] or record[2] ~= ARGV[2] then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'ended_at', string.format('%d.%06d', time[1], time[2]), 'noticed_by', ARGV[4], 'reason', ARGV[5])
return 1
"""


class CallLedger:
    """The records of calls as the orchestrator changes them. Raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._change = client.register_script(_CHANGE)
        self._lose = client.register_script(_LOSE)

    async def find(self, tenant: str, call_id: str) -> CallRecord | None:
        """What is known of a call; None for nothing."""
        try:
            fields: Any = await self._client.hgetall(call_key(self._deployment, tenant, call_id))
            return parse_record(fields)
        except ValidationError as error:
            log.error("call_record_unreadable", call=call_id, error=str(error))
            return None
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not say what became of the call ({error})") from error

    async def lose(self, tenant: str, call_id: str, attempt: int, expected: CallState, reason: str) -> bool:
        """Mark the call as lost, with the time, this process and the reason. Return False if its state is not `expected`."""
        key = call_key(self._deployment, tenant, call_id)
        try:
            return bool(await self._lose(keys=[key], args=[attempt, expected.value, CallState.LOST.value, describe_sender(), reason]))
        except (RedisError, OSError) as error:
            raise _not_taken(error) from error

    async def renew(self, tenant: str, call_id: str, attempt: int) -> bool:
        """Let a lost call be sent again as the next attempt: whoever had it can neither start nor finish it from then on. Also one that
        has ended, but whose result was lost. False when it was forbidden, or sent again by somebody else."""
        return await self._set(tenant, call_id, attempt, CallState.QUEUED, attempt + 1) == CallState.QUEUED

    async def give_up(self, tenant: str, call_id: str, attempt: int, state: CallState, code: ErrorCode) -> CallState | None:
        """Mark the call as ended with `code`: no process waits for it. Return its state, which is `done` if it ended normally meanwhile."""
        told = await self._set(tenant, call_id, attempt, state, attempt, code.value)
        return CallState(told) if told else None

    async def _set(self, tenant: str, call_id: str, attempt: int, state: CallState, new_attempt: int, code: str = "") -> str:
        key = call_key(self._deployment, tenant, call_id)
        try:
            told = await self._change(keys=[key], args=[attempt, state.value, new_attempt, code])
        except (RedisError, OSError) as error:
            raise _not_taken(error) from error
        return told.decode() if isinstance(told, bytes) else str(told)


def describe_loss(record: CallRecord) -> str:
    """Return what is known of a lost call, for its caller. Models read it, so it has none of the record's free text, which is not signed."""
    return "the worker that ran the call was lost" if record.holder else "the host of the call was lost before it began the call"


def _not_taken(error: Exception) -> BrokerUnavailable:
    return BrokerUnavailable(f"Redis did not take what became of the call ({error})")
