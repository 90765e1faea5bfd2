"""A connection to a host with secrets of the session: the proxy decrypts TLS, parses and checks every request, inserts
the secrets, and writes the request anew.

Invariant: a secret leaves only in a request to its host, over TLS that was verified, at the place in the request that
the secret's owner has named. Requests and answers that two parsers could read differently end the connection.
"""

import asyncio
import contextlib
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from http import HTTPStatus

import h11

from toolcrew.contract.secrets import check_session_values
from toolcrew.workers.egress.allowances import ConnectionQuota, EgressOpening
from toolcrew.workers.egress.authority import Authority
from toolcrew.workers.egress.hellos import HelloGate
from toolcrew.workers.egress.http_messages import Header, HeadError, drop_hop_by_hop, find_values, parse_framing
from toolcrew.workers.egress.limits import ProxyLimits
from toolcrew.workers.egress.masking import MaskedStream, SecretMasker, SharedMaskers
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal, build_answer, refuse, refuse_bad_request
from toolcrew.workers.egress.processor_share import start_task
from toolcrew.workers.egress.relaying import AnswerRewriter, HttpRelay, Peer, build_bad_answer, read_headers
from toolcrew.workers.egress.secrets import (
    HTTPS_PORT,
    BoundSecret,
    FilledRequest,
    SecretFiller,
    SecretUses,
)
from toolcrew.workers.egress.streams import ActivityClock, Stream, Work, run_all
from toolcrew.workers.egress.tls import TlsStream
from toolcrew.workers.web.bodies import CODINGS, Inflater
from toolcrew.workers.web.urls import Target

# Headers that the proxy removes or sets itself. `range` is removed: an answer could then contain only a part of a
# secret, which the proxy would not recognize.
_DROPPED = frozenset({b"accept-encoding", b"range", b"if-range", b"host"})
_DECODED = frozenset({b"content-encoding", b"content-length"})
"""Headers that do not apply to a decoded answer."""
_EVENTS = b"text/event-stream"


class SecretProxy:
    """Intercepts connections to hosts with secrets. `upstream`: the TLS context that verifies the hosts."""

    def __init__(self, authority: Authority, uses: SecretUses, upstream: ssl.SSLContext) -> None:
        self.authority = authority
        self.uses = uses
        self.upstream = upstream
        self.maskers = SharedMaskers()


