"""Relays an HTTP request and its answer.

Invariant: both sides read the same messages. Requests and answers are parsed and framed again, so that no byte of one
side can pass as a second request at the other side (request smuggling). A message that two parsers could read
differently is refused.
"""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from http.client import responses
from typing import Protocol

import h11

from toolcrew.workers.egress.allowances import ConnectionQuota
from toolcrew.workers.egress.http_messages import Header, HeadError, drop_hop_by_hop, find_values, parse_framing
from toolcrew.workers.egress.limits import KIB, ProxyLimits
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal, refuse_bad_gateway, refuse_bad_request
from toolcrew.workers.egress.processor_share import start_task
from toolcrew.workers.egress.streams import ActivityClock, Stream

_MAX_INTERIM = 16


class ByteChannel(Protocol):
    """Bytes in both directions. Both methods raise OSError, and `receive` also Refusal."""

    async def receive(self) -> bytes: ...

    async def send(self, data: bytes) -> None: ...


class PlainChannel:
    """A stream without TLS."""

    def __init__(self, stream: Stream, quota: ConnectionQuota) -> None:
        self._stream = stream
        self._quota = quota

    async def receive(self) -> bytes:
        return await self._stream.receive(self._quota)

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)


class Peer:
    """Client or host, with its HTTP/1.1 parser."""

    def __init__(self, channel: ByteChannel, role: "type[h11.CLIENT] | type[h11.SERVER]", limits: ProxyLimits) -> None:
        self.channel = channel
        self.http = h11.Connection(role, max_incomplete_event_size=limits.header_bytes)

    async def next(self) -> "h11.Event":
        """Return the next event. Raises h11.RemoteProtocolError, OSError and Refusal."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.channel.receive())
        # One read can contain thousands of small chunks, which the parser returns without a wait. Pause, because other
        # connections share this event loop.
        await asyncio.sleep(0)
        assert event is not h11.PAUSED
        return event  # type: ignore[return-value]

    async def send(self, event: "h11.Event") -> None:
        await self.channel.send(self.http.send(event) or b"")

    @property
    def is_done(self) -> bool:
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE


class AnswerRewriter:
    """Base class of objects that change an answer on its way to the client. This class changes nothing."""

    async def rewrite_head(self, status: int, headers: list[Header]) -> list[Header]:
        """Return the headers for the client. Raises Refusal."""
        return headers

    async def rewrite(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the content for the client that can be sent now. Raises Refusal."""
        yield data

    async def finish(self) -> bytes:
        """Return the content that was held back until the end of the body. Raises Refusal."""
        return b""


