"""Idempotent requests: a POST with an `Idempotency-Key` runs once, and a repeated request gets the first response.

A claim in Redis decides which of several concurrent requests runs. Invariant: the response is stored before the client
receives the end of the response, if Redis answers within STORE_WAIT_S.
"""

import asyncio
import base64
import hashlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import Header
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolcrew.concurrency.tasks import retry_until_available
from toolcrew.contract.errors import BrokerUnavailable, OperatorError, ToolFailure
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.dispatch.request import derive_call_id
from toolcrew.orchestrator.http.authentication import identify
from toolcrew.orchestrator.http.body_limits import JSON_BYTES, find_header
from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem, response_to
from toolcrew.store.idempotency import PENDING_S, IdempotencyStore, SlotClaim
from toolcrew.telemetry.logs import get_logger

log = get_logger(__name__)

IdempotencyKey = Annotated[
    str | None,
    Header(max_length=255, description="A key of your choice. Requests with the same key are executed once."),
]
MAX_ANSWER_BYTES = 1024 * 1024
STORE_WAIT_S = 1.0
"""Seconds that the end of a response waits until the response is stored.

A client that received the response can then get the same response again, even if this process dies.
"""
_UNDONE = "toolcrew.undone"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_HEADER = b"idempotency-key"
_SESSIONS = "/v1/sessions"
"""The stored response of an opening only shows that its key was used: the session may have ended since."""
_ATTACHES = re.compile(r"/v1/(runs|sessions/[^/]+/(calls|exec))")
"""Routes that return the first request's run, or wait for the result of its call, while the first request runs."""


def mark_not_done(scope: Scope) -> None:
    """Mark a successful response whose request had no effect. The response is not stored, so the client may send the
    request again.
    """
    scope[_UNDONE] = True


def find_call_id(kind: str, key_id: str, idempotency_key: str | None) -> str | None:
    """Return the id of the call of a request with an Idempotency-Key; None without one. The same request sent again
    gets the same id, so that the call does not run twice even if its response was not stored.
    """
    return derive_call_id(kind, key_id, idempotency_key) if idempotency_key is not None else None


