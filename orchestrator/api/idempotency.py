"""Requests that may be sent again: with an `Idempotency-Key` the first answer is the only one, whoever it was that did not hear it."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import BrokerUnavailable, ErrorCode, OperatorError, ToolFailure
from orchestrator.api.door import bearer_of
from orchestrator.api.house import House
from orchestrator.api.limits import JSON_BYTES, find_header
from orchestrator.api.problems import ApiCode, ApiProblem, response_to
from orchestrator.logs import get_logger
from orchestrator.outages import outlast

log = get_logger(__name__)

KEPT_S = 24 * 3600
PENDING_S = 900
"""How long a request may take before another with its key is let through: longer than any call. What it begins is found by its key then, too."""
MAX_ANSWER_BYTES = 1024 * 1024
KEPT_BYTES = 256 * 1024 * 1024
"""Of the answers of one API key within a day: they lie in Redis, which is everybody's."""
SLOT_BYTES = 200
"""What an answer takes beside its own bytes."""
FULL = (
    f"the answers that are kept for this API key fill {KEPT_BYTES // 2**20} MiB, so that this request was not begun: send it without an Idempotency-Key, "
    "with another API key, or when those of yesterday are forgotten"
)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_HEADER = b"idempotency-key"


class Idempotency:
    """Keeps the answers of requests that carry the header, for a day. Those to streams, and answers larger than MAX_ANSWER_BYTES, are not kept: a run is found again by the key itself, and a call is not run again. Of one with `Cache-Control: no-store` it is kept that it was given."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self._app = app
        self._house = house

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
                ApiCode.MALFORMED_REQUEST, "Idempotency-Key: give 1 to 255 visible ASCII characters, new ones for each request"
            )
        identity = await self._house.parts.keys.authenticate(bearer_of(scope))
        body = await _read(receive)
        digest = hashlib.sha256(scope["path"].encode() + b"\0" + scope["query_string"] + b"\0" + body).hexdigest()
        name = hashlib.sha256(f"{identity.key_id}\0{key}".encode()).hexdigest()
        slot = f"toolcrew:{self._house.settings.deployment}:api:once:{name}"
        account = KeptBytes(self._house.parts.pool.redis, self._house.settings.deployment, identity.key_id)
        kept = await self._claim(slot, digest, account)
        if kept is not None:
            # Who is answered from memory has asked nevertheless.
            self._house.rates.take(identity.key_id)
            await _replay(kept, digest, send)
            return
        answer = _Answer(send)
        is_kept = False
        try:
            await self._app(scope, _given(body, receive), answer.send)
            # What was refused has done nothing, and may be asked again.
            is_kept = answer.is_whole and answer.status < 300
        finally:
            await self._settle(slot, answer.record(digest) if is_kept else None, account)

    async def _claim(self, slot: str, digest: str, account: "KeptBytes") -> dict[str, Any] | None:
        """What is kept under the key already; None: it is ours."""
        redis = self._house.parts.pool.redis
        pending = json.dumps({"digest": digest, "pending": True})
        try:
            is_full = await account.count() > KEPT_BYTES
            if not is_full and await redis.set(slot, pending, nx=True, ex=PENDING_S):
                return None
            told: Any = await redis.get(slot)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable("the request was not begun: the service's Redis does not answer; send it again") from error
        if told is None and is_full:
            raise ApiProblem(ErrorCode.QUOTA_EXCEEDED, FULL)
        found: dict[str, Any] = json.loads(told) if told is not None else {"digest": digest, "pending": True}
        return found

    async def _settle(self, slot: str, record: str | None, account: "KeptBytes") -> None:
        """As soon as Redis does it: a request that broke off for its sake would else be said to be worked for as long as one may take."""
        redis = self._house.parts.pool.redis

        async def settle() -> None:
            try:
                if record is None:
                    await redis.delete(slot)
                    return
                await redis.set(slot, record, ex=KEPT_S)
                await account.add(len(record) + SLOT_BYTES)
            except (RedisError, OSError) as error:
                raise BrokerUnavailable(f"it is not kept how a request ended: Redis does not do it ({error})") from error

        try:
            await outlast(settle, PENDING_S)
        except BrokerUnavailable as error:
            log.warning("answer_not_kept", error=str(error))


class KeptBytes:
    """How much is kept for one API key, told by the hour in which it was: what is older than a day is forgotten with its answers."""

    def __init__(self, redis: "redis.asyncio.Redis", deployment: str, key_id: str, clock: Callable[[], float] = time.time) -> None:
        self._redis, self._prefix, self._clock = redis, f"toolcrew:{deployment}:api:kept:{key_id}", clock

    async def count(self) -> int:
        now = self._hour()
        hours: Any = await self._redis.mget([f"{self._prefix}:{now - back}" for back in range(KEPT_S // 3600 + 1)])
        return sum(int(told) for told in hours if told is not None)

    async def add(self, size: int) -> None:
        key = f"{self._prefix}:{self._hour()}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.incrby(key, size)
            pipe.expire(key, KEPT_S + 3600)
            await pipe.execute()

    def _hour(self) -> int:
        return int(self._clock() // 3600)


class _Answer:
    """Passes an answer on, and keeps it as far as it is small enough to be kept."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._is_stream = False
        self._has_ended = False
        self.status = 0

    @property
    def is_whole(self) -> bool:
        return self._has_ended and not self._is_stream

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], list(message["headers"])
            kind = dict(self._headers).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and not self._is_stream:
            self._body += message.get("body", b"")
            self._is_stream = len(self._body) > MAX_ANSWER_BYTES
            self._has_ended = not message.get("more_body", False)
        await self._send(message)

    def record(self, digest: str) -> str:
        if (b"cache-control", b"no-store") in self._headers:
            # It holds a secret, which nobody can tell again: Redis neither.
            return json.dumps({"digest": digest, "told_once": True})
        kept = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers if name in (b"content-type", b"location")
        ]
        body = base64.b64encode(self._body).decode()
        return json.dumps({"digest": digest, "status": self.status, "headers": kept, "body": body})


async def _replay(kept: dict[str, Any], digest: str, send: Send) -> None:
    if kept["digest"] != digest:
        raise ApiProblem(
            ApiCode.IDEMPOTENCY_MISMATCH, "this Idempotency-Key was sent with another request: make a new key for each request"
        )
    if kept.get("pending"):
        raise ApiProblem(
            ApiCode.IDEMPOTENCY_IN_PROGRESS, "the first request with this Idempotency-Key is still worked: send it again in a moment"
        )
    if kept.get("told_once"):
        raise ApiProblem(
            ApiCode.CONFLICT,
            "the first request with this Idempotency-Key was done, and its answer holds a secret, which is told once: if it did not come, revoke "
            "what it made and make another with a new Idempotency-Key",
        )
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept["headers"]]
    body = base64.b64decode(kept["body"])
    headers += [(b"idempotent-replayed", b"true"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": kept["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    """The whole body; how much that may be, BodyLimits says. Raises ApiProblem for one that is too large to be kept in mind."""
    body, is_more = bytearray(), True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiProblem(ApiCode.MALFORMED_REQUEST, "the request broke off")
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
        if len(body) > JSON_BYTES:
            raise ApiProblem(
                ApiCode.BODY_TOO_LARGE, f"with an Idempotency-Key a body may have {JSON_BYTES} bytes; a batch is found again by its `id`"
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
