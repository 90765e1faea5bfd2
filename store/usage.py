"""Used resources of tenants by hour, and of sessions.

Invariant: every amount counts exactly once. sandboxd reports the totals of a session, never increments. A script adds
the difference to the totals that were counted before, and stores the new ones in the same step. Repeated scripts, late
results and killed workers therefore change no sum. Tokens are counted in the script that adds a reply to the log of
its run, which adds every reply once.
"""

import math
import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolcrew.contract.calls import SessionUsage
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.file_ids import KEEP_S
from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.names import location_key, tenant_key
from toolcrew.contract.session_spec import MAX_TTL_S
from toolcrew.contract.session_views import By
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.scripts import Script

DAY_S, HOUR_S = 24 * 3600, 3600
USAGE_TTL_S = 400 * DAY_S
SESSION_USAGE_TTL_S = int(MAX_TTL_S) + DAY_S
STORED_TTL_S = int(KEEP_S) + 2 * DAY_S
"""Lifetime of the records of stored files that the store deletes by their age, in seconds."""
REPLIES = "replies:"
"""Field of a session's usage hash for the replies of models. The other fields are names of meters, which contain no
colon.
"""
AT_ONCE = 500
MAX_DAYS: dict["By", int] = {"hour": 31, "day": 400}
"""Longest time that one report may cover, in days: for reports by hour, and for reports by day."""
MAX_AMOUNT = 10**12
"""Limit of an amount of one reply. The server of a model may report any number."""
UNITS = {"cpu_us": 1e6, "sandbox_us": 1e6, "cost_millionths": 1e6}
"""Name of an amount -> factor between the unit of reports and the smaller unit in Redis, which stores whole numbers
only.
"""
TOTAL = ":total"
"""Field of the records of stored files for the sum of their bytes. No id contains a colon."""
AMOUNTS = (
    *("calls", "cpu_us", "read_bytes", "written_bytes", "network_bytes", "sandbox_us"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "cost_millionths", "stored_bytes"),
    "stream_bytes",
)
"""Names of the amounts that are stored for each hour and each session, in their order in Redis."""
_TIMED_ID = re.compile(r"(file|artifacts|auto)-([0-9a-f]{8,12})-")
"""The beginning of the id of a stored file that contains its creation time."""
_COUNTS = (len(AMOUNTS) - 1, len(AMOUNTS))
_PACKED = {struct.calcsize(f">{count}d"): struct.Struct(f">{count}d") for count in _COUNTS}
"""Size -> binary format in which Redis stores the amounts of an hour or of a session. Whole numbers up to 2**53 are
exact. Without the last amount if it is 0: the release before it reads no other format.
"""

