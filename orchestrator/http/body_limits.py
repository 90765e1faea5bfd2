"""Limits on the size and the slowness of request bodies.

Invariant: the service reserves memory for a body before the body is read, and the total stays below BODY_MEMORY_BYTES.
A request without a valid key or login can send at most LOGIN_BYTES.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolcrew.contract.json_limits import has_more_values_in_text
from toolcrew.orchestrator.http.problems import ApiCode, build_response

CHUNK_WITHIN_S = 20.0
"""Limit of a pause in the middle of a body, in seconds."""
LEAST_BYTES_PER_S = 8 * 1024
"""Lowest average rate of a body in bytes per second, after the first PATIENCE_S seconds."""
PATIENCE_S = 30.0
JSON_BYTES = 2 * 1024 * 1024
LOGIN_BYTES = 16 * 1024
"""Limit, in bytes, of the body of a request without a valid key or login."""
LINGER_S = 5.0
LINGER_BYTES = 128 * 1024 * 1024
JSON_VALUES = 10_000
"""Limit of the values in a JSON body.

Each unexpected value becomes a validation error, which takes kilobytes of memory.
"""
BODY_MEMORY_BYTES = 512 * 1024 * 1024
"""Limit of all bodies together, in bytes, from the first byte of a body to the end of its request.

The limit is half of the memory of a service in this project's deployments.
"""
TENANT_BYTES = BODY_MEMORY_BYTES // 4
"""Limit of one tenant's bodies together, in bytes. A tenant without other bodies can send a single larger body."""
STREAMED_BYTES = 16 * 1024 * 1024
"""Memory, in bytes, that an upload to the store takes, whatever its length."""
RELAYED_BYTES = 512 * 1024
"""Memory, in bytes, that a body takes that is passed on while it arrives, whatever its length: what the server reads
ahead, and a window of a stream.
"""
BODY_OWNER = "toolcrew.body_owner"
"""Key in the ASGI scope of a request. Its value is the owner of the body: the tenant or API key whose memory limit the
body counts for.

The check of the key or login sets the owner. A body without an owner is limited to LOGIN_BYTES.
"""


class _BodyRefused(Exception):
    """Raised in the application that reads a body, to stop it when the body is refused."""


class BodyLimit(NamedTuple):
    """Limit of the bodies of a route.

    `path`: a pattern that matches the whole path. `held_bytes`: the largest part of a body that the route holds in
    memory, or None for the whole body.
    """

    method: str
    path: str
    max_bytes: int
    held_bytes: int | None = None


class BodyLimits:
    """ASGI middleware that rejects bodies that are too large or too slow. It reserves memory for each body; the bodies
    of one owner (a tenant, or an operator's key) together have a limit.

    `path_limits`: limits of the routes whose limit is not JSON_BYTES.
    """

    def __init__(self, app: ASGIApp, path_limits: Sequence[BodyLimit]) -> None:
        self._app = app
        self._path_limits = [(limit, re.compile(limit.path, re.DOTALL)) for limit in path_limits]
        self._reserved_bodies = BodyMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit(scope)
        length = _content_length(scope) or 0
        if length > limit.max_bytes:
            await refuse(_too_large(limit.max_bytes), receive, send)
            return
        body = _Body(scope, receive, limit, self._reserved_bodies, length)
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            # After a refusal the application may turn the interrupted read into a response of its own. That response
            # is dropped, and the refusal is sent instead.
            if body.refusal is None or has_begun:
                has_begun = True
                await send(message)

        try:
            with suppress(_BodyRefused):
                await self._app(scope, body.receive, sent)
        finally:
            body.let_go()
        if body.refusal is not None and not has_begun:
            await refuse(body.refusal, receive, send)

    def _limit(self, scope: Scope) -> BodyLimit:
        for limit, path in self._path_limits:
            if scope["method"] == limit.method and path.fullmatch(scope["path"]):
                return limit
        return BodyLimit("", "", JSON_BYTES)


class BodyMemory:
    """Number of bytes that are reserved for request bodies, by owner of the bodies."""

    def __init__(self) -> None:
        self.total = 0
        self._of = Counter[str]()

    def take(self, owner: str, count: int, *, already: int) -> Response | None:
        """Reserve `count` more bytes for a body that already has `already` bytes. Return None, or the response that
        refuses the body when a limit is reached.
        """
        other_bytes = self._of[owner] - already
        if other_bytes and self._of[owner] + count > TENANT_BYTES:
            detail = (
                f"the bodies of your tenant's requests take {TENANT_BYTES // 2**20} MiB, which is the limit of a "
                "tenant: wait until other requests have ended, then send the request again"
            )
            return _refusal(ApiCode.TOO_MANY_REQUESTS, detail, **{"Retry-After": "2"})
        if self.total + count > BODY_MEMORY_BYTES:
            detail = "the service has no memory for another body: send it again in a moment, or to another replica"
            return _refusal(ApiCode.NOT_READY, detail)
        self._of[owner] += count
        self.total += count
        return None

    def give_back(self, owner: str, count: int) -> None:
        """Release `count` bytes of an owner."""
        self._of[owner] -= count
        self.total -= count
        if not self._of[owner]:
            del self._of[owner]


