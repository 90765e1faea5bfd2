"""Attempts of a program in a sandbox to read a secret that it may use, or to have it sent elsewhere. Each attempt
returns everything that the program, or another server, has got.
"""

import base64
import contextlib
import gzip
import json
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote

import pytest

from tests.support.sandboxd.egress_harness import build_rules, read_all, read_some, status_of
from tests.support.sandboxd.secret_harness import (
    PLACEHOLDER,
    VALUE,
    SecretHarness,
    answer,
    echo,
    open_secret_harness,
    read_answer,
)
from tests.support.web.web_certificate import trusting_context
from toolcrew.contract.masking import find_encodings
from toolcrew.contract.secrets import build_placeholder
from toolcrew.workers.egress.limits import ProxyLimits

MARK, RAW = PLACEHOLDER.decode(), VALUE.encode()
BEARER = f"Authorization: Bearer {MARK}"
FRAGMENT = 8
"""So many characters of the secret in a row count as a success of the attempt."""
Attempt = Callable[[SecretHarness], bytes]
ATTEMPTS: dict[str, Attempt] = {}


def attempt(function: Attempt) -> Attempt:
    ATTEMPTS[function.__name__.replace("_", " ")] = function
    return function


@pytest.fixture(scope="module")
def shared() -> Iterator[SecretHarness]:
    with open_secret_harness(ProxyLimits(watch_s=0.05, linger_s=0.5, header_s=1.0)) as harness:
        yield harness


@pytest.fixture
def harness(shared: SecretHarness) -> SecretHarness:
    return shared.reset()


def find_secret(got: bytes) -> list[bytes]:
    """Return what shows the secret, or a piece of it."""
    lower = got.lower()
    pieces = {RAW[at : at + FRAGMENT].lower() for at in range(len(RAW) - FRAGMENT + 1)}
    return [form for form in {*pieces, *(form.encode().lower() for form in find_encodings(VALUE))} if form in lower]


def send_uninterrupted(harness: SecretHarness, raw: bytes, place: str, name: str) -> bytes:
    """Return what a server gets through a tunnel that nothing intercepts."""
    with harness.open_tunnel(harness.secret(), place=place) as tunnel:
        client = trusting_context().wrap_socket(tunnel, server_hostname=name)
        client.sendall(raw)
        return read_answer(client) + harness.site.received


def receive_answer(harness: SecretHarness, pieces: bytes | Sequence[bytes], *headers: str, path: str = "/") -> bytes:
    """Return what the program gets when the host answers a request with the secret in this way."""
    harness.site.answer = lambda _: pieces
    return harness.ask(harness.get(path, BEARER, *headers))


def send_refused(harness: SecretHarness, raw: bytes) -> bytes:
    """Return what comes back for a request that must not reach the host."""
    got = harness.ask(raw)
    assert not harness.site.requests, harness.site.requests
    return got


# Other destinations


@attempt
def another_host_of_the_session(harness: SecretHarness) -> bytes:
    host = f"search.example:{harness.site.port}"
    return send_uninterrupted(harness, harness.get("/", BEARER, host=host), host, "search.example")


@attempt
def a_redirect_to_another_host(harness: SecretHarness) -> bytes:
    host = f"search.example:{harness.site.port}"
    harness.site.answer = lambda _: answer(b"", f"Location: https://{host}/next?key={MARK}", status="302 Found")
    got = harness.ask(harness.get("/", BEARER))
    assert f"https://{host}/next".encode() in got
    harness.site.requests.clear()
    harness.site.answer = echo
    return got + send_uninterrupted(
        harness, harness.get(f"/next?key={MARK}", BEARER, host=host), host, "search.example"
    )


@attempt
def the_placeholder_in_the_address_of_another_host(harness: SecretHarness) -> bytes:
    host = f"search.example:{harness.site.port}"
    return send_uninterrupted(harness, harness.get(f"/{MARK}?token={MARK}", host=host), host, "search.example")


