"""The log of one run in Redis: only its holder appends, in order, and nothing takes effect before it is in.

Each entry is signed for its tenant, run, attempt and position: a forged reply would make an orchestrator send calls, a forged result would make it
believe that one ran. A process without the secret can only remove entries, or put back earlier genuine ones in their own places.
"""

import asyncio
import json
from typing import Any

import redis.asyncio
from pydantic import ValidationError
from redis.exceptions import RedisError

from contract.clock import SharedClock
from contract.errors import BrokerUnavailable, ConfigError, EnvelopeRefused, RecordRefused
from contract.signing import SigningKeys
from store.run_entries import Entry, SessionOpening, parse_entry
from store.run_keys import RUN_TTL_S, run_key, run_log_key, run_parts_key
from telemetry.logs import get_logger

log = get_logger(__name__)

INLINE_BYTES = 64 * 1024
"""A larger entry lies beside the log."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)

# KEYS: run, log, parts. ARGV: claim, index, entry, part ('' for none), time to live, '1' when the run has come further by it. Gives added; there (said before, its answer was lost); taken (another
# process has the run); or how many entries there are, when Redis has lost its last ones.
_APPEND = """
if redis.call('HGET', KEYS[1], 'claim') ~= ARGV[1] then return 'taken' end
local length, index = redis.call('LLEN', KEYS[2]), tonumber(ARGV[2])
if length > index then return 'there' end
if length < index then return tostring(length) end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
  redis.call('EXPIRE', KEYS[3], ARGV[5])
end
redis.call('RPUSH', KEYS[2], ARGV[3])
if ARGV[6] == '1' then redis.call('HDEL', KEYS[1], 'losses') end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 'added'
"""


class RunTaken(Exception):
    """Another process has the run by now: whoever held it must not go on."""


class RunLog:
    """One run's log as its holder knows it. `entries`: those of the processes that had it before, then its own. `clock`: Redis's."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        deployment: str,
        keys: SigningKeys,
        tenant: str,
        run: str,
        claim: str,
        attempt: int,
        entries: list[Entry],
        clock: SharedClock,
    ) -> None:
        self.clock = clock
        self._append = client.register_script(_APPEND)
        self._deployment, self._tenant, self._run, self._claim = deployment, tenant, run, claim
        self._keys, self._attempt = keys, attempt
        self.entries = entries
        self.has_grown = False
        """Whether this holder has brought the run further."""
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def load(
        cls, client: "redis.asyncio.Redis", deployment: str, keys: SigningKeys, tenant: str, run: str, claim: str, attempt: int
    ) -> "RunLog":
        """Load the log of that attempt of a run, which `claim` holds. Raises BrokerUnavailable; ConfigError if it cannot be verified or read."""
        clock = SharedClock()
        try:
            seconds, micros = await client.time()
            clock.learn(seconds + micros / 1e6)
            items: Any = await client.lrange(run_log_key(deployment, tenant, run), 0, -1)
            texts = [await _whole(client, deployment, tenant, run, index, item) for index, item in enumerate(items)]
            opened = [keys.unseal(entry_purpose(tenant, run, attempt, index), text) for index, text in enumerate(texts)]
            entries = [parse_entry(text) for text in opened]
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not give the run's log ({error})") from error
        except EnvelopeRefused as error:
            raise RecordRefused(f"the log of run {run} cannot be verified, so the run is not continued: retry the item. {error}") from error
        except ValidationError as error:
            raise ConfigError(f"the log of run {run} is of another release: finish its batch with that one, or retry the item") from error
        return cls(client, deployment, keys, tenant, run, claim, attempt, entries, clock)

    async def append(self, entry: Entry) -> None:
        """Returns when the entry is in, however long Redis is away. Raises RunTaken when the run is another process's."""
        async with self._one_at_a_time:
            self.entries.append(entry)
            index, attempt = len(self.entries) - 1, 0
            while index < len(self.entries):
                try:
                    told = await self._add(index)
                except (RedisError, OSError) as error:
                    log.warning("run_log_unanswered", run=self._run, error=str(error) or type(error).__name__)
                    await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                    attempt += 1
                    continue
                if told == "taken":
                    raise RunTaken(self._run)
                # What Redis has lost it is told again.
                index = index + 1 if told in ("added", "there") else int(told)

    async def _add(self, index: int) -> str:
        purpose = entry_purpose(self._tenant, self._run, self._attempt, index)
        text = self._keys.seal(purpose, self.entries[index].model_dump_json())
        item, part = text, ""
        if len(text.encode()) > INLINE_BYTES:
            item, part = json.dumps({"part": index}), text
        names = (self._deployment, self._tenant, self._run)
        # Whoever comes next opens a session anew: a run that kills each of its holders there would come no further.
        is_further = not isinstance(self.entries[index], SessionOpening)
        told = await self._append(
            keys=[run_key(*names), run_log_key(*names), run_parts_key(*names)],
            args=[self._claim, index, item, part, RUN_TTL_S, "1" if is_further else "0"],
        )
        self.has_grown = self.has_grown or is_further
        return told.decode() if isinstance(told, bytes) else str(told)


def entry_purpose(tenant: str, run: str, attempt: int, index: int) -> str:
    """Return what an entry of that attempt at that position is signed for."""
    return f"log {tenant} {run} {attempt} {index}"


async def _whole(client: "redis.asyncio.Redis", deployment: str, tenant: str, run: str, index: int, item: bytes) -> bytes:
    """The text of an entry, wherever it lies."""
    if not item.startswith(b'{"part"'):
        return item
    text: Any = await client.hget(run_parts_key(deployment, tenant, run), str(index))
    if not isinstance(text, bytes):
        raise ConfigError(f"a part of the log of run {run} is gone from Redis: see that it evicts nothing, and retry the item")
    return text
