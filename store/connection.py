"""Connections to Redis, asynchronous ones for orchestrators and blocking ones for workers, with every time-out set.

Nothing outside of this package and of `workers/celery_edge` imports redis. Every store catches what a command raises in
`broker_errors`, so that its callers see BrokerUnavailable and nothing else.
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
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel as SyncSentinel
from redis.sentinel import SentinelConnectionPool as SyncSentinelPool

from contract.errors import BrokerUnavailable, OperatorError
from contract.names import deployment_key
from contract.settings import BrokerSettings
from store.tasks import begin_shared, cancel_all

RedisClient: TypeAlias = "redis.asyncio.Redis"
SyncRedis: TypeAlias = "redis.Redis"
SKEW_WARNING_S = 5.0
"""A host whose clock differs by this much is reported."""


class SharedClock:
    """The one clock of all hosts: Unix seconds as Redis counts them, so that a wrong clock expires no call.

    Until `learn` was called it is this host's own. Safe between threads: one float is written.
    """

    def __init__(self, local: Callable[[], float] = time.time) -> None:
        self._local = local
        self.offset_s = 0.0

    def __call__(self) -> float:
        return self._local() + self.offset_s

    def learn(self, redis_now: float) -> float:
        """Take over the time that Redis has just sent. Returns the seconds by which this host's clock is behind."""
        self.offset_s = redis_now - self._local()
        return self.offset_s


TIMEOUT_S = 10.0
MAX_CONNECTIONS = 16
LOADING_S = 10.0
"""How long a starting Redis may take to load its data."""
LOOK_S = 0.1
_REDIS_ERRORS = (RedisError, OSError)

_sync_clients: "weakref.WeakSet[redis.Redis]" = weakref.WeakSet()
_thread_connections: "weakref.WeakKeyDictionary[SyncPool, threading.local]" = weakref.WeakKeyDictionary()
"""The connection of each thread for its scripts, by pool."""


class RedisAccessDenied(OperatorError):
    """The Redis user has no permission for a command."""


@contextlib.contextmanager
def broker_errors(what: str) -> Iterator[None]:
    """Raise BrokerUnavailable instead of what the Redis client raises inside. `what`: a sentence about what failed, for
    example "the policy was not read".
    """
    try:
        yield
    except _REDIS_ERRORS as error:
        raise BrokerUnavailable(f"{what}: Redis does not answer ({error}); see that Redis is up") from error


def open_redis(broker: BrokerSettings) -> "redis.asyncio.Redis":
    """Return a client whose callers wait for a connection when all are busy. Behind sentinels it follows the master."""
    return redis.asyncio.Redis.from_pool(_open_pool(broker))


async def check_redis(client: "redis.asyncio.Redis", broker: BrokerSettings) -> None:
    """Raises BrokerUnavailable: where it looked, what Redis said, what to check."""
    try:
        await _ping(client)
    except AuthenticationError as error:
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} refuses user or password: check TOOLCREW_REDIS_URL"
        ) from error
    except _REDIS_ERRORS as error:  # not `broker_errors`: the sentence has the address, and what to check
        raise BrokerUnavailable(
            f"Redis at {broker.redis_address()} does not answer ({error}): {broker.connection_advice(str(error))}"
        ) from error


async def _ping(client: "redis.asyncio.Redis") -> None:
    """Ping Redis; wait while it loads its data."""
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
    """A connection that notices when it is lost, and when its user is cancelled.

    Whoever is cancelled while a command is being sent is cancelled: the client sends in `asyncio.wait_for`, which loses
    a cancellation that comes just as the last byte has gone (Python before 3.12), and a task that never ends by it is
    waited for in vain.
    """

    async def can_read(self) -> bool:
        """Check a connection before the pool lends it: one that was reset looks empty to the client, and would fail its
        next command.
        """
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
    """Connections to the present master; closing them closes those to the sentinels, too."""

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
        # With them the pool lends connections that the server has closed (redis-py 8.1). Only Redis Enterprise sends
        # them.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "username": broker.user,
        "password": broker.password,
        "db": broker.database,
        **broker.tls_options(),
    }


