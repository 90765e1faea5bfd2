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
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote

import pytest

from contract.masking import find_encodings
from contract.secrets import build_placeholder
from tests.egress_ground import build_rules, read_all, read_some
from tests.secret_ground import PLACEHOLDER, VALUE, SecretGround, answer, echo, open_secret_ground, read_answer
from tests.web_certificate import trusting_context
from workers.egress.limits import ProxyLimits

P, RAW = PLACEHOLDER.decode(), VALUE.encode()
BEARER = f"Authorization: Bearer {P}"
FRAGMENT = 8
"""So many characters of the secret in a row count as a success of the attempt."""
Attempt = Callable[[SecretGround], bytes]
ATTEMPTS: dict[str, Attempt] = {}


def attempt(function: Attempt) -> Attempt:
    ATTEMPTS[function.__name__.replace("_", " ")] = function
    return function


@pytest.fixture(scope="module")
def shared() -> Iterator[SecretGround]:
    with open_secret_ground(ProxyLimits(watch_s=0.05, linger_s=0.5, header_s=1.0)) as ground:
        yield ground


@pytest.fixture
def ground(shared: SecretGround) -> SecretGround:
    shared.site.answer = echo
    shared.site.requests.clear()
    return shared


def find_secret(got: bytes) -> list[bytes]:
    """Return what shows the secret, or a piece of it."""
    lower = got.lower()
    pieces = {RAW[at : at + FRAGMENT].lower() for at in range(len(RAW) - FRAGMENT + 1)}
    return [form for form in {*pieces, *(form.encode().lower() for form in find_encodings(VALUE))} if form in lower]


def outside(ground: SecretGround, raw: bytes, place: str, name: str) -> bytes:
    """Return what a server gets through a tunnel that nothing intercepts."""
    with ground.open_tunnel(ground.secret(), place=place) as tunnel:
        client = trusting_context().wrap_socket(tunnel, server_hostname=name)
        client.sendall(raw)
        return read_answer(client) + ground.site.seen


def answered(ground: SecretGround, pieces: bytes | Sequence[bytes], *headers: str, path: str = "/") -> bytes:
    """Return what the program gets when the host answers a request with the secret in this way."""
    ground.site.answer = lambda _: pieces
    return ground.ask(ground.get(path, BEARER, *headers))


def refused(ground: SecretGround, raw: bytes) -> bytes:
    """Return what comes back for a request that must not reach the host."""
    got = ground.ask(raw)
    assert not ground.site.requests, ground.site.requests
    return got


# Other destinations


@attempt
def another_host_of_the_session(ground: SecretGround) -> bytes:
    host = f"search.example:{ground.site.port}"
    return outside(ground, ground.get("/", BEARER, host=host), host, "search.example")


@attempt
def a_redirect_to_another_host(ground: SecretGround) -> bytes:
    host = f"search.example:{ground.site.port}"
    ground.site.answer = lambda _: answer(b"", f"Location: https://{host}/next?key={P}", status="302 Found")
    got = ground.ask(ground.get("/", BEARER))
    assert f"https://{host}/next".encode() in got
    ground.site.requests.clear()
    ground.site.answer = echo
    return got + outside(ground, ground.get(f"/next?key={P}", BEARER, host=host), host, "search.example")


@attempt
def the_placeholder_in_the_address_of_another_host(ground: SecretGround) -> bytes:
    host = f"search.example:{ground.site.port}"
    return outside(ground, ground.get(f"/{P}?token={P}", host=host), host, "search.example")


@attempt
def another_port_of_the_host(ground: SecretGround) -> bytes:
    elsewhere = ground.secret(hosts=["site.example:1"])
    with ground.open_tunnel(elsewhere) as tunnel:
        client = trusting_context().wrap_socket(tunnel, server_hostname="site.example")
        client.sendall(ground.get("/", BEARER))
        return read_answer(client) + ground.site.seen


@attempt
def a_name_that_leads_to_another_server(ground: SecretGround) -> bytes:
    """DNS rebinding: the name now has the address of a server without the certificate of the host."""
    secret = ground.secret(hosts=[f"elsewhere.example:{ground.site.port}"])
    names = ["elsewhere.example"]
    rules = build_rules(ground.site.port, hosts=names, private_hosts=names)
    opening = {"v": 1, "tenant": "acme", "session": "s1", "rules": rules, "secrets": [secret]}
    host = f"elsewhere.example:{ground.site.port}"
    with ground.proxy.connect(None) as _, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(ground.proxy.path))
        client.sendall(json.dumps(opening).encode() + f"\nCONNECT {host} HTTP/1.1\r\n\r\n".encode())
        assert b" 200 " in read_some(client, b"\r\n\r\n")
        inner = ground.trust.wrap_socket(client, server_hostname="elsewhere.example")
        inner.sendall(ground.get("/", BEARER, host=host))
        got = read_answer(inner)
    assert b" 502 " in got
    return got + ground.site.seen


