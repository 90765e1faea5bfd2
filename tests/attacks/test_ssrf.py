"""Attacks of a model, or of a page that controls the model, through webfetch: reach this machine, its network, or the
cloud's metadata.
"""

import ipaddress
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.web.web_certificate import server_context, trusting_context
from tests.support.web.web_servers import QUICK, WebServer, answer, build_web, open_web_server, redirect
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.connections import build_tls
from toolcrew.workers.web.exchange import ConnectionOptions, HttpRequest, exchange
from toolcrew.workers.web.fetcher import FetchedPage
from toolcrew.workers.web.limits import Deadline
from toolcrew.workers.web.urls import Address, parse_url

REFUSED_V4 = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 "
    "203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32"
)
REFUSED_V6 = (
    "2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20 ::/96 ::ffff:0:0/96 ::ffff:0:0:0/96 64:ff9b::/96 "
    "64:ff9b:1::/48 100::/64 100:0:0:1::/64 5f00::/16 fc00::/7 fe80::/10 fec0::/10 ff00::/8 ::/3 4000::/2 8000::/1"
)


@pytest.fixture
def secret() -> Iterator[WebServer]:
    """Run the forbidden target: a server on this machine's loopback."""
    with open_web_server({"*": answer("the secret")}) as server:
        yield server


def addresses_of(ranges: str) -> st.SearchStrategy[Address]:
    networks = [ipaddress.ip_network(text) for text in ranges.split()]
    return st.one_of([st.integers(0, network.num_addresses - 1).map(network.__getitem__) for network in networks])


def spellings(address: Address) -> list[str]:
    """Return the known ways to write an address in a URL."""
    if isinstance(address, ipaddress.IPv6Address):
        texts = [
            str(address),
            address.exploded,
            str(address).upper(),
            f"{address}%25lo",
            f"{address}%lo",
            f"::ffff:{str(address)[2:]}",
        ]
        return [f"[{text}]" for text in texts]
    a, b, c, d = address.packed
    number = int(address)
    plain = f"{a}.{b}.{c}.{d}"
    wide = "".join(chr(ord(digit) + 0xFEE0) if digit.isdigit() else digit for digit in plain)
    return [
        *(
            plain,
            f"{plain}.",
            str(number),
            hex(number),
            f"0{number:o}",
            f"{a}.{number & 0xFFFFFF}",
            f"{a}.{b}.{number & 0xFFFF}",
        ),
        *(
            f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}",
            f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
            f"{a:03}.{b:03}.{c:03}.{d:03}",
            f"{a}.{b}.0x{c:x}.{d}",
        ),
        *(
            wide,
            plain.replace(".", "\u3002"),
            plain.replace(".", "\uff0e"),
            plain.replace(".", "%2e"),
            f"[::ffff:{plain}]",
            f"[::{plain}]",
        ),
        *(
            f"[::ffff:{number >> 16:x}:{number & 0xFFFF:x}]",
            f"[64:ff9b::{plain}]",
            f"[2002:{number >> 16:x}:{number & 0xFFFF:x}::1]",
        ),
        *(
            f"[2606:4700::5efe:{plain}]",
            f"user@{plain}",
            f"example.org@{plain}",
            f"{plain}\\.example.org",
            f"{plain}\t",
        ),
    ]


@given(addresses_of(REFUSED_V4) | addresses_of(REFUSED_V6))
def test_every_spelling_of_a_forbidden_address_is_refused(address: Address) -> None:
    rules = WebAccessRules()
    for host in spellings(address):
        for scheme in ("http", "https"):
            with pytest.raises(ToolFailure) as failed:
                rules.check_target(parse_url(f"{scheme}://{host}/"))
            assert failed.value.code in (ErrorCode.SECURITY_REFUSED, ErrorCode.INVALID_ARGUMENTS)


@given(addresses_of(REFUSED_V4) | addresses_of(REFUSED_V6))
def test_a_dns_answer_with_a_forbidden_address_is_refused(address: Address) -> None:
    with pytest.raises(ToolFailure, match="not public"):
        WebAccessRules().check_addresses(parse_url("http://a.example/"), [ipaddress.ip_address("1.1.1.1"), address])


