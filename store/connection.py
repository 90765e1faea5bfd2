"""Connections to Redis: asynchronous ones for orchestrators, blocking ones for workers. Every connection has time
limits.

Only this package and `workers/celery_edge` import redis. Every store wraps its commands in `broker_errors`, so its
callers see only BrokerUnavailable and BrokerFull.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.connection import Connection as SyncConnection
from redis.connection import ConnectionPool as SyncPool
from redis.connection import SSLConnection as SyncTlsConnection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel as SyncSentinel
from redis.sentinel import SentinelConnectionPool as SyncSentinelPool

from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerFull, BrokerUnavailable, OperatorError
from toolcrew.contract.names import deployment_key

RedisClient: TypeAlias = "redis.asyncio.Redis"
SyncRedis: TypeAlias = "redis.Redis"
TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
LOADING_S = 10.0
"""Time that a starting Redis may take to load its data, in seconds."""
CHECK_INTERVAL_S = 0.1
REDIS_ERRORS = (RedisError, OSError)

_sync_clients: "weakref.WeakSet[redis.Redis]" = weakref.WeakSet()


class RedisAccessDenied(OperatorError):
    """The Redis user has no permission for a command."""


@contextlib.contextmanager
def broker_errors(failure: str) -> Iterator[None]:
    """Raise BrokerUnavailable or BrokerFull in place of the errors of the Redis client. `failure`: a clause that says
    what failed, for example "the policy was not read".
    """
    try:
        yield
    except REDIS_ERRORS as error:
        raise broker_error(failure, error) from error


def broker_error(failure: str, error: Exception) -> BrokerUnavailable:
    """Return the error for an error of the Redis client."""
    # In a script, Redis 6 puts the code of a command's error into the middle of the script's error.
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
        return BrokerFull(
            f"{failure}: the memory of Redis is full (`maxmemory`). Delete ended batches, or raise `maxmemory`; "
            "`toolcrew doctor` shows how much is used"
        )
    return BrokerUnavailable(f"{failure}: Redis does not answer ({error}). Check that Redis is running")


def open_redis(broker: BrokerSettings) -> "redis.asyncio.Redis":
    """Return an asynchronous client. If all connections are busy, callers wait. With sentinels, the client follows the
    master.
    """
    return redis.asyncio.Redis.from_pool(_open_pool(broker))


async def check_redis(client: "redis.asyncio.Redis", broker: BrokerSettings) -> None:
    """Check that Redis answers. Raises BrokerUnavailable with the address, the error of Redis and advice."""
    try:
        await _ping(client)
    except AuthenticationError as error:
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} refuses user or password: check TOOLCREW_REDIS_URL"
        ) from error
    except REDIS_ERRORS as error:  # not `broker_errors`: this message contains the address and advice
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): {broker.connection_advice(str(error))}"
        ) from error


async def _ping(client: "redis.asyncio.Redis") -> None:
    """Ping Redis. Wait while Redis loads its data."""
    clock = asyncio.get_running_loop().time
    until = clock() + LOADING_S
    while True:
        try:
            await client.ping()
            return
        except BusyLoadingError:
            if clock() >= until:
                raise
            await asyncio.sleep(CHECK_INTERVAL_S)


class _ReliableConnection(AbstractConnection):
    """A connection that detects its loss and the cancellation of its user.

    The client sends commands in `asyncio.wait_for`. Before Python 3.12, `wait_for` loses a cancellation that arrives
    together with the last sent byte. The task would then not end, and its canceller would wait without end. This class
    raises the lost CancelledError.
    """

    async def can_read(self) -> bool:
        """Check a connection before the pool hands it out. The client considers a reset connection usable, and the
        next command would fail.
        """
        if self._reader is not None and (error := self._reader.exception()) is not None:
            raise RedisConnectionError(f"the connection was lost ({error})")
        return await super().can_read()

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(command, check_health)
        if task is not None and task.cancelling() > before:
            # No caller remains to read the reply, and the next command must not read it.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError


class _PlainConnection(_ReliableConnection, Connection):
    pass


class _TlsConnection(_ReliableConnection, SSLConnection):
    pass


class _MasterConnection(_ReliableConnection, SentinelManagedConnection):
    pass


class _MasterTlsConnection(_ReliableConnection, SentinelManagedSSLConnection):
    pass


class _BlockingSentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the present master. Closing the pool also closes the connections to the sentinels."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


def _open_pool(broker: BrokerSettings) -> BlockingConnectionPool:
    options: dict[str, Any] = {
        **_options(broker),
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": 5.0,
        "health_check_interval": 15,
        "max_connections": MAX_CONNECTIONS,
        "timeout": TIMEOUT_S,
    }
    if broker.is_sentinel:
        sentinel = Sentinel(broker.addresses, sentinel_kwargs=broker.sentinel_options())  # type: ignore[no-untyped-call]
        options["connection_class"] = _MasterTlsConnection if broker.is_tls else _MasterConnection
        return _BlockingSentinelPool(broker.redis_sentinel_master, sentinel, ssl=broker.is_tls, **options)  # type: ignore[no-untyped-call]
    host, port = broker.addresses[0]
    return BlockingConnectionPool(
        connection_class=_TlsConnection if broker.is_tls else _PlainConnection, host=host, port=port, **options
    )


CONNECTION_OPTIONS: dict[str, Any] = {
    # With these notifications, the pool hands out connections that the server has closed (redis-py 8.1). Only Redis
    # Enterprise sends the notifications.
    "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    # The users of a deployment may not send CLIENT SETINFO, which Redis 7.0 does not know.
    "driver_info": None,
}
"""Options of every connection to Redis, also of Celery's."""


