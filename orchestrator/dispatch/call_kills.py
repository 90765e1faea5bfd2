"""Orders to end a call, given anywhere: noted in its record, and heard by the program that makes the call, wherever it waits."""

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from pydantic import Field, ValidationError
from redis.exceptions import RedisError

from contract.calls import Identifier, Record, ToolResult
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.ledger import CALL_TTL_S, CallState
from contract.names import audit_key, call_key, kills_key
from orchestrator.dispatch.transport import DeliveryFailed
from store.audit import AUDIT_LUA
from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_S = 0.5
"""How often a program with calls on their way looks whether one of them is to be ended."""
REMEMBERED_S = 60
MAX_REMEMBERED = 1000
MAX_REASON_CHARS = 500

_KILL = (
    AUDIT_LUA
    + f"""
-- KEYS: call, orders, audit. ARGV: the order, what is noted in the call, the entry of the audit, '1' when whoever makes the call says so: then one that has
-- no record yet waits for its slot. Gives the state that the call has then; '' when nothing is known of it, and whoever makes it is still to hear of it.
local record = redis.call('HMGET', KEYS[1], 'state', 'killed')
local time, state = redis.call('TIME'), record[1]
local now = string.format('%d.%06d', time[1], time[2])
local function note()
  redis.call('ZADD', KEYS[2], now, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - {REMEMBERED_S})
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, {-1 - MAX_REMEMBERED})
  redis.call('EXPIRE', KEYS[2], {2 * REMEMBERED_S})
end
if not state and ARGV[4] ~= '1' then
  note()
  return ''
end
if not state or state == 'queued' then
  audit(KEYS[3], ARGV[3])
  redis.call('HSET', KEYS[1], 'state', 'forbidden', 'killed', ARGV[2], 'code', 'CANCELLED', 'ended_at', now)
  if not state then redis.call('HSET', KEYS[1], 'attempt', 1) end
  redis.call('EXPIRE', KEYS[1], {CALL_TTL_S})
  note()
  return 'forbidden'
end
if (state == 'running' or state == 'lost') and not record[2] then
  audit(KEYS[3], ARGV[3])
  redis.call('HSET', KEYS[1], 'killed', ARGV[2])
end
return state
"""
)


class KillOrder(Record):
    """Who wants a call ended, and why. `entry`: of the audit, written by whoever carries the order out."""

    tenant: Identifier
    call: Identifier
    by: str = Field(max_length=128)
    reason: str = Field(default="", max_length=MAX_REASON_CHARS)
    entry: str = ""

    def told(self) -> str:
        """As the call's caller reads it."""
        return f"the call was killed by {self.by}" + (f": {self.reason}" if self.reason else "")


