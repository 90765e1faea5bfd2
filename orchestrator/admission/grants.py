"""Hears which calls of this orchestrator another one's step has given a slot."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from telemetry.logs import get_logger

log = get_logger(__name__)

LOOK_EVERY_S = 5.0
RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class GrantListener:
    """One subscription. Pub/sub delivers at most once: `on_gap` is called whenever it stands anew, because something may have been missed."""

    def __init__(
        self, client: "redis.asyncio.Redis", channel: str, on_grants: Callable[[Sequence[str]], None], on_gap: Callable[[], None]
    ) -> None:
        self._client = client
        self._channel = channel
        self._on_grants, self._on_gap = on_grants, on_gap

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            try:
                async with self._client.pubsub() as pubsub:
                    await pubsub.subscribe(self._channel)
                    while True:
                        message = await pubsub.get_message(timeout=LOOK_EVERY_S)
                        if message is not None:
                            failures = 0
                            self._take(message)
            except (RedisError, OSError) as error:
                if failures == 0:
                    log.warning("admission_connection_lost", error=str(error))
                await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])
                failures += 1

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            self._on_gap()
        elif message["type"] == "message":
            try:
                calls = [str(call) for call in json.loads(message["data"])]
            except (ValueError, TypeError):
                log.error("admission_grants_unreadable", size=len(message["data"]))
                return
            self._on_grants(calls)
