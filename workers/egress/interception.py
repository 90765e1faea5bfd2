"""A connection to a host with secrets of the session: TLS ends here, and every request is parsed, checked, filled with
secrets and framed again.

Invariant: a secret leaves only in a request to its host, over TLS that was verified, at its place. Requests and answers
that two parsers could read differently end the connection.
"""

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from http.client import responses

import h11

from workers.egress.allowances import ConnectionQuota, EgressOpening
from workers.egress.authority import Authority
from workers.egress.hellos import HelloGate
from workers.egress.http_messages import Header, HeadError, drop_hop_by_hop, find_values, parse_framing
from workers.egress.limits import ProxyLimits
from workers.egress.secrets import (
    HTTPS_PORT,
    BoundSecret,
    FilledRequest,
    MaskedStream,
    SecretFiller,
    SecretMasker,
    SecretUses,
)
from workers.egress.streams import ActivityClock, Stream, Work, run_all
from workers.egress.tls import TlsStream
from workers.egress.verdicts import EgressVerdict, Refusal, build_answer, refuse_bad_gateway, refuse_bad_request
from workers.web.bodies import CODINGS, Inflater
from workers.web.urls import Target

_MAX_INTERIM = 16
# A part of an answer could show a secret in pieces that nothing recognizes, so the host sends the whole.
_DROPPED = frozenset({b"accept-encoding", b"range", b"if-range", b"host"})
_REWRITTEN = frozenset({b"content-encoding", b"content-length"})
"""Headers that change when the proxy decodes an answer."""


class SecretProxy:
    """Intercepts connections to hosts with secrets. `upstream`: verifies the hosts."""

    def __init__(self, authority: Authority, uses: SecretUses, upstream: ssl.SSLContext) -> None:
        self.authority, self.uses, self.upstream = authority, uses, upstream


