"""The common clock of all hosts, which is Redis's clock."""

import time
from collections.abc import Callable

from toolcrew.store.connection import RedisClient, broker_errors

SKEW_WARNING_S = 5.0
"""Difference between a host's clock and Redis's clock, in seconds, above which a warning about the host is logged."""


class SharedClock:
    """The common clock of all hosts: Unix seconds of Redis's clock. A wrong local clock therefore expires no call.

    Before the first `learn`, the clock returns local time. The class is thread-safe, because an update writes a single
    float.
    """

    def __init__(self, local: Callable[[], float] = time.time) -> None:
        self._local = local
        self.offset_s = 0.0

    def __call__(self) -> float:
        return self._local() + self.offset_s

    def learn(self, redis_now: float) -> float:
        """Set the clock to the time that Redis has just sent. Return by how many seconds the local clock is behind
        Redis's clock.
        """
        self.offset_s = redis_now - self._local()
        return self.offset_s


async def read_clock(client: RedisClient) -> float:
    """Return Redis's time in Unix seconds. Raises BrokerUnavailable when Redis does not answer."""
    with broker_errors("Redis's time was not read"):
        seconds, micros = await client.time()
    return float(seconds) + float(micros) / 1_000_000
