"""One blocking Redis client for a worker process, with every time-out set."""

import redis

from contract.settings import BrokerSettings

TIMEOUT_S = 10.0


def connect(broker: BrokerSettings) -> "redis.Redis":
    """A client with its own pool; bytes in, bytes out."""
    return redis.Redis.from_url(
        broker.redis_url.get_secret_value(),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=5.0,
        health_check_interval=15,
    )
