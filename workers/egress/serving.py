"""Serves one connection of a sandbox, from sandboxd's opening to its line in the log.

The proxy refuses by default: every step must allow the connection explicitly, and an error at any step ends it.
"""

import asyncio
import contextlib
import json
import socket
import time
from dataclasses import dataclass, field
from http import HTTPStatus

import h11
import structlog

from toolcrew.workers.egress.allowances import (
    ConnectionQuota,
    ConnectionQuotas,
    EgressOpening,
    EgressQuestion,
    parse_opening,
)
from toolcrew.workers.egress.destinations import Destinations
from toolcrew.workers.egress.hellos import UNRECOGNIZED_NAME, HelloGate
from toolcrew.workers.egress.http_messages import HeadError, ProxyRequest, parse_request
from toolcrew.workers.egress.interception import Interception, SecretProxy, must_intercept
from toolcrew.workers.egress.limits import CHUNK_BYTES, ProxyLimits
from toolcrew.workers.egress.outcomes import (
    EgressOutcome,
    Refusal,
    build_answer,
    refuse_bad_gateway,
    refuse_bad_request,
)
from toolcrew.workers.egress.relaying import AnswerRewriter, HttpRelay, Peer, PlainChannel
from toolcrew.workers.egress.streams import ActivityClock, Stream, run_all, tunnel, watch

log = structlog.get_logger(__name__)

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass
class _Record:
    """The fields of a connection's log line, which never contains a path, a query or a header."""

    opening: EgressOpening | None = None
    request: ProxyRequest | None = None
    outcome: EgressOutcome = EgressOutcome.ALLOWED
    began_at: float = field(default_factory=time.monotonic)

    def write(self, bytes_up: int, bytes_down: int) -> None:
        request = self.request
        log.info(
            "egress",
            tenant=self.opening.tenant if self.opening else "",
            session=self.opening.session if self.opening else "",
            method=request.method if request else "",
            destination=request.target.host if request else "",
            port=request.target.port if request else 0,
            outcome=self.outcome.value,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            seconds=round(time.monotonic() - self.began_at, 3),
        )


class Proxy:
    """Serves connections. Anything that no rule allows is refused."""

    def __init__(
        self, destinations: Destinations, quotas: ConnectionQuotas, limits: ProxyLimits, secrets: SecretProxy
    ) -> None:
        self._destinations = destinations
        self._quotas = quotas
        self._limits = limits
        self._secrets = secrets

    async def serve(self, sock: socket.socket) -> None:
        """Serve a connection to its end, and always close the socket."""
        await _Connection(Stream(sock), self._destinations, self._quotas, self._limits, self._secrets).serve()

    async def refuse_connection(self, sock: socket.socket) -> None:
        """Refuse a connection because the proxy is full."""
        client = Stream(sock)
        sentence = "the egress proxy of this host has as many connections as it can serve: try again later"
        log.warning("egress_full")
        try:
            await _send_last(
                client,
                build_answer(Refusal(EgressOutcome.TOO_MANY_CONNECTIONS, HTTPStatus.SERVICE_UNAVAILABLE, sentence)),
                self._limits,
            )
        finally:
            client.close()


async def _send_last(client: Stream, data: bytes, limits: ProxyLimits) -> None:
    """Send the last bytes and give the client time to read them."""
    with contextlib.suppress(OSError, TimeoutError):  # the client has left or does not read
        async with asyncio.timeout(limits.linger_s):
            await client.send(data)
            client.end_sending()
            await client.drain()


