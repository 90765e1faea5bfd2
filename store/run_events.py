"""The events of a program's run in a stream of Redis: added by whoever works the run, read a page at a time."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from store.hosted_records import STANDING
from store.run_keys import RUN_TTL_S, run_events_key, run_key

MAX_EVENTS, MAX_STREAM_BYTES = 5000, 2 * 1024 * 1024
"""What a run's stream holds; of more the oldest go."""
MAX_EVENT_BYTES = 16 * 1024
PAGE = 16
START = "0-0"
_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")
_STEPS_OF_CUT = (4000, 1000, 200, 40)

# KEYS: run, events. ARGV: claim, number of the first, last step that is told whole ('' when no more is), how many questions are open, time to live, how
# many events are kept, how many bytes of them, then the events. Gives `told`, or `taken`: another process has the run, or it has ended.
_TELL = """
local told = redis.call('HMGET', KEYS[1], 'claim', 'told', 'event_bytes')
if told[1] ~= ARGV[1] then return 'taken' end
local first, bytes = tonumber(ARGV[2]), tonumber(told[3] or '0')
local known = tonumber(told[2] or '0')
for at = 8, #ARGV do
  if first + at - 8 >= known then
    redis.call('XADD', KEYS[2], '*', 'e', ARGV[at])
    bytes = bytes + #ARGV[at]
  end
end
local count, gone = redis.call('XLEN', KEYS[2]), nil
while count > tonumber(ARGV[6]) or bytes > tonumber(ARGV[7]) do
  local oldest = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 20)
  if #oldest == 0 then
    -- The stream was lost, and what is counted of it.
    bytes = 0
    break
  end
  for _, one in ipairs(oldest) do
    if count > tonumber(ARGV[6]) or bytes > tonumber(ARGV[7]) then
      bytes, count, gone = bytes - #one[2][2], count - 1, one[1]
      redis.call('XDEL', KEYS[2], gone)
    end
  end
end
if gone then redis.call('HSET', KEYS[1], 'trimmed', gone) end
redis.call('HSET', KEYS[1], 'told', first + #ARGV - 7, 'event_bytes', bytes, 'asking', ARGV[4])
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'told_step', ARGV[3]) end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 'told'
"""

Entry = tuple[str, str]
"""An event's id, and its JSON."""


@dataclass(frozen=True)
class Telling:
    """Some events of one run. `first`: how many its holder has told before; `told_step`: the last step that is told whole by then; None: no other."""

    tenant: str
    run: str
    claim: str
    first: int
    events: Sequence[str]
    told_step: int | None = None
    asking: int = 0


@dataclass(frozen=True)
class EventPage:
    """Events in order. `tip`: the id of the last one that the stream has; `is_over`: there are none after these, and none will come."""

    entries: tuple[Entry, ...]
    tip: str
    is_over: bool


class ToldEvents:
    """Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._tell = client.register_script(_TELL)

    def key(self, tenant: str, run: str) -> str:
        return run_events_key(self._deployment, tenant, run)

    async def begun(self, tenant: str, run: str) -> tuple[int, bool]:
        """The last step that is told whole, 0 for none; and whether anything is told."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hget(run_key(self._deployment, tenant, run), "told_step")
                pipe.exists(self.key(tenant, run))
                step, has_any = await pipe.execute()
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not say what is told of the run ({error})") from error
        return int(step or 0), bool(has_any)

    async def tell(self, tellings: Sequence[Telling]) -> list[bool]:
        """Add events; of each run whether it is still its teller's. Said again after an answer that was lost it adds nothing twice."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for one in tellings:
                    keys = [run_key(self._deployment, one.tenant, one.run), self.key(one.tenant, one.run)]
                    step = "" if one.told_step is None else one.told_step
                    told = [one.claim, one.first, step, one.asking, RUN_TTL_S, MAX_EVENTS, MAX_STREAM_BYTES, *one.events]
                    await self._tell(keys=keys, args=told, client=pipe)
                return [answer == b"told" for answer in await pipe.execute()]
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not take the events of runs ({error})") from error

    async def read(self, tenant: str, run: str, after: str) -> EventPage:
        """The next events after an id. What is not kept any more is told by one event. Raises ToolFailure(FILE_NOT_FOUND)."""
        key = self.key(tenant, run)
        try:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.xrange(key, min=f"({after}", count=PAGE)
                pipe.xrevrange(key, count=1)
                pipe.hmget(run_key(self._deployment, tenant, run), "batch", "state", "trimmed", "last_event", "end")
                found, last, fields = await pipe.execute()
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not tell the events of the run ({error})") from error
        tip = last[0][0].decode() if last else START
        entries = [(id_.decode(), entry[b"e"].decode()) for id_, entry in found]
        if fields[0] is None and last:
            # Redis has lost the record, and has told that in the last event.
            return EventPage(tuple(entries), tip, is_over=not entries or entries[-1][0] == tip)
        if fields[0] != STANDING.encode():
            raise not_found(run)
        told = dict(zip(("state", "trimmed", "last_event", "end"), (value.decode() if value else "" for value in fields[1:]), strict=True))
        return _page(run, after, entries, tip, told)

    async def last(self, tenant: str, run: str) -> str:
        """The JSON of the last event that is kept of a tenant's run; "" for none."""
        try:
            found: Any = await self._client.xrevrange(self.key(tenant, run), count=1)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not tell the events of the run ({error})") from error
        return found[0][1][b"e"].decode() if found else ""


