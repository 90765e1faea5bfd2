"""Cache of the web pages that a tenant has fetched, so that a tool that reads the next part of a page does not fetch
the page again. Also counts the fetches of a tenant per minute.
"""

import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import tenant_key
from toolcrew.store.connection import SyncRedis, broker_errors

log = structlog.get_logger(__name__)

FRESH_S = 900.0
"""Maximum time for which a page is served without a request to its server, in seconds. The server can shorten the
time.
"""
KEEP_S = 3600
"""Lifetime of a page that can be revalidated (ETag, Last-Modified), in seconds."""
MAX_ENTRY_BYTES = 1024 * 1024
"""Limit of a packed page, in bytes. A larger page is not stored."""
MAX_ENTRIES = 32
"""Limit of pages of one tenant. Above the limit, the oldest page is deleted."""
MAX_SHARE = 0.5
"""Share of Redis's memory in use, 0 to 1, above which no page is stored. The queues need the rest."""
MAX_UNPACKED_BYTES = 16 * 1024 * 1024
MAX_VALIDATOR_CHARS = 512

_MAX_AGE = re.compile(r"max-age\s*=\s*\"?(\d{1,10})")


class WebPage(Record):
    """A fetched response. The body is uncompressed but not decoded, so that one stored page serves every format.

    `is_whole` False: the body was not read, or not to its end. `declared_bytes`: the length according to the server;
    None if unknown. `fetched_at`, `fresh_until`: Unix seconds.
    """

    url: str
    final_url: str
    status: int
    phrase: str
    content_type: str
    body: bytes
    is_whole: bool = True
    declared_bytes: int | None = None
    redirects: tuple[str, ...] = ()
    etag: str | None = None
    last_modified: str | None = None
    fetched_at: float
    fresh_until: float

    @property
    def can_be_asked_after(self) -> bool:
        return bool(self.etag or self.last_modified)


class PageStore(Protocol):
    """A store of pages. Its methods never raise an exception: while the store fails, every call fetches its page."""

    def take(self, tenant: str, url: str) -> WebPage | None: ...

    def keep(self, tenant: str, page: WebPage) -> bool:
        """Store a page. Return whether it was stored."""
        ...

    def count(self, tenant: str) -> int:
        """Count one fetch from the network. Return how many fetches the tenant has made in this minute; 0 when Redis
        does not answer.
        """
        ...


class PageCache:
    """A PageStore in Redis, under the tenant's own keys."""

    def __init__(self, client: SyncRedis, deployment: str, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._deployment = deployment
        self._clock = clock

    def take(self, tenant: str, url: str) -> WebPage | None:
        try:
            with broker_errors("a cached page was not read"):
                data = self._client.get(self._key(tenant, url))
        except BrokerUnavailable as error:
            log.warning("page_cache_unavailable", error=str(error))
            return None
        page = _unpack(data) if isinstance(data, bytes) else None
        # Check the URL: if this key has the page of another URL, the keys collide or the entry is forged.
        return page if page is not None and page.url == url else None

    def keep(self, tenant: str, page: WebPage) -> bool:
        data = _pack(page)
        if len(data) > MAX_ENTRY_BYTES:
            return False
        key, index = self._key(tenant, page.url), self._key(tenant, "index")
        seconds = KEEP_S if page.can_be_asked_after else int(FRESH_S)
        try:
            with broker_errors("a page was not cached"), self._client.pipeline() as pipe:
                if not self._has_room():
                    return False
                pipe.set(key, data, ex=seconds)
                pipe.zadd(index, {key: self._clock()})
                pipe.expire(index, KEEP_S)
                pipe.zrange(index, 0, -MAX_ENTRIES - 1)
                oldest = pipe.execute()[-1]
                if oldest:
                    self._client.delete(*oldest)
                    self._client.zrem(index, *oldest)
        except BrokerUnavailable as error:
            log.warning("page_cache_unavailable", error=str(error))
            return False
        return True

    def count(self, tenant: str) -> int:
        key = self._key(tenant, f"minute-{int(self._clock() // 60)}")
        try:
            with broker_errors("fetched pages were not counted"), self._client.pipeline() as pipe:
                pipe.incr(key)
                pipe.expire(key, 120)
                return int(pipe.execute()[0])
        except BrokerUnavailable as error:
            log.warning("page_cache_unavailable", error=str(error))
            return 0

    def _has_room(self) -> bool:
        memory = self._client.info("memory")
        limit = memory.get("maxmemory", 0)
        return not limit or memory.get("used_memory", 0) < MAX_SHARE * limit

    def _prefix(self, tenant: str) -> str:
        return tenant_key(self._deployment, tenant, "web")

    def _key(self, tenant: str, url: str) -> str:
        return f"{self._prefix(tenant)}.{hashlib.sha256(url.encode()).hexdigest()}"


def may_be_kept(headers: Mapping[str, str]) -> bool:
    """Return whether the server allows storing the page."""
    return "no-store" not in _directives(headers) and headers.get("vary", "").strip() != "*"


def fresh_for_s(headers: Mapping[str, str]) -> float:
    """Return the number of seconds for which the page is fresh, according to its headers: at most FRESH_S, which is
    also the default.
    """
    directives = _directives(headers)
    if "no-cache" in directives:
        return 0.0
    match = _MAX_AGE.search(directives)
    return min(FRESH_S, float(match[1])) if match else FRESH_S


def validator(headers: Mapping[str, str], name: str) -> str | None:
    """Return the ETag or Last-Modified for a later request; None if it is missing or not a valid header."""
    value = headers.get(name, "").strip()
    return value if 0 < len(value) <= MAX_VALIDATOR_CHARS and value.isascii() and value.isprintable() else None


def _directives(headers: Mapping[str, str]) -> str:
    return headers.get("cache-control", "").lower()


def _pack(page: WebPage) -> bytes:
    head = page.model_dump_json(exclude={"body"}).encode()
    return zlib.compress(head + b"\n" + page.body, 1)


def _unpack(data: bytes) -> WebPage | None:
    """Return a stored page; None for a page of another version. Limited to MAX_UNPACKED_BYTES of memory, because any
    process that can write to Redis may have stored the data.
    """
    try:
        inflater = zlib.decompressobj()
        whole = inflater.decompress(data, MAX_UNPACKED_BYTES)
        head, _, body = whole.partition(b"\n")
        return WebPage(**json.loads(head), body=body) if inflater.eof else None
    except (zlib.error, ValueError, TypeError):
        return None