# All amounts of an hour are one packed field. A field for each amount would take more of Redis's time than the rest of
# the script that stores a result, and so would numbers as text.
USAGE_LUA = f"""
local usage_time = redis.call('TIME')
-- Returns the numbers of AMOUNTS in a field of a hash, and whether the field is there.
local function read_usage(key, field)
  local packed = redis.call('HGET', key, field)
  local count = packed and #packed / 8
  if count ~= {_COUNTS[0]} and count ~= {_COUNTS[1]} then return {{{", ".join("0" * len(AMOUNTS))}}}, false end
  local amounts = {{struct.unpack('>' .. string.rep('d', count), packed)}}
  -- The position behind the last amount follows the amounts.
  if count == {_COUNTS[0]} then amounts[{_COUNTS[1]}] = 0 end
  return amounts, true
end
local function write_usage(key, field, amounts)
  local count = amounts[{_COUNTS[1]}] == 0 and {_COUNTS[0]} or {_COUNTS[1]}
  redis.call('HSET', key, field, struct.pack('>' .. string.rep('d', count), unpack(amounts)))
end
local function add_usage(key, field, added)
  local amounts, is_there = read_usage(key, field)
  for i, amount in ipairs(added) do amounts[i] = amounts[i] + amount end
  write_usage(key, field, amounts)
  return is_there
end
-- Adds to an hour. `prefix`: of the keys of the tenant's days. `at`: a time in the hour; nil for now.
local function add_to_hour(prefix, added, at)
  at = at or tonumber(usage_time[1])
  local key, hour = prefix .. math.floor(at / {DAY_S}), math.floor(at / {HOUR_S}) % 24
  if not add_usage(key, hour, added) then redis.call('EXPIRE', key, {USAGE_TTL_S}) end
end
-- Adds the tokens of a reply of a model, and their cost; negative amounts correct an estimate. `session`: key of the
-- usage of the run's session, or false. `at`: the time at which they count; 0 for now. Returns the time.
local function count_reply(prefix, session, prompt, completion, cached, cost, at)
  at = tonumber(at) > 0 and tonumber(at) or tonumber(usage_time[1])
  local added = {{0, 0, 0, 0, 0, 0, prompt, completion, cached, cost, 0}}
  if tonumber(prompt) == 0 and tonumber(completion) == 0 and tonumber(cached) == 0 and tonumber(cost) == 0 then
    return at
  end
  add_to_hour(prefix, added, at)
  if session then
    add_usage(session, '{REPLIES}', added)
    redis.call('EXPIRE', session, {SESSION_USAGE_TTL_S})
  end
  return at
end
-- Adds calls, their stored bytes, and what the totals of a session exceed those that its meter's field has.
-- `meter`: '' for none. `totals`: text with CPU time, three numbers of bytes, time, and bytes of streams.
local function count_usage(prefix, session, meter, totals, calls, stored)
  local added = {{calls, 0, 0, 0, 0, 0, 0, 0, 0, 0, stored, 0}}
  if meter ~= '' then
    local counted, is_there = read_usage(session, meter)
    local at = 1
    for text in string.gmatch(totals, '%d+') do
      at = at < 6 and at + 1 or #added
      added[at] = math.max(text - counted[at], 0)
    end
    for i, amount in ipairs(added) do counted[i] = counted[i] + amount end
    write_usage(session, meter, counted)
    -- A result need not extend the lifetime, because the reports between calls do.
    if calls == 0 or not is_there then redis.call('EXPIRE', session, {SESSION_USAGE_TTL_S}) end
  end
  add_to_hour(prefix, added)
end
-- Records a file in a store, or removes its record if `bytes` is ''. Returns by how much the stored bytes grow: 0 if
-- the file is recorded already, or has no record to remove. `id`: '' for no file.
local function change_stored(key, lifetime, id, bytes)
  if id == '' then return 0 end
  local recorded = redis.call('HGET', key, id)
  if (recorded and true or false) == (bytes ~= '') then return 0 end
  local added = tonumber(recorded and -recorded or bytes)
  if recorded then redis.call('HDEL', key, id) else redis.call('HSET', key, id, bytes) end
  redis.call('HINCRBY', key, '{TOTAL}', added)
  redis.call('EXPIRE', key, lifetime)
  return added
end
"""

# `prefix`, here and below: of the tenant's days.
_COUNT_REPLY = Script(
    USAGE_LUA + "return count_reply(prefix, has_session == '1' and session, prompt, completion, cached, cost, at)",
    keys=("session",),
    args=("prefix", "has_session", "prompt", "completion", "cached", "cost", "at"),
)

_COUNT = Script(
    USAGE_LUA + "count_usage(prefix, session, meter, totals, 0, 0)",
    keys=("session",),
    args=("prefix", "meter", "totals"),
)

# Returns 1 if the stored bytes have changed. `file_bytes` '': remove the record.
CHANGE_STORED = Script(
    USAGE_LUA
    + """
local added = change_stored(stored, file_ttl_s, file, file_bytes)
if added ~= 0 then count_usage(prefix, '', '', '', 0, added) end
return added ~= 0 and 1 or 0
""",
    keys=("stored",),
    args=("prefix", "file_ttl_s", "file", "file_bytes"),
)


def usage_prefix(deployment: str, tenant: str) -> str:
    """Return the prefix of the keys of the hashes of a tenant's days. The number of the day since 1970 follows."""
    return tenant_key(deployment, tenant, "usage.")


def session_usage_key(deployment: str, tenant: str, session: str) -> str:
    """Return the key of the hash with the usage of a session. The hash has a field with the counted totals of each
    meter, and a field for the replies of models.
    """
    return tenant_key(deployment, tenant, f"session.{session}:usage")


def totals_of(usage: SessionUsage) -> str:
    """Return the totals as the text that the scripts read."""
    cpu_us, sandbox_us = round(usage.cpu_s * 1e6), round(usage.sandbox_s * 1e6)
    return f"{cpu_us} {usage.read_bytes} {usage.written_bytes} {usage.network_bytes} {sandbox_us} {usage.stream_bytes}"


def stored_key(deployment: str, tenant: str, file: str) -> str:
    """Return the key of the hash that has the record of a stored file. Files whose ids contain their creation time
    share a hash per day, which expires after them, so that files that a store deletes by their age leave no record.
    """
    match = _TIMED_ID.match(file)
    kind = "files" if match is not None and match[1] != "auto" else "checkpoints"
    day = f".{int(match[2], 16) // DAY_S}" if match is not None else ""
    return tenant_key(deployment, tenant, f"usage.stored.{kind}{day}")


