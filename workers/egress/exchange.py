"""Relays a plain HTTP request and its answer. Both are parsed and framed again, so that bytes of one side can never
pass as a second request at the other side (request smuggling).
"""

from workers.egress.allowances import ConnectionQuota
from workers.egress.http_messages import (
    LAST_CHUNK,
    AnswerHead,
    Body,
    HeadError,
    ProxyRequest,
    build_body,
    encode_chunk,
    parse_answer,
)
from workers.egress.limits import CHUNK_BYTES, ProxyLimits
from workers.egress.streams import ActivityClock, Stream, Work, run_all
from workers.egress.verdicts import EgressVerdict, Refusal, refuse_bad_gateway, refuse_bad_request

MAX_INTERIM = 16
_HEAD_END = b"\r\n\r\n"


async def read_head(
    stream: Stream, quota: ConnectionQuota, limits: ProxyLimits, head: bytes = b""
) -> tuple[bytes, bytes]:
    """Return a head, with its empty line, and the bytes after it. `head`: bytes that were already read. The head is
    empty when the stream ends before it. Raises HeadError.
    """
    while (end := head.find(_HEAD_END)) < 0:
        if len(head) >= limits.header_bytes:
            raise HeadError(f"its head has more than {limits.header_bytes // 1024} KiB")
        data = await stream.receive(quota, min(CHUNK_BYTES, limits.header_bytes - len(head)))
        if not data:
            if head:
                raise HeadError("the connection ended in the middle of its head")
            return b"", b""
        head += data
    return head[: end + 4], head[end + 4 :]


class _HostStoppedReading(Exception):
    """The host does not read the rest of the request."""


class Exchange:
    """Forwards one request and one answer. `rest`: the bytes that the client sent after the head. `has_answered`:
    whether the client has received a part of the host's answer.
    """

    def __init__(
        self,
        client: Stream,
        host: Stream,
        request: ProxyRequest,
        rest: bytes,
        quota: ConnectionQuota,
        activity: ActivityClock,
        limits: ProxyLimits,
    ) -> None:
        self._client = client
        self._host = host
        self._request = request
        self._rest = rest
        self._quota = quota
        self._activity = activity
        self._limits = limits
        self.has_answered = False

    async def run(self, watching: Work) -> None:
        """Forward until the answer is complete. Raises Refusal and OSError."""
        await run_all(self._forward_answer(), background=(self._send_request(), watching))

    async def _send_request(self) -> None:
        try:
            await self._send(self._request.head)
            await self._send_body(build_body(self._request.framing, is_open=False))
        except _HostStoppedReading:
            pass  # the host may answer before it has read the whole request
        except HeadError as error:
            raise refuse_bad_request(str(error)) from None
        # Bytes after the request are not a second request. They are read only to notice that the client leaves.
        while await self._client.receive(self._quota):
            pass

    async def _send_body(self, body: Body) -> None:
        data = self._rest
        while True:
            content = body.take(data) if not body.is_done else b""
            if self._request.framing.is_chunked:
                await self._send(encode_chunk(content) + (LAST_CHUNK if body.is_done else b""))
            else:
                await self._send(content)
            if body.is_done:
                return
            data = await self._client.receive(self._quota)
            if not data:
                body.finish()
            self._activity.record_activity()

    async def _send(self, data: bytes) -> None:
        try:
            await self._host.send(data)
        except OSError:
            raise _HostStoppedReading from None
        self._activity.record_activity()

    async def _forward_answer(self) -> None:
        try:
            head, rest = await self._read_answer()
            await self._forward_body(head, rest)
        except HeadError as error:
            raise self._build_bad_answer(f"does not answer in HTTP/1.1 ({error})") from None

    async def _read_answer(self) -> tuple[AnswerHead, bytes]:
        """Return the final head and the bytes after it. Interim heads (1xx) before it are forwarded. `head.body` is
        set.
        """
        rest = b""
        for _ in range(MAX_INTERIM):
            data, rest = await read_head(self._host, self._quota, self._limits, rest)
            if not data:
                raise self._build_bad_answer("closed the connection without an answer")
            head = parse_answer(data, self._request, self._limits.header_lines)
            await self._send_to_client(head.head, is_interim=head.body is None)
            if head.body is not None:
                return head, rest
        raise self._build_bad_answer("sends interim answers without an end")

    async def _forward_body(self, head: AnswerHead, data: bytes) -> None:
        body = head.body
        assert body is not None
        while True:
            content = body.take(data) if not body.is_done else b""
            await self._send_to_client(encode_chunk(content) if head.is_chunked else content)
            if not body.is_done:
                data = await self._host.receive(self._quota)
                if not data:
                    body.finish()
            if body.is_done:
                await self._send_to_client(LAST_CHUNK if head.is_chunked else b"")
                return

    async def _send_to_client(self, data: bytes, *, is_interim: bool = False) -> None:
        self._activity.record_activity()
        self.has_answered |= not is_interim
        await self._client.send(data)
        self._activity.record_activity()

    def _build_bad_answer(self, problem: str) -> Refusal:
        return refuse_bad_gateway(
            EgressVerdict.BAD_ANSWER, f"{self._request.target.host} {problem}: try again, or another source"
        )
