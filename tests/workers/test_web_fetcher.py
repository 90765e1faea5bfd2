"""Fetching a page over real loopback servers: servers' faults, their cost, the error messages, and cached pages."""

import gzip
import os
import random
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import RedisProcess
from tests.support.web.web_certificate import server_context, trusting_context
from tests.support.web.web_servers import (
    QUICK,
    SHORT_LIMITS,
    Reply,
    Web,
    WebServer,
    answer,
    build_web,
    open_web_server,
    redirect,
)
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.store.web_pages import (
    FRESH_S,
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    PageCache,
    WebPage,
    fresh_for_s,
    may_be_kept,
    validator,
)
from toolcrew.workers.web.fetcher import FetchedPage
from toolcrew.workers.web.limits import Deadline, FetchLimits
from toolcrew.workers.web.resolver import MAX_LOOKUPS, SystemResolver, parse_answers


@pytest.fixture
def server() -> Iterator[WebServer]:
    with open_web_server() as opened:
        yield opened


def fetch(
    server: WebServer, path: str = "/", *, limits: FetchLimits = QUICK, total_s: float = 5.0, host: str = "site.example"
) -> FetchedPage:
    return build_web(server, limits=limits).fetcher.fetch("acme", server.url(path, host), Deadline(total_s))


def failure(server: WebServer, path: str = "/", **options: object) -> ToolFailure:
    with pytest.raises(ToolFailure) as failed:
        fetch(server, path, **options)  # type: ignore[arg-type]
    return failed.value


def wait_for_end(server: WebServer) -> None:
    server.ending.wait(10)


def drip(server: WebServer, first: bytes, piece: bytes, every_s: float = 0.02) -> Reply:
    """Return a reply that sends a small piece repeatedly until the test ends."""

    def reply(connection: socket.socket) -> None:
        connection.sendall(first)
        while not server.ending.wait(every_s):
            connection.sendall(piece)

    return reply


def flood(server: WebServer, first: bytes, piece: bytes) -> Reply:
    def reply(connection: socket.socket) -> None:
        connection.sendall(first)
        while not server.ending.is_set():
            connection.sendall(piece)

    return reply


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


