"""asyncio Redis clients of the orchestrator, with every time-out set and errors in plain words."""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig

from contract.errors import BrokerUnavailable
from contract.settings import BrokerSettings

RedisClient: TypeAlias = "redis.asyncio.Redis"
TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
LOADING_S = 10.0
"""So long a Redis that reads its data in is waited for at the start."""
LOOK_S = 0.1


def open_redis(broker: BrokerSettings) -> "redis.asyncio.Redis":
    """A client whose callers wait for a connection instead of failing when all are busy. Behind sentinels it follows the master."""
    return redis.asyncio.Redis.from_pool(_open_pool(broker))


async def check_redis(client: "redis.asyncio.Redis", broker: BrokerSettings) -> None:
    """Raises BrokerUnavailable: where it looked, what Redis said, what to check."""
    try:
        await _ping(client)
    except AuthenticationError as error:
        raise BrokerUnavailable(f"Redis at {broker.redis_address()} refuses user or password: check TOOLCREW_REDIS_URL") from error
    except (RedisError, OSError) as error:
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): {broker.connection_advice(str(error))}"
        ) from error


async def _ping(client: "redis.asyncio.Redis") -> None:
    """A Redis that has just been started may have to read its data first."""
    clock = asyncio.get_running_loop().time
    until = clock() + LOADING_S
    while True:
        try:
            await client.ping()
            return
        except BusyLoadingError:
            if clock() >= until:
                raise
            await asyncio.sleep(LOOK_S)


class _Careful(AbstractConnection):
    """A connection whose loss, and whose user's end, are not overlooked.

    Whoever is cancelled while a command is being sent is cancelled: the client sends in `asyncio.wait_for`, which loses a cancellation that comes just
    as the last byte has gone (Python before 3.12), and a task that never ends by it is waited for in vain.
    """

    async def can_read(self) -> bool:
        """What the pool asks before it lends a connection: one that was reset looks empty to the client, and would fail its next command."""
        if self._reader is not None and (error := self._reader.exception()) is not None:
            raise RedisConnectionError(f"the connection was lost ({error})")
        return await super().can_read()

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(command, check_health)
        if task is not None and task.cancelling() > before:
            # Nobody is left to read the answer.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError


class _PlainConnection(_Careful, Connection):
    pass


class _TlsConnection(_Careful, SSLConnection):
    pass


class _MasterConnection(_Careful, SentinelManagedConnection):
    pass


class _MasterTlsConnection(_Careful, SentinelManagedSSLConnection):
    pass


class _BlockingSentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to whoever is the master now; closing them closes those to the sentinels, too."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


def _open_pool(broker: BrokerSettings) -> BlockingConnectionPool:
    options: dict[str, Any] = {
        # With them the pool lends connections that the server has closed (redis-py 8.1). Redis Enterprise alone sends them.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "username": broker.user,
        "password": broker.password,
        "db": broker.database,
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": 5.0,
        "health_check_interval": 15,
        "max_connections": MAX_CONNECTIONS,
        "timeout": TIMEOUT_S,
        **broker.tls_options(),
    }
    if broker.is_sentinel:
        sentinel = Sentinel(broker.addresses, sentinel_kwargs=broker.sentinel_options())  # type: ignore[no-untyped-call]
        options["connection_class"] = _MasterTlsConnection if broker.is_tls else _MasterConnection
        return _BlockingSentinelPool(broker.redis_sentinel_master, sentinel, ssl=broker.is_tls, **options)  # type: ignore[no-untyped-call]
    host, port = broker.addresses[0]
    return BlockingConnectionPool(connection_class=_TlsConnection if broker.is_tls else _PlainConnection, host=host, port=port, **options)
