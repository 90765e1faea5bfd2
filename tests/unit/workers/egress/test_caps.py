"""Limits of a session in the proxy: bytes, bytes per second, connections and time. A hostile session does not affect
others.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

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
from tests.support.stack.waiting import SOON_S, until
from tests.support.web.web_servers import WebServer, answer, open_web_server
from toolcrew.contract.tenant_classes import EgressRules
from toolcrew.workers.egress.allowances import ByteRateLimiter, ConnectionQuotas, EgressOpening
from toolcrew.workers.egress.limits import ProxyLimits
from toolcrew.workers.egress.outcomes import EgressOutcome, Refusal

SHORT_LIMITS = ProxyLimits(watch_s=0.05, linger_s=0.2)
IDLE = replace(SHORT_LIMITS, idle_s=0.3)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with open_harness() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[WebServer]:
    with open_web_server() as opened:
        yield opened


@pytest.fixture
def echo() -> Iterator[int]:
    """Return the port of a server that echoes its input."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_echo, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def serve_echo(listener: socket.socket) -> None:
    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def build_session(tenant: str = "acme", session: str = "s1", **rules: int) -> EgressOpening:
    return EgressOpening(v=1, tenant=tenant, session=session, rules=EgressRules(hosts=("a.example",), **rules))


def test_a_session_transfers_exactly_its_byte_limit(harness: Harness, server: WebServer) -> None:
    server.replies["/"] = answer(b"x" * 100_000)
    request = get(f"site.example:{server.port}/")
    rules = build_rules(server, max_bytes=50_000)
    received = harness.ask(rules, request, session="exact")
    line = harness.wait_for_line(session="exact")
    assert line["bytes_up"] + line["bytes_down"] == 50_000
    # The client gets our Connection header in place of the host's; the body is what came.
    assert (
        len(received.partition(b"\r\n\r\n")[2])
        == line["bytes_down"] - len(answer(b"x" * 100_000).partition(b"\r\n\r\n")[0]) - 4
    )
    data = harness.ask(rules, request, session="exact")
    assert (status_of(data), "50000 bytes" in body_of(data)) == (429, True)
    assert status_of(harness.ask(rules, request, session="another")) == 200


def test_a_transfer_that_ends_at_the_byte_limit_is_complete(harness: Harness, echo: int) -> None:
    rules = build_rules(echo)
    with harness.tunnel(rules, f"site.example:{echo}", session="whole") as client:
        head = len(f"CONNECT site.example:{echo} HTTP/1.1\r\nHost: site.example:{echo}\r\n\r\n")
    with harness.tunnel({**rules, "max_bytes": 2 * head + 2000}, f"site.example:{echo}", session="whole") as client:
        client.sendall(b"x" * 1000)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b"x" * 1000
    assert harness.wait_for_line(2, session="whole")["outcome"] == "allowed"


async def test_a_rate_limit_applies_to_all_users_together() -> None:
    now = [0.0]
    rate_limiter = ByteRateLimiter(clock=lambda: now[0])
    rate_limiter.set_rate(100_000)
    bytes_taken = 0
    for _ in range(200):
        now[0] += 0.01
        bytes_taken += await rate_limiter.take(1000)
    assert bytes_taken == pytest.approx(2 * 100_000 + 10_000, rel=0.06)


async def test_users_of_a_rate_limit_get_similar_shares() -> None:
    rate_limiter = ByteRateLimiter()
    rate_limiter.set_rate(400_000)
    received = [0, 0, 0, 0]

    async def use(number: int) -> None:
        while True:
            received[number] += await rate_limiter.take(65536)

    users = [asyncio.ensure_future(use(number)) for number in range(4)]
    # Several pieces for each user: a shorter time would count who came first.
    await until(lambda: sum(received) >= 600_000)
    for user in users:
        user.cancel()
    await asyncio.gather(*users, return_exceptions=True)
    assert min(received) > max(received) / 3


def test_connections_above_the_session_limit_are_refused_until_one_ends(harness: Harness, echo: int) -> None:
    rules = build_rules(echo, max_connections=2)
    destination = f"site.example:{echo}"
    with (
        harness.tunnel(rules, destination, session="many"),
        harness.tunnel(rules, destination, session="many") as second,
    ):
        data = harness.ask(rules, get(destination + "/"), session="many")
        assert (status_of(data), "2 open connections, and the limit is 2" in body_of(data)) == (429, True)
        with harness.tunnel(rules, destination, session="other"):
            pass
        second.shutdown(socket.SHUT_WR)
        assert read_all(second) == b""
        harness.wait_for_line(session="many", outcome="allowed")
        with harness.tunnel(rules, destination, session="many"):
            pass