@dataclass(frozen=True)
class StoredChange:
    """A checkpoint, artifact or upload that was stored, or deleted (`bytes` None), outside of a sandbox.

    Invariant: Redis has a record with the size of each stored file. Only the step that writes or removes this record
    changes the stored bytes of the tenant. So a repeated or concurrent deletion subtracts nothing.
    """

    id: str
    bytes: int | None

    def arguments(self, deployment: str, tenant: str) -> dict[str, str | int]:
        """Return the keys and arguments of the scripts for this change, by their names."""
        return {
            "prefix": usage_prefix(deployment, tenant),
            "stored": stored_key(deployment, tenant, self.id),
            "file_ttl_s": STORED_TTL_S if _TIMED_ID.match(self.id) is not None else USAGE_TTL_S,
            "file": self.id,
            "file_bytes": "" if self.bytes is None else self.bytes,
        }


@dataclass(frozen=True, kw_only=True)
class CallEnding:
    """The end of a call that has run. `code`: "" for a success. `sandbox`: "" for a call without a sandbox.

    `stored`: the file that the call stored outside of its sandbox, or deleted there. `usage`: the totals of its session
    that sandboxd has reported last. `folder`: the folder in which bash_tool ended; "" for any other call.
    `fence`: of the opening of the session in which the call ran.
    """

    deployment: str
    tenant: str
    call: str
    attempt: int
    code: str = ""
    sandbox: str = ""
    session: str | None = None
    stored: StoredChange | None = None
    usage: SessionUsage | None = None
    folder: str = ""
    fence: int | None = None

    @property
    def session_key(self) -> str:
        """Return the key of the usage of its session."""
        return session_usage_key(self.deployment, self.tenant, self.session or "")

    @property
    def location_key(self) -> str:
        """Return the key of the session's location if the call reports its folder; otherwise "": workers without
        sandboxes may not read locations.
        """
        return location_key(self.deployment, self.tenant, self.session) if self.session and self.folder else ""


@dataclass(frozen=True)
class ReplySpending:
    """Tokens of a model's reply, and the cost of the reply in the currency of the prices; a cost of None: no prices are
    set. `at`: the time at which they count, in Unix seconds; 0: now. `counted`: amounts that are counted already.
    """

    usage: TokenUsage = field(default_factory=TokenUsage)
    cost: float | None = None
    at: int = 0
    counted: tuple[int, ...] = (0, 0, 0, 0)

    def amounts(self) -> list[int]:
        """Return the prompt, completion and cached tokens and the cost, in the units of the scripts. They are negative
        if less was used than was counted.
        """
        usage = self.usage
        amounts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, round((self.cost or 0.0) * 1e6))
        limited = [max(0, min(amount, MAX_AMOUNT)) for amount in amounts]
        return [amount - counted for amount, counted in zip(limited, self.counted, strict=True)]

    def arguments(self) -> dict[str, int]:
        """Return the amounts and their time as arguments of the scripts, by their names."""
        return {**dict(zip(("prompt", "completion", "cached", "cost"), self.amounts(), strict=True)), "at": self.at}

    def minus(self, counted: "ReplySpending", at: int) -> "ReplySpending":
        """Return what remains to count after the amounts of `counted`, which count at that time."""
        return replace(self, at=at, counted=tuple(counted.amounts()))


def pack_amounts(amounts: Mapping[str, int]) -> bytes:
    """Encode amounts for a field of the hash of a day or of a session."""
    return _PACKED[8 * len(AMOUNTS)].pack(*(amounts.get(name, 0) for name in AMOUNTS))


