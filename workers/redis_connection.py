"""One blocking Redis client for a worker process, with every time-out set."""

import weakref

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from contract.errors import BrokerUnavailable
from contract.settings import BrokerSettings

TIMEOUT_S = 10.0

_clients: "weakref.WeakSet[redis.Redis]" = weakref.WeakSet()


def connect(broker: BrokerSettings) -> "redis.Redis":
    """A client with its own pool; bytes in, bytes out."""
    client = redis.Redis.from_url(
        broker.redis_url.get_secret_value(),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=5.0,
        health_check_interval=15,
    )
    _clients.add(client)
    return client


def drop_connections() -> None:
    """Have every client of this process connect anew: who was interrupted in the midst of a command may have left its reply on the way,
    and the next command would take it for its own."""
    for client in list(_clients):
        client.connection_pool.disconnect()


def connect_once(broker: BrokerSettings) -> "redis.Redis":
    """A client that sends every command once, for what must not arrive twice and is not worth waiting for. It connects when first used."""
    client = redis.Redis.from_url(
        broker.redis_url.get_secret_value(),
        socket_timeout=5.0,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 0),
    )
    _clients.add(client)
    return client


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
