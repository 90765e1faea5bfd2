"""What happens in batches, in a stream of Redis each: written by whoever works the items, read by whoever watches."""

import asyncio
from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.errors import BrokerUnavailable
from store.happenings import Happening, parse_happening
from store.hosted_records import STANDING
from store.run_keys import RUN_TTL_S, batch_key
from store.tasks import check_cancelled
from telemetry.logs import get_logger

log = get_logger(__name__)

KEPT = 20_000
"""Happenings that a stream holds: who looks in more seldom misses some, but never an outcome, which the runs' records have."""
EVERY_S = 0.2
AT_ONCE = 1000
MAX_UNWRITTEN = 50_000
START = "0"


class HappeningWriter:
    """Adds what it is told, some of it at a time. What Redis does not take for long is dropped: it only tells."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment
        self._unwritten: list[tuple[str, str]] = []
        self._dropped = 0

    def tell(self, tenant: str, batch: str, happening: Happening) -> None:
        """Returns at once. Of a program's run its own events tell (event_teller.py)."""
        if batch == STANDING:
            return
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._dropped += 1
            return
        self._unwritten.append((batch_key(self._deployment, tenant, batch) + ":events", happening.model_dump_json()))

    async def run(self) -> None:
        """Until cancelled; then what is left is written."""
        try:
            while True:
                check_cancelled()
                await asyncio.sleep(EVERY_S)
                await self.flush()
        finally:
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Write what there is, if Redis answers."""
        while self._unwritten:
            some = self._unwritten[:AT_ONCE]
            try:
                async with self._client.pipeline(transaction=False) as pipe:
                    for key, text in some:
                        pipe.xadd(key, {"h": text}, maxlen=KEPT, approximate=True)
                    for key in {key for key, _ in some}:
                        pipe.expire(key, RUN_TTL_S)
                    await pipe.execute()
            except (RedisError, OSError) as error:
                log.warning("happenings_not_written", waiting=len(self._unwritten), dropped=self._dropped, error=str(error))
                return
            del self._unwritten[: len(some)]


class HappeningReader:
    """One watcher of one batch's stream."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str, tenant: str, batch: str, after: str = START) -> None:
        self._client = client
        self._key = batch_key(deployment, tenant, batch) + ":events"
        self._after = after

    async def read(self, wait_s: float) -> Sequence[Happening]:
        """What has come since the last time, after waiting for some for so long. Raises BrokerUnavailable."""
        try:
            told: Any = await self._client.xread({self._key: self._after}, count=AT_ONCE, block=max(1, int(wait_s * 1000)))
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis does not tell what happens in the batch ({error})") from error
        happenings: list[Happening] = []
        for entry in _entries(told):
            self._after = entry[0].decode()
            happenings.append(parse_happening(entry[1][b"h"]))
        return happenings


def _entries(told: Any) -> list[Any]:
    """Of the one stream, in either shape that the client gives: a list of pairs, or a dict."""
    if not told:
        return []
    streams = list(told.values()) if isinstance(told, dict) else [stream[1] for stream in told]
    entries = streams[0]
    # RESP3 wraps the entries of a stream in a list.
    return (
        list(entries[0])
        if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], (list, tuple))
        else list(entries)
    )
