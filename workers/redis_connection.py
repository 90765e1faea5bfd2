"""One blocking Redis client for a worker process, with every time-out set."""

import redis

from contract.errors import BrokerUnavailable
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


def check_redis(broker: BrokerSettings) -> None:
    """Raises BrokerUnavailable: where it looked, what Redis said, what to check."""
    client = connect(broker)
    try:
        client.ping()
    except redis.RedisError as error:
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): check TOOLCREW_REDIS_URL and its password"
        ) from error
    finally:
        client.close()