@attempt
def plain_http_to_the_host(ground: SecretGround) -> bytes:
    rules = build_rules(ground.site.port)
    opening = {"v": 1, "tenant": "acme", "session": "s1", "rules": rules, "secrets": [ground.secret()]}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(ground.proxy.path))
        client.sendall(json.dumps(opening).encode() + b"\n")
        client.sendall(f"GET http://{ground.host}/ HTTP/1.1\r\nHost: {ground.host}\r\n{BEARER}\r\n\r\n".encode())
        return read_all(client) + ground.site.seen


# Names that differ


@attempt
def another_host_header(ground: SecretGround) -> bytes:
    return refused(ground, ground.get("/", BEARER, host="search.example"))


@attempt
def a_second_host_header(ground: SecretGround) -> bytes:
    return refused(ground, ground.get("/", "Host: search.example", BEARER))


@attempt
def no_host_header(ground: SecretGround) -> bytes:
    return refused(ground, f"GET / HTTP/1.1\r\n{BEARER}\r\n\r\n".encode())


@attempt
def a_host_header_with_another_port(ground: SecretGround) -> bytes:
    return refused(ground, ground.get("/", BEARER, host="site.example:443"))


@attempt
def an_address_of_another_host_in_the_first_line(ground: SecretGround) -> bytes:
    return refused(ground, ground.get("https://search.example/", BEARER))


@attempt
def another_name_in_the_greeting(ground: SecretGround) -> bytes:
    with ground.open_tunnel(ground.secret()) as tunnel, pytest.raises(ssl.SSLError):
        trusting_context().wrap_socket(tunnel, server_hostname="search.example")
    return ground.site.seen


@attempt
def no_name_in_the_greeting(ground: SecretGround) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with ground.open_tunnel(ground.secret()) as tunnel, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(tunnel)
    return ground.site.seen


@attempt
def no_tls_at_all(ground: SecretGround) -> bytes:
    with ground.open_tunnel(ground.secret()) as tunnel:
        tunnel.sendall(ground.get("/", BEARER))
        tunnel.shutdown(socket.SHUT_WR)
        return read_all(tunnel) + ground.site.seen


# Requests that two parsers read differently