class MaskingRewriter(AnswerRewriter):
    """Masks secrets in an answer. A compressed answer is decoded first. `report`: receives the names of the secrets
    that were found, each once.
    """

    def __init__(
        self, masker: SecretMasker, host: str, quota: ConnectionQuota, report: Callable[[Sequence[str]], None]
    ) -> None:
        self._masker = masker
        self._host = host
        self._quota = quota
        self._report = report
        self._stream = MaskedStream(masker)
        self._inflater: Inflater | None = None
        self._found: set[str] = set()

    async def rewrite_head(self, status: int, headers: list[Header]) -> list[Header]:
        """Return the headers for the client. Raises Refusal for an answer in which secrets cannot be found."""
        codings = [value.lower().decode("latin-1") for value in find_values(headers, b"content-encoding")]
        codings = [coding for coding in codings if coding != "identity"]
        if len(codings) > 1 or not CODINGS.issuperset(codings) or status == HTTPStatus.PARTIAL_CONTENT:
            raise build_bad_answer(
                self._host, "sends a partial response, or a compressed response that cannot be searched for secrets"
            )
        dropped = {b"accept-ranges"}
        if codings:
            # Hosts may compress in spite of `Accept-Encoding: identity`. A secret is not visible in compressed bytes.
            self._inflater = Inflater(codings[0])
            dropped |= _DECODED
            # The sizes of compressed pieces show which texts of the answer are alike, such as a secret and a guess.
            # Only an event stream must not wait.
            kinds = find_values(headers, b"content-type")
            self._stream = MaskedStream(self._masker, is_in_blocks=not any(_EVENTS in kind.lower() for kind in kinds))
        kept = [header for header in headers if header.key not in dropped]
        return [*await self._mask_headers(kept), _header(b"Accept-Ranges", b"none")]

    async def _mask_headers(self, headers: list[Header]) -> list[Header]:
        """Mask the names of headers too: a host may repeat a value, such as a secret, in a header's name."""
        # One search of all headers costs less than one of each. No form of a secret has a line end.
        lines = await self._masker.mask(b"\n".join(text for header in headers for text in (header.name, header.value)))
        self._note(lines.found)
        texts = lines.text.split(b"\n")
        return [_header(name, value) for name, value in zip(texts[::2], texts[1::2], strict=False)]

    async def rewrite(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield masked content. Decoded bytes count towards the session's quota and rate, which bounds what a
        decompression bomb costs. Raises Refusal.
        """
        if self._inflater is None:
            yield await self._take(data)
            return
        try:
            for piece in self._inflater.feed(data):
                await self._quota.charge(len(piece))
                yield await self._take(piece)
                await asyncio.sleep(0)  # one read may give many pieces: let other connections run between them
        except zlib.error:
            raise build_bad_answer(self._host, "sends a response with an incorrect Content-Encoding") from None

    async def finish(self) -> bytes:
        if self._inflater is not None and not self._inflater.is_whole:
            raise build_bad_answer(self._host, "sends a compressed response that is not complete")
        masked = await self._stream.finish()
        self._note(masked.found)
        return masked.text

    async def _take(self, data: bytes) -> bytes:
        masked = await self._stream.take(data)
        self._note(masked.found)
        return masked.text

    def _note(self, found: frozenset[str]) -> None:
        if new := sorted(found - self._found):
            if not self._found:
                self._quota.count_masked_answer()
            self._found.update(new)
            self._report(new)


class Interception:
    """Serves the requests of one tunnel, one after another, over one connection to the host."""

    def __init__(
        self, proxy: SecretProxy, opening: EgressOpening, target: Target, quota: ConnectionQuota, limits: ProxyLimits
    ) -> None:
        self._proxy = proxy
        self._opening = opening
        self._target = target
        self._quota = quota
        self._limits = limits
        self._activity = ActivityClock()
        # Requests get only the secrets of this host. In answers all secrets of the session are masked, because another
        # host may have passed its secret to this host.
        self._filler = SecretFiller(
            opening.tenant, opening.session, [one for one in opening.secrets if one.is_bound_to(target)]
        )
        self._secrets = {one.name: one.value.get_secret_value() for one in opening.secrets}
        self._relay: HttpRelay | None = None

    async def run(self, client: Stream, host: Stream, first: bytes, watch: Callable[[ActivityClock], Work]) -> None:
        """Serve until one side ends. `first`: bytes that the client has already sent. Raises Refusal and OSError."""
        await run_all(self._run(client, host, first), background=(watch(self._activity),))

    async def _run(self, client: Stream, host: Stream, first: bytes) -> None:
        # Handshake with the client first: without its ClientHello, nothing is sent to the host.
        tls = await self._greet(client, first)
        inner = Peer(tls, h11.SERVER, self._limits)
        try:
            masker = await self._find_masker()
            outer = Peer(await self._connect(host), h11.CLIENT, self._limits)
            self._relay = HttpRelay(inner, outer, self._target.host, self._activity, self._limits)
            while await self._serve_request(inner, outer, self._relay, masker):
                inner.http.start_next_cycle()
                outer.http.start_next_cycle()
        except Refusal as refusal:
            # A part of the host's answer may already be sent. The client would read a refusal as its body.
            if self._relay is None or not self._relay.has_answered:
                await tls.send(build_answer(refusal))
            raise
        finally:
            with contextlib.suppress(OSError, TimeoutError):  # the client has left or does not read
                async with asyncio.timeout(self._limits.linger_s):
                    await tls.close()

    async def _find_masker(self) -> SecretMasker:
        try:
            # The values may have changed since the session was opened.
            check_session_values(self._secrets.values())
        except ValueError as error:
            raise refuse(EgressOutcome.SECRETS_TOO_LONG, str(error)) from None
        return await self._proxy.maskers.get(self._opening.tenant, self._secrets)

    async def _greet(self, client: Stream, first: bytes) -> TlsStream:
        # The name in the ClientHello must be that of the tunnel. Otherwise a program could reach one host under the
        # rules, and with the secrets, of another.
        gate, data = HelloGate(self._target), first
        while not (passed := gate.pass_on(data)):
            data = await client.receive(self._quota)
            if not data:
                gate.finish()
                raise OSError("the client closed the connection before its TLS ClientHello")
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
            raise build_bad_answer(self._target.host, f"cannot be verified ({problem})") from None
        return tls

    async def _serve_request(self, inner: Peer, outer: Peer, relay: HttpRelay, masker: SecretMasker) -> bool:
        """Serve one request. Returns whether both connections can serve another one."""
        relay.has_answered = False
        try:
            request = await self._next_request(inner, outer)
            if request is None:
                return False
            self._quota.check_masked_answers()
            filled = self._fill(request)
        except h11.RemoteProtocolError as error:
            raise refuse_bad_request(f"it is not an HTTP/1.1 request ({error})") from None
        except HeadError as error:
            raise refuse_bad_request(str(error)) from None
        # Count the use before the request is sent: it is better to report a use that the host never saw than to miss
        # one.
        self._count(self._proxy.uses.count, filled.used)
        headers = [(header.name, header.value) for header in filled.headers]
        report = partial(self._count, self._proxy.uses.count_masked)
        masking = MaskingRewriter(masker, self._target.host, self._quota, report)
        await relay.run(_build_request(request.method, filled.target, headers), masking)
        return inner.is_done and outer.is_done

    def _count(self, count: Callable[[str, str, str | None, str, str], None], names: Sequence[str]) -> None:
        opening = self._opening
        for name in names:
            count(opening.tenant, opening.session, opening.run, name, self._target.authority)

    async def _next_request(self, inner: Peer, outer: Peer) -> h11.Request | None:
        """Return the next request, or None when one side ends. A head must be complete in time."""
        # The bytes of the next request may be here already. The proxy then does not wait for the client.
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
            raise Refusal(EgressOutcome.SLOW_REQUEST, HTTPStatus.REQUEST_TIMEOUT, sentence) from None
        self._activity.record_activity()
        return event if isinstance(event, h11.Request) else None

    async def _wait_for_client(self, inner: Peer, outer: Peer) -> bytes | None:
        """Return the client's next bytes, or None when the host closes the connection first, because a request would
        get no answer.
        """
        reading, leaving = start_task(inner.channel.receive()), start_task(outer.channel.receive())
        # The tunnel also ends when the host sends bytes before a request. They would be read as the answer to the next
        # request.
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)

    def _fill(self, request: h11.Request) -> FilledRequest:
        """Check a request and return it with its secrets. Raises HeadError."""
        headers = read_headers(request)
        framing = parse_framing(headers)
        if request.http_version != b"1.1":
            raise HeadError("its version is not HTTP/1.1")
        if len(headers) > self._limits.header_lines:
            raise HeadError(f"it has more than {self._limits.header_lines} header lines")
        if not request.target.startswith(b"/") and (request.method, request.target) != (b"OPTIONS", b"*"):
            raise HeadError("its target is not a path")
        # h11 has checked that there is exactly one Host header. It must name the tunnel's host: a server of several
        # names could give the secret of one to another.
        [host] = find_values(headers, b"host")
        names = {f"{self._target.host}:{self._target.port}".encode()}
        if self._target.port == HTTPS_PORT:
            names.add(self._target.host.encode())
        if host.lower() not in names:
            raise HeadError("its Host header names another host than its tunnel")
        if any(value.lower() != b"100-continue" for value in find_values(headers, b"expect")):
            raise HeadError("its Expect header is not 100-continue")
        forwarded = [header for header in drop_hop_by_hop(headers) if header.key not in _DROPPED]
        forwarded += [_header(b"Host", self._target.authority.encode()), _header(b"Accept-Encoding", b"identity")]
        if framing.is_chunked:
            forwarded.append(_header(b"Transfer-Encoding", b"chunked"))
        # Fill in the secrets last, so that no check and no list of headers depends on the value of a secret.
        return self._filler.fill(request.target, forwarded)


def build_upstream_context() -> ssl.SSLContext:
    """Return the TLS context for connections to hosts. A host must have a certificate of an authority that the system
    trusts.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def must_intercept(secrets: Sequence[BoundSecret], target: Target) -> bool:
    """Return whether a tunnel to the target must be intercepted, because a secret of the session is bound to the
    target.
    """
    return any(secret.is_bound_to(target) for secret in secrets)


def _header(name: bytes, value: bytes) -> Header:
    return Header(name.lower(), name, value)


def _build_request(method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> h11.Request:
    try:
        return h11.Request(method=method, target=target, headers=headers)
    except h11.LocalProtocolError:
        raise refuse_bad_request("it cannot be forwarded") from None
