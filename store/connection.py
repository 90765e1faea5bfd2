"""Connections to Redis: asynchronous ones for orchestrators, blocking ones for workers. Every connection has time
limits.

Only this package and `workers/celery_edge` import redis. Every store wraps its commands in `broker_errors`, so its
callers see only BrokerUnavailable and BrokerFull.
"""

import asyncio
import contextlib
import contextvars
import hashlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import hiredis
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
from redis.connection import DefaultParser
from redis.connection import SSLConnection as SyncTlsConnection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel as SyncSentinel
from redis.sentinel import SentinelConnectionPool as SyncSentinelPool

from toolcrew.contract.errors import BrokerFull, BrokerUnavailable, OperatorError
from toolcrew.contract.names import deployment_key
from toolcrew.contract.settings import BrokerSettings
from toolcrew.store.tasks import begin_shared, cancel_all

RedisClient: TypeAlias = "redis.asyncio.Redis"
SyncRedis: TypeAlias = "redis.Redis"
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


TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
LOADING_S = 10.0
"""Time that a starting Redis may take to load its data, in seconds."""
CHECK_INTERVAL_S = 0.1
_REDIS_ERRORS = (RedisError, OSError)

_sync_clients: "weakref.WeakSet[redis.Redis]" = weakref.WeakSet()
_thread_connections: "weakref.WeakKeyDictionary[SyncPool, threading.local]" = weakref.WeakKeyDictionary()
"""The connections that each thread uses for its scripts, by connection pool."""


class RedisAccessDenied(OperatorError):
    """The Redis user has no permission for a command."""


@contextlib.contextmanager
def broker_errors(failure: str) -> Iterator[None]:
    """Raise BrokerUnavailable or BrokerFull in place of the errors of the Redis client. `failure`: a clause that says
    what failed, for example "the policy was not read".
    """
    try:
        yield
    except _REDIS_ERRORS as error:
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
    except _REDIS_ERRORS as error:  # not `broker_errors`: this message contains the address and advice
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


def _options(broker: BrokerSettings) -> dict[str, Any]:
    return {
        # With these notifications, the pool hands out connections that the server has closed (redis-py 8.1). Only
        # Redis Enterprise sends the notifications.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "username": broker.user,
        "password": broker.password,
        "db": broker.database,
        **broker.tls_options(),
    }


async def read_clock(client: "redis.asyncio.Redis") -> float:
    """Return Redis's time in Unix seconds. Raises BrokerUnavailable when Redis does not answer."""
    with broker_errors("Redis's time was not read"):
        seconds, micros = await client.time()
    return float(seconds) + float(micros) / 1_000_000


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
    except _REDIS_ERRORS as error:  # not `broker_errors`: this message contains the address and advice
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


