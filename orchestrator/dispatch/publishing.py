"""Puts calls into their queues: one script a call, which checks that it may go there, notes it in the ledger and pushes its message."""

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis.asyncio
from redis.exceptions import NoScriptError, RedisError, ResponseError

from contract.clock import SharedClock
from contract.errors import BrokerUnavailable
from contract.ledger import CALL_TTL_S
from contract.names import call_key, host_key, place_key, tenant_sessions_key
from contract.session_locations import LOCATION_MARGIN_S
from orchestrator.dispatch.task_messages import build_message
from orchestrator.dispatch.transport import Delivery, NotSent
from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

BATCH = 200
"""Calls in one pipeline."""
SEND_PATIENCE_S = 3.0
"""How long a call waits for a Redis that does not answer, while it is certain that it was not sent."""
RETRY_S = (0.05, 0.1, 0.2, 0.5)
CLOCK_ROUND_TRIP_S = 0.5
"""What Redis says of the time is old after a longer way."""

# KEYS: call, queue; for a session's call its place, the queue's host, and the tenant's sessions. ARGV: attempt, nonce, tool, message, task, ticket; for a
# session's call session, fence.
# Gives what became of it, and Redis's time, in one line.
_PUBLISH = """
local time = redis.call('TIME')
local function answer(word) return {ok = word .. ' ' .. time[1] .. ' ' .. time[2]} end
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'nonce')
if record[3] == ARGV[2] then return answer('sent') end
local place
if KEYS[3] then
  place = redis.call('HMGET', KEYS[3], 'state', 'queue', 'fence', 'ttl_s')
  local is_there = place[1] == 'open' or place[1] == 'moving'
  if not is_there or place[2] ~= KEYS[2] or place[3] ~= ARGV[8] then return answer('moved') end
  if redis.call('EXISTS', KEYS[4]) == 0 then return answer('host_lost') end
end
local first = ARGV[1] == '1'
if first and record[1] then return answer('duplicate') end
if not first then
  local was_sent = record[3] and string.match(record[3], '^%d+') == ARGV[1]
  if record[1] ~= 'queued' or record[2] ~= ARGV[1] or was_sent then return answer('duplicate') end
end
redis.call('LPUSH', KEYS[2], ARGV[4])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', 'queued', 'attempt', ARGV[1], 'tool', ARGV[3], 'session', ARGV[7] or '', 'queue', KEYS[2],
  'queued_at', time[1] .. '.' .. string.format('%06d', time[2]), 'nonce', ARGV[2], 'task', ARGV[5], 'ticket', ARGV[6])
redis.call('EXPIRE', KEYS[1], CALL_TTL_S)
if place then
  local life = math.ceil(tonumber(place[4]) or 0) + LOCATION_MARGIN_S
  redis.call('EXPIRE', KEYS[3], life)
  if redis.call('TTL', KEYS[5]) < life then redis.call('EXPIRE', KEYS[5], life) end
end
return answer('sent')
""".replace("CALL_TTL_S", str(CALL_TTL_S)).replace("LOCATION_MARGIN_S", str(LOCATION_MARGIN_S))
_PUBLISH_SHA = hashlib.sha1(_PUBLISH.encode(), usedforsecurity=False).hexdigest()

# KEYS: call. ARGV: attempt, how long a call is remembered. Gives the state that the call was in; `superseded` when another attempt decides.
# An earlier attempt that was given up is there when Redis has forgotten what renewed it: as for a claim (workers/ledger.py) ours decides.
_FORBID = """
local record = redis.call('HMGET', KEYS[1], 'state', 'attempt')
local known, attempt = tonumber(record[2] or '1') or 1e9, tonumber(ARGV[1])
local is_forgotten = known < attempt and (record[1] == 'queued' or record[1] == 'lost')
if record[1] and not is_forgotten then
  if known ~= attempt then return 'superseded' end
  if record[1] ~= 'queued' then return record[1] end
end
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'forbidden', 'attempt', ARGV[1], 'ended_at', time[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 'queued'
"""

_REFUSALS: Mapping[str, Literal["host_lost", "moved", "duplicate"]] = {"host_lost": "host_lost", "moved": "moved", "duplicate": "duplicate"}


@dataclass(frozen=True)
class _Letter:
    """One call on its way to Redis. `command`: the script's keys and arguments."""

    command: tuple[Any, ...]
    verdict: "asyncio.Future[str]"


class _Unanswered(Exception):
    """Redis did not say what became of a letter. `may_be_sent`: it was written to the connection."""

    def __init__(self, cause: Exception, *, may_be_sent: bool) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.may_be_sent = may_be_sent