@attempt
def both_lengths(ground: SecretGround) -> bytes:
    headers = (BEARER, "Content-Length: 4", "Transfer-Encoding: chunked")
    return refused(ground, ground.get("/", *headers, method="POST", body=b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n"))


@attempt
def two_different_lengths(ground: SecretGround) -> bytes:
    headers = (BEARER, "Content-Length: 4", "Content-Length: 5")
    return refused(ground, ground.get("/", *headers, method="POST", body=b"12345"))


@attempt
def an_unknown_transfer_encoding(ground: SecretGround) -> bytes:
    got = b""
    for encoding in ("xchunked", "gzip, chunked", "chunked, identity", "\x0bchunked"):
        headers = (BEARER, f"Transfer-Encoding: {encoding}")
        got += refused(ground, ground.get("/", *headers, method="POST", body=b"0\r\n\r\n"))
    return got


@attempt
def a_second_request_for_another_host_behind_the_first(ground: SecretGround) -> bytes:
    second = ground.get("/stolen", BEARER, host="search.example")
    got = ground.ask(ground.get("/", BEARER) + second)
    assert b"/stolen" not in ground.site.seen
    return got


@attempt
def a_request_inside_a_body(ground: SecretGround) -> bytes:
    inner = ground.get("/stolen", BEARER)
    got = ground.ask(ground.get("/", f"Content-Length: {len(inner)}", method="POST", body=inner))
    assert len(ground.site.requests) == 1
    assert RAW not in ground.site.seen
    return got + ground.site.seen


@attempt
def chunks_that_lie(ground: SecretGround) -> bytes:
    got = b""
    for body in (b"zz\r\n", b"5\r\nhelloX\r\n0\r\n\r\n", b"-1\r\n\r\n", b"ffffffffffffffffffffff\r\n"):
        got += ground.ask(ground.get("/", BEARER, "Transfer-Encoding: chunked", method="POST", body=body))
    return got


@attempt
def control_characters_in_a_header(ground: SecretGround) -> bytes:
    got = b""
    for text in ("a\x00b", "a\rX-Evil: 1", "a\x0bb"):
        got += refused(ground, ground.get("/", f"X-A: {text}", BEARER))
    return got


@attempt
def a_trailer_with_the_placeholder(ground: SecretGround) -> bytes:
    body = f"1\r\na\r\n0\r\n{BEARER}\r\n\r\n".encode()
    got = ground.ask(ground.get("/", "Transfer-Encoding: chunked", "Trailer: authorization", method="POST", body=body))
    return got + ground.site.seen


@attempt
def an_older_version(ground: SecretGround) -> bytes:
    return refused(ground, f"GET / HTTP/1.0\r\nHost: {ground.host}\r\n{BEARER}\r\n\r\n".encode())


@attempt
def the_preface_of_http_2(ground: SecretGround) -> bytes:
    return refused(ground, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))


@attempt
def a_tunnel_inside_the_tunnel(ground: SecretGround) -> bytes:
    return refused(ground, f"CONNECT {ground.host} HTTP/1.1\r\nHost: {ground.host}\r\n{BEARER}\r\n\r\n".encode())


@attempt
def headers_without_an_end(ground: SecretGround) -> bytes:
    got = refused(ground, ground.get("/", BEARER, f"X-Long: {'x' * 200_000}"))
    return got + refused(ground, ground.get("/", BEARER, *(f"X-{n}: x" for n in range(150))))


@attempt
def a_request_that_never_ends(ground: SecretGround) -> bytes:
    with ground.connect(ground.secret()) as client:
        client.sendall(ground.get("/", BEARER)[:-4])
        got = read_answer(client)
    assert b" 408 " in got
    return got + ground.site.seen


# Other places of the placeholder


@attempt
def the_placeholder_in_places_that_are_not_its_own(ground: SecretGround) -> bytes:
    query = ground.secret(place="query:key")
    body = f"key={P}"
    raw = ground.get(
        f"/{P}?other={P}&{P}=1&key=x", f"X-Other: {P}", BEARER, f"Content-Length: {len(body)}", f"Cookie: key={P}",
        method="POST", body=body.encode(),
    )  # fmt: skip
    got = ground.ask(raw, query)
    assert RAW not in ground.site.seen
    return got + ground.site.seen


@attempt
def the_placeholder_as_the_user_of_basic_authentication(ground: SecretGround) -> bytes:
    credentials = base64.b64encode(f"{P}:x".encode()).decode()
    got = ground.ask(ground.get("/", f"Authorization: Basic {credentials}"), ground.secret(place="basic"))
    return got + ground.site.seen


@attempt
def the_placeholder_of_another_session_or_tenant(ground: SecretGround) -> bytes:
    got = b""
    for tenant, session, name in (("acme", "s2", "TOKEN"), ("rival", "s1", "TOKEN"), ("acme", "s1", "OTHER")):
        foreign = build_placeholder(tenant, session, name)
        got += ground.ask(ground.get("/", f"Authorization: Bearer {foreign}")) + ground.site.seen
    return got


@attempt
def a_revoked_secret(ground: SecretGround) -> bytes:
    with ground.open_tunnel() as tunnel:
        client = trusting_context().wrap_socket(tunnel, server_hostname="site.example")
        client.sendall(ground.get("/", BEARER))
        return read_answer(client) + ground.site.seen


@attempt
def the_placeholder_for_the_proxy_itself(ground: SecretGround) -> bytes:
    got = ground.ask(ground.get("/", f"Proxy-Authorization: Bearer {P}"))
    return got + ground.site.seen + answered(ground, answer(b""), f"Proxy-Authorization: {P}")


@attempt
def a_connection_header_that_names_the_secret(ground: SecretGround) -> bytes:
    return ground.ask(ground.get("/", BEARER, "Connection: authorization")) + ground.site.seen


# Answers that contain the secret


@attempt
def an_echo_in_the_body(ground: SecretGround) -> bytes:
    return ground.ask(ground.get("/", BEARER))


@attempt
def an_echo_of_the_method_trace(ground: SecretGround) -> bytes:
    return ground.ask(ground.get("/", BEARER, method="TRACE"))


@attempt
def an_echo_in_an_error(ground: SecretGround) -> bytes:
    return answered(ground, answer(b"wrong token " + RAW, status="403 Forbidden"))


@attempt
def an_echo_in_headers(ground: SecretGround) -> bytes:
    headers = (f"X-Token: {VALUE}", f"{VALUE}: x", f"Set-Cookie: t={VALUE}", f"Location: /?{quote(VALUE)}")
    return answered(ground, answer(b"", *headers, status="302 Found"))


@attempt
def an_echo_in_the_words_of_the_status(ground: SecretGround) -> bytes:
    return answered(ground, answer(b"", status=f"200 {VALUE}"))


@attempt
def an_echo_across_chunks(ground: SecretGround) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"1\r\n%c\r\n" % byte for byte in b"<" + RAW + b">"]
    return re.sub(rb"\r\n1\r\n", b"", answered(ground, [head, *chunks, b"0\r\n\r\n"]))