class _Connection:
    def __init__(
        self,
        client: Stream,
        destinations: Destinations,
        quotas: ConnectionQuotas,
        limits: ProxyLimits,
        secrets: SecretProxy,
    ) -> None:
        self._client = client
        self._host: Stream | None = None
        self._secrets = secrets
        self._destinations = destinations
        self._quotas = quotas
        self._limits = limits
        self._record = _Record()
        self._is_http = True
        self._last_bytes = b""

    async def serve(self) -> None:
        try:
            await self._serve()
        except Refusal as refusal:
            self._record.outcome = refusal.outcome
            self._close_host()
            await _send_last(
                self._client, self._last_bytes or (build_answer(refusal) if self._is_http else b""), self._limits
            )
        except OSError:
            self._record.outcome = EgressOutcome.INTERRUPTED
        except asyncio.CancelledError:
            self._record.outcome = EgressOutcome.STOPPED
            raise
        finally:
            self._client.close()
            self._close_host()
            if self._client.received or self._record.outcome is not EgressOutcome.ALLOWED:
                self._record.write(self._client.received, self._host.received if self._host else 0)

    def _close_host(self) -> None:
        if self._host is not None:
            self._host.close()

    async def _serve(self) -> None:
        opening = await self._read_opening()
        if opening is None:
            return
        if isinstance(opening, EgressQuestion):
            await _send_last(self._client, self._answer(opening), self._limits)
            return
        self._record.opening = opening
        with self._quotas.enter(opening) as quota:
            await self._quotas.find_share(opening.tenant).run(self._serve_request(opening, quota))

    async def _serve_request(self, opening: EgressOpening, quota: ConnectionQuota) -> None:
        received = await self._read_request(quota)
        if received is None:
            return
        request, rest = received
        self._record.request = request
        sock = await self._destinations.connect(opening.tenant, request.target, opening.rules)
        self._host = Stream(sock)
        if request.is_tunnel and must_intercept(opening.secrets, request.target):
            await self._intercept(self._host, opening, request, rest, quota)
        elif request.is_tunnel:
            await self._tunnel(self._host, request, rest, quota)
        else:
            await self._exchange(self._host, request, rest, quota)

    def _answer(self, question: EgressQuestion) -> bytes:
        if question.ask == "authority":
            return self._secrets.authority.build_bundle()
        return json.dumps(self._secrets.uses.take()).encode()

    async def _read_opening(self) -> EgressOpening | EgressQuestion | None:
        """Return sandboxd's opening line. None: the peer sent nothing; a check whether the proxy runs does this."""
        try:
            async with asyncio.timeout(self._limits.opening_s):
                line = await self._client.receive_line(self._limits.opening_bytes)
        except TimeoutError:
            raise refuse_bad_gateway(
                EgressOutcome.BAD_OPENING,
                "sandboxd did not send the rules of this session in time: report it to the operator",
            ) from None
        return parse_opening(line) if line else None

    async def _read_request(self, quota: ConnectionQuota) -> tuple[ProxyRequest, bytes] | None:
        """Return the request and the bytes after its head, or None when the client left without a request."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                first = await self._client.receive(quota)
            async with asyncio.timeout(self._limits.header_s):
                head, rest = await _read_head(self._client, quota, self._limits, first) if first else (b"", b"")
        except TimeoutError:
            sentence = f"the head of the request did not come within {self._limits.header_s:g} s"
            raise Refusal(EgressOutcome.SLOW_REQUEST, HTTPStatus.REQUEST_TIMEOUT, sentence) from None
        except HeadError as error:
            raise refuse_bad_request(str(error)) from None
        return (parse_request(head, self._limits.header_lines), rest) if head else None

    async def _tunnel(self, host: Stream, request: ProxyRequest, rest: bytes, quota: ConnectionQuota) -> None:
        gate, activity = HelloGate(request.target), ActivityClock()
        await self._client.send(_ESTABLISHED)
        self._is_http = False
        try:
            relaying = tunnel(self._client, host, gate, rest, quota, activity)
            await run_all(relaying, background=(watch(self._client, activity, self._limits),))
        except Refusal as refusal:
            if refusal.outcome is EgressOutcome.TLS_REFUSED:
                self._last_bytes = UNRECOGNIZED_NAME if gate.answers_in_tls else build_answer(refusal)
            raise

    async def _intercept(
        self, host: Stream, opening: EgressOpening, request: ProxyRequest, rest: bytes, quota: ConnectionQuota
    ) -> None:
        await self._client.send(_ESTABLISHED)
        self._is_http = False
        interception = Interception(self._secrets, opening, request.target, quota, self._limits)
        await interception.run(self._client, host, rest, lambda activity: watch(self._client, activity, self._limits))

    async def _exchange(self, host: Stream, request: ProxyRequest, rest: bytes, quota: ConnectionQuota) -> None:
        """Relay one request. Later bytes are not read as a second request."""
        activity, channel = ActivityClock(), PlainChannel(self._client, quota)
        inner = Peer(channel, h11.SERVER, self._limits)
        inner.http.receive_data(request.head + rest)
        relay = HttpRelay(
            inner,
            Peer(PlainChannel(host, quota), h11.CLIENT, self._limits),
            request.target.host,
            activity,
            self._limits,
        )
        try:
            head = inner.http.next_event()
            if not isinstance(head, h11.Request):
                raise refuse_bad_request("it is not HTTP/1.1")
            forwarded = h11.Request(method=head.method, target=head.target, headers=head.headers.raw_items())
            watching = watch(self._client, activity, self._limits)
            await run_all(relay.run(forwarded, AnswerRewriter(), is_last=True), background=(watching,))
        except h11.ProtocolError:
            raise refuse_bad_request("it is not HTTP/1.1") from None
        finally:
            self._is_http = not relay.has_answered


_HEAD_END = b"\r\n\r\n"


async def _read_head(stream: Stream, quota: ConnectionQuota, limits: ProxyLimits, head: bytes) -> tuple[bytes, bytes]:
    """Return a head, with its empty line, and the bytes after it. `head`: bytes that were already read. Raises
    HeadError.
    """
    while (end := head.find(_HEAD_END)) < 0:
        if len(head) >= limits.header_bytes:
            raise HeadError(f"its head has more than {limits.header_bytes // 1024} KiB")
        data = await stream.receive(quota, min(CHUNK_BYTES, limits.header_bytes - len(head)))
        if not data:
            raise HeadError("the connection ended in the middle of its head")
        head += data
    return head[: end + 4], head[end + 4 :]