class CallKills:
    """The orders of a deployment."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._script = client.register_script(_KILL)

    async def order(self, order: KillOrder, *, is_ours: bool = False) -> CallState | None:
        """Note the order; it may be given again. The state that the call has then: FORBIDDEN, when it never begins; None when nothing is known of it, so
        that only the program that makes it (`is_ours`), if there is one, can say so. Raises BrokerUnavailable."""
        keys = [call_key(self._deployment, order.tenant, order.call), kills_key(self._deployment), audit_key(self._deployment)]
        try:
            told = await self._script(keys=keys, args=[order.model_dump_json(), order.told(), order.entry, int(is_ours)])
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"the call was not killed: Redis does not take the order ({error}); see that it is up") from error
        return CallState(told.decode()) if told else None

    async def recent(self, after: float) -> list[tuple[float, KillOrder]]:
        """The orders of the last minute that were given after that instant, each with its own. Raises BrokerUnavailable."""
        try:
            rows: Any = await self._client.zrangebyscore(kills_key(self._deployment), f"({after!r}", "+inf", withscores=True)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not say which calls are to be ended ({error})") from error
        return [(float(at), order) for text, at in rows if (order := _parsed(text)) is not None]

    async def told(self, tenant: str, call_id: str) -> tuple[str, bool]:
        """Who killed a call and why, as a sentence, and whether it never began; "" when nobody did, or Redis does not say."""
        try:
            fields: Any = await self._client.hmget(call_key(self._deployment, tenant, call_id), "killed", "state")
        except (RedisError, OSError) as error:
            log.warning("kill_not_known", call=call_id, error=str(error))
            return "", False
        told, state = (field.decode(errors="replace") if isinstance(field, bytes) else "" for field in fields)
        return told, state == CallState.FORBIDDEN


@dataclass
class _Underway:
    """A call that this program makes. `killed`: why its task was told to stop."""

    task: "asyncio.Task[Any]"
    cancelling: int
    killed: str = ""


class KillWatch:
    """Ends the calls of this program that are to be ended and have not begun; those that run are ended where they run, and their results come as ever."""

    def __init__(self, kills: CallKills) -> None:
        self._kills = kills
        self._calls: dict[tuple[str, str], _Underway] = {}
        self._watch: asyncio.Task[None] | None = None
        self._seen_at = 0.0

    @contextmanager
    def over(self, tenant: str, call_id: str) -> Iterator[None]:
        """While the block makes the call. Raises ToolFailure(CANCELLED) from whatever it waits for when the call is to be ended and has not begun."""
        task = asyncio.current_task()
        key = (tenant, call_id)
        if task is None or key in self._calls:
            # The id is in use: that call is the one that is meant.
            yield
            return
        underway = self._calls[key] = _Underway(task, task.cancelling())
        if self._watch is None:
            self._watch = begin_shared(self._run(), "kills")
        try:
            yield
        except asyncio.CancelledError:
            if underway.killed and task.uncancel() <= underway.cancelling:
                raise _never_run(underway.killed) from None
            raise
        finally:
            del self._calls[key]

    async def watched(self, tenant: str, call_id: str, work: Awaitable[ToolResult]) -> ToolResult:
        """The result of the call that `work` makes; of one that was killed it says by whom and why. Raises as `work` does."""
        try:
            with self.over(tenant, call_id):
                result = await work
        except DeliveryFailed as failed:
            await self._explain(tenant, call_id, failed)
            raise
        return await self._explained(tenant, result)

    async def _explained(self, tenant: str, result: ToolResult) -> ToolResult:
        """The result, telling who killed the call, if somebody did."""
        was_ended = result.metadata.get("cancelled") is True
        if result.error_code is not ErrorCode.CANCELLED and not was_ended:
            return result
        told, _ = await self._kills.told(tenant, result.call_id)
        if not told:
            return result
        words = f"{told}; {result.error or 'its processes were ended'}"
        return result.model_copy(update={"success": False, "error_code": ErrorCode.CANCELLED, "error": words})

    async def _explain(self, tenant: str, call_id: str, failed: DeliveryFailed) -> None:
        """Raises what tells of the kill instead of the failure, when that is what came of one; whether the call may have acted is told as before."""
        told, has_never_begun = await self._kills.told(tenant, call_id)
        if has_never_begun and told:
            raise _never_run(told) from failed
        if told:
            raise DeliveryFailed(failed.code, f"{told}; {failed.message}") from failed

    async def aclose(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            await cancel_all((self._watch,))

    async def look(self) -> None:
        """One round. Raises BrokerUnavailable."""
        for at, order in await self._kills.recent(self._seen_at):
            underway = self._calls.get((order.tenant, order.call))
            if underway is not None and not underway.killed:
                state = await self._kills.order(order, is_ours=True)
                if state is CallState.FORBIDDEN and self._calls.get((order.tenant, order.call)) is underway:
                    underway.killed = order.told()
                    underway.task.cancel()
            self._seen_at = max(self._seen_at, at)

    async def _run(self) -> None:
        """As long as there are calls: one that is over soon costs no look at all."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if not self._calls:
                    return
                try:
                    await self.look()
                except BrokerUnavailable as error:
                    log.warning("kills_not_heard", error=str(error))
        finally:
            self._watch = None
            # What is begun later may have been killed before: a run that goes on elsewhere makes its call again.
            self._seen_at = 0.0


def _never_run(told: str) -> ToolFailure:
    return ToolFailure(ErrorCode.CANCELLED, f"{told}; it had not begun, and was not run")


def _parsed(text: bytes) -> KillOrder | None:
    try:
        return KillOrder.model_validate_json(text)
    except ValidationError as error:
        log.error("kill_order_unreadable", error=str(error.errors(include_url=False, include_input=False)[0]["msg"]))
        return None