@attempt
def an_echo_in_pieces_up_to_the_end_of_the_connection(ground: SecretGround) -> bytes:
    pieces = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", *(RAW[at : at + 5] for at in range(0, len(RAW), 5))]
    got = answered(ground, pieces)
    return b"".join(got.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])


@attempt
def an_echo_in_the_trailer(ground: SecretGround) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return answered(ground, head + b"1\r\na\r\n0\r\nX-Token: " + RAW + b"\r\n\r\n")


@attempt
def an_echo_in_an_interim_answer(ground: SecretGround) -> bytes:
    return answered(ground, b"HTTP/1.1 103 Early Hints\r\nLink: " + RAW + b"\r\n\r\n" + answer(b"done"))


@attempt
def an_echo_in_other_encodings(ground: SecretGround) -> bytes:
    forms = [base64.b64encode(b"x" * n + RAW) for n in range(3)]
    forms += [
        base64.urlsafe_b64encode(RAW),
        RAW.hex().encode(),
        RAW.upper(),
        RAW.lower(),
        quote(VALUE, safe="").encode(),
    ]
    got = answered(ground, answer(b" ".join(forms) + json.dumps(VALUE).encode()))
    assert b"*" * 20 in got
    return got


@attempt
def a_compressed_echo(ground: SecretGround) -> bytes:
    body = gzip.compress(RAW)
    got = answered(ground, answer(body, "Content-Encoding: gzip"), "Accept-Encoding: gzip, br")
    assert b" 502 " in got
    assert b"Accept-Encoding: identity" in ground.site.seen
    with contextlib.suppress(gzip.BadGzipFile, EOFError):
        got += gzip.decompress(got.partition(b"\r\n\r\n")[2])
    return got


@attempt
def a_compressed_transfer(ground: SecretGround) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    return answered(ground, head + b"1\r\na\r\n0\r\n\r\n")


@attempt
def an_echo_in_parts(ground: SecretGround) -> bytes:
    """Each request asks for a part that is too short to be recognized."""
    got = b""
    for at in range(0, len(RAW), 4):
        part = f"Content-Range: bytes {at}-{at + 3}/{len(RAW)}"
        said = answered(
            ground, answer(RAW[at : at + 4], part, status="206 Partial Content"), f"Range: bytes={at}-{at + 3}"
        )
        assert b" 502 " in said
        got += said.partition(b"\r\n\r\n")[2]
    assert b"range" not in ground.site.seen.lower()
    return got


@attempt
def an_upgrade_to_another_protocol(ground: SecretGround) -> bytes:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + RAW
    got = answered(ground, switch, "Upgrade: websocket", "Connection: Upgrade")
    assert b"websocket" not in ground.site.seen
    return got


@attempt
def an_answer_that_two_parsers_read_differently(ground: SecretGround) -> bytes:
    both = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
    return answered(ground, both + RAW) + answered(ground, b"HTTP/1.1 200 OK\r\nX:\x00" + RAW + b"\r\n\r\n")


@attempt
def bytes_behind_an_answer(ground: SecretGround) -> bytes:
    return answered(ground, answer(b"done") + RAW)


@attempt
def an_echo_after_the_secret_was_used_earlier(ground: SecretGround) -> bytes:
    with ground.connect(ground.secret()) as client:
        client.sendall(ground.get("/", BEARER))
        got = read_answer(client)
        ground.site.answer = lambda _: answer(b"you sent " + RAW)
        client.sendall(ground.get("/later"))
        return got + read_answer(client)


# What the proxy itself says


@attempt
def errors_and_logs_of_the_proxy(ground: SecretGround) -> bytes:
    broken = json.dumps({"v": 1, "tenant": "acme", "session": "s1", "rules": {}, "secrets": [ground.secret(place="x")]})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(ground.proxy.path))
        client.sendall(broken.encode() + b"\n" + ground.get("/", BEARER))
        got = read_all(client)
    return got + ground.proxy_question("uses") + repr(ground.proxy.logs).encode()


@attempt
def the_proxys_questions_asked_by_a_program(ground: SecretGround) -> bytes:
    """A program's bytes come after the opening, so they are never a question or another opening."""
    with ground.proxy.connect(build_rules(ground.site.port)) as client:
        client.sendall(b'{"v": 1, "ask": "uses"}\n\r\n\r\n')
        return read_all(client)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_obtains_nothing(name: str, ground: SecretGround) -> None:
    got = ATTEMPTS[name](ground)
    assert find_secret(got) == [], got
    assert find_secret(repr(ground.proxy.logs).encode()) == []


def test_an_attempt_that_succeeds_would_be_noticed(ground: SecretGround) -> None:
    assert len(ATTEMPTS) >= 40
    ground.ask(ground.get("/", BEARER))
    assert find_secret(ground.site.seen)
    assert find_secret(base64.b64encode(b"user:" + RAW))
