"""The egress proxy puts secrets into requests to their hosts, keeps connections, masks answers and leaves other
connections alone.
"""

import asyncio
import base64
import ssl
import time
from collections.abc import Iterator

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.secrets import MAX_VALUE_CHARS, build_placeholder
from tests.egress_harness import status_of
from tests.secret_harness import PLACEHOLDER, VALUE, SecretHarness, answer, echo, open_secret_harness, read_answer
from workers.egress.limits import ProxyLimits
from workers.egress.relaying import Peer
from workers.egress.secrets import BoundSecret, MaskedStream, SecretMasker, SecretUses

P = PLACEHOLDER.decode()


@pytest.fixture(scope="module")
def shared() -> Iterator[SecretHarness]:
    with open_secret_harness() as harness:
        yield harness


@pytest.fixture
def harness(shared: SecretHarness) -> SecretHarness:
    return shared.reset()


def test_a_secret_is_inserted_at_each_place_and_masked_in_every_reply(harness: SecretHarness) -> None:
    basic = base64.b64encode(b"git:" + PLACEHOLDER).decode()
    cases = [
        ("header:Authorization", harness.get("/", f"Authorization: Bearer {P}"), f"Authorization: Bearer {VALUE}"),
        ("header:X-Key", harness.get("/", f"x-key: {P}"), f"x-key: {VALUE}"),
        ("query:key", harness.get(f"/a?b=1&key={P}"), f"GET /a?b=1&key={VALUE} HTTP/1.1"),
        (
            "basic",
            harness.get("/", f"Authorization: Basic {basic}"),
            f"Authorization: Basic {base64.b64encode(b'git:' + VALUE.encode()).decode()}",
        ),
    ]
    for secret_place, request, line in cases:
        received = harness.ask(request, harness.secret(place=secret_place))
        assert line.encode() in harness.site.requests[-1], secret_place
        assert status_of(received) == 200
        assert VALUE.encode() not in received
        assert b"*" * 16 in received


def test_a_connection_is_reused_and_every_secret_use_reported_once(harness: SecretHarness) -> None:
    before, placeholder = harness.site.connections, build_placeholder("acme", "kept", "TOKEN")
    with harness.connect(harness.secret(), session="kept") as client:
        for number in range(3):
            client.sendall(harness.get(f"/{number}", f"Authorization: {placeholder}"))
            assert status_of(read_answer(client)) == 200
        body = b"5\r\nhello\r\n0\r\n\r\n"
        client.sendall(harness.get("/x", "Transfer-Encoding: chunked", method="PUT", body=body))
        assert b"hello" in read_answer(client)
    assert harness.site.connections == before + 1
    uses = [use for use in harness.read_uses() if use["session"] == "kept"]
    assert [(use["secret"], use["host"], use["run"], use["count"]) for use in uses] == [
        ("TOKEN", harness.host, "r1", 3)
    ]
    assert harness.read_uses() == []


def test_a_request_with_expect_100_continue_is_answered(harness: SecretHarness) -> None:
    harness.site.answer = lambda request: [b"HTTP/1.1 100 Continue\r\n\r\n", echo(request)]
    received = harness.ask(harness.get("/", "Content-Length: 5", "Expect: 100-continue", method="POST", body=b"hello"))
    assert received.endswith(b"hello")


def test_a_host_without_a_session_secret_is_not_intercepted(harness: SecretHarness) -> None:
    other = harness.secret(hosts=["search.example:1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        harness.connect(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        harness.connect()
    received = harness.ask(harness.get(), name="site.example")
    assert status_of(received) == 200


def test_a_secret_split_into_pieces_of_any_size_is_masked() -> None:
    secret = BoundSecret.model_validate({"name": "TOKEN", "value": VALUE, "hosts": [], "place": "basic"})
    masker, raw = SecretMasker.of([secret]), VALUE.encode()
    text = b"<" + raw + b"> " + raw.upper() + base64.b64encode(b"x" + raw) + raw.hex().encode() + raw[:9] + b" end"
    masked = masker.mask(text)
    assert raw.lower() not in masked.lower()
    assert raw.hex().encode() not in masked
    for size in (1, 2, 7, 64, len(text)):
        stream = MaskedStream(masker)
        pieces = [stream.take(text[at : at + size]) for at in range(0, len(text), size)]
        assert b"".join([*pieces, stream.finish()]) == masked
    stream = MaskedStream(masker)
    assert stream.take(b"data: hello\n\n") == b"data: hello\n\n", "nothing is held back"
    assert stream.take(raw[:5]) == b""
    assert stream.finish() == raw[:5]


@given(
    pieces=st.lists(st.sampled_from([b"a", b"b", b"ab", b"aab", b"abaab", b"x", b"aaaa"]), max_size=30),
    form=st.sampled_from([b"aa", b"aaaa", b"aba", b"ababa", b"aabaa", b"abaabaab", b"xaxax"]),
)
def test_exactly_the_bytes_of_each_occurrence_are_masked(pieces: list[bytes], form: bytes) -> None:
    text = b"".join(pieces)
    expected = bytearray(text)
    for at in range(len(text)):
        if text.startswith(form, at):
            expected[at : at + len(form)] = b"*" * len(form)
    assert SecretMasker([form]).mask(text) == bytes(expected)


def test_a_repetitive_secret_is_masked_in_bounded_time() -> None:
    """The attacker's aim: to stop the proxy for all tenants with a secret and an answer of its own."""
    masker, answer_text = SecretMasker([b"a" * MAX_VALUE_CHARS]), b"a" * (2 * 1024 * 1024)
    started = time.process_time()
    assert masker.mask(answer_text) == b"*" * len(answer_text)
    assert time.process_time() - started < 2.0


async def test_a_body_of_many_small_chunks_does_not_block_the_event_loop() -> None:
    head = b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    class OneRead:
        async def receive(self) -> bytes:
            return head + b"1\r\na\r\n" * 50 + b"0\r\n\r\n"

        async def send(self, data: bytes) -> None:
            raise AssertionError("nothing is sent")

    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count_turns())
    peer = Peer(OneRead(), h11.SERVER, ProxyLimits())
    while not isinstance(await peer.next(), h11.EndOfMessage):
        pass
    other.cancel()
    assert turns >= 50


def test_equal_secret_uses_are_counted_and_reported_at_intervals() -> None:
    now = [0.0]
    uses = SecretUses(clock=lambda: now[0])
    for _ in range(3):
        uses.count("acme", "s1", None, "TOKEN", "a.example")
    [first] = uses.take()
    assert (first["count"], first["run"]) == (3, "")
    uses.count("acme", "s1", None, "TOKEN", "a.example")
    assert uses.take() == []
    now[0] = 61.0
    assert [use["count"] for use in uses.take()] == [1]
    now[0] = 200.0
    assert (uses.take(), uses.take()) == ([], [])


def test_closing_chunked_and_empty_replies_arrive(harness: SecretHarness) -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"
    chunked = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"0\r\nX: y\r\n\r\n"]
    for pieces, body in ((closing, b"until the en"), (chunked, b"abc"), (answer(b"", status="204 No"), b"")):
        harness.site.answer = lambda _, pieces=pieces: pieces
        received = harness.ask(harness.get("/", "Connection: close"))
        assert status_of(received) in (200, 204)
        assert body in received
        assert b"X: y" not in received