def test_two_hundred_concurrent_connections_are_served(harness: Harness, echo: int) -> None:
    rules = build_rules(echo, max_connections=200)
    clients = [harness.connect(rules, session="crowd") for _ in range(200)]
    try:
        for client in clients:
            client.sendall(f"CONNECT site.example:{echo} HTTP/1.1\r\n\r\n".encode())
        for number, client in enumerate(clients):
            assert b" 200 " in read_some(client, b"\r\n\r\n")
            client.sendall(b"%04d" % number)
        assert [client.recv(4) for client in clients] == [b"%04d" % number for number in range(200)]
    finally:
        for client in clients:
            client.close()


def test_connections_above_the_tenant_limit_are_refused() -> None:
    quotas = ConnectionQuotas(max_tenant_connections=2)
    with quotas.enter(build_session(session="a")), quotas.enter(build_session(session="b")):
        with pytest.raises(Refusal, match="this tenant's sessions have 2") as refused:
            quotas.enter(build_session(session="c")).__enter__()
        assert refused.value.outcome is EgressOutcome.TOO_MANY_CONNECTIONS
        with quotas.enter(build_session("globex", "a")):
            pass
    with quotas.enter(build_session(session="c")):
        pass


async def test_stored_session_quotas_are_bounded_without_evicting_active_sessions() -> None:
    quotas = ConnectionQuotas(max_tenant_connections=9, max_sessions=2)
    with capture_logs() as logs, quotas.enter(build_session(session="a", max_bytes=10)) as first:
        assert await first.take(100) == 10
        for name in "bcd":
            with quotas.enter(build_session(session=name)):
                pass
        with pytest.raises(Refusal, match="10 bytes"):
            quotas.enter(build_session(session="a", max_bytes=10)).__enter__()
    assert {line["event"] for line in logs} <= {"egress_session_forgotten"}


def test_connections_above_the_proxy_limit_are_refused(echo: int) -> None:
    with open_harness(max_connections=1) as harness:
        with harness.tunnel(build_rules(echo), f"site.example:{echo}"):
            data = harness.ask(build_rules(echo), b"")
        assert (status_of(data), "as many connections" in body_of(data)) == (503, True)


def test_a_slow_request_header_is_refused() -> None:
    with (
        open_web_server() as server,
        open_harness(limits=replace(SHORT_LIMITS, header_s=0.2)) as harness,
        harness.connect(build_rules(server)) as client,
    ):
        with contextlib.suppress(OSError):
            for _ in range(100):
                client.sendall(b"G")
                time.sleep(0.01)
        data = read_all(client)
        assert (status_of(data), harness.wait_for_line()["outcome"]) == (408, "slow_request")


@pytest.mark.parametrize("head", [b"GET http://site.example/ HTTP/1.1\r\nX: ", b"G"])
def test_a_request_header_above_the_size_limit_is_refused(head: bytes) -> None:
    with open_harness(limits=replace(SHORT_LIMITS, header_bytes=8192)) as harness:
        data = harness.ask(build_rules(), head + b"x" * 9000)
    assert (status_of(data), "more than 8 KiB" in body_of(data)) == (400, True)


def test_an_idle_connection_is_closed(echo: int) -> None:
    with open_harness(limits=IDLE) as harness:
        with harness.tunnel(build_rules(echo), f"site.example:{echo}") as client:
            assert read_all(client) == b""
        assert harness.wait_for_line()["outcome"] == "idle"


def test_a_host_that_does_not_answer_gives_a_502_response(server: WebServer) -> None:
    def wait(_: socket.socket) -> None:
        server.ending.wait(SOON_S)

    server.replies["/"] = wait
    with open_harness(limits=IDLE) as harness:
        data = harness.ask(build_rules(server), get(f"site.example:{server.port}/"))
        server.ending.set()
    assert (status_of(data), "no data was sent or received for 0.3 s" in body_of(data)) == (502, True)


def test_a_busy_connection_is_closed_at_the_total_time_limit(echo: int) -> None:
    with (
        open_harness(limits=replace(SHORT_LIMITS, total_s=0.6)) as harness,
        harness.tunnel(build_rules(echo), f"site.example:{echo}") as client,
    ):
        with contextlib.suppress(OSError):
            while True:
                client.sendall(b"x")
                if not client.recv(1):
                    break
                time.sleep(0.02)
        assert harness.wait_for_line()["outcome"] == "too_long"


def test_a_client_that_does_not_read_does_not_block_others(harness: Harness, server: WebServer) -> None:
    server.replies["/flood"] = [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1_000_000] * 20]
    server.replies["/"] = answer("hello")
    with harness.connect(build_rules(server), session="lazy") as slow_client:
        slow_client.sendall(get(f"site.example:{server.port}/flood"))
        for _ in range(20):
            assert (
                status_of(harness.ask(build_rules(server), get(f"site.example:{server.port}/"), session="busy")) == 200
            )