class Publisher:
    """Publishes what comes in one turn of the event loop, or while Redis has not answered yet, in one pipeline.

    A publish that got no answer is repeated, which sends nothing twice: the record knows who made it.
    """

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, clock: SharedClock) -> None:
        # Its connections are used by themselves: only so it is certain whether anything was sent, and no layer above sends it again.
        self._pool: Any = client.connection_pool
        self._deployment = deployment
        self._clock = clock
        self._connection: Any = None
        self._is_closed = False
        self._letters: list[_Letter] = []
        self._sending: asyncio.Task[None] | None = None
        self._forbid = client.register_script(_FORBID)

    async def publish(self, delivery: Delivery, task_id: str) -> None:
        """Returns when the call is in its queue.

        Raises NotSent; BrokerUnavailable when Redis does not answer for SEND_PATIENCE_S, or refuses it. Once it may have been sent that is found out, for
        as long as it takes: until its deadline the call may still start.
        """
        command = self._command(delivery, task_id)
        began = asyncio.get_running_loop().time()
        attempt, may_be_sent = 0, False
        while True:
            try:
                verdict = await self._post(command)
                break
            except _Unanswered as unanswered:
                may_be_sent = may_be_sent or unanswered.may_be_sent
                waited_s = asyncio.get_running_loop().time() - began
                if not may_be_sent and waited_s > SEND_PATIENCE_S:
                    raise BrokerUnavailable(f"the call was not sent: Redis does not answer ({unanswered})") from unanswered
            except BrokerUnavailable as refused:
                # What was refused is only the repetition: the first may lie in the queue.
                if not may_be_sent or self._is_closed:
                    raise
                log.warning("publish_not_known", call=delivery.call_id, error=str(refused))
            if may_be_sent and self._clock() > delivery.start_by:
                return  # whoever awaits it forbids it, or hears that it runs
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        if verdict in _REFUSALS:
            raise NotSent(_REFUSALS[verdict])

    async def forbid(self, delivery: Delivery) -> str:
        """See to it that a call that nobody has taken is never started. Gives its state until now: `queued` when it was waiting and is forbidden now,
        `superseded` when the ledger speaks of another attempt.

        Raises BrokerUnavailable.
        """
        key = call_key(self._deployment, delivery.tenant, delivery.call_id)
        try:
            state = await self._forbid(keys=[key], args=[delivery.attempt, CALL_TTL_S])
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not say whether the call has started ({error})") from error
        return state.decode() if isinstance(state, bytes) else str(state)

    async def aclose(self) -> None:
        """Stop sending; whoever still waits for it gets BrokerUnavailable."""
        self._is_closed = True
        if self._sending is not None:
            await cancel_all((self._sending,))
        await self._give_back()
        _fail(self._letters, _Unanswered(ConnectionError("the client was closed"), may_be_sent=False))

    def _command(self, delivery: Delivery, task_id: str) -> tuple[Any, ...]:
        call = call_key(self._deployment, delivery.tenant, delivery.call_id)
        message, keys = build_message(delivery, task_id, call), [call, delivery.queue]
        # A random word is wanted that is another each time, not one that nobody can guess.
        nonce = f"{delivery.attempt}:{random.getrandbits(64):x}"
        arguments: list[Any] = [delivery.attempt, nonce, delivery.task.removeprefix("tool."), message, task_id, delivery.ticket]
        if delivery.sticky is not None:
            session = delivery.sticky.session
            keys += [place_key(self._deployment, delivery.tenant, session), host_key(self._deployment, delivery.queue)]
            keys.append(tenant_sessions_key(self._deployment, delivery.tenant))
            arguments += [session, delivery.sticky.fence]
        return (len(keys), *keys, *arguments)

    async def _post(self, command: tuple[Any, ...]) -> str:
        """What became of one letter. Raises _Unanswered, BrokerUnavailable."""
        if self._is_closed:
            raise BrokerUnavailable("the client was closed while the call was sent: it may or may not act")
        letter = _Letter(command, asyncio.get_running_loop().create_future())
        self._letters.append(letter)
        if self._sending is None or self._sending.done():
            self._sending = begin_shared(self._send_all(), "publish")
        return await letter.verdict

    async def _send_all(self) -> None:
        while self._letters:
            # Whoever was cancelled before is not sent at all.
            letters = [letter for letter in self._letters[:BATCH] if not letter.verdict.done()]
            del self._letters[:BATCH]
            try:
                if letters:
                    await self._send(letters)
            finally:
                _fail(letters, _Unanswered(ConnectionError("sending was broken off"), may_be_sent=True))

    async def _send(self, letters: Sequence[_Letter]) -> None:
        try:
            connection = await self._open_connection()
        except (RedisError, OSError) as error:
            _fail(letters, _Unanswered(error, may_be_sent=False))
            return
        is_clean = False
        try:
            await self._exchange(connection, letters)
            is_clean = True
        except (RedisError, OSError) as error:
            _fail(letters, _Unanswered(error, may_be_sent=True))
        finally:
            if not is_clean:
                # An answer that is still on its way would be taken for that to the next command.
                await self._give_back()

    async def _open_connection(self) -> Any:
        """The connection that is kept, for to get one from the pool costs as much as to publish. One that has ended, as far as is known, is replaced."""
        if self._connection is not None and (not self._connection.is_connected or await self._connection.can_read()):
            await self._give_back()
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        return self._connection

    async def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _exchange(self, connection: Any, letters: Sequence[_Letter]) -> None:
        """Send a batch and read its answers. An error of the connection leaves the rest unanswered."""
        unknown = await self._ask(connection, letters, "EVALSHA", _PUBLISH_SHA)
        if unknown:
            # Redis has started anew, and knows no scripts.
            await self._ask(connection, unknown, "EVAL", _PUBLISH)

    async def _ask(self, connection: Any, letters: Sequence[_Letter], name: str, script: str) -> list[_Letter]:
        """The letters for which Redis did not know the script."""
        began = asyncio.get_running_loop().time()
        await connection.send_packed_command(connection.pack_commands([(name, script, *letter.command) for letter in letters]))
        unknown: list[_Letter] = []
        for letter in letters:
            try:
                word, seconds, micros = (await connection.read_response()).decode().split()
            except NoScriptError:
                unknown.append(letter)
            except ResponseError as error:
                _fail([letter], BrokerUnavailable(f"the call was not sent: Redis refuses it ({error})"))
            else:
                if asyncio.get_running_loop().time() - began < CLOCK_ROUND_TRIP_S:
                    self._clock.learn(int(seconds) + int(micros) / 1e6)
                if not letter.verdict.done():
                    letter.verdict.set_result(word)
        return unknown


def _fail(letters: Sequence[_Letter], error: Exception) -> None:
    for letter in letters:
        if not letter.verdict.done():
            letter.verdict.set_exception(error)