@attempt
def another_port_of_the_host(harness: SecretHarness) -> bytes:
    elsewhere = harness.secret(hosts=["site.example:1"])
    with harness.open_tunnel(elsewhere) as tunnel:
        client = trusting_context().wrap_socket(tunnel, server_hostname="site.example")
        client.sendall(harness.get("/", BEARER))
        return read_answer(client) + harness.site.received


@attempt
def a_name_that_leads_to_another_server(harness: SecretHarness) -> bytes:
    """DNS rebinding: the name now has the address of a server without the certificate of the host."""
    secret = harness.secret(hosts=[f"elsewhere.example:{harness.site.port}"])
    names = ["elsewhere.example"]
    rules = build_rules(harness.site.port, hosts=names, private_hosts=names)
    opening = {"v": 1, "tenant": "acme", "session": "s1", "rules": rules, "secrets": [secret]}
    host = f"elsewhere.example:{harness.site.port}"
    with harness.proxy.connect(None) as _, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(harness.proxy.path))
        client.sendall(json.dumps(opening).encode() + f"\nCONNECT {host} HTTP/1.1\r\n\r\n".encode())
        assert b" 200 " in read_some(client, b"\r\n\r\n")
        inner = harness.trust.wrap_socket(client, server_hostname="elsewhere.example")
        inner.sendall(harness.get("/", BEARER, host=host))
        got = read_answer(inner)
    assert b" 502 " in got
    return got + harness.site.received


@attempt
def plain_http_to_the_host(harness: SecretHarness) -> bytes:
    rules = build_rules(harness.site.port)
    opening = {"v": 1, "tenant": "acme", "session": "s1", "rules": rules, "secrets": [harness.secret()]}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(harness.proxy.path))
        client.sendall(json.dumps(opening).encode() + b"\n")
        client.sendall(f"GET http://{harness.host}/ HTTP/1.1\r\nHost: {harness.host}\r\n{BEARER}\r\n\r\n".encode())
        return read_all(client) + harness.site.received


# Names that differ


@attempt
def another_host_header(harness: SecretHarness) -> bytes:
    return send_refused(harness, harness.get("/", BEARER, host="search.example"))


@attempt
def a_second_host_header(harness: SecretHarness) -> bytes:
    return send_refused(harness, harness.get("/", "Host: search.example", BEARER))


@attempt
def no_host_header(harness: SecretHarness) -> bytes:
    return send_refused(harness, f"GET / HTTP/1.1\r\n{BEARER}\r\n\r\n".encode())


@attempt
def a_host_header_with_another_port(harness: SecretHarness) -> bytes:
    return send_refused(harness, harness.get("/", BEARER, host="site.example:443"))


@attempt
def an_address_of_another_host_in_the_first_line(harness: SecretHarness) -> bytes:
    return send_refused(harness, harness.get("https://search.example/", BEARER))


@attempt
def another_name_in_sni(harness: SecretHarness) -> bytes:
    with harness.open_tunnel(harness.secret()) as tunnel, pytest.raises(ssl.SSLError):
        trusting_context().wrap_socket(tunnel, server_hostname="search.example")
    return harness.site.received


@attempt
def no_sni(harness: SecretHarness) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with harness.open_tunnel(harness.secret()) as tunnel, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(tunnel)
    return harness.site.received


@attempt
def no_tls(harness: SecretHarness) -> bytes:
    with harness.open_tunnel(harness.secret()) as tunnel:
        tunnel.sendall(harness.get("/", BEARER))
        tunnel.shutdown(socket.SHUT_WR)
        return read_all(tunnel) + harness.site.received


# Requests that two parsers read differently