class LuaScript:
    """A Lua script that is sent by its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class WorkerScript:
    """A Lua script that a worker runs for every call.

    The command uses a connection that belongs to the thread. The usual method of the client costs twice as much
    processor time, mostly for metrics and retry counters. A worker with short calls would spend a tenth of its time
    there. Like the client, this class reconnects, repeats a command whose reply was lost, and sends the source if
    Redis does not know the script. The class raises the same errors as the client.
    """

    def __init__(self, client: SyncRedis, source: str) -> None:
        self._pool = client.connection_pool
        self._script = LuaScript(source)
        self._thread = _thread_connections.setdefault(self._pool, threading.local())

    def __call__(
        self,
        keys: Sequence[str],
        args: Sequence[str | bytes | int | float],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Any:
        """Run the script and return its reply. `meanwhile` runs while Redis works, so it must not run a script over
        the same client. `meanwhile` runs again if the script is sent again, and does not run if Redis cannot be
        reached.
        """
        connection = self._connection()
        arguments = (len(keys), *keys, *args)
        try:
            return connection.retry.call_with_retry(
                lambda: self._run(connection, arguments, meanwhile), lambda _: connection.disconnect()
            )
        except BaseException:
            # The reply may still arrive, and the next command would read it as its own.
            connection.disconnect()
            raise

    def _connection(self) -> Any:
        # After a fork, the child must not use the connection of its parent: both would read each other's replies.
        if getattr(self._thread, "process", None) != os.getpid():
            self._thread.process, self._thread.connection = os.getpid(), self._pool.get_connection()
        connection = self._thread.connection
        # Check the connection as the pool does. A connection that Redis has closed, or that still has an old reply, is
        # opened again.
        connection.connect()
        try:
            is_clean = not connection.can_read()
        except _REDIS_ERRORS:  # no BrokerUnavailable: the connection is opened again
            is_clean = False
        if not is_clean:
            connection.disconnect()
            connection.connect()
        return connection

    def _run(self, connection: Any, arguments: tuple[Any, ...], meanwhile: Callable[[], object]) -> Any:
        try:
            connection.send_command("EVALSHA", self._script.sha, *arguments)
            meanwhile()
            return connection.read_response()
        except NoScriptError:
            connection.send_command("EVAL", self._script.source, *arguments)
            return connection.read_response()


CLOSED = "the client was closed"
_INCOMPLETE = object()
"""The return value of the parser for an incomplete reply."""


class ReplyMissing(RedisConnectionError):
    """Redis did not answer a script. `may_have_run`: the script was written to the connection, so Redis may have run
    it.
    """

    def __init__(self, reason: str, *, may_have_run: bool) -> None:
        super().__init__(reason)
        self.may_have_run = may_have_run


@dataclass
class _Invocation:
    script: LuaScript
    arguments: tuple[Any, ...]
    answer: "asyncio.Future[Any]"
    sent_at: float = 0.0


class ScriptConnection(asyncio.Protocol):
    """Runs any number of scripts at the same time for an orchestrator, over one permanent connection.

    Each tool call uses Redis twice before a worker receives the call. The client creates a task and two timers for
    each command, which costs more than all other work for a call. Therefore the client only opens, authenticates and
    encrypts the connection. This class then takes over the transport. Scripts from the same iteration of the event
    loop are written together, in their order. The class sends no script twice: its callers know whether a repetition
    is safe.
    """

    def __init__(self, client: RedisClient) -> None:
        self._pool: Any = client.connection_pool
        self._connection: Any = None
        self._transport: asyncio.Transport | None = None
        self._client_protocol = asyncio.Protocol()
        """The asyncio protocol object of the Redis client. It gets the transport back when this class closes, and is
        notified of the end of the transport.
        """
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._unsent: list[_Invocation] = []
        self._unanswered: deque[_Invocation] = deque()
        self._is_writable = True
        self._flush: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.Context()
        self._is_opening = self._is_closed = self._is_replica = False

    def run(
        self, script: LuaScript, keys: Sequence[str], arguments: Sequence[str | int | float]
    ) -> "asyncio.Future[Any]":
        """Return a future of the script's reply. The future raises ReplyMissing, or the RedisError that Redis sent as
        the reply.

        A script whose future is cancelled before the script is written is not sent.
        """
        loop = asyncio.get_running_loop()
        invocation = _Invocation(script, (str(len(keys)), *keys, *map(str, arguments)), loop.create_future())
        if self._is_closed:
            _fail([invocation], CLOSED, may_have_run=False)
            return invocation.answer
        self._unsent.append(invocation)
        if self._flush is None:
            # An empty context: the write serves many calls, and must not run in the context of the first one.
            self._flush = loop.call_soon(self._send, context=self._context)
        return invocation.answer

    async def aclose(self) -> None:
        """Close the connection. Scripts without a reply get ReplyMissing."""
        self._is_closed = True
        self._lose(CLOSED)
        unsent, self._unsent = self._unsent, []
        _fail(unsent, CLOSED, may_have_run=False)
        if self._timer is not None:
            self._timer.cancel()
        if self._is_opening:
            await cancel_all(self._tasks)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Methods that the transport calls

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        reader = self._reader
        while (reply := reader.gets()) is not _INCOMPLETE:
            if not self._unanswered:
                self._lose("Redis sent an answer without a command")
                return
            self._answer(self._unanswered.popleft(), reply)
        if self._is_replica and not self._unanswered:
            # After a failover, the client follows the new master, but this connection would stay with the old one.
            self._lose("Redis has become a replica")

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_protocol.connection_lost(exc)
        self._lose(str(exc or "Redis has closed the connection"))

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._send()

    def _send(self) -> None:
        self._flush = None
        if self._transport is None:
            if self._unsent and not self._is_opening and not self._is_closed:
                self._is_opening = True
                self._begin(self._open(), "redis-scripts")
            return
        if self._is_writable:
            unsent, self._unsent = [invocation for invocation in self._unsent if not invocation.answer.done()], []
            self._write(unsent, lambda script: ("EVALSHA", script.sha))

    def _write(self, invocations: Sequence[_Invocation], command: Callable[[LuaScript], tuple[str, str]]) -> None:
        if not invocations or self._transport is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for invocation in invocations:
            invocation.sent_at = now
        # Redis answers in the order of the commands, so a queue is enough to match replies.
        self._unanswered += invocations
        self._transport.write(
            b"".join(
                hiredis.pack_command((*command(invocation.script), *invocation.arguments)) for invocation in invocations
            )
        )
        if self._timer is None:
            self._timer = loop.call_later(TIMEOUT_S, self._check_silence, context=self._context)

    def _answer(self, invocation: _Invocation, reply: Any) -> None:
        error = _parse_error(str(reply)) if isinstance(reply, hiredis.ReplyError) else None
        if isinstance(error, NoScriptError):
            # Redis was restarted and does not know the script. Scripts that were sent after this one may run before
            # it.
            self._write([invocation], lambda script: ("EVAL", script.source))
        elif isinstance(error, RedisConnectionError):
            # For example, Redis is still loading its data. Redis has not run the script.
            _fail([invocation], str(error), may_have_run=False)
            self._lose(str(error))
        elif not invocation.answer.done():
            if error is None:
                invocation.answer.set_result(reply)
            else:
                # Redis 6 puts the code of a command's error into the middle of the script's error.
                self._is_replica = self._is_replica or "READONLY" in str(reply)
                invocation.answer.set_exception(error)

    def _check_silence(self) -> None:
        self._timer = None
        if self._unanswered:
            loop = asyncio.get_running_loop()
            deadline = self._unanswered[0].sent_at + TIMEOUT_S
            if loop.time() < deadline:
                self._timer = loop.call_at(deadline, self._check_silence, context=self._context)
            else:
                self._lose(f"Redis has not answered for {TIMEOUT_S:g} s")

    async def _open(self) -> None:
        """Let the client open a connection, and take over its transport."""
        try:
            connection = await self._pool.get_connection()
        except _REDIS_ERRORS as error:
            unsent, self._unsent = self._unsent, []
            _fail(unsent, str(error) or type(error).__name__, may_have_run=False)
            return
        finally:
            self._is_opening = False
        transport = connection._writer.transport
        self._connection, self._transport = connection, transport
        self._reader, self._is_writable = hiredis.Reader(notEnoughData=_INCOMPLETE), True
        self._client_protocol = transport.get_protocol()
        transport.set_protocol(self)
        if self._is_closed or transport.is_closing():
            self._lose(CLOSED if self._is_closed else "Redis has closed the connection")
        self._send()

    def _lose(self, reason: str) -> None:
        """Close the connection. Scripts that were not written yet are sent over the next connection."""
        connection, transport = self._connection, self._transport
        self._connection = self._transport = None
        self._is_replica = False
        unanswered, self._unanswered = self._unanswered, deque()
        _fail(unanswered, reason, may_have_run=True)
        if transport is not None:
            # Late data, and the end of this transport, must not reach the next connection.
            transport.set_protocol(self._client_protocol)
            self._begin(self._release(connection), "redis-scripts-release")
        if self._unsent:
            self._send()

    async def _release(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = begin_shared(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _parse_error(text: str) -> Exception:
    error: Exception = DefaultParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


def _fail(invocations: Iterable[_Invocation], reason: str, *, may_have_run: bool) -> None:
    for invocation in invocations:
        if not invocation.answer.done():
            invocation.answer.set_exception(ReplyMissing(reason, may_have_run=may_have_run))