class _Body:
    """Counts the bytes of one body. `refusal`: the response when the body is too large or too slow."""

    def __init__(
        self, scope: Scope, receive: Receive, limit: BodyLimit, reserved_bodies: BodyMemory, length: int
    ) -> None:
        """Store the limit of the body. `length`: Content-Length of the request, or 0 without the header."""
        self._scope = scope
        self._receive = receive
        self._max_bytes = limit.max_bytes
        self._length = length
        self._held_bytes = limit.held_bytes
        # Media types are case-insensitive, and the parser reads a body of any of their spellings.
        media_type = (find_header(scope, b"content-type") or b"json").lower()
        is_json = self._max_bytes == JSON_BYTES and b"json" in media_type
        self._json = bytearray() if is_json else None
        self._reserved_bodies = reserved_bodies
        self._owner = ""
        self._count = 0
        self._reserved = 0
        self._is_whole = False
        self.refusal: Response | None = None
        self._waited_s = 0.0

    async def receive(self) -> Message:
        """Receive the next message and count its bytes. A body over a limit stops the application
        and sets `refusal`.
        """
        if self._is_whole:
            return await self._receive()
        if not self._count:
            # The application checks the key or login before it reads the body, so the owner, if any, is known here.
            self._owner = self._scope.get(BODY_OWNER, "")
            self._max_bytes = self._max_bytes if self._owner else min(self._max_bytes, LOGIN_BYTES)
            # The declared length is reserved before the first byte. Otherwise many uploads could start at the same
            # time and exhaust the memory together.
            if (refusal := self._reserve(self._length)) is not None:
                return self._refuse(refusal)
        began_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(CHUNK_WITHIN_S):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(_too_slow())
        # Only the time that the body waits for the client counts, not the time that a sandbox needs to take it.
        self._waited_s += asyncio.get_running_loop().time() - began_at
        if message["type"] != "http.request":
            return message
        self._count += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        if self._count > self._max_bytes:
            return self._refuse(_too_large(self._max_bytes))
        if (refusal := self._reserve(self._count)) is not None:
            return self._refuse(refusal)
        is_slow = self._waited_s > PATIENCE_S and self._count < self._waited_s * LEAST_BYTES_PER_S
        if not self._is_whole and is_slow:
            return self._refuse(_too_slow())
        return message if self._json is None else self._hold_back(self._json, message)

    def _hold_back(self, body: bytearray, message: Message) -> Message:
        """Collect the body of a JSON request. Return each message without its bytes, and the last message with all of
        them.

        The values are counted before the application gets the body, so the JSON parser never sees too many.
        """
        body += message.get("body", b"")
        if not self._is_whole:
            return {**message, "body": b""}
        if has_more_values_in_text(body.decode(errors="replace"), JSON_VALUES):
            detail = f"the body has more than {JSON_VALUES} values: send fewer at a time, or send a file"
            return self._refuse(_refusal(ApiCode.BODY_TOO_LARGE, detail))
        return {**message, "body": bytes(body)}

    def _reserve(self, count: int) -> Response | None:
        """Reserve memory for `count` bytes of the body. Return the refusal when a limit is reached.

        A body without an owner is small and needs no reservation.
        """
        count = count if self._held_bytes is None else min(count, self._held_bytes)
        missing = count - self._reserved
        if missing <= 0 or not self._owner:
            return None
        refusal = self._reserved_bodies.take(self._owner, missing, already=self._reserved)
        if refusal is None:
            self._reserved = count
        return refusal

    def let_go(self) -> None:
        """Release the reserved memory at the end of the request."""
        self._reserved_bodies.give_back(self._owner, self._reserved)
        self._reserved = 0

    def _refuse(self, refusal: Response) -> NoReturn:
        self.refusal = refusal
        raise _BodyRefused


async def refuse(refusal: Response, receive: Receive, send: Send) -> None:
    """Send the refusal of a request before its body is read completely.

    The rest of the body is discarded for at most LINGER_S seconds. Closing the connection at once would reset the
    connection, and the client would lose the response.
    """
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
    # The response stays open, so that the server does not close the connection before the client has read the refusal.
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


def _refusal(code: ApiCode, detail: str, **headers: str) -> Response:
    return build_response(code, detail, headers={"Connection": "close", **headers})


def _too_large(limit: int) -> Response:
    detail = f"the body is too large: send at most {limit} bytes, or send large content in parts"
    return _refusal(ApiCode.BODY_TOO_LARGE, detail)


def _too_slow() -> Response:
    detail = (
        f"the body stopped, or was slower than {LEAST_BYTES_PER_S} bytes per second: send it again, faster or in parts"
    )
    return _refusal(ApiCode.TOO_SLOW, detail)


def find_header(scope: Scope, header: bytes) -> bytes | None:
    """Return the first header with the name `header`, which is in lower case."""
    return next((value for name, value in scope["headers"] if name == header), None)


def _content_length(scope: Scope) -> int | None:
    # A number of 19 or more digits is ignored. The limit then applies while the body is read.
    value = find_header(scope, b"content-length")
    return int(value) if value is not None and value.isdigit() and len(value) < 19 else None