@attempt
def content_length_with_chunked_encoding(harness: SecretHarness) -> bytes:
    headers = (BEARER, "Content-Length: 4", "Transfer-Encoding: chunked")
    return send_refused(harness, harness.get("/", *headers, method="POST", body=b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n"))


@attempt
def two_different_lengths(harness: SecretHarness) -> bytes:
    headers = (BEARER, "Content-Length: 4", "Content-Length: 5")
    return send_refused(harness, harness.get("/", *headers, method="POST", body=b"12345"))


@attempt
def an_unknown_transfer_encoding(harness: SecretHarness) -> bytes:
    got = b""
    for encoding in ("xchunked", "gzip, chunked", "chunked, identity", "\x0bchunked"):
        headers = (BEARER, f"Transfer-Encoding: {encoding}")
        got += send_refused(harness, harness.get("/", *headers, method="POST", body=b"0\r\n\r\n"))
    return got


@attempt
def a_second_request_for_another_host_behind_the_first(harness: SecretHarness) -> bytes:
    second = harness.get("/stolen", BEARER, host="search.example")
    got = harness.ask(harness.get("/", BEARER) + second)
    assert b"/stolen" not in harness.site.received
    return got


@attempt
def a_request_inside_a_body(harness: SecretHarness) -> bytes:
    inner = harness.get("/stolen", BEARER)
    got = harness.ask(harness.get("/", f"Content-Length: {len(inner)}", method="POST", body=inner))
    assert len(harness.site.requests) == 1
    assert RAW not in harness.site.received
    return got + harness.site.received


@attempt
def chunks_with_wrong_sizes(harness: SecretHarness) -> bytes:
    got = b""
    for body in (b"zz\r\n", b"5\r\nhelloX\r\n0\r\n\r\n", b"-1\r\n\r\n", b"ffffffffffffffffffffff\r\n"):
        got += harness.ask(harness.get("/", BEARER, "Transfer-Encoding: chunked", method="POST", body=body))
    return got


@attempt
def control_characters_in_a_header(harness: SecretHarness) -> bytes:
    got = b""
    for text in ("a\x00b", "a\rX-Evil: 1", "a\x0bb"):
        got += send_refused(harness, harness.get("/", f"X-A: {text}", BEARER))
    return got


@attempt
def a_trailer_with_the_placeholder(harness: SecretHarness) -> bytes:
    body = f"1\r\na\r\n0\r\n{BEARER}\r\n\r\n".encode()
    got = harness.ask(
        harness.get("/", "Transfer-Encoding: chunked", "Trailer: authorization", method="POST", body=body)
    )
    return got + harness.site.received


@attempt
def http_1_0(harness: SecretHarness) -> bytes:
    return send_refused(harness, f"GET / HTTP/1.0\r\nHost: {harness.host}\r\n{BEARER}\r\n\r\n".encode())


@attempt
def http_2_preface(harness: SecretHarness) -> bytes:
    return send_refused(harness, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))


@attempt
def a_tunnel_inside_the_tunnel(harness: SecretHarness) -> bytes:
    return send_refused(
        harness, f"CONNECT {harness.host} HTTP/1.1\r\nHost: {harness.host}\r\n{BEARER}\r\n\r\n".encode()
    )


@attempt
def endless_headers(harness: SecretHarness) -> bytes:
    got = send_refused(harness, harness.get("/", BEARER, f"X-Long: {'x' * 200_000}"))
    return got + send_refused(harness, harness.get("/", BEARER, *(f"X-{n}: x" for n in range(150))))


@attempt
def a_request_that_never_ends(harness: SecretHarness) -> bytes:
    with harness.connect(harness.secret()) as client:
        client.sendall(harness.get("/", BEARER)[:-4])
        got = read_answer(client)
    assert b" 408 " in got
    return got + harness.site.received


# Other places of the placeholder


@attempt
def the_placeholder_in_places_that_are_not_its_own(harness: SecretHarness) -> bytes:
    query = harness.secret(place="query:key")
    body = f"key={MARK}"
    raw = harness.get(
        f"/{MARK}?other={MARK}&{MARK}=1&key=x", f"X-Other: {MARK}", BEARER, f"Content-Length: {len(body)}", f"Cookie: key={MARK}",
        method="POST", body=body.encode(),
    )  # fmt: skip
    got = harness.ask(raw, query)
    assert RAW not in harness.site.received
    return got + harness.site.received


@attempt
def the_placeholder_as_the_user_of_basic_authentication(harness: SecretHarness) -> bytes:
    credentials = base64.b64encode(f"{MARK}:x".encode()).decode()
    got = harness.ask(harness.get("/", f"Authorization: Basic {credentials}"), harness.secret(place="basic"))
    return got + harness.site.received


@attempt
def the_placeholder_of_another_session_or_tenant(harness: SecretHarness) -> bytes:
    got = b""
    for tenant, session, name in (("acme", "s2", "TOKEN"), ("rival", "s1", "TOKEN"), ("acme", "s1", "OTHER")):
        foreign = build_placeholder(tenant, session, name)
        got += harness.ask(harness.get("/", f"Authorization: Bearer {foreign}")) + harness.site.received
    return got


@attempt
def a_revoked_secret(harness: SecretHarness) -> bytes:
    with harness.open_tunnel() as tunnel:
        client = trusting_context().wrap_socket(tunnel, server_hostname="site.example")
        client.sendall(harness.get("/", BEARER))
        return read_answer(client) + harness.site.received


@attempt
def the_placeholder_for_the_proxy_itself(harness: SecretHarness) -> bytes:
    got = harness.ask(harness.get("/", f"Proxy-Authorization: Bearer {MARK}"))
    return got + harness.site.received + receive_answer(harness, answer(b""), f"Proxy-Authorization: {MARK}")


@attempt
def a_connection_header_that_names_the_secret(harness: SecretHarness) -> bytes:
    return harness.ask(harness.get("/", BEARER, "Connection: authorization")) + harness.site.received


# Answers that contain the secret


@attempt
def an_echo_in_the_body(harness: SecretHarness) -> bytes:
    return harness.ask(harness.get("/", BEARER))


@attempt
def an_echo_of_the_method_trace(harness: SecretHarness) -> bytes:
    return harness.ask(harness.get("/", BEARER, method="TRACE"))


@attempt
def an_echo_in_an_error(harness: SecretHarness) -> bytes:
    return receive_answer(harness, answer(b"wrong token " + RAW, status="403 Forbidden"))


@attempt
def an_echo_in_headers(harness: SecretHarness) -> bytes:
    headers = (f"X-Token: {VALUE}", f"{VALUE}: x", f"Set-Cookie: t={VALUE}", f"Location: /?{quote(VALUE)}")
    return receive_answer(harness, answer(b"", *headers, status="302 Found"))


@attempt
def an_echo_in_the_reason_phrase(harness: SecretHarness) -> bytes:
    return receive_answer(harness, answer(b"", status=f"200 {VALUE}"))


@attempt
def an_echo_across_chunks(harness: SecretHarness) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"1\r\n%c\r\n" % byte for byte in b"<" + RAW + b">"]
    return re.sub(rb"\r\n1\r\n", b"", receive_answer(harness, [head, *chunks, b"0\r\n\r\n"]))


