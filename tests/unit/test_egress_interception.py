"""The egress proxy puts secrets into requests to their hosts, keeps connections, masks answers and leaves other
connections alone.
"""

import base64
import ssl
from collections.abc import Iterator

import pytest

from contract.secrets import build_placeholder
from tests.egress_ground import status_of
from tests.secret_ground import PLACEHOLDER, VALUE, SecretGround, answer, echo, open_secret_ground, read_answer
from workers.egress.secrets import BoundSecret, MaskedStream, SecretMasker, SecretUses

MASKED = b"*" * len(VALUE)
P = PLACEHOLDER.decode()


@pytest.fixture(scope="module")
def shared() -> Iterator[SecretGround]:
    with open_secret_ground() as ground:
        yield ground


@pytest.fixture
def ground(shared: SecretGround) -> SecretGround:
    shared.site.answer = echo
    shared.site.requests.clear()
    return shared


def test_each_place_is_filled_and_every_answer_is_masked(ground: SecretGround) -> None:
    basic = base64.b64encode(b"git:" + PLACEHOLDER).decode()
    cases = [
        ("header:Authorization", ground.get("/", f"Authorization: Bearer {P}"), f"Authorization: Bearer {VALUE}"),
        ("header:X-Key", ground.get("/", f"x-key: {P}"), f"x-key: {VALUE}"),
        ("query:key", ground.get(f"/a?b=1&key={P}"), f"GET /a?b=1&key={VALUE} HTTP/1.1"),
        (
            "basic",
            ground.get("/", f"Authorization: Basic {basic}"),
            f"Authorization: Basic {base64.b64encode(b'git:' + VALUE.encode()).decode()}",
        ),
    ]
    for place, request, line in cases:
        told = ground.ask(request, ground.secret(place=place))
        assert line.encode() in ground.site.requests[-1], place
        assert status_of(told) == 200
        assert VALUE.encode() not in told
        assert b"*" * 16 in told


def test_a_connection_is_kept_and_every_use_is_reported_once(ground: SecretGround) -> None:
    before, own = ground.site.connections, build_placeholder("acme", "kept", "TOKEN")
    with ground.connect(ground.secret(), session="kept") as client:
        for number in range(3):
            client.sendall(ground.get(f"/{number}", f"Authorization: {own}"))
            assert status_of(read_answer(client)) == 200
        body = b"5\r\nhello\r\n0\r\n\r\n"
        client.sendall(ground.get("/x", "Transfer-Encoding: chunked", method="PUT", body=body))
        assert b"hello" in read_answer(client)
    assert ground.site.connections == before + 1
    uses = [use for use in ground.read_uses() if use["session"] == "kept"]
    assert [(use["secret"], use["host"], use["run"], use["count"]) for use in uses] == [("TOKEN", ground.host, "r1", 3)]
    assert ground.read_uses() == []


def test_a_body_that_needs_a_go_ahead_gets_it(ground: SecretGround) -> None:
    ground.site.answer = lambda request: [b"HTTP/1.1 100 Continue\r\n\r\n", echo(request)]
    told = ground.ask(ground.get("/", "Content-Length: 5", "Expect: 100-continue", method="POST", body=b"hello"))
    assert told.endswith(b"hello")


def test_a_host_without_a_secret_of_the_session_keeps_its_own_certificate(ground: SecretGround) -> None:
    other = ground.secret(hosts=["search.example:1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        ground.connect(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        ground.connect()
    told = ground.ask(ground.get(), name="site.example")
    assert status_of(told) == 200


def test_the_masker_finds_a_secret_in_pieces_of_any_size() -> None:
    secret = BoundSecret.model_validate({"name": "TOKEN", "value": VALUE, "hosts": [], "place": "basic"})
    masker, raw = SecretMasker.of([secret]), VALUE.encode()
    text = b"<" + raw + b"> " + raw.upper() + base64.b64encode(b"x" + raw) + raw.hex().encode() + raw[:9] + b" end"
    whole = masker.mask(text)
    assert raw.lower() not in whole.lower()
    assert raw.hex().encode() not in whole
    for size in (1, 2, 7, 64, len(text)):
        stream = MaskedStream(masker)
        pieces = [stream.take(text[at : at + size]) for at in range(0, len(text), size)]
        assert b"".join([*pieces, stream.finish()]) == whole
    stream = MaskedStream(masker)
    assert stream.take(b"data: hello\n\n") == b"data: hello\n\n", "nothing is held back"
    assert stream.take(raw[:5]) == b""
    assert stream.finish() == raw[:5]


def test_uses_of_one_kind_are_counted_and_reported_at_intervals() -> None:
    now = [0.0]
    uses = SecretUses(clock=lambda: now[0])
    for _ in range(3):
        uses.note("acme", "s1", None, "TOKEN", "a.example")
    [first] = uses.take()
    assert (first["count"], first["run"]) == (3, "")
    uses.note("acme", "s1", None, "TOKEN", "a.example")
    assert uses.take() == []
    now[0] = 61.0
    assert [use["count"] for use in uses.take()] == [1]
    now[0] = 200.0
    assert (uses.take(), uses.take()) == ([], [])


def test_an_answer_of_every_kind_arrives(ground: SecretGround) -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"
    chunked = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"0\r\nX: y\r\n\r\n"]
    for pieces, body in ((closing, b"until the en"), (chunked, b"abc"), (answer(b"", status="204 No"), b"")):
        ground.site.answer = lambda _, pieces=pieces: pieces
        told = ground.ask(ground.get("/", "Connection: close"))
        assert status_of(told) in (200, 204)
        assert body in told
        assert b"X: y" not in told
