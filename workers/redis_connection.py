"""Blocking Redis clients for a worker process, with every time-out set."""

import weakref
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from contract.errors import BrokerUnavailable
from contract.settings import BrokerSettings

TIMEOUT_S = 10.0

_clients: "weakref.WeakSet[redis.Redis]" = weakref.WeakSet()


def connect(broker: BrokerSettings) -> "redis.Redis":
    """A client with its own pool; bytes in, bytes out. Behind sentinels it follows the master."""
    return _open(broker, socket_timeout=TIMEOUT_S, socket_connect_timeout=5.0, health_check_interval=15)


def drop_connections() -> None:
    """Have every client of this process connect anew: who was interrupted in the midst of a command may have left its reply on the way,
    and the next command would take it for its own."""
    for client in list(_clients):
        client.connection_pool.disconnect()


def connect_once(broker: BrokerSettings) -> "redis.Redis":
    """A client that sends every command once, for what must not arrive twice and is not worth waiting for. It connects when first used."""
    return _open(broker, socket_timeout=5.0, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 0))


def check_redis(broker: BrokerSettings) -> None:
    """Raises BrokerUnavailable: where it looked, what Redis said, what to check."""
    client = connect(broker)
    try:
        client.ping()
    except redis.RedisError as error:
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): {broker.connection_advice(str(error))}"
        ) from error
    finally:
        client.close()


def _open(broker: BrokerSettings, **timing: Any) -> "redis.Redis":
    options: dict[str, Any] = {
        # With them the pool may lend connections that the server has closed. Redis Enterprise alone sends them.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "username": broker.user,
        "password": broker.password,
        "db": broker.database,
        **timing,
        **broker.tls_options(),
    }
    client = redis.Redis.from_pool(_open_pool(broker, options))
    _clients.add(client)
    return client


def _open_pool(broker: BrokerSettings, options: dict[str, Any]) -> ConnectionPool:
    if broker.is_sentinel:
        sentinel = Sentinel(broker.addresses, sentinel_kwargs=broker.sentinel_options())  # type: ignore[no-untyped-call]
        return SentinelConnectionPool(broker.redis_sentinel_master, sentinel, ssl=broker.is_tls, **options)  # type: ignore[no-untyped-call]
    host, port = broker.addresses[0]
    return ConnectionPool(connection_class=SSLConnection if broker.is_tls else Connection, host=host, port=port, **options)
