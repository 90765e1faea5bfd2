"""The parser of URLs accepts one spelling. The tables of addresses and the rules that use them."""

import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.access_rules import WebAccessRules
from toolcrew.workers.web.addresses import AddressRules
from toolcrew.workers.web.urls import parse_location, parse_url


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
def test_url_is_parsed_to_its_canonical_form(text: str, url: str) -> None:
    target = parse_url(text)
    assert target.url == url
    assert parse_url(target.url) == target


@pytest.mark.parametrize(
    "url",
    [
        "", "example.org", "example.org:8080/path", "/path", "http:example.org", "http:/example.org", "http://",
        "http:///path", "http://?q", "http://example.org:", "http://example.org:0/", "http://example.org:080/",
        "http://example.org:65536/", "http://example.org:80x/", "http://example.org:\u0668\u0660/",
        "http://exa mple.org/", "http://example.org/a b", "http://example.org/\t", "http://example.org/\r\nHost: x",
        "http://example.org/\x00", "http://example.org/\u00a0", "http://example.org/\u200b",
        "http://example.org/\u202e", "http://example.org/\ud800", "http://example.org\\@evil.example/",
        "http://example.org\\evil", "http://example..org/", "http://.example.org/", "http://example.org../",
        "http://-a.example/", "http://a%2eexample.org/", "http://exam*ple.org/", "http://[::1/",
        "http://[2606:4700::1111]x/", "http://xn--\u00fc.example/", "http://a\u00adb\u2044.example/",
        "http://example.org/" + "a" * 2048, "http://example.org/" + "\u00fc" * 500,
        "http://" + "a" * 64 + ".example/", "http://" + "a." * 130 + "example/",
    ],
)  # fmt: skip
def test_invalid_url_is_invalid_arguments(url: str) -> None:
    assert refusal(url).code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://example.org/", "gopher://example.org/", "javascript:alert(1)",
        "data:text/html,x", "http://user@example.org/", "http://user:password@example.org/",
        "http://example.org@evil.example/", "http://@example.org/", "http://1/", "http://127.1/", "http://010.0.0.1/",
        "http://0x7f000001/", "http://0x7f.1/", "http://2130706433/", "http://93.184.216.034/", "http://93.184.216/",
        "http://1.2.3.4.5/", "http://1.2.3.256/", "http://a.0x1/", "http://\uff11\uff12\uff17.0.0.1/",
        "http://93.184.216.34\u3002/", "http://\u2468.184.216.34/", "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/", "http://[2606:4700:0::1111]/", "http://[2606:4700::1111:0:0:0]/",
        "http://[2606:4700::AAAA]/", "http://[2606:4700::01]/", "http://[1.2.3.4]/", "http://[v1.x]/", "http://[]/",
    ],
)  # fmt: skip
def test_ambiguous_host_or_other_scheme_is_refused(url: str) -> None:
    assert refusal(url).code is ErrorCode.SECURITY_REFUSED


def test_trailing_dot_does_not_hide_a_private_address() -> None:
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
def test_redirect_location_is_resolved_against_its_url(location: str, url: str) -> None:
    assert parse_location(parse_url("https://example.org/a/b"), location).url == url


@pytest.mark.parametrize(
    "location",
    ["https:other.example", "\thttps://other.example/", "https://x\n.example/", "/\\evil.example", "\\\\evil.example"],
)
def test_ambiguous_redirect_location_is_refused(location: str) -> None:
    with pytest.raises(ToolFailure):
        parse_location(parse_url("https://example.org/a/b"), location)


def test_host_header_includes_only_a_non_default_port() -> None:
    assert parse_url("http://example.org:443/").authority == "example.org:443"
    assert parse_url("https://example.org:443/").authority == "example.org"
    assert parse_url("http://[2606:4700::1]:81/").authority == "[2606:4700::1]:81"


@given(st.text(max_size=60) | st.text(alphabet="abc./:@[]\\#?%0123456789 -_\u3002\uff0e\uff11\n", max_size=60))
def test_any_text_is_a_stable_target_or_refused(text: str) -> None:
    for candidate in (text, f"http://{text}", f"https://example.org/{text}"):
        with contextlib.suppress(ToolFailure):
            target = parse_url(candidate)
            assert parse_url(target.url) == target
            assert target.url.isascii()
            assert not set(target.url) & set(" \r\n\t\\\0")


RULES = AddressRules()


def is_refused(address: str, rules: AddressRules = RULES) -> bool:
    return rules.refusal(ipaddress.ip_address(address)) is not None


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
        "128.0.0.0", "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0",
        "198.17.255.255", "198.20.0.0", "223.255.255.255", "168.63.129.15", "168.63.129.17", "2001:200::",
        "2001:db7:ffff::", "2001:db9::", "2003::1", "2606:4700::1111", "3ffe::1",
    ],
)  # fmt: skip
def test_public_addresses_next_to_special_ranges_are_allowed(address: str) -> None:
    assert not is_refused(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.0.0.0", "10.255.255.255", "100.100.100.200", "127.255.255.255", "169.254.169.254",
        "172.31.255.255", "192.0.0.192", "192.168.255.255", "198.19.255.255", "224.0.0.1", "239.255.255.255",
        "255.255.255.255", "168.63.129.16", "192.88.99.1", "::", "::1", "::7f00:1", "::ffff:127.0.0.1",
        "::ffff:8.8.8.8", "::ffff:0:8.8.8.8", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "100:0:0:1::1", "1fff::",
        "2001::1", "2001:2::1", "2001:1ff:ffff::", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1",
        "2620:4f:8000::1", "3fff::1", "3fff:fff::1", "4000::", "5f00::1", "fd00:ec2::254", "fe80::1", "fec0::1",
        "ff02::1",
    ],
)  # fmt: skip
def test_special_addresses_are_refused(address: str) -> None:
    assert is_refused(address)