def test_request_has_only_the_required_headers(server: WebServer) -> None:
    server.replies["/"] = answer("hello")
    fetch(server)
    names = {line.partition(":")[0].lower() for line in server.requests[0].split("\r\n")[1:]}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert (server.header("host"), server.header("connection")) == (f"site.example:{server.port}", "close")


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [("gzip", gzip.compress(b"hello" * 100)), ("deflate", zlib.compress(b"hello" * 100)), ("", b"hello" * 100)],
    ids=["gzip", "deflate", "plain"],
)
def test_compressed_chunked_and_unbounded_bodies_are_read(server: WebServer, encoding: str, packed: bytes) -> None:
    head = HEAD + (f"content-encoding: {encoding}\r\n".encode() if encoding else b"")
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(packed[at : at + 7]), packed[at : at + 7]) for at in range(0, len(packed), 7)
    )
    server.replies["/chunked"] = [head, b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n"]
    server.replies["/closed"] = head + b"\r\n" + packed
    assert fetch(server, "/chunked").page.body == fetch(server, "/closed").page.body == b"hello" * 100


def test_silent_server_times_out_at_the_first_byte_limit(server: WebServer) -> None:
    server.replies["/"] = lambda _: wait_for_end(server)
    failed = failure(server, limits=SHORT_LIMITS)
    assert (failed.code, "sent nothing within 0.3 s" in failed.message) == (ErrorCode.TIMEOUT, True)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (HEAD + b"content-length: 9999\r\n\r\n", b"x"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["headers", "body", "chunks"],
)
def test_slow_server_times_out_at_the_minimum_rate(server: WebServer, first: bytes, piece: bytes) -> None:
    server.replies["/"] = drip(server, first, piece)
    failed = failure(server, limits=SHORT_LIMITS)
    assert (failed.code, "less than 1024 bytes/s" in failed.message) == (ErrorCode.TIMEOUT, True)


def test_interrupted_call_does_not_wait_for_its_server(server: WebServer) -> None:
    class Interrupted(BaseException):
        """The exception of workers/interrupts.py, which a signal handler raises at an arbitrary point of the code."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    def reply(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"\r\n")
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for_end(server)

    server.replies["/"] = reply
    before, began = signal.signal(signal.SIGUSR1, interrupt), time.monotonic()
    try:
        with pytest.raises(Interrupted):
            fetch(server, total_s=60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < 30
    assert "http" not in {thread.name for thread in threading.enumerate()}


def test_server_that_pauses_within_the_minimum_rate_is_read(server: WebServer) -> None:
    big = b"x" * 100_000

    def reply(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"content-length: 100001\r\n\r\n" + big)
        server.ending.wait(SHORT_LIMITS.rate_window_s * 1.3)
        connection.sendall(b"y")

    server.replies["/"] = reply
    assert fetch(server, limits=SHORT_LIMITS).page.body == big + b"y"


def test_total_timeout_includes_redirects(server: WebServer) -> None:
    def slow_redirect(connection: socket.socket) -> None:
        server.ending.wait(0.2)
        connection.sendall(redirect("/"))

    server.replies["/"] = slow_redirect
    assert failure(server, total_s=0.5).code is ErrorCode.TIMEOUT


@pytest.mark.parametrize(
    "reply",
    [
        b"garbage\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n",
    ],
)  # fmt: skip
def test_invalid_http_is_reported_without_its_text(server: WebServer, reply: bytes) -> None:
    server.replies["/"] = reply
    failed = failure(server)
    assert failed.code is ErrorCode.NETWORK_ERROR
    assert failed.message.startswith("site.example ")
    assert "OpenSSH" not in failed.message


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        HEAD,
        HEAD + b"content-length: 100\r\n\r\nonly this",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        HEAD + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b"hello" * 100)[:-4],
    ],
    ids=["nothing", "half a head", "wrong length", "no last chunk", "half a gzip"],
)
def test_truncated_response_is_an_error(server: WebServer, reply: bytes) -> None:
    server.replies["/"] = reply
    failed = failure(server)
    assert (failed.code, failed.metadata["cause"]) == (ErrorCode.NETWORK_ERROR, "reset")


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" * 5000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"t: " + b"x" * 200_000,
    ],
    ids=["lines", "one line", "early hints", "trailers"],
)
def test_too_many_or_too_large_headers_are_refused(server: WebServer, reply: bytes) -> None:
    server.replies["/"] = reply
    failed = failure(server)
    assert (failed.code, "headers" in failed.message) == (ErrorCode.NETWORK_ERROR, True)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HEAD + b"\r\n", b"x" * 65536),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"),
    ],
    ids=["without a length", "chunked"],
)
def test_endless_body_is_stopped_at_the_size_limit(server: WebServer, first: bytes, piece: bytes) -> None:
    server.replies["/"] = flood(server, first, piece)
    failed = failure(server, limits=FetchLimits(wire_bytes=500_000))
    assert (failed.code, "500000 bytes" in failed.message) == (ErrorCode.FILE_TOO_LARGE, True)


def test_chunk_framing_counts_toward_the_size_limit(server: WebServer) -> None:
    server.replies["/"] = flood(server, HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1;" + b"e" * 500 + b"\r\nx\r\n")
    assert failure(server, limits=FetchLimits(wire_bytes=200_000)).code is ErrorCode.FILE_TOO_LARGE


def test_declared_oversized_body_is_not_read(server: WebServer) -> None:
    server.replies["/"] = HEAD + b"content-length: 5000001\r\n\r\n"
    assert "5000001 bytes" in failure(server).message


def test_gzip_bomb_is_stopped_early(server: WebServer) -> None:
    server.replies["/"] = answer(gzip.compress(bytes(20_000_000), 9), content_encoding="gzip")
    failed = failure(server, limits=FetchLimits())
    assert (failed.code, "100 times" in failed.message) == (ErrorCode.FILE_TOO_LARGE, True)


def test_body_of_binary_content_is_not_read(server: WebServer) -> None:
    server.replies["/"] = flood(
        server, b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 99999999\r\n\r\n", b"x" * 1000
    )
    page = fetch(server).page
    assert (page.body, page.is_whole, page.declared_bytes) == (b"", False, 99999999)


def test_only_the_start_of_an_error_body_is_read(server: WebServer) -> None:
    server.replies["/"] = flood(server, b"HTTP/1.1 500 X\r\ncontent-type: text/plain\r\n\r\n", b"x" * 1000)
    page = fetch(server).page
    assert (page.status, len(page.body), page.is_whole) == (500, QUICK.error_body_bytes, False)


@pytest.mark.parametrize(
    "rest",
    [b"content-encoding: br\r\n\r\nx", b"content-length: 100\r\n\r\nx", b"transfer-encoding: chunked\r\n\r\nzz\r\n"],
    ids=["packed otherwise", "too short", "no chunks"],
)
def test_broken_body_does_not_hide_an_error_status(server: WebServer, rest: bytes) -> None:
    server.replies["/"] = b"HTTP/1.1 404 X\r\ncontent-type: text/plain\r\n" + rest
    page = fetch(server).page
    assert (page.status, page.body, page.is_whole) == (404, b"", False)


def test_fetches_per_minute_and_tenant_are_limited(server: WebServer) -> None:
    server.replies["*"] = answer("hello")
    web = build_web(server, limits=QUICK, per_minute=2)
    for path in ("/1", "/2", "/1"):
        web.fetcher.fetch("acme", server.url(path), Deadline(5))
    with pytest.raises(ToolFailure, match="more than 2 pages") as failed:
        web.fetcher.fetch("acme", server.url("/3"), Deadline(5))
    assert (failed.value.code, server.paths) == (ErrorCode.SECURITY_REFUSED, ["/1", "/2"])
    assert web.fetcher.fetch("other", server.url("/3"), Deadline(5)).page.body == b"hello"


def test_closed_port_is_reported_as_a_refused_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = WebServer(unused.getsockname()[1])
        failed = failure(closed)
    assert (failed.code, failed.metadata["cause"]) == (ErrorCode.NETWORK_ERROR, "refused")


def test_connection_reset_is_reported(server: WebServer) -> None:
    def reply(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    server.replies["/"] = reply
    failed = failure(server)
    assert (failed.code, failed.metadata["cause"]) == (ErrorCode.NETWORK_ERROR, "reset")


def test_next_address_is_tried_after_a_refused_connection(server: WebServer) -> None:
    server.replies["/"] = answer("hello")
    web = build_web(server, names={"site.example": [["127.0.0.2", "::1", "127.0.0.1"]]}, limits=QUICK)
    assert web.fetcher.fetch("acme", server.url(), Deadline(5)).page.body == b"hello"


# TLS


def fetch_over_tls(
    server: WebServer, host: str = "site.example", trusted: bool = True, limits: FetchLimits = QUICK
) -> bytes:
    web = build_web(server, limits=limits, tls=trusting_context() if trusted else None)
    return web.fetcher.fetch("acme", server.url("/", host, "https"), Deadline(5)).page.body


def test_https_page_with_a_valid_certificate_is_fetched() -> None:
    with open_web_server({"/": answer("hello")}, tls=server_context()) as server:
        assert fetch_over_tls(server) == b"hello"


@pytest.mark.parametrize(
    ("host", "trusted"), [("other.example", True), ("site.example", False)], ids=["another name", "unknown authority"]
)
def test_certificate_with_a_wrong_name_or_unknown_authority_is_refused(host: str, trusted: bool) -> None:
    with open_web_server({"/": answer("hello")}, tls=server_context()) as server:
        with pytest.raises(ToolFailure) as failed:
            fetch_over_tls(server, host, trusted)
        assert (failed.value.code, failed.value.metadata["cause"]) == (ErrorCode.NETWORK_ERROR, "tls")
        assert not server.requests


def test_server_that_ignores_the_tls_handshake_times_out(server: WebServer) -> None:
    with pytest.raises(ToolFailure) as failed:
        fetch_over_tls(server, limits=SHORT_LIMITS)
    assert (failed.value.code, "TLS" in failed.value.message) == (ErrorCode.TIMEOUT, True)


# The system's resolver


def test_system_resolver_returns_addresses_of_a_known_name() -> None:
    assert {str(address) for address in SystemResolver().resolve("localhost", Deadline(5), 3)} <= {"127.0.0.1", "::1"}


def test_silent_name_server_times_out_with_bounded_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def silent(*_: object, **__: object) -> list[object]:
        released.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    resolver = SystemResolver()
    errors = []
    for _ in range(MAX_LOOKUPS + 1):
        with pytest.raises(ToolFailure) as failed:
            resolver.resolve("a.example", Deadline(5), 0.02)
        assert failed.value.code is ErrorCode.TIMEOUT
        errors.append(failed.value.message)
    assert ["too many lookups" in message for message in errors] == [*[False] * MAX_LOOKUPS, True]
    released.set()
    for thread in threading.enumerate():
        if thread.name == "dns":
            thread.join(5)
    with pytest.raises(ToolFailure, match="0 addresses"):
        resolver.resolve("a.example", Deadline(5), 5)


@pytest.mark.parametrize("answers", [[], [f"192.0.2.{n}" for n in range(17)], ["not an address"]])
def test_missing_excessive_or_invalid_dns_answers_are_refused(answers: list[str]) -> None:
    with pytest.raises(ToolFailure, match=r"^DNS: "):
        parse_answers("a.example", answers)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Site:
    """A server with one page, and a fetcher with a clock that the test sets."""

    def __init__(self, server: WebServer) -> None:
        self.server = server
        self.clock = Clock()
        self.web: Web = build_web(server, limits=QUICK, clock=self.clock)

    def fetch(
        self, path: str = "/", tenant: str = "acme", *, reads_on: bool = False, after_s: float = 0
    ) -> FetchedPage:
        self.clock.now += after_s
        return self.web.fetcher.fetch(tenant, self.server.url(path), Deadline(5), reads_on=reads_on)


@pytest.fixture
def site() -> Iterator[Site]:
    with open_web_server({"/": answer("one")}) as server:
        yield Site(server)


def test_page_is_cached_for_15_minutes(site: Site) -> None:
    assert [site.fetch().source, site.fetch(after_s=FRESH_S - 1).source, site.fetch(after_s=2).source] == [
        "network",
        "cache",
        "network",
    ]
    assert len(site.server.requests) == 2


def test_cached_pages_are_not_shared_between_tenants(site: Site) -> None:
    assert [site.fetch(tenant=tenant).source for tenant in ("acme", "other", "acme")] == ["network", "network", "cache"]


def test_reading_on_uses_the_cached_page_despite_no_cache(site: Site) -> None:
    site.server.replies["/"] = answer("one", cache_control="no-cache")
    assert site.fetch().source == "network"
    site.server.replies["/"] = answer("two")
    assert site.fetch(reads_on=True, after_s=10).page.body == b"one"
    assert site.fetch(after_s=10).page.body == b"two"


@pytest.mark.parametrize(
    ("header", "value", "sent"),
    [("etag", '"v1"', "if-none-match"), ("last_modified", "Sun, 01 Nov 2026 00:00:00 GMT", "if-modified-since")],
)
def test_unchanged_stale_page_is_revalidated(site: Site, header: str, value: str, sent: str) -> None:
    site.server.replies["/"] = answer("one", **{header: value})
    site.fetch()
    site.server.replies["/"] = b"HTTP/1.1 304 Not Modified\r\n\r\n"
    fetched = site.fetch(after_s=FRESH_S + 1)
    assert (fetched.source, fetched.page.body, site.server.header(sent)) == ("revalidated", b"one", value)
    assert site.fetch(after_s=FRESH_S - 1).source == "cache"


def test_validators_are_sent_only_to_the_final_url(site: Site) -> None:
    site.server.replies |= {"/start": redirect("/page"), "/page": answer("one", etag='"v1"')}
    site.fetch("/start")
    site.fetch("/start", after_s=FRESH_S + 1)
    assert site.server.paths == ["/start", "/page", "/start", "/page"]
    assert [site.server.header("if-none-match", at) for at in range(4)] == [None, None, None, '"v1"']


@pytest.mark.parametrize("status", [404, 500, 203, 204])
def test_only_status_200_is_cached(site: Site, status: int) -> None:
    site.server.replies["/"] = answer("" if status == 204 else "x", status, content_length="")
    site.fetch()
    assert not site.web.store.pages


@pytest.mark.parametrize(
    ("control", "is_stored", "fresh_s"),
    [
        ("", True, FRESH_S),
        ("max-age=5", True, 5),
        ("max-age=999999", True, FRESH_S),
        ("no-cache", True, 0),
        ("No-Store", False, FRESH_S),
        ("max-age=x", True, FRESH_S),
    ],
)
def test_cache_control_header_is_applied(control: str, is_stored: bool, fresh_s: float) -> None:
    headers = {"cache-control": control}
    assert (may_be_kept(headers), fresh_for_s(headers)) == (is_stored, fresh_s)


@pytest.mark.parametrize("value", ["", "a\x7fb", "\u00e9", "x" * 513])
def test_validator_with_an_invalid_header_value_is_dropped(value: str) -> None:
    assert validator({"etag": value}, "etag") is None


# In Redis


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator["redis.Redis"]:
    with redis_server.client() as opened:
        yield opened


@pytest.fixture
def cache(client: "redis.Redis") -> PageCache:
    return PageCache(client, "test")


def build_page(url: str = "http://a.example/", body: bytes = b"\x00\xffbody\n{}", **fields: object) -> WebPage:
    plain = {
        "final_url": url,
        "status": 200,
        "phrase": "200 OK",
        "content_type": "text/html",
        "fetched_at": 1.0,
        "fresh_until": 2.0,
    }
    return WebPage(**{**plain, "url": url, "body": body, **fields})  # type: ignore[arg-type]


def test_cached_page_is_read_back_only_for_its_tenant(client: "redis.Redis", cache: PageCache) -> None:
    page = build_page(redirects=("http://b.example/",), etag='"v1"')
    assert cache.keep("acme", page)
    assert cache.take("acme", page.url) == page
    assert (cache.take("other", page.url), cache.take("acme", "http://a.example/x")) == (None, None)
    assert PageCache(client, "live").take("acme", page.url) is None


def test_cached_pages_expire(client: "redis.Redis", cache: PageCache) -> None:
    cache.keep("acme", build_page())
    cache.keep("acme", build_page("http://b.example/", etag="x"))
    ages = sorted(client.ttl(key) for key in client.keys("*"))
    assert ages[0] <= FRESH_S < ages[1] <= 3600
    assert all(key.startswith(b"toolcrew:test:t:acme:web.") for key in client.keys("*"))


def test_number_of_cached_pages_per_tenant_is_limited(redis_server: RedisProcess) -> None:
    clock = Clock()
    with redis_server.client() as client:
        cache = PageCache(client, "test", clock)
        for number in range(MAX_ENTRIES + 3):
            clock.now += 1
            cache.keep("acme", build_page(f"http://a.example/{number}"))
        assert len(client.keys("*")) == MAX_ENTRIES + 1
        assert cache.take("acme", "http://a.example/2") is None
        assert cache.take("acme", "http://a.example/3") is not None


def test_oversized_page_is_not_cached(client: "redis.Redis") -> None:
    noise = random.Random(1).randbytes(MAX_ENTRY_BYTES + 1000)
    assert not PageCache(client, "test").keep("acme", build_page(body=noise))
    assert client.keys("*") == []


def test_page_cache_stores_nothing_when_redis_is_half_full(client: "redis.Redis", cache: PageCache) -> None:
    client.config_set("maxmemory", client.info("memory")["used_memory"])
    try:
        assert not cache.keep("acme", build_page())
        client.config_set("maxmemory", 1024 * 1024 * 1024)
        assert cache.keep("acme", build_page())
    finally:
        client.config_set("maxmemory", 0)


def test_fetches_are_counted_per_minute_and_tenant(redis_server: RedisProcess) -> None:
    clock = Clock()
    with redis_server.client() as client:
        cache = PageCache(client, "test", clock)
        assert [cache.count("acme"), cache.count("acme"), cache.count("other")] == [1, 2, 1]
        assert all(0 < client.ttl(key) <= 120 for key in client.keys("*"))
        clock.now += 60
        assert cache.count("acme") == 1


@pytest.mark.parametrize("data", [b"", b"junk", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_invalid_cached_data_is_ignored(client: "redis.Redis", cache: PageCache, data: bytes) -> None:
    cache.keep("acme", build_page())
    (key,) = (key for key in client.keys("*") if client.type(key) == b"string")
    client.set(key, data)
    assert cache.take("acme", "http://a.example/") is None


def test_page_cache_without_redis_stores_nothing() -> None:
    cache = PageCache(redis.Redis(port=reserve_port(), retry=Retry(NoBackoff(), 0)), "test")
    assert cache.take("acme", "http://a.example/") is None
    assert cache.keep("acme", build_page()) is False
    assert cache.count("acme") == 0
