"""The parser of URLs: one spelling is accepted, and spellings on which parsers could disagree are refused."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ErrorCode, ToolFailure
from workers.web.urls import parse_location, parse_url


def refusal(url: str) -> ToolFailure:
    with pytest.raises(ToolFailure) as failed:
        parse_url(url)
    return failed.value


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://Example.ORG", "http://example.org/"),
        ("HTTPS://example.org:443/a?b=c#d", "https://example.org/a?b=c"),
        ("http://example.org:8080?q", "http://example.org:8080/?q"),
        ("http://example.org./a", "http://example.org/a"),
        ("http://b\u00fccher.example/\u00fc?q=\u4e2d", "http://xn--bcher-kva.example/%C3%BC?q=%E4%B8%AD"),
        ("http://\u30c9\u30e1\u30a4\u30f3\u3002example/", "http://xn--eckwd4c7c.example/"),
        ("http://93.184.216.34/", "http://93.184.216.34/"),
        ("https://[2606:4700::1111]:443/", "https://[2606:4700::1111]/"),
        ("http://a_b.example.org/%2e%2E/x%zz", "http://a_b.example.org/%2e%2E/x%zz"),
    ],
)
def test_what_is_fetched_has_one_spelling(text: str, url: str) -> None:
    target = parse_url(text)
    assert target.url == url
    assert parse_url(target.url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "example.org:8080/path",
        "/path",
        "http:example.org",
        "http:/example.org",
        "http://",
        "http:///path",
        "http://?q",
        "http://example.org:",
        "http://example.org:0/",
        "http://example.org:080/",
        "http://example.org:65536/",
        "http://example.org:80x/",
        "http://example.org:\u0668\u0660/",
        "http://exa mple.org/",
        "http://example.org/a b",
        "http://example.org/\t",
        "http://example.org/\r\nHost: x",
        "http://example.org/\x00",
        "http://example.org/\u00a0",
        "http://example.org/\u200b",
        "http://example.org/\u202e",
        "http://example.org/\ud800",
        "http://example.org\\@evil.example/",
        "http://example.org\\evil",
        "http://example..org/",
        "http://.example.org/",
        "http://example.org../",
        "http://-a.example/",
        "http://a%2eexample.org/",
        "http://exam*ple.org/",
        "http://[::1/",
        "http://[2606:4700::1111]x/",
        "http://xn--\u00fc.example/",
        "http://a\u00adb\u2044.example/",
        "http://example.org/" + "a" * 2048,
        "http://example.org/" + "\u00fc" * 500,
        "http://" + "a" * 64 + ".example/",
        "http://" + "a." * 130 + "example/",
    ],
)
def test_an_invalid_url_is_an_error_of_the_caller(url: str) -> None:
    assert refusal(url).code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/",
        "gopher://example.org/",
        "javascript:alert(1)",
        "data:text/html,x",
        "http://user@example.org/",
        "http://user:password@example.org/",
        "http://example.org@evil.example/",
        "http://@example.org/",
        "http://1/",
        "http://127.1/",
        "http://010.0.0.1/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://93.184.216.034/",
        "http://93.184.216/",
        "http://1.2.3.4.5/",
        "http://1.2.3.256/",
        "http://a.0x1/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://93.184.216.34\u3002/",
        "http://\u2468.184.216.34/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[2606:4700:0::1111]/",
        "http://[2606:4700::1111:0:0:0]/",
        "http://[2606:4700::AAAA]/",
        "http://[2606:4700::01]/",
        "http://[1.2.3.4]/",
        "http://[v1.x]/",
        "http://[]/",
    ],
)
def test_what_is_another_spelling_or_another_scheme_is_refused(url: str) -> None:
    assert refusal(url).code is ErrorCode.SECURITY_REFUSED


def test_a_dot_behind_an_address_changes_nothing_about_it() -> None:
    assert refusal("http://127.0.0.1./").code is ErrorCode.SECURITY_REFUSED


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/b", "https://example.org/b"),
        ("c?x", "https://example.org/a/c?x"),
        ("?y", "https://example.org/a/b?y"),
        ("//other.example/z", "https://other.example/z"),
        ("http://other.example", "http://other.example/"),
        ("../up", "https://example.org/up"),
    ],
)
def test_a_redirect_is_read_from_where_it_was_given(location: str, url: str) -> None:
    assert parse_location(parse_url("https://example.org/a/b"), location).url == url


@pytest.mark.parametrize(
    "location",
    ["https:other.example", "\thttps://other.example/", "https://x\n.example/", "/\\evil.example", "\\\\evil.example"],
)
def test_a_redirect_that_two_readers_would_follow_differently_is_not_followed(location: str) -> None:
    with pytest.raises(ToolFailure):
        parse_location(parse_url("https://example.org/a/b"), location)


def test_the_host_header_names_a_port_that_is_not_the_schemes() -> None:
    assert parse_url("http://example.org:443/").authority == "example.org:443"
    assert parse_url("https://example.org:443/").authority == "example.org"
    assert parse_url("http://[2606:4700::1]:81/").authority == "[2606:4700::1]:81"


@given(st.text(max_size=60) | st.text(alphabet="abc./:@[]\\#?%0123456789 -_\u3002\uff0e\uff11\n", max_size=60))
def test_whatever_comes_is_a_target_that_reads_the_same_again_or_a_failure_that_says_why(text: str) -> None:
    for candidate in (text, f"http://{text}", f"https://example.org/{text}"):
        with contextlib.suppress(ToolFailure):
            target = parse_url(candidate)
            assert parse_url(target.url) == target
            assert target.url.isascii()
            assert not set(target.url) & set(" \r\n\t\\\0")
