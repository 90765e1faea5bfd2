"""Cached pages: the tenants that share them, their lifetime, and the revalidation with their server."""

import random
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from store.web_pages import (
    FRESH_S,
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    PageCache,
    WebPage,
    fresh_for_s,
    may_be_kept,
    validator,
)
from tests.conftest import RedisProcess
from tests.stack import free_port
from tests.web_servers import QUICK, Web, WebServer, answer, build_web, open_web_server, redirect
from workers.web.fetcher import FetchedPage
from workers.web.limits import Deadline


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


def test_a_page_is_fetched_once_in_a_quarter_of_an_hour(site: Site) -> None:
    assert [site.fetch().source, site.fetch(after_s=FRESH_S - 1).source, site.fetch(after_s=2).source] == [
        "network",
        "cache",
        "network",
    ]
    assert len(site.server.requests) == 2


def test_one_tenants_pages_are_not_anothers(site: Site) -> None:
    assert [site.fetch(tenant=tenant).source for tenant in ("acme", "other", "acme")] == ["network", "network", "cache"]


def test_reading_on_does_not_fetch_again_whatever_the_page_says_of_its_age(site: Site) -> None:
    site.server.replies["/"] = answer("one", cache_control="no-cache")
    assert site.fetch().source == "network"
    site.server.replies["/"] = answer("two")
    assert site.fetch(reads_on=True, after_s=10).page.body == b"one"
    assert site.fetch(after_s=10).page.body == b"two"


@pytest.mark.parametrize(
    ("header", "value", "sent"),
    [("etag", '"v1"', "if-none-match"), ("last_modified", "Sun, 01 Nov 2026 00:00:00 GMT", "if-modified-since")],
)
def test_an_unchanged_old_page_is_revalidated(site: Site, header: str, value: str, sent: str) -> None:
    site.server.replies["/"] = answer("one", **{header: value})
    site.fetch()
    site.server.replies["/"] = b"HTTP/1.1 304 Not Modified\r\n\r\n"
    fetched = site.fetch(after_s=FRESH_S + 1)
    assert (fetched.source, fetched.page.body, site.server.header(sent)) == ("revalidated", b"one", value)
    assert site.fetch(after_s=FRESH_S - 1).source == "cache"


def test_only_the_url_that_gave_a_page_is_reported_it(site: Site) -> None:
    site.server.replies |= {"/start": redirect("/page"), "/page": answer("one", etag='"v1"')}
    site.fetch("/start")
    site.fetch("/start", after_s=FRESH_S + 1)
    assert site.server.paths == ["/start", "/page", "/start", "/page"]
    assert [site.server.header("if-none-match", at) for at in range(4)] == [None, None, None, '"v1"']


@pytest.mark.parametrize("status", [404, 500, 203, 204])
def test_only_a_plain_success_is_kept(site: Site, status: int) -> None:
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
def test_cache_control_is_read(control: str, is_stored: bool, fresh_s: float) -> None:
    headers = {"cache-control": control}
    assert (may_be_kept(headers), fresh_for_s(headers)) == (is_stored, fresh_s)


@pytest.mark.parametrize("value", ["", "a\x7fb", "\u00e9", "x" * 513])
def test_a_validator_that_would_be_no_good_header_is_not_kept(value: str) -> None:
    assert validator({"etag": value}, "etag") is None


# In Redis


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


def test_a_page_comes_back_as_it_was_kept_and_for_its_tenant_only(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        cache = PageCache(client, "test")
        page = build_page(redirects=("http://b.example/",), etag='"v1"')
        assert cache.keep("acme", page)
        assert cache.take("acme", page.url) == page
        assert (cache.take("other", page.url), cache.take("acme", "http://a.example/x")) == (None, None)
        assert PageCache(client, "live").take("acme", page.url) is None


def test_kept_pages_expire_by_themselves(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        cache = PageCache(client, "test")
        cache.keep("acme", build_page())
        cache.keep("acme", build_page("http://b.example/", etag="x"))
        ages = sorted(client.ttl(key) for key in client.keys("*"))
        assert ages[0] <= FRESH_S < ages[1] <= 3600
        assert all(key.startswith(b"toolcrew:test:t:acme:web.") for key in client.keys("*"))


def test_what_a_tenant_keeps_is_bounded(redis_server: RedisProcess) -> None:
    clock = Clock()
    with redis_server.client() as client:
        cache = PageCache(client, "test", clock)
        for number in range(MAX_ENTRIES + 3):
            clock.now += 1
            cache.keep("acme", build_page(f"http://a.example/{number}"))
        assert len(client.keys("*")) == MAX_ENTRIES + 1
        assert cache.take("acme", "http://a.example/2") is None
        assert cache.take("acme", "http://a.example/3") is not None


def test_a_page_too_large_to_keep_is_not_kept(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        noise = random.Random(1).randbytes(MAX_ENTRY_BYTES + 1000)
        assert not PageCache(client, "test").keep("acme", build_page(body=noise))
        assert client.keys("*") == []


def test_the_cache_leaves_half_of_redis_to_the_queue(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        cache = PageCache(client, "test")
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        try:
            assert not cache.keep("acme", build_page())
            client.config_set("maxmemory", 1024 * 1024 * 1024)
            assert cache.keep("acme", build_page())
        finally:
            client.config_set("maxmemory", 0)


def test_fetches_are_counted_by_the_minute_and_tenant(redis_server: RedisProcess) -> None:
    clock = Clock()
    with redis_server.client() as client:
        cache = PageCache(client, "test", clock)
        assert [cache.count("acme"), cache.count("acme"), cache.count("other")] == [1, 2, 1]
        assert all(0 < client.ttl(key) <= 120 for key in client.keys("*"))
        clock.now += 60
        assert cache.count("acme") == 1


@pytest.mark.parametrize("data", [b"", b"junk", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_what_is_no_page_is_not_taken_for_one(redis_server: RedisProcess, data: bytes) -> None:
    with redis_server.client() as client:
        cache = PageCache(client, "test")
        cache.keep("acme", build_page())
        (key,) = (key for key in client.keys("*") if client.type(key) == b"string")
        client.set(key, data)
        assert cache.take("acme", "http://a.example/") is None


def test_without_redis_pages_are_fetched_and_not_kept() -> None:
    cache = PageCache(redis.Redis(port=free_port(), retry=Retry(NoBackoff(), 0)), "test")
    assert cache.take("acme", "http://a.example/") is None
    assert cache.keep("acme", build_page()) is False
    assert cache.count("acme") == 0
