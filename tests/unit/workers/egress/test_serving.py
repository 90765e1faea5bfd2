"""The egress proxy over its real socket and loopback servers: allowed requests, refused requests, and the error
messages.
"""

import contextlib
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.sandboxd.egress_harness import (
    Harness,
    body_of,
    build_rules,
    get,
    open_harness,
    read_all,
    read_some,
    status_of,
)
from tests.support.stack.waiting import SOON_S
from tests.support.web.web_servers import WebServer, answer, open_web_server
from toolcrew.workers.web.addresses import AddressRules


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    names = {
        "rebinding.example": [["127.0.0.1"], ["93.184.216.34"]],
        "mixed.example": [["93.184.216.34", "10.0.0.1"]],
        "metadata.example": [["169.254.169.254"]],
        "redis": [["172.18.0.2"]],
        "closed.example": [["127.0.0.1"]],
    }
    with open_harness(names) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[WebServer]:
    with open_web_server() as opened:
        yield opened


def test_a_forwarded_request_has_only_its_headers_and_its_log_no_content() -> None:
    with open_web_server() as server, open_harness({"files.site.example": [["127.0.0.1"]]}) as harness:
        server.replies["/a?b=%22secret"] = server.replies["/a"] = b"HTTP/1.0 200 OK\r\n\r\nhello"
        destination = f"files.site.example:{server.port}"
        headers = ("X-Secret: 1", "Proxy-Authorization: Basic x", "Connection: x-hop", "X-Hop: 1")
        request = get(f"{destination}/a?b=%22secret", *headers)
        rules = build_rules(server, hosts=["*.site.example"], private_hosts=["*.site.example"])
        data = harness.ask(rules, request, tenant="acme", session="s9")
        line = harness.wait_for_line()
    assert server.requests[-1].split("\r\n") == [
        "GET /a?b=%22secret HTTP/1.1",
        f"Host: {destination}",
        "X-Secret: 1",
        "Connection: close",
    ]
    assert status_of(data) == 200
    assert b"Connection: close\r\n" in data
    assert b"Transfer-Encoding: chunked" in data, "an answer without a length gets an end that can be seen"
    assert data.endswith(b"5\r\nhello\r\n0\r\n\r\n")
    assert line.pop("seconds") >= 0
    assert 0 < line.pop("bytes_down") <= len(data) + 40
    assert line == {
        "event": "egress",
        "log_level": "info",
        "tenant": "acme",
        "session": "s9",
        "method": "GET",
        "destination": "files.site.example",
        "port": server.port,
        "outcome": "allowed",
        "bytes_up": len(request),
    }
    assert "secret" not in json.dumps(harness.logs).lower()


def test_a_chunked_body_is_framed_again_without_extensions(harness: Harness, server: WebServer) -> None:
    bodies = []

    def reply(connection: socket.socket) -> None:
        body_bytes = server.bodies[-1]
        while not body_bytes.endswith(b"0\r\n\r\n"):
            body_bytes += connection.recv(1000)
        bodies.append(body_bytes)
        connection.sendall(answer("ok"))

    server.replies["/"] = reply
    body = b"3;ext=1\r\nabc\r\n0002\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    data = harness.ask(
        build_rules(server), get(f"site.example:{server.port}/", "Transfer-Encoding: chunked", method="POST", body=body)
    )
    assert status_of(data) == 200
    assert b"ext" not in bodies[0]
    assert b"Trailer" not in bodies[0]
    assert bodies[0].replace(b"\r\n", b"|") in (b"3|abc|2|de|0||", b"5|abcde|0||")


def test_a_second_request_on_a_connection_reaches_no_server(harness: Harness, server: WebServer) -> None:
    server.replies["*"] = answer("hello")
    first_request = get(f"site.example:{server.port}/one")
    data = harness.ask(build_rules(server), first_request + get(f"site.example:{server.port}/two", host="evil.example"))
    assert (data.count(b"HTTP/1.1"), server.paths) == (1, ["/one"])