@given(st.integers(0, 2**32 - 1))
def test_every_address_that_ipaddress_calls_non_global_is_refused(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    if not address.is_global or address.is_multicast:
        assert AddressRules().refusal(address) is not None


def refusal(server: WebServer, url: str, **options: object) -> ToolFailure:
    """Return the failure of a fetch that may use the server's port, but not its address."""
    web = build_web(server, limits=QUICK, ports=frozenset({server.port}), **options)  # type: ignore[arg-type]
    with pytest.raises(ToolFailure) as failed:
        web.fetcher.fetch("acme", url, Deadline(5))
    return failed.value


def test_a_name_that_resolves_to_loopback_is_not_connected_to(secret: WebServer) -> None:
    failed = refusal(secret, secret.url(host="evil.example"), names={"evil.example": [["127.0.0.1"]]})
    assert (failed.code, secret.requests) == (ErrorCode.SECURITY_REFUSED, [])


def test_a_private_address_among_public_ones_is_not_connected_to(secret: WebServer) -> None:
    names = {"evil.example": [["192.0.9.1", "2606:4700::1", "127.0.0.1"]]}
    failed = refusal(secret, secret.url(host="evil.example"), names=names)
    assert (failed.code, secret.requests) == (ErrorCode.SECURITY_REFUSED, [])


class LoopbackIsPublic(AddressRules):
    """The real rules, except for the one address of a test."""

    def refusal(self, address: Address) -> str | None:
        return None if str(address) == "127.0.0.1" else super().refusal(address)


def fetch_as_public(server: WebServer, *answers: list[str]) -> FetchedPage:
    """Fetch a page from a name whose lookups give these answers in order. The addresses are judged by the rules."""
    web = build_web(
        server,
        limits=QUICK,
        names={"rebind.example": list(answers)},
        addresses=LoopbackIsPublic(),
        allowed_hosts=frozenset(),
        ports=frozenset({server.port}),
    )
    return web.fetcher.fetch("acme", server.url(host="rebind.example"), Deadline(5))


def test_the_checked_address_is_used_without_a_second_lookup() -> None:
    """DNS rebinding: a second lookup would give another address, but no second lookup happens."""
    with open_web_server({"/": answer("public")}) as public:
        assert fetch_as_public(public, ["127.0.0.1"], ["169.254.169.254"]).page.body == b"public"


def test_the_target_of_a_redirect_is_resolved_and_checked_again() -> None:
    with open_web_server({"/": redirect("/again"), "/again": answer("x")}) as public:
        assert fetch_as_public(public, ["127.0.0.1"], ["127.0.0.1"]).page.body == b"x"
        with pytest.raises(ToolFailure, match="link-local") as failed:
            fetch_as_public(public, ["127.0.0.1"], ["127.0.0.1", "169.254.169.254"])
    assert (failed.value.code, public.paths) == (ErrorCode.SECURITY_REFUSED, ["/", "/again", "/"])


def test_the_connection_uses_the_checked_address_and_not_the_system_resolver(secret: WebServer) -> None:
    target = parse_url(f"http://localhost:{secret.port}/")
    judged = ConnectionOptions([ipaddress.ip_address("127.0.0.99")], QUICK, Deadline(2), build_tls())
    with pytest.raises(ToolFailure) as failed:
        exchange(HttpRequest(target), judged, lambda _: None)
    assert failed.value.metadata["cause"] == "refused"
    assert not secret.requests


LOCATIONS = [
    "http://127.0.0.1:{port}/",
    "http://[::1]:{port}/",
    "http://localhost:{port}/",
    "http://inside.example:{port}/",
    "//127.0.0.1:{port}/",
    "http://0x7f.1:{port}/",
    "http://2130706433:{port}/",
    "http://site.example@127.0.0.1:{port}/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:169.254.169.254]/",
    "http://metadata.google.internal/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/_x",
    "ftp://127.0.0.1/",
    "http:127.0.0.1:{port}",
    "http://127.0.0.1:{port}\\@site.example/",
    "http://site.example:22/",
]


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_redirect_to_an_internal_target_is_not_followed(secret: WebServer, location: str) -> None:
    with open_web_server({"/": redirect(location.format(port=secret.port))}) as public:
        web = build_web(
            public,
            secret,
            limits=QUICK,
            allowed_hosts=frozenset({f"site.example:{public.port}"}),
            ports=frozenset({80, 443, public.port, secret.port}),
            names={"inside.example": [["127.0.0.1"]]},
        )
        with pytest.raises(ToolFailure) as failed:
            web.fetcher.fetch("acme", public.url(), Deadline(5))
    assert (failed.value.code, secret.requests) == (ErrorCode.SECURITY_REFUSED, [])
    assert "site.example redirects" in failed.value.message


def test_a_redirect_from_https_to_http_is_not_followed(secret: WebServer) -> None:
    with open_web_server({"/": redirect(secret.url())}, tls=server_context()) as public:
        web = build_web(public, secret, limits=QUICK, tls=trusting_context())
        with pytest.raises(ToolFailure) as failed:
            web.fetcher.fetch("acme", public.url(scheme="https"), Deadline(5))
    assert ("from https to http" in failed.value.message, secret.requests) == (True, [])


@pytest.mark.parametrize(("hops", "arrives"), [(5, True), (6, False)])
def test_at_most_five_redirects_are_followed(hops: int, arrives: bool) -> None:
    replies = {f"/{n}": redirect(f"/{n + 1}") for n in range(hops)} | {f"/{hops}": answer("there")}
    with open_web_server(replies) as server:
        web = build_web(server, limits=QUICK)
        if arrives:
            assert web.fetcher.fetch("acme", server.url("/0"), Deadline(5)).page.body == b"there"
        else:
            with pytest.raises(ToolFailure, match="more than 5 redirects"):
                web.fetcher.fetch("acme", server.url("/0"), Deadline(5))


def test_a_redirect_loop_ends() -> None:
    with open_web_server({"/": redirect("/")}) as server, pytest.raises(ToolFailure, match="more than 5 redirects"):
        build_web(server, limits=QUICK).fetcher.fetch("acme", server.url(), Deadline(5))


@pytest.mark.parametrize(
    "page",
    [answer("x", refresh="0;url=http://127.0.0.1/"), answer('<meta http-equiv="refresh" content="0;url=/secret">')],
)
def test_a_refresh_header_or_tag_is_not_followed(page: bytes) -> None:
    with open_web_server({"/": page}) as server:
        build_web(server, limits=QUICK).fetcher.fetch("acme", server.url(), Deadline(5))
        assert server.paths == ["/"]


def test_cookies_are_not_sent_back() -> None:
    with open_web_server(
        {
            "/": b"HTTP/1.1 302 X\r\nset-cookie: a=b\r\nlocation: /next\r\ncontent-length: 0\r\n\r\n",
            "/next": answer("x"),
        }
    ) as server:
        build_web(server, limits=QUICK).fetcher.fetch("acme", server.url(), Deadline(5))
        assert [server.header("cookie", at) for at in (0, 1)] == [None, None]


def test_proxy_variables_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch, secret: WebServer) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, secret.url(host="127.0.0.1"))
    with open_web_server({"/": answer("direct")}) as server:
        assert build_web(server, limits=QUICK).fetcher.fetch("acme", server.url(), Deadline(5)).page.body == b"direct"
    assert not secret.requests


def test_a_url_cannot_inject_a_request_header() -> None:
    with open_web_server({"*": answer("x")}) as server:
        web = build_web(server, limits=QUICK)
        for url in (server.url("/a\r\nX-Evil: 1"), server.url("/a b"), server.url("/a\n")):
            with pytest.raises(ToolFailure):
                web.fetcher.fetch("acme", url, Deadline(5))
        web.fetcher.fetch("acme", server.url("/a%0d%0aX-Evil:%201"), Deadline(5))
        assert server.header("x-evil") is None