def _page(run: str, after: str, found: list[Entry], tip: str, told: Mapping[str, str]) -> EventPage:
    trimmed, last = told["trimmed"], told["last_event"]
    entries = [(trimmed, _missed(run))] if trimmed and is_before(after, trimmed) else []
    entries += found
    if told["state"] != "ended":
        return EventPage(tuple(entries), tip, is_over=False)
    if not last or not is_before(after, last):
        return EventPage(tuple(entries), tip, is_over=not found)
    if not found:
        # The stream has gone, a day after the end or with what Redis lost: how the run ended is in its record.
        place = _id_before(last)
        entries = [(place, _missed(run))] if is_before(after, place) else []
        entries.append((last, told["end"]))
    return EventPage(tuple(entries), tip, is_over=entries[-1][0] == last)


def _missed(run: str) -> str:
    return build_event({"type": "EventsMissed", "run": run})


def not_found(run: str) -> ToolFailure:
    return ToolFailure(ErrorCode.FILE_NOT_FOUND, f"there is no run {run[:80]}: list those that there are; runs are remembered for 30 days")


def parse_id(text: str) -> str:
    """The id of an event as it was told; "" for the beginning. Raises ToolFailure(INVALID_ARGUMENTS)."""
    if not text:
        return START
    parts = _ID.fullmatch(text)
    # Redis cannot look for what is after the last id that there can be.
    if parts is None or any(int(part) >= 2**64 for part in parts.groups(default="0")) or set(parts.groups()) == {str(2**64 - 1)}:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, "this is no id of an event: give one as it came with an event, or none to begin with the first"
        )
    return f"{int(parts[1])}-{int(parts[2] or 0)}"


def is_before(one: str, other: str) -> bool:
    """Of two ids of events."""
    return _place(one) < _place(other)


def _place(event: str) -> tuple[int, int]:
    milliseconds, _, number = event.partition("-")
    return int(milliseconds), int(number or 0)


def _id_before(event: str) -> str:
    milliseconds, number = _place(event)
    return f"{milliseconds}-{number - 1}" if number else f"{milliseconds - 1}-{2**64 - 1}"


def build_event(told: dict[str, Any]) -> str:
    """The JSON of an event. Of a large one the long texts are shortened, and it says so (`is_cut`): results and transcript have the whole."""
    text = _dump(told)
    for limit in _STEPS_OF_CUT:
        if len(text.encode()) <= MAX_EVENT_BYTES:
            return text
        text = _dump({**_shorten(told, limit), "is_cut": True})
    if len(text.encode()) <= MAX_EVENT_BYTES:
        return text
    return _dump({name: told[name] for name in ("type", "run", "at", "attempt") if name in told} | {"is_cut": True})


def _dump(told: dict[str, Any]) -> str:
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":"), default=str)
    # Halves of surrogate pairs cannot be written down.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shorten(value: Any, limit: int) -> Any:
    match value:
        case str() if len(value) > limit:
            return value[:limit]
        case dict():
            return {str(name)[:limit]: _shorten(inner, limit) for name, inner in value.items()}
        case list() | tuple():
            return [_shorten(inner, limit) for inner in value]
        case _:
            return value
