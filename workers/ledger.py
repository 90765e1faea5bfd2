"""The worker's side of the ledger: a call is started once or refused once, whatever a queue repeats. Its end is noted with its result
(workers/celery_edge/result_backend.py)."""

import secrets
from typing import Any

import redis

from contract.calls import ToolCall, ToolContext
from contract.clock import SharedClock
from contract.errors import BrokerUnavailable
from contract.ledger import CALL_TTL_S, CallState, Claim
from contract.names import call_key, place_key

# Of every script: KEYS[1] the call; ARGV[1] its attempt, ARGV[2] how long it is remembered, ARGV[3] a word of this decision, by which one that is sent again,
# because the answer to the first was lost, knows itself. `verdict` tells whether this message may decide about the call, "granted", or not.
_GATE = """
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'claim')
local state, known, attempt = record[1], tonumber(record[2] or '1') or 1e9, tonumber(ARGV[1])
local verdict = 'granted'
if state and known > attempt then verdict = 'superseded'
elseif state and known == attempt and state ~= 'queued' then verdict = 'started'
elseif state and known < attempt and state ~= 'queued' and state ~= 'lost' then verdict = 'started' end
local function note(...)
  redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'claim', ARGV[3], ...)
  redis.call('HDEL', KEYS[1], 'ticket')
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
local is_again = verdict == 'started' and record[3] == ARGV[3]
"""

# KEYS: call, place. ARGV: attempt, ttl, word, holder, deadline, fence, whether a session that moves will do, tool, session, node.
_CLAIM = (
    _GATE
    + """
if is_again and state == 'running' then return {'granted', now} end
if is_again and state == 'forbidden' then return {'expired', now} end
if verdict ~= 'granted' then return {verdict, now} end
if tonumber(now) > tonumber(ARGV[5]) then
  note('state', 'forbidden', 'ended_at', now)
  return {'expired', now}
end
if ARGV[6] ~= '' then
  local place = redis.call('HMGET', KEYS[2], 'fence', 'state')
  if place[1] ~= ARGV[6] or (place[2] ~= 'open' and not (ARGV[7] == '1' and place[2] == 'moving')) then return {'moved', now} end
end
note('state', 'running', 'holder', ARGV[4], 'started_at', now, 'tool', ARGV[8], 'session', ARGV[9], 'node', ARGV[10])
return {'granted', now}
"""
)

# KEYS: call. ARGV: attempt, ttl, word, holder, tool, session, node.
_CONFIRM = (
    _GATE
    + """
if verdict == 'granted' then
  note('state', 'running', 'holder', ARGV[4], 'started_at', now, 'tool', ARGV[5], 'session', ARGV[6], 'node', ARGV[7])
end
return {verdict, now}
"""
)

# ARGV: attempt, ttl, word.
_REFUSE = (
    _GATE
    + """
if is_again and state == 'forbidden' then return {'granted', now} end
if verdict == 'granted' then note('state', 'forbidden', 'ended_at', now) end
return {verdict, now}
"""
)

# KEYS: call. ARGV: ttl. A call that is not known yet may be on its way.
_FORBID = """
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'forbidden' then return 1 end
if state and state ~= 'queued' then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'forbidden', 'ended_at', string.format('%d.%06d', time[1], time[2]))
if not state then redis.call('HSET', KEYS[1], 'attempt', 1) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""


class Ledger:
    """Records of calls in Redis (contract/ledger.py), each changed by one script. Every answer tells the shared clock what Redis's says.

    What becomes of a message of attempt N, by the record that it finds:

    ==================================  ====================================================================================
    no record                           decides: Redis has lost its last second, or somebody else has published the message
    `queued`, attempt N                 decides: the rule
    `queued` or `lost`, attempt < N     decides: Redis has lost what renewed the call, and the earlier attempt was given up
    any other state, attempt < N        STARTED: Redis has lost what renewed the call, and an earlier attempt may have acted; who
                                        waits for the call is told so (orchestrator/dispatch/call_watch.py)
    decided by this very message        the same again: the client has sent it again, because the first answer was lost
    any other state, attempt N          STARTED: a repetition; or forbidden, given up, lost with its host's queue
    attempt > N                         SUPERSEDED
    ==================================  ====================================================================================

    To decide is to start (`claim`) or to refuse (`refuse`). A claim past the call's deadline forbids the call: EXPIRED. A claim for a session that is
    elsewhere by now changes nothing: MOVED. `node`: the worker's name in Celery. A repetition that Redis has forgotten altogether is caught before it comes here (workers/celery_edge/broker_transport.py).
    """

    def __init__(self, client: "redis.Redis", deployment: str, clock: SharedClock, node: str = "") -> None:
        self._deployment = deployment
        self._node = node
        self._client = client
        self._clock = clock
        self._claim = client.register_script(_CLAIM)
        self._confirm = client.register_script(_CONFIRM)
        self._refuse = client.register_script(_REFUSE)
        self._forbid = client.register_script(_FORBID)

    def claim(self, call: ToolCall, context: ToolContext, holder: str) -> Claim:
        """Whether the call may start now, on behalf of `holder`. Raises BrokerUnavailable: then it must not."""
        key = self._key(context.tenant, call.id)
        fence = context.fence if context.session is not None and context.fence is not None else ""
        place = place_key(self._deployment, context.tenant, context.session) if fence and context.session else key
        may_move = int(call.name == "session.open")
        arguments = [holder, repr(context.deadline_at), fence, may_move, call.name, context.session or "", self._node]
        return self._decided(self._claim, [key, place], context.attempt, arguments)

    def confirm(self, call: ToolCall, context: ToolContext, holder: str) -> Claim:
        """Note anew that a call runs which was granted here before: GRANTED when that had been forgotten, wherever its session lives by now. Raises
        BrokerUnavailable."""
        arguments = [holder, call.name, context.session or "", self._node]
        return self._decided(self._confirm, [self._key(context.tenant, call.id)], context.attempt, arguments)

    def refuse(self, call: ToolCall, context: ToolContext) -> Claim:
        """Whether a refusal is the call's answer: GRANTED, and then it will never start. Raises BrokerUnavailable."""
        return self._decided(self._refuse, [self._key(context.tenant, call.id)], context.attempt, [])

    def forbid(self, tenant: str, call_id: str) -> bool:
        """True when the call had not started and never will. Raises BrokerUnavailable."""
        try:
            return bool(self._forbid(keys=[self._key(tenant, call_id)], args=[CALL_TTL_S]))
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis did not take that the call is cancelled ({error}); see that Redis is up") from error

    def holder(self, tenant: str, call_id: str) -> str | None:
        """Who runs the call, as it called itself; None when nobody does. Raises BrokerUnavailable."""
        try:
            state, holder = self._client.hmget(self._key(tenant, call_id), "state", "holder")
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis did not say who runs the call ({error})") from error
        return holder.decode(errors="replace") if state == CallState.RUNNING.encode() and isinstance(holder, bytes) else None

    def _key(self, tenant: str, call_id: str) -> str:
        return call_key(self._deployment, tenant, call_id)

    def _decided(self, script: Any, keys: list[str], attempt: int, arguments: list[Any]) -> Claim:
        try:
            verdict, now = script(keys=keys, args=[attempt, CALL_TTL_S, secrets.token_hex(8), *arguments])
        except redis.RedisError as error:
            raise BrokerUnavailable(f"the call was not run: Redis did not take its claim ({error}); see that Redis is up") from error
        self._clock.learn(float(now))
        return Claim(verdict.decode())
