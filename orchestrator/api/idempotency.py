"""Requests that may be sent again: with an `Idempotency-Key` the first answer is the only one, whoever it was that did
not hear it.
"""

import asyncio
import base64
import hashlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from orchestrator.api.api_state import ApiState
from orchestrator.http.authentication import identify
from orchestrator.http.body_limits import JSON_BYTES, find_header
from orchestrator.http.problems import ApiCode, ApiProblem, response_to
from store.idempotency import PENDING_S, IdempotencyStore, SlotClaim
from store.tasks import retry_until_available
from telemetry.logs import get_logger

log = get_logger(__name__)

MAX_ANSWER_BYTES = 1024 * 1024
KEPT_FIRST_S = 1.0
"""So long the end of an answer waits until it is kept: whoever has heard it gets it again, whatever becomes of this
process.
"""
_UNDONE = "toolcrew.undone"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_HEADER = b"idempotency-key"


def note_undone(scope: Scope) -> None:
    """The request has done nothing, although its answer is none of a refusal: it is not kept, and the request may be
    sent again.
    """
    scope[_UNDONE] = True


class Idempotency:
    """Keeps the answers of requests that carry the header, for a day. Those to streams, and answers larger than
    MAX_ANSWER_BYTES, are not kept: a run is found again by the key itself, and a call is not run again. Of one with
    `Cache-Control: no-store` it is kept that it was given.
    """

    def __init__(self, app: ASGIApp, app_state: ApiState) -> None:
        self._app = app
        self._app_state = app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = find_header(scope, _HEADER) if scope["type"] == "http" and scope["method"] == "POST" else None
        if key is None or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            await self._once(key.decode("latin-1"), scope, receive, send)
        except (ApiProblem, ToolFailure, OperatorError) as error:
            await response_to(error, scope["path"])(scope, receive, send)

    async def _once(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        if not _KEY.fullmatch(key):
            raise ApiProblem(
                ApiCode.MALFORMED_REQUEST,
                "Idempotency-Key: give 1 to 255 visible ASCII characters, new ones for each request",
            )
        identity = await identify(self._app_state, scope)
        body = await _read(receive)
        digest = hashlib.sha256(scope["path"].encode() + b"\0" + scope["query_string"] + b"\0" + body).hexdigest()
        name = hashlib.sha256(f"{identity.key_id}\0{key}".encode()).hexdigest()
        slots = IdempotencyStore(
            self._app_state.parts.pool.redis, self._app_state.settings.deployment, self._app_state.parts.pool.keys
        )
        claim = slots.name(identity.key_id, name, digest, secrets.token_hex(8))
        kept = await self._claim(slots, claim)
        if kept is not None:
            await _replay(kept, digest, send)
            return
        answer = _Answer(
            scope, send, lambda told: self._settle(slots, claim, told.record(digest) if told.is_kept else None)
        )
        try:
            await self._app(scope, _given(body, receive), answer.send)
        finally:
            if not answer.has_ended:
                await self._settle(slots, claim, None)

    async def _claim(self, slots: IdempotencyStore, claim: SlotClaim) -> dict[str, Any] | None:
        """What is kept under the key already; None: it is ours."""
        try:
            return await slots.claim(claim)
        except BaseException:
            # It may be ours without our having heard of it, and would be said to be worked for as long as a request may
            # take.
            self._app_state.background.begin(_patiently(partial(slots.release, claim)))
            raise

    async def _settle(self, slots: IdempotencyStore, claim: SlotClaim, record: str | None) -> None:
        settle = partial(slots.release, claim) if record is None else partial(slots.keep, claim, record)
        await asyncio.wait({self._app_state.background.begin(_patiently(settle))}, timeout=KEPT_FIRST_S)


async def _patiently(settle: Callable[[], Awaitable[None]]) -> None:
    """As soon as Redis does it."""
    try:
        await retry_until_available(settle, PENDING_S)
    except BrokerUnavailable as error:
        log.warning("answer_not_kept", error=str(error))


class _Answer:
    """Passes an answer on, and keeps it as far as it is small enough to be kept."""

    def __init__(self, scope: Scope, send: Send, on_end: Callable[["_Answer"], Awaitable[None]]) -> None:
        """`on_end`: before the end of the answer is passed on."""
        self._scope, self._send, self._on_end = scope, send, on_end
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._is_stream = False
        self._status = 0
        self.has_ended = False

    @property
    def is_kept(self) -> bool:
        """What was refused has done nothing, and may be asked again."""
        return self.has_ended and not self._is_stream and self._status < 300 and _UNDONE not in self._scope

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            kind = dict(self._headers).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self._take(message.get("body", b""))
            if not message.get("more_body", False):
                self.has_ended = True
                await self._on_end(self)
        await self._send(message)

    def _take(self, body: bytes) -> None:
        if not self._is_stream:
            self._body += body
            self._is_stream = len(self._body) > MAX_ANSWER_BYTES

    def record(self, digest: str) -> str:
        if (b"cache-control", b"no-store") in self._headers:
            # It holds a secret, which nobody can tell again: Redis neither.
            return json.dumps({"digest": digest, "told_once": True})
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._headers
            if name in (b"content-type", b"location")
        ]
        body = base64.b64encode(self._body).decode()
        return json.dumps({"digest": digest, "status": self._status, "headers": kept, "body": body})


async def _replay(kept: dict[str, Any], digest: str, send: Send) -> None:
    if kept["digest"] != digest:
        raise ApiProblem(
            ApiCode.IDEMPOTENCY_MISMATCH,
            "this Idempotency-Key was sent with another request: make a new key for each request",
        )
    if kept.get("pending"):
        raise ApiProblem(
            ApiCode.IDEMPOTENCY_IN_PROGRESS,
            "the first request with this Idempotency-Key is still worked: send it again in a moment",
        )
    if kept.get("told_once"):
        raise ApiProblem(
            ApiCode.CONFLICT,
            "the first request with this Idempotency-Key was done, and its answer holds a secret, which is told once: "
            "if it did not come, revoke what it made and make another with a new Idempotency-Key",
        )
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept["headers"]]
    body = base64.b64decode(kept["body"])
    headers += [(b"idempotent-replayed", b"true"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": kept["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    """The whole body; how much that may be, BodyLimits says. Raises ApiProblem for one that is too large to be kept in
    mind.
    """
    body, is_more = bytearray(), True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiProblem(ApiCode.MALFORMED_REQUEST, "the request broke off")
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
        if len(body) > JSON_BYTES:
            raise ApiProblem(
                ApiCode.BODY_TOO_LARGE,
                f"with an Idempotency-Key a body may have {JSON_BYTES} bytes; a batch is found again by its `id`",
            )
    return bytes(body)


def _given(body: bytes, receive: Receive) -> Receive:
    """The body that has been read, then what the connection says."""
    has_been_given = False

    async def again() -> Message:
        nonlocal has_been_given
        if has_been_given:
            return await receive()
        has_been_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
