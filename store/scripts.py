"""Lua scripts, and the two ways in which frequent scripts reach Redis: `WorkerScript` and `ScriptConnection`."""

import asyncio
import contextvars
import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

import hiredis
from redis.connection import ConnectionPool, DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from toolcrew.concurrency.tasks import begin_shared, cancel_all
from toolcrew.store.connection import REDIS_ERRORS, TIMEOUT_S, RedisClient, SyncRedis

Value: TypeAlias = str | bytes | int | float | Sequence[str] | Sequence[str | bytes | int | float]
"""The value of a key or argument of a script. A sequence is the value of a name that ends with `...`."""
_thread_connections: "weakref.WeakKeyDictionary[ConnectionPool, threading.local]" = weakref.WeakKeyDictionary()
"""The connections that each thread uses for its scripts, by connection pool."""


class Script:
    """A Lua script whose keys and arguments have names. In the source, each name is a local variable. A last name that
    ends with `...` takes all further values, and is a table without the dots in its name.

    Callers pass every name, by keyword: KeyError and TypeError are errors of the caller. Redis gets the digest of the
    script, and the source only if it does not know the script.
    """

    def __init__(self, source: str, *, keys: Sequence[str] = (), args: Sequence[str] = ()) -> None:
        self.script = self.source = _declare("KEYS", keys) + _declare("ARGV", args) + source
        """`script` is the name under which pipelines of the Redis client read the source."""
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        self.keys = tuple(keys)
        self.args = tuple(args)
        self._one_key, self._more_keys = _split_names(keys)
        self._one_arg, self._more_args = _split_names(args)

    @classmethod
    def load(cls, *files: str, args: Sequence[str], functions: str = "") -> "Script":
        """Return a script from files of this package. `functions`: Lua functions that they use."""
        folder = resources.files("toolcrew.store")
        texts = (folder.joinpath(name).read_text(encoding="utf-8") for name in files)
        return cls("\n".join((functions, *texts)), args=args)

    def arrange(self, values: Mapping[str, Value]) -> list[Any]:
        """Return the arguments of EVALSHA after the digest: the number of keys, the keys, and the arguments."""
        if len(values) != len(self.keys) + len(self.args):
            raise TypeError(f"the script has the keys {self.keys} and the arguments {self.args}, not {set(values)}")
        keys = [values[name] for name in self._one_key]
        if self._more_keys:
            keys += values[self._more_keys]  # type: ignore[arg-type]  # the value of such a name is a sequence
        arguments = [len(keys), *keys]
        arguments += [values[name] for name in self._one_arg]
        if self._more_args:
            arguments += values[self._more_args]  # type: ignore[arg-type]
        return arguments

    async def run(self, client: RedisClient, /, **values: Value) -> Any:
        """Run the script and return its reply. Raises the errors of the Redis client."""
        arguments = self.arrange(values)
        try:
            return await client.evalsha(self.sha, *arguments)
        except NoScriptError:
            return await client.eval(self.source, *arguments)

    def run_blocking(self, client: SyncRedis, /, **values: Value) -> Any:
        """Run the script over a blocking client and return its reply. Raises the errors of the Redis client."""
        arguments = self.arrange(values)
        try:
            return client.evalsha(self.sha, *arguments)
        except NoScriptError:
            return client.eval(self.source, *arguments)

    def add_to(self, pipe: Any, /, **values: Value) -> None:
        """Add the script to a pipeline of either client, which loads the script first if Redis does not know it."""
        pipe.scripts.add(self)
        pipe.evalsha(self.sha, *self.arrange(values))


def _declare(table: str, names: Sequence[str]) -> str:
    """Return the Lua lines that name the entries of KEYS or ARGV."""
    lines = ""
    for at, name in enumerate(names, 1):
        if name.endswith("..."):
            rest = name.removesuffix("...")
            # No `unpack`: Lua limits the number of values that a function returns.
            lines += f"local {rest} = {{}}\nfor i = {at}, #{table} do {rest}[i - {at - 1}] = {table}[i] end\n"
        else:
            lines += f"local {name} = {table}[{at}]\n"
    return lines


def _split_names(names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the names of single values, and the name of all further values ("" if there is none)."""
    single = tuple(name for name in names if not name.endswith("..."))
    return single, "".join(name.removesuffix("...") for name in names[len(single) :])


class WorkerScript:
    """A Lua script that a worker runs for every call.

    The command uses a connection that belongs to the thread. The usual method of the client costs twice as much
    processor time, mostly for metrics and retry counters. A worker with short calls would spend a tenth of its time
    there. Like the client, this class reconnects, repeats a command whose reply was lost, and sends the source if
    Redis does not know the script. The class raises the same errors as the client.
    """

    def __init__(self, client: SyncRedis, script: Script) -> None:
        self._pool = client.connection_pool
        self._script = script
        self._thread = _thread_connections.setdefault(self._pool, threading.local())

    def run(self, meanwhile: Callable[[], object] = lambda: None, /, **values: Value) -> Any:
        """Run the script and return its reply. `meanwhile` runs while Redis works, so it must not run a script over
        the same client. `meanwhile` runs again if the script is sent again, and does not run if Redis cannot be
        reached.
        """
        connection = self._connection()
        arguments = self._script.arrange(values)
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
        except REDIS_ERRORS:  # no BrokerUnavailable: the connection is opened again
            is_clean = False
        if not is_clean:
            connection.disconnect()
            connection.connect()
        return connection

    def _run(self, connection: Any, arguments: Sequence[Any], meanwhile: Callable[[], object]) -> Any:
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
    script: Script
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

    def run(self, script: Script, /, **values: Value) -> "asyncio.Future[Any]":
        """Return a future of the script's reply. The future raises ReplyMissing, or the RedisError that Redis sent as
        the reply.

        A script whose future is cancelled before the script is written is not sent.
        """
        loop = asyncio.get_running_loop()
        invocation = _Invocation(script, tuple(map(str, script.arrange(values))), loop.create_future())
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

    def _write(self, invocations: Sequence[_Invocation], command: Callable[[Script], tuple[str, str]]) -> None:
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
        except REDIS_ERRORS as error:
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
