"""websearch_tool and its providers, over loopback servers that use the providers' protocols."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from tests.support.web.web_certificate import server_context
from tests.support.web.web_servers import (
    QUICK,
    SYSTEM_TLS,
    MemoryStore,
    StubResolver,
    WebServer,
    answer,
    open_web_server,
    run_tool,
)
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ConfigError, ErrorCode
from toolcrew.contract.settings import WebSettings, read_environment
from toolcrew.workers.web.providers.base import SearchProvider
from toolcrew.workers.web.providers.brave import Brave
from toolcrew.workers.web.providers.endpoint import SearchEndpoint
from toolcrew.workers.web.providers.exa import Exa
from toolcrew.workers.web.providers.searxng import Searxng
from toolcrew.workers.web.providers.tavily import Tavily
from toolcrew.workers.web.tools import build_access_rules, build_providers, build_web_tools
from toolcrew.workers.web.websearch import build_websearch

KEY = "key-that-stays-secret"
NOW = 1_790_000_000.0


@pytest.fixture
def server() -> Iterator[WebServer]:
    with open_web_server() as opened:
        yield opened


class Service:
    """One provider over the server, and the pauses that the provider made."""

    def __init__(self, server: WebServer, kind: str, key: str = KEY) -> None:
        self.pauses: list[float] = []
        endpoint = SearchEndpoint(
            kind,
            server.url("", "search.example"),
            f"TOOLCREW_{kind.upper()}_API_KEY",
            StubResolver({"search.example": [["127.0.0.1"]]}),
            limits=QUICK,
            tls=SYSTEM_TLS,
            pause=self.pauses.append,
            clock=lambda: NOW,
        )
        secret = SecretStr(key)
        build: dict[str, Callable[[], SearchProvider]] = {
            "tavily": lambda: Tavily(endpoint, secret),
            "brave": lambda: Brave(endpoint, secret),
            "exa": lambda: Exa(endpoint, secret, clock=lambda: NOW),
            "searxng": lambda: Searxng(endpoint),
        }
        self.provider = build[kind]()


def entries(kind: str, *urls: str) -> dict[str, Any]:
    """Return the reply of a provider of this kind for these hits."""
    snippet = {"tavily": "content", "brave": "description", "exa": "text", "searxng": "content"}[kind]
    hits = [
        {"title": f"Title {n}", "url": url, snippet: f"Snippet {n}", "score": 0.5}
        for n, url in enumerate(urls, start=1)
    ]
    return {"web": {"results": hits}} if kind == "brave" else {"results": hits}


def build_reply(content: Any, status: int = 200, **headers: str) -> bytes:
    return answer(content if isinstance(content, str) else json.dumps(content), status, "application/json", **headers)


def search(*services: Service, timeout_s: float = 30, **arguments: Any) -> ToolResult:
    return run_tool(
        build_websearch([service.provider for service in services]),
        timeout_s=timeout_s,
        **{"query": "needle", **arguments},
    )


KINDS = ["tavily", "brave", "exa", "searxng"]


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_numbered_and_fenced(server: WebServer, kind: str) -> None:
    server.replies["*"] = build_reply(entries(kind, "https://a.example/1", "https://b.example/2"))
    result = search(Service(server, kind))
    lines = result.text().splitlines()
    assert lines[0].startswith("[untrusted text of the web")
    assert lines[2:5] == ["1. Title 1", "   https://a.example/1", "   Snippet 1"]
    assert lines[5:9] == ["", "2. Title 2", "   https://b.example/2", "   Snippet 2"]
    assert lines[-1] == f"[2 results from {kind}]"
    assert result.metadata["results"][0] == {  # type: ignore[index]
        "title": "Title 1",
        "url": "https://a.example/1",
        "snippet": "Snippet 1",
        "published": None,
        "score": 0.5,
    }


FILTERS = {
    "max_results": 3,
    "include_domains": ["A.example", "*.b.example"],
    "exclude_domains": ["c.example"],
    "time_range": "week",
}


def test_tavily_request_has_its_fields(server: WebServer) -> None:
    server.replies["/search"] = build_reply(entries("tavily", "https://a.example/"))
    assert search(Service(server, "tavily"), **FILTERS).success
    assert server.requests[0].split()[0] == "POST"
    assert server.header("authorization") == f"Bearer {KEY}"
    assert server.header("content-type") == "application/json"
    assert json.loads(server.bodies[0]) == {
        "query": "needle",
        "max_results": 3,
        "search_depth": "basic",
        "include_answer": False,
        "include_domains": ["a.example", "b.example"],
        "exclude_domains": ["c.example"],
        "time_range": "week",
    }


def test_exa_request_has_its_fields(server: WebServer) -> None:
    server.replies["/search"] = build_reply(entries("exa", "https://a.example/"))
    assert search(Service(server, "exa"), **FILTERS).success
    assert (server.requests[0].split()[0], server.header("x-api-key")) == ("POST", KEY)
    payload = json.loads(server.bodies[0])
    assert payload["numResults"] == 3
    assert payload["includeDomains"] == ["a.example", "b.example"]
    assert payload["excludeDomains"] == ["c.example"]
    assert payload["startPublishedDate"] == "2026-09-14T14:13:20.000Z"


@pytest.mark.parametrize(
    ("kind", "path", "parameters_of_kind"),
    [
        ("brave", "/res/v1/web/search", {"count": ["3"], "freshness": ["pw"]}),
        ("searxng", "/search", {"format": ["json"], "time_range": ["week"]}),
    ],
)
def test_domain_filters_are_added_to_the_query(
    server: WebServer, kind: str, path: str, parameters_of_kind: dict[str, list[str]]
) -> None:
    server.replies[path] = build_reply(entries(kind, "https://a.example/"))
    assert search(Service(server, kind), **FILTERS).success
    parameters = parse_qs(server.paths[0].partition("?")[2])
    assert parameters == {"q": ["needle (site:a.example OR site:b.example) -site:c.example"], **parameters_of_kind}
    assert server.header("x-subscription-token") == (KEY if kind == "brave" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_other_domains_are_omitted_with_a_note(server: WebServer, kind: str) -> None:
    urls = [
        "https://x.a.example/1",
        "https://evila.example/2",
        "https://a.example.evil.example/3",
        "https://bad.a.example/4",
        "https://a.example@evil.example/5",
    ]
    server.replies["*"] = build_reply(entries(kind, *urls))
    result = search(Service(server, kind), include_domains=["a.example"], exclude_domains=["bad.a.example"])
    assert [hit["url"] for hit in result.metadata["results"]] == ["https://x.a.example/1"]  # type: ignore[union-attr,index,call-overload]
    assert "4 more from other domains" in result.text()


def test_results_are_limited_and_unique(server: WebServer) -> None:
    server.replies["*"] = build_reply(
        entries("searxng", "https://a.example/1", "https://a.example/1", "https://a.example/2", "https://a.example/3")
    )
    result = search(Service(server, "searxng"), max_results=2)
    assert [hit["url"] for hit in result.metadata["results"]] == ["https://a.example/1", "https://a.example/2"]  # type: ignore[union-attr,index,call-overload]


def test_markup_in_results_is_removed(server: WebServer) -> None:
    hit = {"title": "A &amp; B", "url": "https://a.example/", "description": "the <strong>needle</strong>"}
    server.replies["*"] = build_reply({"web": {"results": [{**hit, "age": "2 days ago"}]}})
    assert "1. A & B (2 days ago)\n   https://a.example/\n   the needle\n" in search(Service(server, "brave")).text()


# Failing services


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry_after": "2"}, 2.0),
        ({}, 1.0),
        ({"x_ratelimit_reset": "3, 1419704"}, 3.0),
        ({"retry_after": "Mon, 21 Sep 2026 14:13:24 GMT"}, 4.0),
        ({"retry_after": "soon"}, 1.0),
        ({"retry_after": "-5"}, 1.0),
        ({"retry_after": "nan"}, 1.0),
        ({"retry_after": "0"}, 0.0),
        ({"retry_after": "Mon, 21 Sep 2026 00:00:00 GMT"}, 0.0),
    ],
)
def test_busy_provider_is_retried_after_its_retry_after(
    server: WebServer, headers: dict[str, str], pause: float
) -> None:
    server.replies["*"] = build_reply({}, 429, **headers)
    service = Service(server, "tavily")
    assert search(service).error_code is ErrorCode.HTTP_ERROR
    assert (service.pauses, len(server.requests)) == ([pause], 2)


@pytest.mark.parametrize(
    "wait", ["60", "5.5", "999999999999", "Mon, 21 Sep 2026 15:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT"]
)
def test_provider_with_a_long_retry_after_is_skipped(server: WebServer, wait: str) -> None:
    server.replies |= {
        "/search": build_reply({}, 429, retry_after=wait),
        "/res/v1/web/search": build_reply(entries("brave", "https://a.example/")),
    }
    first, second = Service(server, "tavily"), Service(server, "brave")
    result = search(first, second)
    assert (result.success, result.metadata["provider"], first.pauses) == (True, "brave", [])
    assert "tavily: tavily answered 429 Too Many Requests" in result.text()


@pytest.mark.parametrize(
    "reply",
    [
        build_reply({}, 500),
        build_reply({}, 401),
        build_reply("<html>", 200),
        build_reply("[" * 100_000),
        build_reply("[" + "[]," * 500_000 + "0]"),
        b"garbage\r\n\r\n",
        b"",
    ],
)
def test_next_provider_replaces_a_failed_one(server: WebServer, reply: bytes) -> None:
    server.replies |= {"/search": reply, "/res/v1/web/search": build_reply(entries("brave", "https://a.example/"))}
    assert search(Service(server, "tavily"), Service(server, "brave")).metadata["provider"] == "brave"


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        "x",
        {"results": None},
        {"results": [None, 5, {}, {"url": 7}, {"url": "javascript:x"}, {"url": "https://a b"}]},
    ],
)
def test_reply_without_results_gives_no_results(server: WebServer, content: Any) -> None:
    server.replies["*"] = build_reply(content) if content != "x" else build_reply('"x"')
    assert search(Service(server, "tavily")).metadata["results"] == []


def test_error_lists_every_failed_provider_with_its_reason(server: WebServer) -> None:
    server.replies |= {"/search": build_reply({}, 403), "/res/v1/web/search": build_reply({}, 503)}
    result = search(Service(server, "tavily"), Service(server, "brave"))
    assert result.error_code is ErrorCode.HTTP_ERROR
    assert "tavily: tavily refuses the request (403): check TOOLCREW_TAVILY_API_KEY" in str(result.error)
    assert "brave: brave answered 503 Service Unavailable" in str(result.error)


@pytest.mark.parametrize(
    "reply",
    [
        build_reply({"error": f"bad key {KEY}"}, 401),
        build_reply({"error": KEY}, 500),
        build_reply({"error": KEY}, 429),
        b"HTTP/1.1 " + KEY.encode(),
    ],
)
@pytest.mark.parametrize("kind", ["tavily", "brave", "exa"])
def test_api_key_is_in_no_result_error_or_log(server: WebServer, kind: str, reply: bytes) -> None:
    server.replies["*"] = reply
    with capture_logs() as logs:
        result = search(Service(server, kind))
    assert KEY not in result.model_dump_json() + json.dumps(logs, default=str)


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r\nX-Evil: 1", f"{KEY}\u00e9"])
def test_invalid_api_key_is_in_no_result_or_log(server: WebServer, key: str) -> None:
    with capture_logs() as logs:
        result = search(Service(server, "brave", key))
    assert not result.success
    assert KEY not in result.model_dump_json() + json.dumps(logs, default=str)


@pytest.mark.parametrize(
    ("query", "reason"), [(" \t ", "no words"), ("a \ud800", "cannot be shown"), ("a\x00b", "cannot be shown")]
)
def test_invalid_query_is_refused(server: WebServer, query: str, reason: str) -> None:
    result = search(Service(server, "searxng"), query=query)
    assert (result.error_code, reason in str(result.error)) == (ErrorCode.INVALID_ARGUMENTS, True)
    assert not server.requests


@pytest.mark.parametrize(
    "domain", ["a.example OR site:b.example", "https://a.example/", "a", "a..example", "-a.example", "a.example/x"]
)
def test_invalid_domain_filter_is_refused(server: WebServer, domain: str) -> None:
    assert search(Service(server, "brave"), include_domains=[domain]).error_code is ErrorCode.INVALID_ARGUMENTS
    assert not server.requests


def test_hostile_results_stay_within_their_lines(server: WebServer) -> None:
    hit = {
        "title": "a\n9. b\x1b[2J",
        "url": "https://a.example/",
        "content": "x" * 5000 + "\n[0 results from tavily]",
        "score": "high",
    }
    server.replies["*"] = build_reply({"results": [hit, {**hit, "url": "https://a.example/" + "x" * 3000}]})
    lines = search(Service(server, "tavily")).text().splitlines()
    assert lines[2] == "1. a 9. b\ufffd[2J"
    assert (len(lines[4]), lines[4].endswith("...")) == (1003, True)
    assert lines[-1] == "[1 result from tavily]"


# Settings


def test_providers_have_a_fixed_order_starting_with_searxng() -> None:
    settings = WebSettings(
        tavily_api_key=SecretStr("a"), exa_api_key=SecretStr("b"), searxng_url=SecretStr("http://searxng:8080/x/")
    )
    assert [provider.name for provider in build_providers(settings, StubResolver())] == ["searxng", "tavily", "exa"]
    assert build_providers(WebSettings(brave_api_key=SecretStr(" ")), StubResolver()) == ()


def test_searxng_on_a_private_address_is_reached_below_its_path(server: WebServer) -> None:
    server.replies["/x/search"] = build_reply(entries("searxng", "https://a.example/"))
    settings = WebSettings(searxng_url=SecretStr(f"http://127.0.0.1:{server.port}/x/"))
    tools = build_web_tools(settings, MemoryStore(), StubResolver())
    assert [tool.name for tool in tools] == ["webfetch_tool", "websearch_tool"]
    assert run_tool(tools[1], query="needle").success


def test_provider_certificate_is_checked_against_system_authorities() -> None:
    with open_web_server({"*": build_reply({})}, tls=server_context()) as server:
        settings = WebSettings(searxng_url=SecretStr(server.url("", "search.example", "https")))
        tools = build_web_tools(settings, MemoryStore(), StubResolver({"search.example": [["127.0.0.1"]]}))
        assert "certificate" in str(run_tool(tools[1], query="needle").error)
        assert not server.requests


def test_web_settings_are_read_from_the_environment_and_hide_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TAVILY_API_KEY": KEY,
        "SEARXNG_URL": f"http://{KEY}/",
        "WEBFETCH_ALLOW_HOSTS": '["Wiki.internal:8080"]',
    }.items():
        monkeypatch.setenv(f"TOOLCREW_{name}", value)
    settings = read_environment(WebSettings)
    assert KEY not in repr(settings) + str(settings) + settings.model_dump_json()
    assert build_access_rules(settings).allowed_hosts == {"wiki.internal:8080"}
    assert build_access_rules(settings).ports == {80, 443}


def test_invalid_searxng_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="TOOLCREW_SEARXNG_URL") as failed:
        build_providers(WebSettings(searxng_url=SecretStr(f"http://user:{KEY}@searxng/")), StubResolver())
    assert KEY not in str(failed.value)
