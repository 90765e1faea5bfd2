"""Heads of messages between clients and sandboxes: a corpus of ambiguous requests, and what each side may see."""

import h11
import pytest

from toolcrew.orchestrator.previews.messages import (
    RefusedMessage,
    build_request,
    build_response,
    build_switch,
    read_request,
)

HOST = b"Host: 8000-aaaaaaaaaaaaaaaaaaaa.previews.test\r\n"


def parse(head: bytes) -> h11.Request:
    """Return the request as the front's parser reads it."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(head)
    event = parser.next_event()
    assert isinstance(event, h11.Request)
    return event


def forward(*lines: bytes, method: bytes = b"GET", target: bytes = b"/") -> h11.Request:
    """Return the request that the sandbox gets."""
    head = b"".join([method, b" ", target, b" HTTP/1.1\r\n", HOST, *(line + b"\r\n" for line in lines), b"\r\n"])
    return build_request(read_request(parse(head)), "https")


def fields(message: h11.Request | h11.Response | h11.InformationalResponse) -> dict[bytes, bytes]:
    return {bytes(name): bytes(value) for name, value in message.headers}


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"Host : other\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n\tfolded: b\r\nHost: c\r\n\r\n",
        b"GET http://other.test/ HTTP/1.1\r\n" + HOST + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
        b"CONNECT other.test:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding\x0b: chunked\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\rSet: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n",
    ],
)
def test_a_request_that_can_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises((RefusedMessage, h11.RemoteProtocolError)):
        read_request(parse(head))


def test_the_sandbox_sees_neither_tickets_nor_headers_of_one_connection() -> None:
    request = forward(
        b"Connection: keep-alive, X-Hop",
        b"X-Hop: 1",
        b"Keep-Alive: 5",
        b"Proxy-Authorization: Basic x",
        b"TE: trailers",
        b"Upgrade: h2c",
        b"HTTP2-Settings: x",
        b"X-Forwarded-Host: other.test",
        b"X-Forwarded-For: 1.2.3.4",
        b"Forwarded: for=1.2.3.4",
        b"X-Access-Token: secret",
        b"E2b-Sandbox-Id: x",
        b"Toolcrew-Ticket: secret",
        b"Cookie: a=1; __Host-toolcrew=secret; b=2",
        b"Cookie: __Host-toolcrew=secret",
        b"Authorization: Bearer of-the-program",
        target=b"/x?a=1&toolcrew_ticket=secret&b=2",
    )
    assert request.target == b"/x?a=1&b=2"
    assert fields(request) == {
        b"host": b"8000-aaaaaaaaaaaaaaaaaaaa.previews.test",
        b"http2-settings": b"x",
        b"authorization": b"Bearer of-the-program",
        b"cookie": b"a=1; b=2",
        b"x-forwarded-host": b"8000-aaaaaaaaaaaaaaaaaaaa.previews.test",
        b"x-forwarded-proto": b"https",
    }


@pytest.mark.parametrize("target", [b"/?toolcrew_ticket=t", b"/?a&toolcrew_ticket=t&toolcrew_ticket=u"])
def test_all_tickets_are_removed_from_the_target(target: bytes) -> None:
    assert b"toolcrew_ticket" not in forward(target=target).target


def test_a_named_header_cannot_remove_the_host_or_the_length() -> None:
    request = forward(b"Connection: host, content-length, close", b"Content-Length: 2", method=b"POST")
    assert fields(request)[b"content-length"] == b"2"
    assert fields(request)[b"host"].startswith(b"8000-")


@pytest.mark.parametrize(
    ("method", "lines", "passes"),
    [
        (b"GET", [b"Connection: Upgrade", b"Upgrade: WebSocket"], True),
        (b"POST", [b"Connection: Upgrade", b"Upgrade: websocket"], False),
        (b"GET", [b"Connection: Upgrade", b"Upgrade: websocket, h2c"], False),
        (b"GET", [b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: h2c"], False),
        (b"GET", [b"Connection: Upgrade", b"Upgrade: websocket", b"Content-Length: 5"], False),
    ],
)
def test_only_a_plain_request_for_a_web_socket_may_switch(method: bytes, lines: list[bytes], passes: bool) -> None:
    assert (fields(forward(*lines, method=method)).get(b"upgrade") == b"websocket") == passes


def test_an_answer_cannot_set_cookies_of_other_sandboxes_or_rules_for_the_domain() -> None:
    answer = build_response(
        h11.Response(
            status_code=200,
            headers=[
                ("Set-Cookie", "own=1; Path=/"),
                ("Set-Cookie", "toss=1; domain=previews.test"),
                ("Set-Cookie", "toss=1; Domain"),
                ("Set-Cookie", "__Host-toolcrew=stolen; Secure; Path=/"),
                ("Strict-Transport-Security", "max-age=1; includeSubDomains"),
                ("Alt-Svc", 'h3="other.test:443"'),
                ("Clear-Site-Data", '"cookies"'),
                ("Connection", "close, X-Hop"),
                ("X-Hop", "1"),
                ("Content-Type", "text/plain"),
            ],
        )
    )
    assert [(bytes(name), bytes(value)) for name, value in answer.headers] == [
        (b"set-cookie", b"own=1; Path=/"),
        (b"content-type", b"text/plain"),
    ]


def test_the_length_of_a_chunked_answer_is_not_passed() -> None:
    answer = h11.Response(status_code=200, headers=[("Transfer-Encoding", "chunked"), ("X", "1")])
    assert fields(build_response(answer)) == {b"x": b"1"}


def test_a_switch_to_another_protocol_is_refused() -> None:
    with pytest.raises(RefusedMessage) as raised:
        build_switch(h11.InformationalResponse(status_code=101, headers=[("Upgrade", "h2c")]))
    assert raised.value.status == 502