async def read_clock(client: "redis.asyncio.Redis") -> float:
    """Return Redis's time in Unix seconds. Raises BrokerUnavailable."""
    with broker_errors("Redis's time was not read"):
        seconds, micros = await client.time()
    return float(seconds) + float(micros) / 1_000_000


async def check_writable(client: "redis.asyncio.Redis", deployment: str) -> None:
    """Raise BrokerUnavailable unless Redis takes a write."""
    with broker_errors("Redis takes no data"):
        await client.set(deployment_key(deployment, "api:ready"), "1", ex=60)


async def read_server_info(client: "redis.asyncio.Redis", *sections: str) -> dict[str, Any]:
    """Return what INFO reports in these sections. Raises BrokerUnavailable, and RedisAccessDenied when the user may not
    ask for it.
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
    """Return a blocking client with its own pool; bytes in, bytes out. Behind sentinels it follows the master."""
    return _open_sync(broker, socket_timeout=TIMEOUT_S, socket_connect_timeout=5.0, health_check_interval=15)


def connect_once(broker: BrokerSettings) -> "redis.Redis":
    """Return a blocking client that sends every command once, for what must not arrive twice. It connects when it is
    first used.
    """
    return _open_sync(broker, socket_timeout=5.0, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 0))


def drop_connections() -> None:
    """Close the connections of every blocking client of this process. After an interrupt in the middle of a command,
    its reply may still be on the connection, and the next command would take it for its own."""
    for client in list(_sync_clients):
        client.connection_pool.disconnect()


def check_connection(broker: BrokerSettings) -> None:
    """Raise BrokerUnavailable with the address, Redis's answer and what to check, if Redis does not answer a blocking
    client.
    """
    client = connect(broker)
    try:
        client.ping()
    except _REDIS_ERRORS as error:  # as in `check_redis`
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


class Script:
    """A Lua script that is sent by its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class WorkerScript:
    """A Lua script that a worker runs for every call.

    It sends the command over a connection of the thread's own. The client's own way costs twice as much processor time,
    most of it for metrics and for retries that count attempts; a worker with short calls spends a tenth of its time
    there. As the client does, it reconnects, repeats a command whose answer was lost, and sends the source to a Redis
    that does not know the script. It raises what the client raises.
    """

    def __init__(self, client: SyncRedis, source: str) -> None:
        self._pool = client.connection_pool
        self._script = Script(source)
        self._thread = _thread_connections.setdefault(self._pool, threading.local())

    def __call__(
        self,
        keys: Sequence[str],
        args: Sequence[str | bytes | int | float],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Any:
        """Return the script's answer. `meanwhile` is called while the answer is on its way, so it must not run a
        script over the same client. It is called again when the script is sent again, and not at all when Redis cannot
        be reached.
        """
        connection = self._connection()
        arguments = (len(keys), *keys, *args)
        try:
            return connection.retry.call_with_retry(
                lambda: self._run(connection, arguments, meanwhile), lambda _: connection.disconnect()
            )
        except BaseException:
            # Its answer may still be on its way, and the next command would take it for its own.
            connection.disconnect()
            raise

    def _connection(self) -> Any:
        # After a fork, the connection that the parent made belongs to the parent.
        if getattr(self._thread, "process", None) != os.getpid():
            self._thread.process, self._thread.connection = os.getpid(), self._pool.get_connection()
        connection = self._thread.connection
        # As the pool does it when it lends a connection: one that Redis has closed, or that has an answer of before, is
        # opened anew.
        connection.connect()
        try:
            is_clean = not connection.can_read()
        except _REDIS_ERRORS:  # not `broker_errors`: nothing has failed yet, the connection is opened again
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
"""What the parser returns when the rest of an answer has not arrived yet."""


class Unanswered(RedisConnectionError):
    """Redis did not answer a script. `may_have_run`: it was written to the connection."""

    def __init__(self, reason: str, *, may_have_run: bool) -> None:
        super().__init__(reason)
        self.may_have_run = may_have_run


@dataclass
class _Invocation:
    script: Script
    arguments: tuple[Any, ...]
    answer: "asyncio.Future[Any]"
    sent_at: float = 0.0


class ScriptConnection(asyncio.Protocol):
    """Runs scripts for an orchestrator over one connection that stays open, any number at a time.

    Each tool call needs Redis twice before a worker has it. The client spends a task and two timers on each command,
    more than the rest of a call costs. So the client opens the connection, authenticates and encrypts it; this class
    then takes its transport over. Scripts that are run in one turn of the event loop are written together, in their
    order. Nothing is sent twice: the callers know whether a repetition is safe.
    """

    def __init__(self, client: RedisClient) -> None:
        self._pool: Any = client.connection_pool
        self._connection: Any = None
        self._transport: asyncio.Transport | None = None
        self._client_protocol = asyncio.Protocol()
        """The client's own protocol of the transport: it gets the transport back, and learns of its end."""
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._unsent: list[_Invocation] = []
        self._unanswered: deque[_Invocation] = deque()
        self._is_writable = True
        self._flush: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.Context()
        self._is_opening = self._is_closed = self._is_replica = False

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int | float]) -> "asyncio.Future[Any]":
        """Return the future answer of the script. Its exceptions: Unanswered; what Redis says against it, a RedisError.

        A script whose future is cancelled before it is written is not sent.
        """
        loop = asyncio.get_running_loop()
        invocation = _Invocation(script, (str(len(keys)), *keys, *map(str, arguments)), loop.create_future())
        if self._is_closed:
            _fail([invocation], CLOSED, may_have_run=False)
            return invocation.answer
        self._unsent.append(invocation)
        if self._flush is None:
            # It is not part of the call that happened to come first.
            self._flush = loop.call_soon(self._send, context=self._context)
        return invocation.answer

    async def aclose(self) -> None:
        """Close the connection. What still waits gets Unanswered."""
        self._is_closed = True
        self._lose(CLOSED)
        unsent, self._unsent = self._unsent, []
        _fail(unsent, CLOSED, may_have_run=False)
        if self._timer is not None:
            self._timer.cancel()
        if self._is_opening:
            await cancel_all(self._tasks)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What the transport calls

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        reader = self._reader
        while (reply := reader.gets()) is not _INCOMPLETE:
            if not self._unanswered:
                self._lose("Redis sent an answer without a command")
                return
            self._answer(self._unanswered.popleft(), reply)
        if self._is_replica and not self._unanswered:
            # After a failover the client knows the new master; this connection would stay with the old one.
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

    def _write(self, invocations: Sequence[_Invocation], command: Callable[[Script], tuple[str, str]]) -> None:
        if not invocations or self._transport is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for invocation in invocations:
            invocation.sent_at = now
        self._unanswered += invocations
        self._transport.write(
            b"".join(hiredis.pack_command((*command(one.script), *one.arguments)) for one in invocations)
        )
        if self._timer is None:
            self._timer = loop.call_later(TIMEOUT_S, self._check_silence, context=self._context)

    def _answer(self, invocation: _Invocation, reply: Any) -> None:
        error = _parse_error(str(reply)) if isinstance(reply, hiredis.ReplyError) else None
        if isinstance(error, NoScriptError):
            # Redis has started anew. Scripts that were sent after this one may run before it.
            self._write([invocation], lambda script: ("EVAL", script.source))
        elif isinstance(error, RedisConnectionError):
            # For example, Redis is still loading its data. It has not run the script.
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
            due = self._unanswered[0].sent_at + TIMEOUT_S
            if loop.time() < due:
                self._timer = loop.call_at(due, self._check_silence, context=self._context)
            else:
                self._lose(f"Redis has not answered for {TIMEOUT_S:g} s")

    async def _open(self) -> None:
        """Have the client open a connection, and take its transport over."""
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
        """Give the connection up. What was not written yet is sent over the next one."""
        connection, transport = self._connection, self._transport
        self._connection = self._transport = None
        self._is_replica = False
        unanswered, self._unanswered = self._unanswered, deque()
        _fail(unanswered, reason, may_have_run=True)
        if transport is not None:
            # What still arrives, and its end, must not reach the next connection.
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
            invocation.answer.set_exception(Unanswered(reason, may_have_run=may_have_run))
