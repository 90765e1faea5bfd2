"""Bounds on what a request may send: how much, and how slowly."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.problems import ApiCode, build_response

CHUNK_WITHIN_S = 20.0
"""How long a client may be silent in the middle of a body."""
LEAST_BYTES_PER_S = 8 * 1024
"""Of a body, on the average, after the first seconds."""
PATIENCE_S = 30.0
JSON_BYTES = 2 * 1024 * 1024
BATCH_BYTES = 200 * 1024 * 1024
SKILL_BYTES = 16 * 1024 * 1024
"""Of a skill's .zip file: it lies in /tmp while it is examined, which is small where a service is deployed. The command takes larger ones."""
LOGIN_BYTES = 16 * 1024
"""Of what is read of somebody who has not shown a key yet."""
LINGER_S = 5.0
LINGER_BYTES = 128 * 1024 * 1024
HELD_BYTES = 512 * 1024 * 1024
"""Of all bodies together that are being read or worked with: half of the memory that a service has as it is deployed here."""


class _Refused(Exception):
    """Ends whoever reads the body."""


class BodyLimits:
    """Ends a request whose body is too large or comes too slowly, whoever reads it. `other`: (method, pattern of the whole path, bytes) of the routes that take more or less than JSON_BYTES."""

    def __init__(self, app: ASGIApp, other: Sequence[tuple[str, str, int]]) -> None:
        self._app = app
        self._other = [(method, re.compile(path, re.DOTALL), most) for method, path, most in other]
        self._held = Held()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._most(scope)
        if (told := _content_length(scope)) is not None and told > most:
            await refuse(_too_large(most), receive, send)
            return
        body = _Body(receive, most, self._held)
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            # Whoever read the body made an answer of his own of it.
            if body.refusal is None or has_begun:
                has_begun = True
                await send(message)

        try:
            with suppress(_Refused):
                await self._app(scope, body.receive, sent)
        finally:
            body.let_go()
        if body.refusal is not None and not has_begun:
            await refuse(body.refusal, receive, send)

    def _most(self, scope: Scope) -> int:
        for method, path, most in self._other:
            if scope["method"] == method and path.fullmatch(scope["path"]):
                return most
        return JSON_BYTES


@dataclass
class Held:
    """How much of all bodies lies in memory."""

    count: int = 0


class _Body:
    """Counts what comes of one body. `refusal`: what the client is told when it was too much, or came too slowly."""

    def __init__(self, receive: Receive, most: int, held: Held) -> None:
        self._receive = receive
        self._most = most
        self._held = held
        self._count = 0
        self._is_whole = False
        self.refusal: Response | None = None
        self._began_at = asyncio.get_running_loop().time()

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(CHUNK_WITHIN_S):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(_too_slow())
        if message["type"] != "http.request":
            return message
        came = len(message.get("body", b""))
        self._count += came
        self._held.count += came
        self._is_whole = not message.get("more_body", False)
        if self._count > self._most:
            return self._refuse(_too_large(self._most))
        if self._held.count > HELD_BYTES:
            return self._refuse(_too_many())
        took_s = asyncio.get_running_loop().time() - self._began_at
        if not self._is_whole and took_s > PATIENCE_S and self._count < took_s * LEAST_BYTES_PER_S:
            return self._refuse(_too_slow())
        return message

    def let_go(self) -> None:
        """The request is over."""
        self._held.count -= self._count
        self._count = 0

    def _refuse(self, refusal: Response) -> NoReturn:
        self.refusal = refusal
        raise _Refused


async def refuse(refusal: Response, receive: Receive, send: Send) -> None:
    """Answer a request whose body was not read to its end. What still comes is thrown away for a moment: a connection that is closed upon it takes the
    answer with it."""
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
    await send({"type": "http.response.body", "body": bytes(refusal.body), "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await _throw_away(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(receive: Receive) -> None:
    count, is_more = 0, True
    while is_more and count < LINGER_BYTES:
        message = await receive()
        is_more = message["type"] == "http.request" and message.get("more_body", False)
        count += len(message.get("body", b""))


def _too_large(most: int) -> Response:
    detail = f"at most {most} bytes can be sent here: send less, or large content in parts"
    return build_response(ApiCode.BODY_TOO_LARGE, detail, headers={"Connection": "close"})


def _too_many() -> Response:
    detail = "the service holds as many bodies as it has memory for: send it again in a moment, or to another replica"
    return build_response(ApiCode.NOT_READY, detail, headers={"Connection": "close"})


def _too_slow() -> Response:
    detail = f"the body stopped coming, or came at less than {LEAST_BYTES_PER_S} bytes a second: send it again, faster or in parts"
    return build_response(ApiCode.TOO_SLOW, detail, headers={"Connection": "close"})


def find_header(scope: Scope, wanted: bytes) -> bytes | None:
    """The first of that name, which is lower case."""
    return next((value for name, value in scope["headers"] if name == wanted), None)


def _content_length(scope: Scope) -> int | None:
    value = find_header(scope, b"content-length")
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else None