def test_a_100_continue_reply_arrives_before_the_body_is_sent(harness: Harness, server: WebServer) -> None:
    def reply(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert connection.recv(5) == b"hello"
        connection.sendall(answer("ok"))

    server.replies["/"] = reply
    server.header = lambda name, at=-1: None  # type: ignore[method-assign]  # the server itself waits for no body
    with harness.connect(build_rules(server)) as client:
        client.sendall(get(f"site.example:{server.port}/", "Content-Length: 5", "Expect: 100-continue", method="POST"))
        assert read_some(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"hello")
        assert read_all(client).endswith(b"ok")


@pytest.mark.parametrize(
    ("reply", "fragment"),
    [
        (b"", "closed the connection without"),
        (b"SSH-2.0-x\r\n\r\n", "does not answer in HTTP/1.1"),
        (b"HTTP/1.1 101 Go\r\n\r\n", "does not answer in HTTP/1.1"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "does not answer in HTTP/1.1"),
        (b"HTTP/1.1 100 C\r\n\r\n" * 17, "without an end"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 101 + b"\r\n", "more than 100 header lines"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000, "more than 64 KiB"),
    ],
)
def test_an_invalid_host_reply_gives_a_502_response(
    harness: Harness, server: WebServer, reply: bytes, fragment: str
) -> None:
    server.replies["/"] = reply
    data = harness.ask(build_rules(server), get(f"site.example:{server.port}/")).replace(b"HTTP/1.1 100 C\r\n\r\n", b"")
    assert status_of(data) == 502
    assert fragment in body_of(data)


def test_a_tunnel_forwards_data_and_end_of_stream_in_both_directions(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with harness.tunnel(build_rules(port), f"site.example:{port}") as client:
            host, _ = listener.accept()
            with host:
                client.sendall(b"ping")
                client.shutdown(socket.SHUT_WR)
                assert read_all(host) == b"ping"
                host.sendall(b"pong")
                host.shutdown(socket.SHUT_WR)
                assert read_all(client) == b"pong"


def test_data_sent_before_a_connection_reset_reaches_the_client(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with harness.tunnel(build_rules(port), f"site.example:{port}") as client:
            host, _ = listener.accept()
            client.sendall(b"x" * 100_000)
            host.recv(1)
            host.sendall(b"too large")
            host.close()  # with unread bytes: the kernel breaks the connection off
            with contextlib.suppress(BrokenPipeError):
                client.sendall(b"x" * 10_000_000)
            assert read_all(client) == b"too large"


def test_a_client_disconnect_closes_the_host_connection(harness: Harness, server: WebServer) -> None:
    has_left = threading.Event()

    def reply(connection: socket.socket) -> None:
        connection.settimeout(SOON_S)
        if connection.recv(1) == b"":
            has_left.set()

    server.replies["/"] = reply
    with harness.connect(build_rules(server)) as client:
        client.sendall(get(f"site.example:{server.port}/"))
    assert has_left.wait(SOON_S)


def refusal(harness: Harness, rules: dict[str, object] | None, data: bytes) -> tuple[int, str]:
    reply = harness.ask(rules, data)
    assert reply, "no answer"
    return status_of(reply), body_of(reply)


def test_an_unlisted_host_or_port_is_refused_without_a_lookup(harness: Harness) -> None:
    rules = {"hosts": ["pypi.org", "*.pythonhosted.org"]}
    lookups = len(harness.resolver.asked)
    status, message = refusal(harness, rules, get("example.org/secret?token=1"))
    assert (status, len(harness.resolver.asked)) == (403, lookups)
    assert "example.org is not on this tenant's list; allowed: pypi.org, *.pythonhosted.org" in message
    assert refusal(harness, rules, b"CONNECT example.org:443 HTTP/1.1\r\n\r\n")[0] == 403
    rules = build_rules(hosts=["*.site.example", "site.example"])
    for host in ("evilsite.example", "site.example.evil.example"):
        assert refusal(harness, rules, get(f"{host}/"))[0] == 403
    assert refusal(harness, build_rules(hosts=["*.site.example"]), get("site.example/"))[0] == 403
    status, message = refusal(harness, rules, b"CONNECT site.example:22 HTTP/1.1\r\n\r\n")
    assert status == 403
    assert "port 22 of site.example is not allowed for this tenant; allowed ports: 80, 443" in message


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("site.example", []),
        ("mixed.example", []),
        ("metadata.example", ["metadata.example"]),
        ("redis", []),
        ("127.0.0.1", []),
        ("10.1.2.3", ["site.example"]),
        ("169.254.169.254", ["169.254.169.254"]),
    ],
)
def test_a_private_address_is_refused_and_not_shown(harness: Harness, host: str, private: list[str]) -> None:
    rules = {"hosts": [host, "site.example"], "private_hosts": private}
    for data in (get(f"{host}/"), f"CONNECT {host}:443 HTTP/1.1\r\n\r\n".encode()):
        status, message = refusal(harness, rules, data)
        assert (status, "private" in message) == (403, True)
        assert not any(
            address in message.replace(host, "") for address in ("127.0.0.1", "10.0.0.1", "169.254", "172.18")
        )


@pytest.mark.parametrize(
    "destination", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433", "127.1", "0177.0.0.1"]
)
def test_an_address_in_another_notation_does_not_match_a_wildcard(harness: Harness, destination: str) -> None:
    rules = build_rules(hosts=["*.0.0.1", "*.1", "site.example"], private_hosts=["*.0.0.1", "*.1"])
    status, _ = refusal(harness, rules, get(f"{destination}/"))
    assert status in (400, 403)


@pytest.mark.parametrize("host", ["site.example", "127.0.0.1"])
def test_a_network_blocked_by_the_operator_is_refused_for_private_hosts(server: WebServer, host: str) -> None:
    blocked = AddressRules([ipaddress.ip_network("127.0.0.0/24")])
    with open_harness(addresses=blocked) as harness:
        rules = build_rules(server, hosts=[host], private_hosts=[host])
        status, message = refusal(harness, rules, get(f"{host}:{server.port}/"))
    assert (status, server.requests) == (403, [])
    assert "may not use other addresses" in message


def test_a_host_name_is_resolved_once_per_request(harness: Harness, server: WebServer) -> None:
    rules = build_rules(server, hosts=["rebinding.example"], private_hosts=[])
    before = harness.resolver.asked.count("rebinding.example")
    assert refusal(harness, rules, get(f"rebinding.example:{server.port}/"))[0] == 403
    assert harness.resolver.asked.count("rebinding.example") == before + 1
    assert server.requests == []


def test_an_unresolved_or_unreachable_host_gives_a_502_response(harness: Harness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    rules = build_rules(port, hosts=["*.example"], private_hosts=["*.example"])
    status, message = refusal(harness, rules, get(f"nowhere.example:{port}/"))
    assert (status, "DNS: nowhere.example has no address" in message) == (502, True)
    status, message = refusal(harness, rules, get(f"closed.example:{port}/"))
    assert (status, "refused the connection" in message, "127.0.0.1" in message) == (502, True, False)


@pytest.mark.parametrize(
    "opening",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"v":1,"tenant":"a","session":"s"}\n',
        b'{"v":2,"tenant":"a","session":"s","rules":{}}\n',
        b'{"v":1,"tenant":"","session":"s","rules":{}}\n',
        b'{"v":1,"tenant":"a","session":"s","rules":{"hosts":["*"]}}\n',
        b'{"v":1,"tenant":"a","session":"s","rules":{"host":["a.b"]}}\n',
        b"[" * 1_100_000,
    ],
)
def test_a_connection_with_invalid_rules_is_refused(harness: Harness, opening: bytes) -> None:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with client:
        client.settimeout(SOON_S)
        client.connect(str(harness.path))
        client.sendall(opening)
        client.shutdown(socket.SHUT_WR)
        data = read_all(client)
    assert (status_of(data), "report it to the operator" in body_of(data)) == (502, True)
