"""The proxy's parser of requests: accepted requests, and refused attempts at request smuggling."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.workers.egress.http_messages import ProxyRequest, parse_request
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal

URL = b"http://site.example/"
HOST = b"Host: site.example"


def parse(first: bytes, *lines: bytes) -> ProxyRequest:
    return parse_request(b"\r\n".join([first, *lines, b"", b""]), 100)


def refusal_of(first: bytes, *lines: bytes) -> str:
    with pytest.raises(Refusal) as refused:
        parse(first, *lines)
    assert (refused.value.outcome, refused.value.status) == (EgressOutcome.BAD_REQUEST, 400)
    return refused.value.sentence


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        (b"http://site.example", "site.example", "/"),
        (b"http://SITE.example.:80/a/../b?c=%00#"[:-1], "site.example", "/a/../b?c=%00"),
        (b"http://site.example:8080?x", "site.example:8080", "/?x"),
        (b"HTTP://site.example/" + b"a" * 60_000, "site.example", "/" + "a" * 60_000),
    ],
)
def test_an_absolute_url_is_split_into_path_and_host_header(url: bytes, authority: str, path: str) -> None:
    request = parse(b"GET " + url + b" HTTP/1.1", b"Host: " + authority.encode())
    assert (request.target.authority, request.is_tunnel) == (authority, False)
    assert request.head == f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("destination", "lines"),
    [
        (b"site.example:443", []),
        (b"site.example:443", [b"Host: site.example:443", b"Proxy-Connection: keep-alive", b"User-Agent: x"]),
        (b"site.example:8443", [b"Host: site.example"]),
        (b"site.example:443", [b"Content-Length: 0"]),
        (b"[::1]:443", [b"Host: [::1]:443"]),
    ],
)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_connect_request_names_host_and_port(destination: bytes, lines: list[bytes], version: bytes) -> None:
    request = parse(b"CONNECT " + destination + b" HTTP/" + version, *lines)
    host, _, port = destination.decode().rpartition(":")
    assert (request.is_tunnel, request.target.host, request.target.port) == (True, host.strip("[]"), int(port))


def test_hop_by_hop_headers_are_removed() -> None:
    one_hop = [
        b"TE: trailers",
        b"Upgrade: h2c",
        b"HTTP2-Settings: x",
        b"Keep-Alive: 5",
        b"Proxy-Authorization: y",
        b"Trailer: z",
    ]
    request = parse(b"GET " + URL + b" HTTP/1.1", HOST, b"Connection: X-A, upgrade", b"X-A: 1", *one_hop, b"X-B: 2")
    assert request.head == b"GET / HTTP/1.1\r\nHost: site.example\r\nX-B: 2\r\nConnection: close\r\n\r\n"


POST = b"POST " + URL + b" HTTP/1.1"
GET = b"GET " + URL + b" HTTP/1.1"


@pytest.mark.parametrize(
    "lines",
    [
        (POST, HOST, b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (POST, HOST, b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (POST, HOST, b"Content-Length: 5", b"Content-Length: 6"),
        (POST, HOST, b"Content-Length: 5", b"Content-Length: 5"),
        (POST, HOST, b"Content-Length: 5, 5"),
        (POST, HOST, b"Content-Length: +5"),
        (POST, HOST, b"Content-Length: -1"),
        (POST, HOST, b"Content-Length: 0x5"),
        (POST, HOST, b"Content-Length: 5_0"),
        (POST, HOST, b"Content-Length: \xb2"),
        (POST, HOST, b"Content-Length: 5 5"),
        (POST, HOST, b"Content-Length:"),
        (POST, HOST, b"Content-Length: " + b"9" * 19),
        (POST, HOST, b"Content-Length : 5"),
        (POST, HOST, b" Content-Length: 5"),
        (POST, HOST, b"Transfer-Encoding: chunked, identity"),
        (POST, HOST, b"Transfer-Encoding: identity"),
        (POST, HOST, b"Transfer-Encoding: gzip, chunked"),
        (POST, HOST, b"Transfer-Encoding: xchunked"),
        (POST, HOST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (POST, HOST, b"Transfer-Encoding: \x0bchunked"),
        (POST, HOST, b"Transfer-Encoding : chunked"),
        (POST, HOST, b"Transfer-Encoding:\r\n chunked"),
        (POST, HOST, b"X: a\nTransfer-Encoding: chunked"),
        (POST, HOST, b"X: a\rTransfer-Encoding: chunked"),
        (POST, HOST, b"X: a\x00b"),
        (POST, HOST, b"X: a", b"\tb"),
        (POST, HOST, b": a"),
        (POST, HOST, b"no colon"),
        (POST, HOST, b"X\x00: a"),
        (POST, HOST, b"X Y: a"),
        (POST, HOST, b"X\x80: a"),
        (POST, HOST, b"Connection: close, Content-Length", b"Content-Length: 5"),
        (POST, HOST, b"Connection: Transfer-Encoding", b"Transfer-Encoding: chunked"),
        (GET, HOST, b"Connection: Host"),
        (GET, HOST, b"Expect: something"),
        (POST.replace(b"1.1", b"1.0"), HOST, b"Transfer-Encoding: chunked"),
        (GET, *[b"X: y"] * 101),
    ],
)
def test_a_request_with_ambiguous_framing_is_refused(lines: tuple[bytes, ...]) -> None:
    assert refusal_of(*lines).startswith("the request is not accepted: ")


@pytest.mark.parametrize(
    "lines",
    [
        (GET,),
        (GET, b"Host: evil.example"),
        (GET, b"Host: site.example:8080"),
        (GET, b"Host:"),
        (GET, HOST, HOST),
        (GET, HOST, b"Host: evil.example"),
        (GET, b"Host: site.example@evil.example"),
        (GET, b"Host: site.example, evil.example"),
        (GET, b"Host: site.example/evil"),
        (b"CONNECT site.example:443 HTTP/1.1", b"Host: evil.example:443"),
        (b"CONNECT site.example:443 HTTP/1.1", b"Host: site.example:80"),
    ],
)
def test_a_host_header_that_differs_from_the_url_is_refused(lines: tuple[bytes, ...]) -> None:
    refusal_of(*lines)


@pytest.mark.parametrize(
    "first",
    [
        b"", b"GET", b"GET / HTTP/1.1", b"GET * HTTP/1.1", b"GET //site.example/ HTTP/1.1",
        b"GET https://site.example/ HTTP/1.1", b"GET ftp://site.example/ HTTP/1.1",
        b"GET file:///etc/passwd HTTP/1.1", b"GET http:///x HTTP/1.1", b"GET http://user@site.example/ HTTP/1.1",
        b"GET http://site.example:0/ HTTP/1.1", b"GET http://site.example:99999/ HTTP/1.1",
        b"GET http://site.example:8 0/ HTTP/1.1", b"GET http://site.example\\@evil.example/ HTTP/1.1",
        b"GET http://site.example%2eevil.example/ HTTP/1.1", b"GET http://site.example/#x HTTP/1.1",
        b"GET http://s\xc3\xaete.example/ HTTP/1.1", b"GET http://site.example/\x7f HTTP/1.1",
        b"GET  http://site.example/ HTTP/1.1", b"GET\thttp://site.example/ HTTP/1.1",
        b"GET http://site.example/ HTTP/1.1 ", b"GET http://site.example/ HTTP/2.0",
        b"GET http://site.example/ HTTP/1.10", b"GET http://site.example/ http/1.1", b"GET http://site.example/",
        b"get http://site.example/ HTTP/1.1", b"G\x00T http://site.example/ HTTP/1.1", b"PRI * HTTP/2.0",
        b"\r\nGET http://site.example/ HTTP/1.1", b"CONNECT site.example HTTP/1.1",
        b"CONNECT site.example: HTTP/1.1", b"CONNECT :443 HTTP/1.1", b"CONNECT site.example:443/x HTTP/1.1",
        b"CONNECT http://site.example:443 HTTP/1.1", b"CONNECT user@site.example:443 HTTP/1.1",
        b"CONNECT site.example:443:80 HTTP/1.1", b"CONNECT site.example:0443 HTTP/1.1", b"CONNECT ::1:443 HTTP/1.1",
        b"CONNECT [::1%25lo]:443 HTTP/1.1",
    ],
)  # fmt: skip
def test_an_invalid_request_line_is_refused(first: bytes) -> None:
    assert "not accepted" in refusal_of(first, HOST)


@pytest.mark.parametrize("line", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
def test_a_connect_request_with_a_body_is_refused(line: bytes) -> None:
    assert "CONNECT with a body" in refusal_of(b"CONNECT site.example:443 HTTP/1.1", line)


_STARTS = [b"GET ", b"POST ", b"CONNECT ", URL, b"site.example:443", b" HTTP/1.1", b" HTTP/1.0", HOST, b"http://", b"@"]
_HEADERS = [b"Content-Length: ", b"Transfer-Encoding: ", b"chunked", b"5", b",", b"Connection: ", b"X", b": "]
_TOKENS = st.sampled_from([*_STARTS, *_HEADERS, b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b"\xff", b"\x0b"])
_HEADS = st.one_of(st.binary(max_size=200), st.lists(_TOKENS, max_size=25).map(b"".join)).map(
    lambda data: data + b"\r\n\r\n"
)


@given(_HEADS)
def test_any_bytes_give_a_request_or_a_refusal(head: bytes) -> None:
    try:
        request = parse_request(head, 100)
    except Refusal:
        return
    assert request.is_tunnel == (request.head == b"")


_LINES = st.lists(
    st.sampled_from(
        [
            HOST,
            b"Content-Length: 3",
            b"Transfer-Encoding: chunked",
            b"Connection: x",
            b"X: 1",
            b"Upgrade: h2c",
            b"Expect: 100-continue",
        ]
    ),
    max_size=5,
)


@given(st.sampled_from([POST, GET, b"PUT http://site.example/a?b HTTP/1.1"]), _LINES)
def test_a_forwarded_request_is_read_identically_by_h11(first: bytes, lines: list[bytes]) -> None:
    try:
        request = parse(first, *lines)
    except Refusal:
        return
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(request.head)
    event = reader.next_event()
    assert isinstance(event, h11.Request)
    headers = [
        (name, value)
        for name, value in event.headers
        if name in (b"host", b"content-length", b"transfer-encoding", b"connection")
    ]
    framing = [(b"transfer-encoding", b"chunked")] if request.framing.is_chunked else []
    length = [(b"content-length", b"3")] if request.framing.length == 3 else []
    assert sorted(headers) == sorted([(b"host", b"site.example"), *framing, *length, (b"connection", b"close")])
