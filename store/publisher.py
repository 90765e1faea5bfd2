"""Puts calls into their queues: one script for each call, which checks that it may go there, writes its record and pushes its message."""

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis.exceptions import NoScriptError, RedisError, ResponseError

from contract.clock import SharedClock
from contract.errors import BrokerUnavailable
from contract.names import call_key, host_key, place_key, tenant_sessions_key
from store.calls import PUBLISH
from store.connection import RedisClient
from store.tasks import begin_shared, cancel_all
from telemetry.logs import get_logger

log = get_logger(__name__)

BATCH = 200
"""Calls in one pipeline."""
SEND_WAIT_S = 3.0
"""How long a call waits for a Redis that does not answer, while it is certain that it was not sent."""
RETRY_S = (0.05, 0.1, 0.2, 0.5)
CLOCK_ROUND_TRIP_S = 0.5
"""What Redis says of the time is old after a longer way."""

_PUBLISH_SHA = hashlib.sha1(PUBLISH.encode(), usedforsecurity=False).hexdigest()
_REFUSALS: Mapping[str, Literal["host_lost", "moved", "duplicate"]] = {"host_lost": "host_lost", "moved": "moved", "duplicate": "duplicate"}


class NotSent(Exception):
    """Nothing was published. `host_lost`: the queue's host does not live; `moved`: the session is elsewhere, or on its way; `duplicate`: the call id
    was used before."""

    def __init__(self, reason: Literal["host_lost", "moved", "duplicate"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class CallMessage:
    """A call as it is published. `text`: the message of its Celery task. `start_by`: Unix seconds of the shared clock after which it must not start.
    `ticket`: a signed text that the record has until a worker begins the call (contract/ledger.py). `session`, `fence`: of a call that must reach the host
    of its session; None for one that any worker of the queue may run."""

    tenant: str
    call_id: str
    attempt: int
    tool: str
    queue: str
    task_id: str
    text: str
    start_by: float
    ticket: str = ""
    session: str | None = None
    fence: int | None = None


@dataclass(frozen=True)
class PendingMessage:
    """One call on its way to Redis. `command`: the script's keys and arguments."""

    command: tuple[Any, ...]
    outcome: "asyncio.Future[str]"


class _Unanswered(Exception):
    """Redis did not answer what became of a message. `may_be_sent`: it was written to the connection."""

    def __init__(self, cause: Exception, *, may_be_sent: bool) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.may_be_sent = may_be_sent


class Publisher:
    """Publishes what comes in one turn of the event loop, or while Redis has not answered yet, in one pipeline.

    A publish that got no answer is repeated, which sends nothing twice: the record knows who made it.
    """

    def __init__(self, client: RedisClient, deployment: str, clock: SharedClock) -> None:
        # Its connections are used by themselves: only so it is certain whether anything was sent, and no layer above sends it again.
        self._pool: Any = client.connection_pool
        self._deployment = deployment
        self._clock = clock
        self._connection: Any = None
        self._is_closed = False
        self._messages: list[PendingMessage] = []
        self._sending: asyncio.Task[None] | None = None

    async def publish(self, call: CallMessage) -> None:
        """Return when the call is in its queue.

        Raises NotSent; BrokerUnavailable when Redis does not answer for SEND_WAIT_S, or refuses it. Once it may have been sent,
        this waits until that is known, or until the call's deadline: until then it may still start.
        """
        command = self._command(call)
        began = asyncio.get_running_loop().time()
        attempt, may_be_sent = 0, False
        while True:
            try:
                outcome = await self._post(command)
                break
            except _Unanswered as unanswered:
                may_be_sent = may_be_sent or unanswered.may_be_sent
                waited_s = asyncio.get_running_loop().time() - began
                if not may_be_sent and waited_s > SEND_WAIT_S:
                    raise BrokerUnavailable(f"the call was not sent: Redis does not answer ({unanswered})") from unanswered
            except BrokerUnavailable as refused:
                # What was refused is only the repetition: the first may lie in the queue.
                if not may_be_sent or self._is_closed:
                    raise
                log.warning("publish_not_known", call=call.call_id, error=str(refused))
            if may_be_sent and self._clock() > call.start_by:
                return  # its caller forbids it, or gets its result
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        if outcome in _REFUSALS:
            raise NotSent(_REFUSALS[outcome])

    async def aclose(self) -> None:
        """Stop sending. Callers that still wait get BrokerUnavailable."""
        self._is_closed = True
        if self._sending is not None:
            await cancel_all((self._sending,))
        await self._give_back()
        _fail(self._messages, _Unanswered(ConnectionError("the client was closed"), may_be_sent=False))

    def _command(self, call: CallMessage) -> tuple[Any, ...]:
        keys = [call_key(self._deployment, call.tenant, call.call_id), call.queue]
        # The word must differ each time; that it cannot be guessed is not needed.
        nonce = f"{call.attempt}:{random.getrandbits(64):x}"
        arguments: list[Any] = [call.attempt, nonce, call.tool, call.text, call.task_id, call.ticket]
        if call.session is not None and call.fence is not None:
            keys += [place_key(self._deployment, call.tenant, call.session), host_key(self._deployment, call.queue)]
            keys.append(tenant_sessions_key(self._deployment, call.tenant))
            arguments += [call.session, call.fence]
        return (len(keys), *keys, *arguments)

    async def _post(self, command: tuple[Any, ...]) -> str:
        """Send one message and return its outcome. Raises _Unanswered, BrokerUnavailable."""
        if self._is_closed:
            raise BrokerUnavailable("the client was closed while the call was sent: it may or may not act")
        message = PendingMessage(command, asyncio.get_running_loop().create_future())
        self._messages.append(message)
        if self._sending is None or self._sending.done():
            self._sending = begin_shared(self._send_all(), "publish")
        return await message.outcome

    async def _send_all(self) -> None:
        while self._messages:
            # A call whose caller was cancelled before is not sent at all.
            messages = [message for message in self._messages[:BATCH] if not message.outcome.done()]
            del self._messages[:BATCH]
            try:
                if messages:
                    await self._send(messages)
            finally:
                _fail(messages, _Unanswered(ConnectionError("sending was broken off"), may_be_sent=True))

    async def _send(self, messages: Sequence[PendingMessage]) -> None:
        try:
            connection = await self._open_connection()
        except (RedisError, OSError) as error:
            _fail(messages, _Unanswered(error, may_be_sent=False))
            return
        is_clean = False
        try:
            await self._exchange(connection, messages)
            is_clean = True
        except (RedisError, OSError) as error:
            _fail(messages, _Unanswered(error, may_be_sent=True))
        finally:
            if not is_clean:
                # An answer that is still on its way would be taken for that to the next command.
                await self._give_back()

    async def _open_connection(self) -> Any:
        """Return the kept connection: to get one from the pool costs as much as to publish. One that is known to have ended is replaced."""
        if self._connection is not None and (not self._connection.is_connected or await self._connection.can_read()):
            await self._give_back()
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        return self._connection

    async def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _exchange(self, connection: Any, messages: Sequence[PendingMessage]) -> None:
        """Send a batch and read its answers. An error of the connection leaves the rest unanswered."""
        unknown = await self._ask(connection, messages, "EVALSHA", _PUBLISH_SHA)
        if unknown:
            # Redis has started anew, and knows no scripts.
            await self._ask(connection, unknown, "EVAL", PUBLISH)

    async def _ask(self, connection: Any, messages: Sequence[PendingMessage], name: str, script: str) -> list[PendingMessage]:
        """Send the messages, and return those for which Redis did not know the script."""
        began = asyncio.get_running_loop().time()
        await connection.send_packed_command(connection.pack_commands([(name, script, *message.command) for message in messages]))
        unknown: list[PendingMessage] = []
        for message in messages:
            try:
                word, seconds, micros = (await connection.read_response()).decode().split()
            except NoScriptError:
                unknown.append(message)
            except ResponseError as error:
                _fail([message], BrokerUnavailable(f"the call was not sent: Redis refuses it ({error})"))
            else:
                if asyncio.get_running_loop().time() - began < CLOCK_ROUND_TRIP_S:
                    self._clock.learn(int(seconds) + int(micros) / 1e6)
                if not message.outcome.done():
                    message.outcome.set_result(word)
        return unknown


def _fail(messages: Sequence[PendingMessage], error: Exception) -> None:
    for message in messages:
        if not message.outcome.done():
            message.outcome.set_exception(error)
