"""One connection of a client: reads its requests, and passes each one to the sandbox and the response back.

Invariant: a connection holds one piece of each direction, whatever the two sides send and however slowly they read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import h11

from toolcrew.contract.errors import ErrorCode, OperatorError, ToolFailure
from toolcrew.orchestrator.previews.messages import (
    RefusedMessage,
    RequestHead,
    build_request,
    build_response,
    build_switch,
    read_request,
)
from toolcrew.orchestrator.previews.upstream import Upstream

MAX_HEAD_BYTES = 32 * 1024
PIECE_BYTES = 32 * 1024
HEAD_WITHIN_S = 10.0
KEEP_ALIVE_S = 30.0
STALL_S = 60.0
"""Seconds without a byte of a request's body, or in which a client takes no byte, after which a connection ends."""
_SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})


class ClientLeft(Exception):
    """The client has closed its connection, or sends or takes nothing."""


class ClientConnection:
    """A connection of a client. `admit`: returns an own answer, or None and lets the request pass. `connect`: opens a
    connection to the sandbox. Both raise RefusedMessage, ToolFailure, OperatorError.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        scheme: str,
        admit: Callable[[RequestHead], Awaitable[h11.Response | None]],
        connect: Callable[[RequestHead], Awaitable[Upstream]],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._scheme = scheme
        self._admit, self._connect = admit, connect
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._upstream: tuple[str, Upstream] | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no request is complete or on its way to the sandbox."""
        return self._http.our_state is h11.IDLE

    async def serve(self) -> None:
        """Serve requests until one side closes the connection."""
        within_s = HEAD_WITHIN_S
        try:
            while await self._serve_one(within_s):
                self._http.start_next_cycle()
                within_s = KEEP_ALIVE_S
        except ClientLeft:
            pass
        finally:
            self._drop_upstream()
            self._writer.close()

    async def _serve_one(self, within_s: float) -> bool:
        """Serve a request. Return whether another one may follow."""
        try:
            async with asyncio.timeout(within_s):
                event = await self._receive()
            if not isinstance(event, h11.Request):
                return False
            head = read_request(event)
            answer = await self._admit(head)
            if answer is not None:
                await self._answer(answer)
                return False
            return await self._pass(head)
        except TimeoutError:
            return False
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint, f"the request is invalid: {error}")
        except RefusedMessage as refused:
            await self._refuse(refused.status, str(refused))
        except (ToolFailure, OperatorError) as error:
            # Anybody may read this. Only the sandbox's answer has no names and reasons of the operator.
            reason = f": {error}" if error.code is ErrorCode.NETWORK_ERROR else ""
            await self._refuse(502, f"the port cannot be reached [{error.code.value}]{reason}")
        return False

    # --- One request

    async def _pass(self, head: RequestHead) -> bool:
        upstream = await self._find_upstream(head)
        request = build_request(head, self._scheme)
        try:
            await upstream.send(request)
            return await self._exchange(head, upstream)
        except (ToolFailure, OperatorError):
            # The program may have closed a connection that was idle. Nothing was done if it has not answered.
            if upstream.is_fresh or self._http.our_state is not h11.SEND_RESPONSE or not self._can_repeat(head):
                raise
        self._drop_upstream()
        upstream = await self._find_upstream(head)
        await upstream.send(request)
        return await self._exchange(head, upstream)

    @staticmethod
    def _can_repeat(head: RequestHead) -> bool:
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in head.headers)
        return head.method in _SAFE_METHODS and not has_body

    async def _exchange(self, head: RequestHead, upstream: Upstream) -> bool:
        """Send the body, and at the same time return the response."""
        sending = asyncio.create_task(self._send_body(upstream))
        try:
            has_switched = await self._with(sending, self._return_response(head, upstream))
        finally:
            await _end([sending])
        if has_switched:
            await self._pass_raw(upstream)
            return False
        upstream.end_request()
        if not upstream.is_reusable:
            self._drop_upstream()
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _with(self, sending: "asyncio.Task[None]", returning: Awaitable[bool]) -> bool:
        """Wait for the response. A failure to send the body, or the end of the client, ends the wait."""
        task = asyncio.ensure_future(returning)
        leaving: asyncio.Future[None] | None = None
        try:
            await asyncio.wait([task, sending], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                sending.result()
                leaving = asyncio.create_task(self._wait_until_left())
                await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            return task.result()
        finally:
            await _end([each for each in (task, leaving) if each is not None])

    async def _wait_until_left(self) -> None:
        """Return when the client has closed the connection. What it sends meanwhile is the next request's beginning."""
        if self._http.trailing_data[0]:
            await asyncio.get_running_loop().create_future()
        data = await self._reader.read(PIECE_BYTES)
        self._http.receive_data(data)
        if data:
            await asyncio.get_running_loop().create_future()

    async def _send_body(self, upstream: Upstream) -> None:
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        while True:
            try:
                async with asyncio.timeout(STALL_S):
                    event = await self._receive()
            except TimeoutError:
                raise ClientLeft from None
            if isinstance(event, h11.Data):
                await upstream.send(h11.Data(data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await upstream.send(h11.EndOfMessage())
                return
            else:
                raise ClientLeft

    async def _return_response(self, head: RequestHead, upstream: Upstream) -> bool:
        """Send the response to the client. Return whether the connection is a WebSocket now."""
        while True:
            event = await upstream.receive()
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    await self._send(build_switch(event))
                    return True
                continue
            if isinstance(event, h11.Response):
                await self._send(build_response(event))
            elif isinstance(event, h11.Data):
                await self._send(h11.Data(data=bytes(event.data)))
            else:
                await self._send(h11.EndOfMessage())
                return False

    async def _pass_raw(self, upstream: Upstream) -> None:
        """Pass the bytes of a WebSocket in both directions until both have ended, or one fails."""

        async def upwards() -> None:
            if early := self._http.trailing_data[0]:
                await upstream.write_raw(early)
            while data := await self._read():
                await upstream.write_raw(data)
            await upstream.write_raw(b"")

        async def downwards() -> None:
            async for data in upstream.read_raw():
                await self._write(data)

        sending = asyncio.create_task(upwards())
        try:
            await downwards()
        finally:
            await _end([sending])

    # --- Connections and answers

    async def _find_upstream(self, head: RequestHead) -> Upstream:
        if self._upstream is not None:
            host, upstream = self._upstream
            if host == head.host and upstream.is_reusable and self._can_repeat(head):
                return upstream
            self._drop_upstream()
        upstream = await self._connect(head)
        self._upstream = (head.host, upstream)
        return upstream

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream[1].close()
            self._upstream = None

    async def _refuse(self, status: int, advice: str) -> None:
        await self._answer(build_answer(status), advice)

    async def _answer(self, response: h11.Response, text: str = "") -> None:
        """Send an own response and end the connection. If a response has begun, the connection only ends."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._writer.transport.abort()
            return
        body = f"{text}\n".encode() if text else b""
        headers = [*response.headers, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await self._send(h11.Response(status_code=response.status_code, headers=headers))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    # --- Bytes

    async def _receive(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._read())
        return event

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(PIECE_BYTES)
        except OSError as error:
            raise ClientLeft from error

    async def _send(self, event: h11.Event) -> None:
        await self._write(self._http.send(event) or b"")

    async def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            async with asyncio.timeout(STALL_S):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            self._writer.transport.abort()
            raise ClientLeft from error


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks whose results are not needed, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def build_answer(status: int, *headers: tuple[bytes, bytes]) -> h11.Response:
    """Return the head of an answer of the front."""
    own = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    return h11.Response(status_code=status, headers=[*own, *headers])
