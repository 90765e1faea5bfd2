"""asyncio Redis clients of the orchestrator, with every time-out set and errors in plain words."""

import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError

from contract.errors import BrokerUnavailable
from contract.settings import BrokerSettings

TIMEOUT_S = 10.0


def open_redis(broker: BrokerSettings) -> "redis.asyncio.Redis":
    """A client whose callers wait for a connection instead of failing when all are busy."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        broker.redis_url.get_secret_value(),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=5.0,
        health_check_interval=15,
        max_connections=16,
        timeout=TIMEOUT_S,
    )
    return redis.asyncio.Redis(connection_pool=pool)


async def check_redis(client: "redis.asyncio.Redis", broker: BrokerSettings) -> None:
    """Raises BrokerUnavailable: where it looked, what Redis said, what to check."""
    try:
        await client.ping()
    except AuthenticationError as error:
        raise BrokerUnavailable(f"Redis at {broker.redis_address()} refuses the password: check TOOLCREW_REDIS_URL") from error
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): is it running, and is TOOLCREW_REDIS_URL right?"
        ) from error