class _Peer:
    """One side: its TLS and its HTTP/1.1 parser."""

    def __init__(self, tls: TlsStream, role: "type[h11.CLIENT] | type[h11.SERVER]", limits: ProxyLimits) -> None:
        self.tls = tls
        self.http = h11.Connection(role, max_incomplete_event_size=limits.header_bytes)

    async def next(self) -> "h11.Event":
        """Return the next event. Raises h11.RemoteProtocolError, OSError and Refusal."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.tls.receive())
        assert event is not h11.PAUSED
        return event  # type: ignore[return-value]

    async def send(self, event: "h11.Event") -> None:
        await self.tls.send(self.http.send(event) or b"")

    @property
    def is_done(self) -> bool:
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE


class Interception:
    """Serves the requests of one tunnel, one after another, over one connection to the host."""

    def __init__(
        self, proxy: SecretProxy, opening: EgressOpening, target: Target, quota: ConnectionQuota, limits: ProxyLimits
    ) -> None:
        self._proxy, self._opening, self._target = proxy, opening, target
        self._quota, self._limits = quota, limits
        self._activity = ActivityClock()
        self._filler = SecretFiller(
            opening.tenant, opening.session, [one for one in opening.secrets if one.is_bound_to(target)]
        )
        self._masker = SecretMasker.of(opening.secrets)
        self._has_answered = False

    async def run(self, client: Stream, host: Stream, first: bytes, watch: Callable[[ActivityClock], Work]) -> None:
        """Serve until one side ends. `first`: bytes that the client has already sent. Raises Refusal and OSError."""
        await run_all(self._run(client, host, first), background=(watch(self._activity),))

    async def _run(self, client: Stream, host: Stream, first: bytes) -> None:
        inner = _Peer(await self._greet(client, first), h11.SERVER, self._limits)
        try:
            outer = _Peer(await self._connect(host), h11.CLIENT, self._limits)
            while await self._serve_request(inner, outer):
                inner.http.start_next_cycle()
                outer.http.start_next_cycle()
        except Refusal as refusal:
            # A part of the host's answer may be out. Text after it would read as its body.
            if not self._has_answered:
                await inner.tls.send(build_answer(refusal))
            raise
        finally:
            with contextlib.suppress(OSError, TimeoutError):  # the client has left or does not read
                async with asyncio.timeout(self._limits.linger_s):
                    await inner.tls.close()

    async def _greet(self, client: Stream, first: bytes) -> TlsStream:
        gate, data = HelloGate(self._target), first
        while not (passed := gate.pass_on(data)):
            data = await client.receive(self._quota)
            if not data:
                gate.finish()
                raise OSError("the client left before its TLS greeting")
        tls = TlsStream(client, self._proxy.authority.find_context(self._target.host), self._quota, first=passed)
        async with asyncio.timeout(self._limits.header_s):
            await tls.handshake()
        return tls

    async def _connect(self, host: Stream) -> TlsStream:
        tls = TlsStream(host, self._proxy.upstream, self._quota, hostname=self._target.host)
        try:
            async with asyncio.timeout(self._limits.header_s):
                await tls.handshake()
        except (ssl.SSLError, TimeoutError) as error:
            problem = getattr(error, "verify_message", None) or "TLS failed"
            raise self._build_bad_answer(f"cannot be verified ({problem})") from None
        return tls

    async def _serve_request(self, inner: _Peer, outer: _Peer) -> bool:
        """Serve one request. Returns whether both connections can serve another one."""
        self._has_answered = False
        try:
            request = await self._next_request(inner, outer)
            if request is None:
                return False
            filled = self._fill(request)
        except h11.RemoteProtocolError as error:
            raise refuse_bad_request(f"it is no HTTP/1.1 request ({error})") from None
        except HeadError as error:
            raise refuse_bad_request(str(error)) from None
        await self._send_head(outer, request, filled)
        sending = asyncio.ensure_future(self._send_body(inner, outer))
        answering = asyncio.ensure_future(self._forward_answer(inner, outer, self._masker.plus(filled.credentials)))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                sending.result()
            await answering
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)
        return inner.is_done and outer.is_done

    async def _next_request(self, inner: _Peer, outer: _Peer) -> h11.Request | None:
        """Return the next request, or None when one side ends. A head must be complete in time."""
        if inner.http.trailing_data == (b"", False):
            data = await self._wait_for_client(inner, outer)
            if data is None:
                return None
            inner.http.receive_data(data)
        try:
            async with asyncio.timeout(self._limits.header_s):
                event = await inner.next()
        except TimeoutError:
            sentence = f"the head of the request did not come within {self._limits.header_s:g} s"
            raise Refusal(EgressVerdict.SLOW_REQUEST, HTTPStatus.REQUEST_TIMEOUT, sentence) from None
        self._activity.record_activity()
        return event if isinstance(event, h11.Request) else None

    async def _wait_for_client(self, inner: _Peer, outer: _Peer) -> bytes | None:
        """Return the client's next bytes, or None when the host ends first: a request would get no answer then."""
        reading, leaving = asyncio.ensure_future(inner.tls.receive()), asyncio.ensure_future(outer.tls.receive())
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)

    def _fill(self, request: h11.Request) -> FilledRequest:
        """Check a request and return it with its secrets. Raises HeadError."""
        headers = _read_headers(request)
        framing = parse_framing(headers)
        if request.http_version != b"1.1":
            raise HeadError("its version is not HTTP/1.1")
        if len(headers) > self._limits.header_lines:
            raise HeadError(f"it has more than {self._limits.header_lines} header lines")
        if not request.target.startswith(b"/") and (request.method, request.target) != (b"OPTIONS", b"*"):
            raise HeadError("its target is not a path")
        [host] = find_values(headers, b"host")
        names = {f"{self._target.host}:{self._target.port}".encode()}
        if self._target.port == HTTPS_PORT:
            names.add(self._target.host.encode())
        if host.lower() not in names:
            raise HeadError("its Host header names another host than its tunnel")
        if any(value.lower() != b"100-continue" for value in find_values(headers, b"expect")):
            raise HeadError("it expects something else than 100-continue")
        kept = [header for header in drop_hop_by_hop(headers) if header.key not in _DROPPED]
        kept += [_header(b"Host", self._target.authority.encode()), _header(b"Accept-Encoding", b"identity")]
        if framing.is_chunked:
            kept.append(_header(b"Transfer-Encoding", b"chunked"))
        return self._filler.fill(request.target, kept)

    async def _send_head(self, outer: _Peer, request: h11.Request, filled: FilledRequest) -> None:
        for name in filled.used:
            self._proxy.uses.note(
                self._opening.tenant, self._opening.session, self._opening.run, name, self._target.authority
            )
        headers = [(header.name, header.value) for header in filled.headers]
        try:
            await outer.send(h11.Request(method=request.method, target=filled.target, headers=headers))
        except h11.LocalProtocolError:
            raise refuse_bad_request("it cannot be written again") from None

    async def _send_body(self, inner: _Peer, outer: _Peer) -> None:
        """Forward the body. Trailers are dropped. A host that reads no more may still answer."""
        try:
            while isinstance(event := await inner.next(), h11.Data):
                self._activity.record_activity()
                if not await _try_send(outer, h11.Data(data=bytes(event.data))):
                    return
        except h11.RemoteProtocolError:
            raise refuse_bad_request("its body is not HTTP/1.1") from None
        await _try_send(outer, h11.EndOfMessage())

    async def _forward_answer(self, inner: _Peer, outer: _Peer, masker: SecretMasker) -> None:
        try:
            inflater = await self._start_answer(inner, await self._read_answer(inner, outer), masker)
            stream = MaskedStream(masker)
            while isinstance(event := await outer.next(), h11.Data):
                self._activity.record_activity()
                async for data in self._decode(bytes(event.data), inflater):
                    await self._send_data(inner, stream.take(data))
            if inflater is not None and not inflater.is_whole:
                raise self._build_bad_answer("sends a compressed answer that is not complete")
            await self._send_data(inner, stream.finish())
            await inner.send(h11.EndOfMessage())
        except (h11.RemoteProtocolError, HeadError):
            # The text of the error may quote the answer.
            raise self._build_bad_answer("does not answer in HTTP/1.1") from None
        except h11.LocalProtocolError:
            raise self._build_bad_answer("sends an answer that cannot be written again") from None
        except zlib.error:
            raise self._build_bad_answer("sends an answer that is not compressed as it says") from None

    async def _decode(self, data: bytes, inflater: Inflater | None) -> AsyncIterator[bytes]:
        """Yield a part of an answer in pieces. Decoded bytes count towards the session's quota and rate, which bounds
        what a decompression bomb costs. Raises zlib.error and Refusal.
        """
        if inflater is None:
            yield data
            return
        for piece in inflater.feed(data):
            await self._quota.charge(len(piece))
            yield piece
            await asyncio.sleep(0)  # one read makes many pieces, and other connections must not wait for all of them

    async def _read_answer(self, inner: _Peer, outer: _Peer) -> h11.Response:
        for _ in range(_MAX_INTERIM):
            event = await outer.next()
            self._activity.record_activity()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise self._build_bad_answer("closed the connection without an answer")
            if event.status_code == HTTPStatus.CONTINUE and inner.http.they_are_waiting_for_100_continue:
                await inner.send(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[]))
        raise self._build_bad_answer("sends interim answers without an end")

    async def _start_answer(self, inner: _Peer, response: h11.Response, masker: SecretMasker) -> Inflater | None:
        """Send the head of an answer. Return the decoder of its body, or None when it is not compressed."""
        headers = _read_headers(response)
        parse_framing(headers)
        passed = [header for header in drop_hop_by_hop(headers) if header.key != b"accept-ranges"]
        codings = [value.lower().decode("latin-1") for value in find_values(headers, b"content-encoding")]
        codings = [coding for coding in codings if coding != "identity"]
        if len(codings) > 1 or not CODINGS.issuperset(codings) or response.status_code == HTTPStatus.PARTIAL_CONTENT:
            raise self._build_bad_answer(
                "sends a part of an answer, or a compressed one that cannot be searched for secrets"
            )
        if codings:
            passed = [header for header in passed if header.key not in _REWRITTEN]
        kept = [(masker.mask(header.name), masker.mask(header.value)) for header in passed]
        kept.append((b"Accept-Ranges", b"none"))
        if response.http_version != b"1.1" or b"close" in b",".join(find_values(headers, b"connection")).lower():
            kept.append((b"Connection", b"close"))
        # The host's own words may be the secret.
        reason = responses.get(response.status_code, "").encode()
        data = inner.http.send(h11.Response(status_code=response.status_code, headers=kept, reason=reason))
        self._has_answered = True
        await inner.tls.send(data or b"")
        return Inflater(codings[0]) if codings else None

    async def _send_data(self, inner: _Peer, data: bytes) -> None:
        if data:
            await inner.send(h11.Data(data=data))
            self._activity.record_activity()

    def _build_bad_answer(self, problem: str) -> Refusal:
        return refuse_bad_gateway(
            EgressVerdict.BAD_ANSWER, f"{self._target.host} {problem}: try again, or another source"
        )


async def _try_send(outer: _Peer, event: "h11.Event") -> bool:
    """Return whether the host still takes the request."""
    try:
        await outer.send(event)
    except (OSError, h11.LocalProtocolError):
        return False
    return True


def build_upstream_context() -> ssl.SSLContext:
    """Return the client's side of TLS to hosts, which must be known to an authority of the system."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def find_bound(secrets: Sequence[BoundSecret], target: Target) -> bool:
    """Return whether a tunnel to the target must be intercepted."""
    return any(secret.is_bound_to(target) for secret in secrets)


def _header(name: bytes, value: bytes) -> Header:
    return Header(name.lower(), name, value)


def _read_headers(message: h11.Request | h11.Response) -> tuple[Header, ...]:
    return tuple(_header(name, value) for name, value in message.headers.raw_items())
