"""Opens streams: checks the policy, finds the gateway of the session's host, and sends a ticket.

Invariant: a stream is opened only with a ticket for the session's present host and fence. A request that may have had
an effect is not sent again.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from toolcrew.concurrency.tasks import Backoff, SharedReads, begin_shared, cancel_all
from toolcrew.contract.errors import (
    BrokerUnavailable,
    ErrorCode,
    OperatorError,
    SandboxUnavailable,
    StreamLost,
    ToolFailure,
)
from toolcrew.contract.names import host_of, sandboxd_queue
from toolcrew.contract.stream_protocol import MAX_JSON_BYTES, WINDOW_BYTES, FrameKind
from toolcrew.contract.stream_tickets import (
    TICKET_S,
    StreamTicket,
    find_request_permission,
    find_stream_permission,
    seal_ticket,
)
from toolcrew.orchestrator.dispatch.pool_connection import PoolConnection
from toolcrew.orchestrator.streams.connection import GatewayConnection, open_connection
from toolcrew.orchestrator.streams.permissions import check_stream
from toolcrew.orchestrator.streams.stream import Stream, StreamReply
from toolcrew.store.audit import Actor, Audit, build_entry
from toolcrew.store.clock import SharedClock, read_clock
from toolcrew.store.sessions import SessionAddress, SessionStore
from toolcrew.store.stream_gateways import StreamGatewayStore
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

RETRY_S = 20.0
"""Seconds for which the opening of a stream is repeated while a gateway or a session moves."""
CHECK_EVERY_S = 4.0
"""Seconds between two checks of the tenants with open streams."""
CLOCK_EVERY_S = 60.0
LOCATION_EVERY_S = 300.0
"""Seconds between two extensions of the location of a session with open streams."""
_REPEATABLE_CALLS = frozenset({"processes", "stat", "wait", "resize", "close_stdin", "set_metadata"})
_AUDITED = frozenset({"process", "attach", "port"})
_LONG_ARGV_CHARS = 900

Result = TypeVar("Result")


@dataclass(frozen=True)
class StreamTarget:
    """A session, and the author of its streams in the audit log."""

    tenant: str
    session: str
    actor: Actor


@dataclass(frozen=True)
class _OpenStream:
    target: StreamTarget
    permission: str
    opening: Mapping[str, Any]
    stream: Stream
    is_recorded: bool


class Streams:
    """The streams of one process. All of its streams to one host share a connection."""

    def __init__(self, pool: PoolConnection, deployment: str) -> None:
        self._keys = pool.keys
        self._tenants = pool.tenants
        self._locator = pool.dispatcher.locator
        self._redis = pool.redis
        self._audit = Audit(pool.redis, deployment)
        self._gateways = StreamGatewayStore(pool.redis, deployment, pool.keys)
        self._sessions = SessionStore(pool.redis, deployment)
        self._clock, self._clock_at = SharedClock(), float("-inf")
        self._connections: dict[str, GatewayConnection] = {}
        self._connecting = SharedReads[GatewayConnection]()
        self._open: dict[int, _OpenStream] = {}
        self._extended: dict[tuple[str, str], float] = {}
        self._checking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, target: StreamTarget, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request of docs/stream-protocol.md and return its answer. Raises ToolFailure with the code of the
        sandbox, OperatorError; OUTCOME_UNKNOWN when the connection was lost before the answer.
        """
        permission = find_request_permission(request)

        async def send(connection: GatewayConnection, ticket: str) -> dict[str, Any]:
            reply = StreamReply()
            number = connection.begin(reply, FrameKind.CALL, _encode(ticket, "call", request))
            try:
                return await reply.answer
            finally:
                connection.leave(number)

        return await self._attempt(target, permission, send, is_repeatable=request["op"] in _REPEATABLE_CALLS)

    async def open(
        self,
        target: StreamTarget,
        opening: Mapping[str, Any],
        *,
        window: int = WINDOW_BYTES,
        is_recorded: bool = True,
    ) -> Stream:
        """Open a stream of docs/stream-protocol.md. `window`: bytes that are received before `read` takes them; at
        most BULK_WINDOW_BYTES. `is_recorded`: write audit entries for a process or a port.

        Raises ToolFailure with the code of the sandbox, OperatorError.
        """
        permission = find_stream_permission(opening)

        async def send(connection: GatewayConnection, ticket: str) -> Stream:
            stream = Stream(connection, _encode(ticket, "open", opening), window)
            try:
                await stream.wait_opened()
            except BaseException:
                stream.close()
                raise
            return stream

        if is_recorded:
            await self._record("stream.open", target, opening)
        # A sandbox starts one process for a key.
        is_repeatable = opening["what"] != "process" or opening.get("key") is not None
        stream = await self._attempt(target, permission, send, is_repeatable=is_repeatable)
        self._watch(_OpenStream(target, permission, opening, stream, is_recorded))
        return stream

    async def close(self) -> None:
        """End all streams and connections."""
        if self._checking is not None:
            await cancel_all([self._checking])
        for opened in list(self._open.values()):
            opened.stream.close()
        for connection in self._connections.values():
            connection.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- One attempt after another

    async def _attempt(
        self,
        target: StreamTarget,
        permission: str,
        send: Callable[[GatewayConnection, str], Awaitable[Result]],
        *,
        is_repeatable: bool,
    ) -> Result:
        await check_stream(self._tenants, target.tenant, permission)
        policy = await self._tenants.policy(target.tenant)
        backoff = Backoff(RETRY_S)
        address = await self._locator.find(target.tenant, target.session, policy)
        while True:
            has_sent = False
            try:
                connection = await self._connect(address.queue)
                ticket = await self._build_ticket(target, permission, address, connection)
                has_sent = not connection.is_lost
                return await send(connection, ticket)
            except StreamLost as error:
                if has_sent and not is_repeatable:
                    raise _unknown(error) from error
                failure: Exception = error
            except SandboxUnavailable as error:
                if has_sent:
                    raise
                failure = error
            except ToolFailure as error:
                # The session has another host or fence, or the gateway was replaced. Nothing was done.
                if error.code not in (ErrorCode.SESSION_NOT_FOUND, ErrorCode.UNAUTHENTICATED):
                    raise
                failure = error
            if not await backoff.wait():
                raise _describe(failure, address) from failure
            address = await self._locator.refresh(target.tenant, target.session, address, policy, is_lost=not has_sent)

    async def _connect(self, queue: str) -> GatewayConnection:
        """Return the connection to the gateway of a host. Raises SandboxUnavailable, BrokerUnavailable."""
        name = sandboxd_queue(queue)
        connection = self._connections.get(name)
        if connection is None or connection.is_lost:
            connection = await self._connecting.read(name, lambda: self._open_connection(name))
        return connection

    async def _open_connection(self, name: str) -> GatewayConnection:
        gateway = await self._gateways.find(name)
        if gateway is None:
            raise SandboxUnavailable(
                f"host {host_of(name)} has no stream gateway: start it "
                "(python -m toolcrew.workers.stream_gateway), and see `toolcrew doctor`"
            )
        connection = await open_connection(self._keys, gateway)
        self._connections[name] = connection
        return connection

    async def _build_ticket(
        self, target: StreamTarget, permission: str, address: SessionAddress, connection: GatewayConnection
    ) -> str:
        gateway = connection.gateway
        return seal_ticket(
            self._keys,
            StreamTicket(
                tenant=target.tenant,
                session=target.session,
                fence=address.fence,
                queue=gateway.queue,
                gateway=gateway.id,
                actor=target.actor.key,
                may=(permission,),
                expires_at=await self._read_clock() + TICKET_S,
                nonce=secrets.token_hex(16),
            ),
        )

    async def _read_clock(self) -> float:
        if time.monotonic() - self._clock_at > CLOCK_EVERY_S:
            self._clock.learn(await read_clock(self._redis))
            self._clock_at = time.monotonic()
        return self._clock()

    # --- Open streams

    def _watch(self, opened: _OpenStream) -> None:
        """Check an open stream now and then, and record its end."""
        number = id(opened.stream)
        self._open[number] = opened
        opened.stream.on_end = lambda: self._forget(number)
        if opened.stream.has_ended:
            self._forget(number)
        if self._checking is None or self._checking.done():
            self._checking = begin_shared(self._check_open(), "stream-checks")

    def _forget(self, number: int) -> None:
        opened = self._open.pop(number, None)
        if opened is not None and opened.is_recorded:
            task = begin_shared(self._record_end(opened), "stream-audit")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _check_open(self) -> None:
        """End the streams whose tenant was paused, has used up its budget, or may not have them any more."""
        while self._open:
            await asyncio.sleep(CHECK_EVERY_S)
            checked: dict[tuple[str, str], ToolFailure | None] = {}
            for opened in list(self._open.values()):
                key = (opened.target.tenant, opened.permission)
                if key not in checked:
                    checked[key] = await self._find_refusal(*key)
                refusal = checked[key]
                if refusal is not None:
                    opened.stream.fail(refusal)
            await self._extend_locations()

    async def _find_refusal(self, tenant: str, permission: str) -> ToolFailure | None:
        try:
            await check_stream(self._tenants, tenant, permission)
        except ToolFailure as failure:
            return failure
        except OperatorError as error:
            # Open streams go on while Redis does not answer.
            log.warning("stream_not_checked", tenant=tenant, error=str(error))
        return None

    async def _extend_locations(self) -> None:
        """Keep the locations of sessions whose only use is their streams."""
        now = time.monotonic()
        sessions = {(opened.target.tenant, opened.target.session) for opened in self._open.values()}
        self._extended = {key: at for key, at in self._extended.items() if key in sessions}
        for tenant, session in sessions:
            if now - self._extended.get((tenant, session), float("-inf")) > LOCATION_EVERY_S:
                self._extended[tenant, session] = now
                with suppress(BrokerUnavailable):  # the next round extends it
                    await self._sessions.extend(tenant, session)

    # --- Audit

    async def _record(self, action: Any, target: StreamTarget, opening: Mapping[str, Any], **details: str) -> None:
        """Write an audit entry for a stream to a process or a port. Raises BrokerUnavailable."""
        what = str(opening["what"])
        if what not in _AUDITED:
            return
        argv = opening.get("argv")
        facts = {
            "what": what,
            "argv": json.dumps(argv)[:_LONG_ARGV_CHARS] if isinstance(argv, list) else "",
            "process": str(opening.get("process") or opening.get("tag") or ""),
            "port": str(opening.get("port") or ""),
            **details,
        }
        await self._audit.add(build_entry(target.actor, action, target.session, tenant=target.tenant, details=facts))

    async def _record_end(self, opened: _OpenStream) -> None:
        stream = opened.stream
        try:
            await self._record(
                "stream.end",
                opened.target,
                opened.opening,
                sent_bytes=str(stream.sent),
                received_bytes=str(stream.received),
            )
        except OperatorError as error:
            log.warning("stream_end_not_recorded", session=opened.target.session, error=str(error))


def _encode(ticket: str, name: str, fields: Mapping[str, Any]) -> bytes:
    """Return the payload of OPEN or CALL. Raises ToolFailure(INVALID_ARGUMENTS)."""
    try:
        text = json.dumps({"ticket": ticket, name: dict(fields)}, ensure_ascii=False, allow_nan=False)
        payload = text.encode()
    except (TypeError, ValueError, RecursionError):
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "the request has a text or a number that is invalid") from None
    if len(payload) > MAX_JSON_BYTES:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the request has {len(payload)} bytes, at most {MAX_JSON_BYTES} are allowed: write long data to a file",
        )
    return payload


def _unknown(error: StreamLost) -> OperatorError:
    unknown = OperatorError(f"{error}. The request may have had an effect: check it before you repeat it")
    unknown.code = ErrorCode.OUTCOME_UNKNOWN
    return unknown


def _describe(failure: Exception, address: SessionAddress) -> Exception:
    if isinstance(failure, ToolFailure) and failure.code is ErrorCode.UNAUTHENTICATED:
        return SandboxUnavailable(
            f"the stream gateway of host {host_of(address.queue)} refuses this process: {failure}"
        )
    return failure