@dataclass(frozen=True)
class UsageRow:
    """Used amounts from `start` on, in Unix seconds. `amounts`: amount by its name in AMOUNTS, in the units of Redis
    (UNITS).
    """

    start: int
    amounts: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the row with the instant in ISO 8601, and amounts in seconds, bytes, tokens, and currency."""
        return {"start": format_instant(self.start), **show_amounts(self.amounts)}


def show_amounts(amounts: Mapping[str, int]) -> dict[str, float | int]:
    """Return the amounts in seconds, bytes, tokens, and currency, by names that contain the unit."""
    shown: dict[str, float | int] = {}
    for name in AMOUNTS:
        amount = amounts.get(name, 0)
        shown[_SHOWN.get(name, name)] = amount / UNITS[name] if name in UNITS else amount
    return shown


_SHOWN = {"cpu_us": "cpu_s", "sandbox_us": "sandbox_s", "cost_millionths": "cost"}


def sum_rows(rows: Iterable[UsageRow]) -> Mapping[str, int]:
    """Return the sum of each amount over all rows."""
    sums = dict.fromkeys(AMOUNTS, 0)
    for row in rows:
        for name, amount in row.amounts.items():
            sums[name] += amount
    return sums


class UsageStore:
    """Used resources, for orchestrators. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def count_reply(self, tenant: str, session: str | None, spending: ReplySpending) -> int:
        """Count tokens of a reply that are not in the log of a run. `session` None: count them for no session. Return
        the time at which they count, in Unix seconds.
        """
        with broker_errors("the tokens of a reply were not counted"):
            counted_at = await _COUNT_REPLY.run(
                self._client,
                session=session_usage_key(self._deployment, tenant, session or ""),
                prefix=usage_prefix(self._deployment, tenant),
                has_session=int(bool(session)),
                **spending.arguments(),
            )
        return int(counted_at)

    async def read(self, tenant: str, start: float, end: float, by: By = "day") -> list[UsageRow]:
        """Return what a tenant used from `start` until before `end`, in Unix seconds. `start` is rounded down to a
        whole period in UTC. Periods without use are left out.

        Raises ToolFailure(INVALID_ARGUMENTS): the time is negative or longer than MAX_DAYS.
        """
        if not 0 <= start <= end <= start + MAX_DAYS[by] * DAY_S:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"a report by {by} covers at most {MAX_DAYS[by]} days, and its end must not be before its start: "
                "choose other times",
            )
        first, last = int(start // DAY_S), int(-(-end // DAY_S))
        prefix, pipe = usage_prefix(self._deployment, tenant), self._client.pipeline(transaction=False)
        for day in range(first, last):
            pipe.hgetall(f"{prefix}{day}")
        with broker_errors("the usage was not read"):
            hashes: list[Mapping[bytes, bytes]] = await pipe.execute() if last > first else []
        rows = [row for day, fields in zip(range(first, last), hashes, strict=True) for row in _rows(day, fields, by)]
        length_s = HOUR_S if by == "hour" else DAY_S
        return [row for row in rows if start - length_s < row.start < end]

    async def read_today(self, tenants: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        """Return the amounts since 00:00 UTC of every tenant that used something."""
        used: dict[str, Mapping[str, int]] = {}
        day = int(time.time() // DAY_S)
        for at in range(0, len(tenants), AT_ONCE):
            names, pipe = tenants[at : at + AT_ONCE], self._client.pipeline(transaction=False)
            for tenant in names:
                pipe.hgetall(f"{usage_prefix(self._deployment, tenant)}{day}")
            with broker_errors("the usage was not read"):
                hashes = await pipe.execute()
            for tenant, fields in zip(names, hashes, strict=True):
                for row in _rows(day, fields, "day"):
                    used[tenant] = row.amounts
        return used

    async def read_session(self, tenant: str, session: str) -> Mapping[str, int]:
        """Return what a session used; an empty mapping if nothing is known."""
        with broker_errors("the session's usage was not read"):
            fields: Any = await self._client.hgetall(session_usage_key(self._deployment, tenant, session))
        return sum_packed(fields.values())


def sum_packed(fields: Iterable[bytes]) -> Mapping[str, int]:
    """Return the sums of packed amounts. Skips other values: every process that can write to Redis may write. Amounts
    that are 0 are left out.
    """
    sums = dict.fromkeys(AMOUNTS, 0)
    for packed in fields:
        if (packing := _PACKED.get(len(packed))) is not None:
            for name, amount in zip(AMOUNTS, packing.unpack(packed), strict=False):
                sums[name] += int(amount) if math.isfinite(amount) else 0
    return {name: amount for name, amount in sums.items() if amount}


def _rows(day: int, fields: Mapping[bytes, bytes], by: By) -> list[UsageRow]:
    hours = sorted((int(hour), packed) for hour, packed in fields.items() if hour.isdigit())
    if by == "day":
        periods = [(0, sum_packed(packed for _, packed in hours))]
    else:
        periods = [(hour, sum_packed([packed])) for hour, packed in hours]
    return [UsageRow(day * DAY_S + hour * HOUR_S, amounts) for hour, amounts in periods if amounts]


class WorkerUsageStore:
    """Counts the totals that sandboxd reports between calls, for workers."""

    def __init__(self, client: SyncRedis, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    def count(self, usages: Iterable[tuple[str, SessionUsage]]) -> None:
        """Add to the usage by how much the totals of sessions have grown. `usages`: pairs of the name
        `<tenant>:<session>` and the totals. Raises BrokerUnavailable.
        """
        with broker_errors("the usage of sessions was not counted"), self._client.pipeline(transaction=False) as pipe:
            for name, usage in usages:
                tenant, _, session = name.partition(":")
                _COUNT.add_to(
                    pipe,
                    session=session_usage_key(self._deployment, tenant, session),
                    prefix=usage_prefix(self._deployment, tenant),
                    meter=usage.meter,
                    totals=totals_of(usage),
                )
            pipe.execute()