@attempt
def an_echo_in_pieces_up_to_the_end_of_the_connection(harness: SecretHarness) -> bytes:
    pieces = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", *(RAW[at : at + 5] for at in range(0, len(RAW), 5))]
    got = receive_answer(harness, pieces)
    return b"".join(got.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])


@attempt
def an_echo_in_the_trailer(harness: SecretHarness) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return receive_answer(harness, head + b"1\r\na\r\n0\r\nX-Token: " + RAW + b"\r\n\r\n")


@attempt
def an_echo_in_an_interim_answer(harness: SecretHarness) -> bytes:
    return receive_answer(harness, b"HTTP/1.1 103 Early Hints\r\nLink: " + RAW + b"\r\n\r\n" + answer(b"done"))


@attempt
def an_echo_in_other_encodings(harness: SecretHarness) -> bytes:
    forms = [base64.b64encode(b"x" * n + RAW) for n in range(3)]
    forms += [
        base64.urlsafe_b64encode(RAW),
        RAW.hex().encode(),
        RAW.upper(),
        RAW.lower(),
        quote(VALUE, safe="").encode(),
    ]
    got = receive_answer(harness, answer(b" ".join(forms) + json.dumps(VALUE).encode()))
    assert b"*" * 20 in got
    return got


@attempt
def a_compressed_echo(harness: SecretHarness) -> bytes:
    bodies = [("gzip", gzip.compress(RAW)), ("x-gzip", gzip.compress(RAW)), ("deflate", zlib.compress(RAW))]
    bodies += [("Deflate", zlib.compress(RAW, wbits=-15)), ("gzip", gzip.compress(RAW[:9]) + gzip.compress(RAW[9:]))]
    got = b""
    for coding, body in bodies:
        reply = receive_answer(harness, answer(body, f"Content-Encoding: {coding}"), "Accept-Encoding: gzip, br")
        assert reply.count(b"*") == len(RAW), coding
        assert b"content-encoding" not in reply.lower()
        got += reply
    assert b"Accept-Encoding: identity" in harness.site.received
    assert b"gzip, br" not in harness.site.received
    return got