class HttpRelay:
    """Relays requests of `inner`, the client, to `outer`, the host, one after another. `host`: the host's name for
    error messages. `has_answered`: whether the client has received a part of the answer to the present request.
    """

    def __init__(self, inner: Peer, outer: Peer, host: str, activity: ActivityClock, limits: ProxyLimits) -> None:
        self._inner = inner
        self._outer = outer
        self._host = host
        self._activity = activity
        self._limits = limits
        self.has_answered = False

    async def run(self, request: h11.Request, rewriter: AnswerRewriter, *, is_last: bool = False) -> None:
        """Send the request with the body that the client sends, and forward the answer. `is_last`: bytes after the
        request are not a second request. Raises Refusal and OSError.
        """
        self.has_answered = False
        try:
            await self._outer.send(request)
        except h11.LocalProtocolError:
            raise refuse_bad_request("it cannot be forwarded") from None
        # Relay body and answer at the same time: a host may answer before it has the whole body, and may wait until its
        # answer is read.
        sending = start_task(self._send_all(is_last=is_last))
        answering = start_task(self._forward_answer(rewriter))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            # Ignore an error while sending the body if the host has answered: it may refuse a body and close its side.
            if not answering.done():
                sending.result()
            await answering
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _send_all(self, *, is_last: bool) -> None:
        await self._send_body()
        while is_last and await self._inner.channel.receive():
            pass  # read only to notice when the client disconnects

    async def _send_body(self) -> None:
        """Forward the body without trailers. If the host stops reading, drop the rest, because the host may still
        answer.
        """
        try:
            while isinstance(event := await self._inner.next(), h11.Data):
                self._activity.record_activity()
                if not await self._try_send(h11.Data(data=bytes(event.data))):
                    return
        except h11.RemoteProtocolError:
            raise refuse_bad_request("its body is not HTTP/1.1") from None
        await self._try_send(h11.EndOfMessage())

    async def _try_send(self, event: "h11.Event") -> bool:
        """Send a part of the request. Return False when the host no longer reads."""
        try:
            await self._outer.send(event)
        except (OSError, h11.LocalProtocolError):
            return False
        return True

    async def _forward_answer(self, rewriter: AnswerRewriter) -> None:
        try:
            await self._start_answer(await self._read_answer(), rewriter)
            while isinstance(event := await self._outer.next(), h11.Data):
                self._activity.record_activity()
                async for data in rewriter.rewrite(bytes(event.data)):
                    await self._send_data(data)
            await self._send_data(await rewriter.finish())
            await self._inner.send(h11.EndOfMessage())
        except HeadError as error:
            raise build_bad_answer(self._host, f"does not answer in HTTP/1.1 ({error})") from None
        except h11.RemoteProtocolError as error:
            # The error's text may quote the answer, which may contain a secret. So the client does not get this text.
            is_long = error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            more = f" (its head has more than {self._limits.header_bytes // KIB} KiB)" if is_long else ""
            raise build_bad_answer(self._host, f"does not answer in HTTP/1.1{more}") from None
        except h11.LocalProtocolError:
            raise build_bad_answer(self._host, "sends a response that cannot be forwarded") from None

    async def _read_answer(self) -> h11.Response:
        # Limit the interim answers: each counts as activity, so a host could keep the connection open forever.
        for _ in range(_MAX_INTERIM):
            try:
                event = await self._outer.next()
            except h11.RemoteProtocolError:
                # The parser raises the same error for a closed connection and for bytes that are not an answer.
                if self._outer.http.trailing_data != (b"", True):
                    raise
                raise build_bad_answer(self._host, "closed the connection without a response") from None
            self._activity.record_activity()
            if isinstance(event, h11.Response):
                return event
            is_go_ahead = isinstance(event, h11.InformationalResponse) and event.status_code == HTTPStatus.CONTINUE
            if is_go_ahead and self._inner.http.they_are_waiting_for_100_continue:
                go_ahead = h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[], reason=b"Continue")
                await self._inner.send(go_ahead)
        raise build_bad_answer(self._host, "sends interim responses without an end")

    async def _start_answer(self, response: h11.Response, rewriter: AnswerRewriter) -> None:
        headers = read_headers(response)
        # Parse only to check the headers: h11 accepts framing that other clients read differently.
        parse_framing(headers)
        if len(headers) > self._limits.header_lines:
            raise HeadError(f"it has more than {self._limits.header_lines} header lines")
        forwarded = await rewriter.rewrite_head(response.status_code, drop_hop_by_hop(headers))
        lines = [(header.name, header.value) for header in forwarded]
        if response.http_version != b"1.1" or b"close" in b",".join(find_values(headers, b"connection")).lower():
            lines.append((b"Connection", b"close"))
        # Do not use the host's reason phrase, which may contain a secret.
        reason = responses.get(response.status_code, "").encode()
        data = self._inner.http.send(h11.Response(status_code=response.status_code, headers=lines, reason=reason))
        # Set before the send: a part of the head may have been sent when the send fails.
        self.has_answered = True
        await self._inner.channel.send(data or b"")

    async def _send_data(self, data: bytes) -> None:
        if data:
            await self._inner.send(h11.Data(data=data))
            self._activity.record_activity()


def build_bad_answer(host: str, problem: str) -> Refusal:
    """Return the refusal for a host with an invalid answer."""
    return refuse_bad_gateway(EgressOutcome.BAD_ANSWER, f"{host} {problem}: try again, or another source")


def read_headers(message: h11.Request | h11.Response) -> tuple[Header, ...]:
    """Return the headers of a message, unchanged and in their order."""
    return tuple(Header(name.lower(), name, value) for name, value in message.headers.raw_items())
