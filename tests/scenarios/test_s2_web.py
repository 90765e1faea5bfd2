"""Rows S2-17 to S2-23 of the scenarios: web search and page fetching, over loopback servers."""

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from tests.support.web.web_servers import (
    MemoryStore,
    StubResolver,
    WebServer,
    answer,
    open_web_server,
    redirect,
    run_tool,
)
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.settings import WebSettings
from toolcrew.workers.web.tools import build_web_tools

RESULTS = """{"results": [
  {"title": "asyncio \u2014 Asynchronous I/O", "url": "https://docs.python.org/3/library/asyncio.html", "content": "asyncio is a library to write concurrent code"},
  {"title": "Another", "url": "https://blog.example/asyncio", "content": "What I learnt"}
]}"""
PAGE = f"""<html><head><title>The manual</title><style>.x {{}}</style></head><body><nav><a href="/">Home</a></nav><main><h1>Install</h1>
<p>{"Install the package with the installer of your system, then start it. " * 8}</p><script>track()</script></main></body></html>"""


@pytest.fixture
def web() -> Iterator[WebServer]:
    with open_web_server() as server:
        yield server


def call(web: WebServer, name: str, *, is_configured: bool = True, **arguments: object) -> ToolResult:
    """Call the tools as their worker builds them from settings. Only site.example may be fetched."""
    settings = WebSettings(
        webfetch_allow_hosts=[f"site.example:{web.port}"],
        searxng_url=SecretStr(web.url("", "127.0.0.1")) if is_configured else None,
    )
    tools = build_web_tools(settings, MemoryStore(), StubResolver({"site.example": [["127.0.0.1"]]}))
    return run_tool(next(tool for tool in tools if tool.name == name), **arguments)


def wait_for_end(web: WebServer) -> None:
    web.ending.wait(5)


def test_s2_17_a_web_search_uses_the_configured_provider(web: WebServer) -> None:
    web.replies["/search"] = answer(RESULTS, content_type="application/json")
    result = call(web, "websearch_tool", query="asyncio")
    assert (result.success, result.metadata["provider"], len(web.requests)) == (True, "searxng", 1)


def test_s2_18_a_search_for_documentation_returns_links_and_summaries(web: WebServer) -> None:
    web.replies["/search"] = answer(RESULTS, content_type="application/json")
    text = call(web, "websearch_tool", query="python asyncio documentation", include_domains=["docs.python.org"]).text()
    assert (
        "1. asyncio \u2014 Asynchronous I/O\n   https://docs.python.org/3/library/asyncio.html\n   asyncio is a library"
        in text
    )
    assert "blog.example" not in text


def test_s2_19_without_a_key_the_search_tool_reports_which_key_to_set(web: WebServer) -> None:
    result = call(web, "websearch_tool", is_configured=False, query="asyncio")
    assert (result.success, result.error_code) == (False, ErrorCode.CONFIG_MISSING)
    assert str(result.error).startswith("websearch_tool needs an API key: set TOOLCREW_TAVILY_API_KEY")


def test_s2_20_an_external_resource_can_be_fetched(web: WebServer) -> None:
    web.replies["/data.json"] = answer('{"name": "toolcrew", "tags": ["agents"]}', content_type="application/json")
    result = call(web, "webfetch_tool", url=web.url("/data.json"))
    assert result.success
    assert '"name": "toolcrew"' in result.text()


def test_s2_21_the_content_of_a_url_is_fetched_as_text(web: WebServer) -> None:
    web.replies["/manual"] = answer(PAGE)
    result = call(web, "webfetch_tool", url=web.url("/manual"))
    assert result.success
    assert "Install the package with the installer of your system" in result.text()
    assert result.metadata["title"] == "The manual"


def test_s2_22_readable_text_is_extracted_from_html_without_tags(web: WebServer) -> None:
    web.replies["/manual"] = answer(PAGE)
    text = call(web, "webfetch_tool", url=web.url("/manual"), format="text").text()
    for removed in ("<p>", "<h1>", "</", "track()", ".x {}", "Home"):
        assert removed not in text


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("/gone", ErrorCode.HTTP_ERROR, "answered 404 Not Found"),
        ("/broken", ErrorCode.NETWORK_ERROR, "closed the connection before"),
        ("/inside", ErrorCode.SECURITY_REFUSED, "not public (link-local, where cloud metadata is)"),
    ],
)
def test_s2_23_a_failed_fetch_reports_the_reason(web: WebServer, path: str, code: ErrorCode, reason: str) -> None:
    web.replies |= {
        "/broken": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx",
        "/inside": redirect("http://169.254.169.254/latest/meta-data/"),
    }
    result = call(web, "webfetch_tool", url=web.url(path))
    assert (result.success, result.error_code) == (False, code)
    assert reason in str(result.error)


def test_s2_23_a_fetch_above_its_time_limit_is_interrupted(web: WebServer) -> None:
    web.replies["/slow"] = lambda _: wait_for_end(web)
    result = call(web, "webfetch_tool", url=web.url("/slow"), timeout=1)
    assert (result.error_code, "the limit of 1 s passed" in str(result.error)) == (ErrorCode.TIMEOUT, True)


def test_s2_23_the_error_for_an_unknown_host_names_it(web: WebServer) -> None:
    result = call(web, "webfetch_tool", url="http://nowhere.example/")
    assert (result.error_code, "DNS: nowhere.example" in str(result.error)) == (ErrorCode.NETWORK_ERROR, True)