def _options(broker: BrokerSettings) -> dict[str, Any]:
    return {
        **CONNECTION_OPTIONS,
        "username": broker.user,
        "password": broker.password,
        "db": broker.database,
        **broker.tls_options(),
    }


async def check_writable(client: "redis.asyncio.Redis", deployment: str) -> None:
    """Raise BrokerUnavailable unless Redis accepts a write."""
    with broker_errors("Redis takes no data"):
        await client.set(deployment_key(deployment, "api:ready"), "1", ex=60)


async def read_server_info(client: "redis.asyncio.Redis", *sections: str) -> dict[str, Any]:
    """Return the report of INFO for these sections. Raises BrokerUnavailable when Redis does not answer. Raises
    RedisAccessDenied: the user has no permission for INFO.
    """
    info: dict[str, Any] = {}
    with broker_errors("the state of the Redis server was not read"):
        try:
            for section in sections:
                info |= await client.info(section)
        except NoPermissionError as error:
            raise RedisAccessDenied(str(error)) from error
    return info


def connect(broker: BrokerSettings) -> "redis.Redis":
    """Return a blocking client with its own connection pool. Replies are bytes. With sentinels, the client follows the
    master.
    """
    return _open_sync(broker, socket_timeout=TIMEOUT_S, socket_connect_timeout=5.0, health_check_interval=15)


def connect_once(broker: BrokerSettings) -> "redis.Redis":
    """Return a blocking client that never repeats a command, for commands that must not run twice. The client connects
    at its first use.
    """
    return _open_sync(broker, socket_timeout=5.0, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 0))


def drop_connections() -> None:
    """Close the connections of every blocking client of this process. If an interrupt stops a command, its reply may
    still arrive on the connection. The next command would then read that reply as its own.
    """
    for client in list(_sync_clients):
        client.connection_pool.disconnect()


def check_connection(broker: BrokerSettings) -> None:
    """Raise BrokerUnavailable with the address, the error of Redis and advice, if Redis does not answer a blocking
    client.
    """
    client = connect(broker)
    try:
        client.ping()
    except REDIS_ERRORS as error:  # not `broker_errors`: this message contains the address and advice
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): {broker.connection_advice(str(error))}"
        ) from error
    finally:
        client.close()


def _open_sync(broker: BrokerSettings, **timing: Any) -> "redis.Redis":
    client = redis.Redis.from_pool(_open_sync_pool(broker, {**_options(broker), **timing}))
    _sync_clients.add(client)
    return client


def _open_sync_pool(broker: BrokerSettings, options: dict[str, Any]) -> SyncPool:
    if broker.is_sentinel:
        sentinel = SyncSentinel(broker.addresses, sentinel_kwargs=broker.sentinel_options())  # type: ignore[no-untyped-call]
        return SyncSentinelPool(broker.redis_sentinel_master, sentinel, ssl=broker.is_tls, **options)  # type: ignore[no-untyped-call]
    host, port = broker.addresses[0]
    return SyncPool(
        connection_class=SyncTlsConnection if broker.is_tls else SyncConnection, host=host, port=port, **options
    )