@pytest.mark.parametrize(
    ("address", "refused"),
    [("2606:4700::5efe:10.0.0.1", True), ("2606:4700::200:5efe:127.0.0.1", True), ("2606:4700::5efe:8.8.8.8", False)],
)
def test_isatap_address_is_judged_by_its_embedded_address(address: str, refused: bool) -> None:
    assert is_refused(address) is refused


@pytest.mark.parametrize("prefix", ["64:ff9b::/96", "2a00:1:2:3::/96"])
def test_nat64_address_is_judged_by_its_embedded_address(prefix: str) -> None:
    network = ipaddress.IPv6Network(prefix)
    rules = AddressRules(nat64_prefix=network)
    inside = [
        str(network[int(ipaddress.IPv4Address(address))]) for address in ("8.8.8.8", "169.254.169.254", "10.0.0.1")
    ]
    assert [is_refused(address, rules) for address in inside] == [False, True, True]


def test_nat64_prefix_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="/96"):
        AddressRules(nat64_prefix=ipaddress.IPv6Network("64:ff9b::/64"))


def test_configured_ranges_are_refused() -> None:
    rules = AddressRules([ipaddress.ip_network("8.8.0.0/16"), ipaddress.ip_network("2606:4700::/32")])
    assert is_refused("8.8.4.4", rules)
    assert is_refused("2606:4700::1111", rules)
    assert not is_refused("8.9.0.0", rules)


def check(rules: WebAccessRules, url: str, *addresses: str) -> str | None:
    """Return the refusal of a URL whose host has these addresses, or None if the URL passes."""
    try:
        target = parse_url(url)
        rules.check_target(target)
        rules.check_addresses(target, [ipaddress.ip_address(address) for address in addresses])
    except ToolFailure as failure:
        return failure.message if failure.code is ErrorCode.SECURITY_REFUSED else None
    return None


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "a.localhost", "LOCALHOST", "localhost.", "printer.local", "metadata.google.internal",
        "metadata", "router.home.arpa", "a.onion", "db", "metadata.tencentyun.com",
    ],
)  # fmt: skip
def test_names_of_private_networks_are_refused_without_a_lookup(host: str) -> None:
    assert "private network" in str(check(WebAccessRules(), f"http://{host}/", "8.8.8.8"))


@pytest.mark.parametrize("host", ["mylocalhost.example", "internal.example", "onion.example", "local.example"])
def test_public_names_similar_to_private_ones_are_allowed(host: str) -> None:
    assert check(WebAccessRules(), f"http://{host}/", "8.8.8.8") is None


def test_one_private_address_among_public_ones_refuses_the_url() -> None:
    assert "not public" in str(check(WebAccessRules(), "http://a.example/", "8.8.8.8", "1.1.1.1", "10.0.0.1"))
    assert "not public" in str(check(WebAccessRules(), "http://a.example/", "8.8.8.8", "::1"))


def test_only_listed_ports_are_allowed() -> None:
    assert "port 22" in str(check(WebAccessRules(), "http://a.example:22/", "8.8.8.8"))
    assert check(WebAccessRules(ports=frozenset({8443})), "https://a.example:8443/", "8.8.8.8") is None
    assert check(WebAccessRules(), "http://a.example:443/", "8.8.8.8") is None


def test_only_allowed_hosts_bypass_the_address_rules() -> None:
    rules = WebAccessRules(allowed_hosts=frozenset({"wiki.internal", "10.0.0.7"}))
    assert check(rules, "http://wiki.internal/", "10.0.0.5") is None
    assert check(rules, "http://10.0.0.7/") is None
    assert check(rules, "http://10.0.0.8/") is not None
    assert check(rules, "http://a.wiki.internal/", "10.0.0.5") is not None
    assert check(rules, "http://wiki.internal.evil.example/", "10.0.0.5") is not None


def test_allowed_host_without_a_port_is_allowed_at_every_port() -> None:
    rules = WebAccessRules(allowed_hosts=frozenset({"wiki.internal", "build.internal:8080", "[fd00::7]:81"}))
    assert check(rules, "http://wiki.internal:8080/", "10.0.0.5") is None
    assert "port 8080" in str(check(rules, "http://www.example.org:8080/", "8.8.8.8"))
    assert "port 81" in str(check(rules, "http://build.internal:81/", "10.0.0.5"))
    assert check(rules, "http://build.internal:8080/", "10.0.0.5") is None
    assert check(rules, "http://build.internal/", "10.0.0.5") is not None
    assert check(rules, "http://[fd00::7]:81/") is None


def test_only_hosts_setting_refuses_every_other_host() -> None:
    rules = WebAccessRules(only_hosts=frozenset({"docs.example", "*.python.org"}))
    assert check(rules, "http://docs.example/", "8.8.8.8") is None
    assert check(rules, "http://docs.python.org/", "8.8.8.8") is None
    for host in ("python.org", "evilpython.org", "docs.example.evil.example", "8.8.8.8"):
        assert "not among the hosts" in str(check(rules, f"http://{host}/", "8.8.8.8"))
    assert "not public" in str(check(rules, "http://docs.example/", "10.0.0.1"))