@attempt
def a_compressed_echo_in_pieces_of_one_byte(harness: SecretHarness) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"1\r\n%c\r\n" % byte for byte in gzip.compress(b"<" + RAW + b">", 0)]
    got = receive_answer(harness, [head, *chunks, b"0\r\n\r\n"])
    assert b" 200 " in got
    return re.sub(rb"\r\n[0-9a-f]+\r\n", b"", got)


@attempt
def a_compressed_echo_that_nothing_decodes(harness: SecretHarness) -> bytes:
    got = b""
    for coding in ("br", "zstd", "compress", "gzip, gzip", "gzip, identity", "", "gzip\r\nContent-Encoding: gzip"):
        reply = receive_answer(harness, answer(gzip.compress(gzip.compress(RAW, 0), 0), f"Content-Encoding: {coding}"))
        assert b" 502 " in reply, coding
        got += reply
    return got


@attempt
def an_echo_with_a_false_content_encoding(harness: SecretHarness) -> bytes:
    packed, head = gzip.compress(b"x"), b"\x1f\x8b\x08\x08\0\0\0\0\0\0"  # a gzip member with a file name
    bodies = [RAW, packed + RAW, packed + b"\x1f\x8b" + RAW, packed[:-1], packed[:-8] + RAW]
    bodies += [head + RAW + b"\0" + zlib.compress(b"x", wbits=-15) + packed[-8:], gzip.compress(RAW)[:-4]]
    return b"".join(receive_answer(harness, answer(body, "Content-Encoding: gzip")) for body in bodies)


@attempt
def a_compressed_transfer(harness: SecretHarness) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    return receive_answer(harness, head + b"1\r\na\r\n0\r\n\r\n")


@attempt
def an_echo_in_partial_content(harness: SecretHarness) -> bytes:
    """Each request asks for a part that is too short to be recognized."""
    got = b""
    for at in range(0, len(RAW), 4):
        part = f"Content-Range: bytes {at}-{at + 3}/{len(RAW)}"
        reply = receive_answer(
            harness, answer(RAW[at : at + 4], part, status="206 Partial Content"), f"Range: bytes={at}-{at + 3}"
        )
        assert b" 502 " in reply
        got += reply.partition(b"\r\n\r\n")[2]
    assert b"range" not in harness.site.received.lower()
    return got


@attempt
def a_range_request_gets_the_whole_body(harness: SecretHarness) -> bytes:
    whole = answer(b"<" + RAW + b">", "Accept-Ranges: bytes", 'ETag: "1"')
    got = receive_answer(harness, whole, "Range: bytes=0-3", 'If-Range: "1"')
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"accept-ranges: none" in got.lower()
    assert b"range" not in harness.site.received.lower()
    return got