class Idempotency:
    """Stores the responses of requests with an Idempotency-Key for a day.

    Streams and responses larger than MAX_ANSWER_BYTES are not stored. A repeated request for a session, a call or
    a run finds it by its Idempotency-Key, also while the first request runs. A response with `Cache-Control:
    no-store` contains a secret. Of such a response, only the fact that the request was processed is stored.
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
                "the Idempotency-Key is invalid: use 1 to 255 visible ASCII characters, and a new key for each request",
            )
        identity = await identify(self._app_state, scope)
        body = await _read(receive)
        # The digest detects a key that a client reuses for another request.
        digest = hashlib.sha256(scope["path"].encode() + b"\0" + scope["query_string"] + b"\0" + body).hexdigest()
        # The name contains the id of the API key, so that two callers can use the same Idempotency-Key.
        name = hashlib.sha256(f"{identity.key_id}\0{key}".encode()).hexdigest()
        slots = IdempotencyStore(
            self._app_state.parts.pool.redis, self._app_state.settings.deployment, self._app_state.parts.pool.keys
        )
        claim = slots.name(identity.key_id, name, digest, secrets.token_hex(8), identity.tenant)
        record = await self._claim(slots, claim)
        if record is not None:
            if record["digest"] == digest and _is_attached(scope["path"], record):
                await self._app(scope, _replay_body(body, receive), send)
            else:
                await _replay(record, digest, send)
            return
        answer = _Answer(
            scope,
            send,
            lambda ended: self._settle(slots, claim, ended.record(digest) if ended.is_kept else None),
        )
        try:
            await self._app(scope, _replay_body(body, receive), answer.send)
        finally:
            # The request failed or the client disconnected. The claim is released, so that the client can retry.
            if not answer.has_ended:
                await self._settle(slots, claim, None)

    async def _claim(self, slots: IdempotencyStore, claim: SlotClaim) -> dict[str, Any] | None:
        """Claim the key. Return the record that is already stored under the key, or None when this request owns the
        claim.
        """
        try:
            return await slots.claim(claim)
        except BaseException:
            # Redis may have stored the claim before the error. An unreleased claim would block the key for PENDING_S.
            self._app_state.background.begin(_retry_until_available(partial(slots.release, claim)))
            raise

    async def _settle(self, slots: IdempotencyStore, claim: SlotClaim, record: str | None) -> None:
        settle = partial(slots.release, claim) if record is None else partial(slots.keep, claim, record)
        # The background task continues after the timeout. A slow Redis delays the response by at most STORE_WAIT_S.
        await asyncio.wait({self._app_state.background.begin(_retry_until_available(settle))}, timeout=STORE_WAIT_S)


async def _retry_until_available(settle: Callable[[], Awaitable[None]]) -> None:
    """Run `settle`, and retry while Redis is unavailable."""
    try:
        await retry_until_available(settle, PENDING_S)
    except BrokerUnavailable as error:
        log.warning("response_not_stored", error=str(error))


class _Answer:
    """Forwards a response to the client, and keeps a copy up to MAX_ANSWER_BYTES."""

    def __init__(self, scope: Scope, send: Send, on_end: Callable[["_Answer"], Awaitable[None]]) -> None:
        """Prepare to forward a response. `on_end`: called before the end of the response is sent."""
        self._scope = scope
        self._send = send
        self._on_end = on_end
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._is_stream = False
        self._status = 0
        self.has_ended = False

    @property
    def is_kept(self) -> bool:
        """Return whether the response is stored. A rejected request did nothing, so the client may send the request
        again.
        """
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
        """Return the record to store, as JSON."""
        if (b"cache-control", b"no-store") in self._headers:
            # The response contains a secret that is shown only once, so the secret is not written to Redis.
            return json.dumps({"digest": digest, "told_once": True})
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._headers
            if name in (b"content-type", b"location")
        ]
        body = base64.b64encode(self._body).decode()
        return json.dumps({"digest": digest, "status": self._status, "headers": headers, "body": body})


def _is_attached(path: str, record: Mapping[str, Any]) -> bool:
    """Return whether the route of a repeated request finds the work of the first one itself."""
    return path == _SESSIONS or bool(record.get("pending") and _ATTACHES.fullmatch(path))


async def _replay(record: dict[str, Any], digest: str, send: Send) -> None:
    if record["digest"] != digest:
        raise ApiProblem(
            ApiCode.IDEMPOTENCY_MISMATCH,
            "this Idempotency-Key was used for another request: create a new key for each request",
        )
    if record.get("pending"):
        raise ApiProblem(
            ApiCode.IDEMPOTENCY_IN_PROGRESS,
            "the first request with this Idempotency-Key is still in progress: send it again in a moment",
        )
    if record.get("told_once"):
        raise ApiProblem(
            ApiCode.CONFLICT,
            "the first request with this Idempotency-Key succeeded, and its response contained a secret that is "
            "shown only once. If you did not receive it, revoke the created key and create another with a new "
            "Idempotency-Key",
        )
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in record["headers"]]
    body = base64.b64decode(record["body"])
    headers += [(b"idempotent-replayed", b"true"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": record["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    """Read the whole body. Raises ApiProblem for a body larger than JSON_BYTES, or when the client disconnects."""
    body, is_more = bytearray(), True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiProblem(ApiCode.MALFORMED_REQUEST, "the request ended before its body was complete: send it again")
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
        if len(body) > JSON_BYTES:
            raise ApiProblem(
                ApiCode.BODY_TOO_LARGE,
                f"a request with an Idempotency-Key can have a body of at most {JSON_BYTES} bytes; for a batch, "
                "send its `id` instead",
            )
    return bytes(body)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays the body that was read, and then forwards the messages of the connection."""
    has_been_given = False

    async def again() -> Message:
        nonlocal has_been_given
        if has_been_given:
            return await receive()
        has_been_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