@attempt
def an_upgrade_to_another_protocol(harness: SecretHarness) -> bytes:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + RAW
    got = receive_answer(harness, switch, "Upgrade: websocket", "Connection: Upgrade")
    assert b"websocket" not in harness.site.received
    return got


@attempt
def an_answer_that_two_parsers_read_differently(harness: SecretHarness) -> bytes:
    both = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
    return receive_answer(harness, both + RAW) + receive_answer(
        harness, b"HTTP/1.1 200 OK\r\nX:\x00" + RAW + b"\r\n\r\n"
    )


@attempt
def bytes_after_a_response(harness: SecretHarness) -> bytes:
    return receive_answer(harness, answer(b"done") + RAW)


@attempt
def an_echo_after_the_secret_was_used_earlier(harness: SecretHarness) -> bytes:
    with harness.connect(harness.secret()) as client:
        client.sendall(harness.get("/", BEARER))
        got = read_answer(client)
        harness.site.answer = lambda _: answer(b"you sent " + RAW)
        client.sendall(harness.get("/later"))
        return got + read_answer(client)


# What the proxy itself says


@attempt
def errors_and_logs_of_the_proxy(harness: SecretHarness) -> bytes:
    broken = json.dumps(
        {"v": 1, "tenant": "acme", "session": "s1", "rules": {}, "secrets": [harness.secret(place="x")]}
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(harness.proxy.path))
        client.sendall(broken.encode() + b"\n" + harness.get("/", BEARER))
        got = read_all(client)
    return got + harness.proxy_question("uses") + repr(harness.proxy.logs).encode()


@attempt
def control_questions_sent_by_a_program(harness: SecretHarness) -> bytes:
    """A program's bytes come after the opening, so they are never a question or another opening."""
    with harness.proxy.connect(build_rules(harness.site.port)) as client:
        client.sendall(b'{"v": 1, "ask": "uses"}\n\r\n\r\n')
        return read_all(client)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_obtains_nothing(name: str, harness: SecretHarness) -> None:
    got = ATTEMPTS[name](harness)
    assert find_secret(got) == [], got
    assert find_secret(repr(harness.proxy.logs).encode()) == []


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_decompression_bomb_ends_at_its_session_quota_and_delays_no_other_session(
    coding: str, harness: SecretHarness
) -> None:
    packer = zlib.compressobj(9, wbits=31 if coding == "gzip" else 15)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    harness.site.answer = lambda request: (
        answer(bomb, f"Content-Encoding: {coding}") if b"/bomb" in request else answer(b"plain")
    )
    quota, rate = 24 << 20, 4 << 20
    got, is_over = [0], threading.Event()

    def read_bomb(client: ssl.SSLSocket) -> None:
        with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
            while piece := client.recv(65536):
                got[0] += len(piece)
        is_over.set()

    secret, began = harness.secret(), time.monotonic()
    with harness.connect(secret, session=f"bomb-{coding}", max_bytes=quota, bytes_per_second=rate) as client:
        client.sendall(harness.get("/bomb"))
        reading = threading.Thread(target=read_bomb, args=(client,))
        reading.start()
        assert status_of(harness.ask(harness.get("/"), session="another")) == 200
        assert not is_over.is_set(), "the other session was answered meanwhile"
        reading.join()
    assert time.monotonic() - began > quota / rate * 0.7, "decoded bytes come at the rate of the session"
    assert quota * 0.9 < got[0] < quota * 1.01
    assert harness.proxy.wait_for_line(session=f"bomb-{coding}")["outcome"] == "bytes_spent"


def test_the_check_detects_an_attempt_that_obtains_the_secret(harness: SecretHarness) -> None:
    assert len(ATTEMPTS) >= 54
    harness.ask(harness.get("/", BEARER))
    assert find_secret(harness.site.received)
    assert find_secret(base64.b64encode(b"user:" + RAW))
