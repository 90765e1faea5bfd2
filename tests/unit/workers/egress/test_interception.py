"""The egress proxy puts secrets into requests to their hosts, keeps connections, masks answers and leaves other
connections alone.
"""

import asyncio
import base64
import gc
import itertools
import ssl
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import partial

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.support.sandboxd.egress_harness import status_of
from tests.support.sandboxd.secret_harness import (
    PLACEHOLDER,
    VALUE,
    SecretHarness,
    answer,
    echo,
    open_secret_harness,
    read_answer,
)
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.masking import SecretForm
from toolcrew.contract.secrets import MAX_VALUE_CHARS, build_placeholder
from toolcrew.workers.egress.allowances import MAX_MASKED_ANSWERS
from toolcrew.workers.egress.limits import ProxyLimits
from toolcrew.workers.egress.masking import MaskedStream, SecretMasker, SharedMaskers, _Positions
from toolcrew.workers.egress.relaying import Peer
from toolcrew.workers.egress.secrets import MAX_REPORTED, MAX_USES, SecretUses

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


async def take_in_pieces(stream: MaskedStream, pieces: Iterable[bytes]) -> list[bytes]:
    """Return what comes out for each piece, and at the end."""
    return [(await stream.take(piece)).text for piece in pieces] + [(await stream.finish()).text]


async def test_a_secret_split_into_pieces_of_any_size_is_masked() -> None:
    masker, raw = await SecretMasker.of({"TOKEN": VALUE}), VALUE.encode()
    text = b"<" + raw + b"> " + raw.upper() + base64.b64encode(b"x" + raw) + raw.hex().encode() + raw[:9] + b" end"
    masked = (await masker.mask(text)).text
    assert raw.lower() not in masked.lower()
    assert raw.hex().encode() not in masked
    for size in (1, 2, 7, 64, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert b"".join(await take_in_pieces(MaskedStream(masker), pieces)) == masked
    assert (await MaskedStream(masker).take(b"data: hello\n\n")).text == b"data: hello\n\n", "nothing is held back"


@settings(deadline=None)
@given(
    text=st.lists(st.sampled_from([b"a", b"ab", b"secret-abcab", b"abcab", b"\n", b"\xff", b" ", b"SECRET-"])),
    sizes=st.lists(st.integers(1, 40), min_size=1),
    is_in_blocks=st.booleans(),
)
def test_a_body_is_masked_alike_however_it_arrives(text: list[bytes], sizes: list[int], is_in_blocks: bool) -> None:
    body = b"".join(text)

    async def mask() -> tuple[bytes, bytes]:
        masker = await SecretMasker.of({"A": "secret-abcab", "B": "abcabcab"})
        stream, rest, pieces = MaskedStream(masker, is_in_blocks=is_in_blocks), body, []
        for size in itertools.cycle(sizes):
            if not rest:
                break
            pieces.append(rest[:size])
            rest = rest[size:]
        return b"".join(await take_in_pieces(stream, pieces)), (await masker.mask(body)).text

    assert len(set(asyncio.run(mask()))) == 1


@settings(deadline=None)
@given(arrived=st.binary(max_size=300), sizes=st.lists(st.integers(1, 40), min_size=1))
def test_what_is_held_back_depends_on_lengths_and_line_ends_alone(arrived: bytes, sizes: list[int]) -> None:
    """The secret is in neither text, and the texts have the same line ends."""
    other = bytes(ord("z") if 0x20 <= byte < 0x7F else byte for byte in arrived)

    async def sizes_of(text: bytes) -> list[int]:
        stream, ends = MaskedStream(await SecretMasker.of({"A": "ghp-0123456789"})), [0, *itertools.accumulate(sizes)]
        return [len(piece) for piece in await take_in_pieces(stream, (text[a:b] for a, b in itertools.pairwise(ends)))]

    assert asyncio.run(sizes_of(arrived)) == asyncio.run(sizes_of(other))


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b"a", b"b", b"ab", b"aab", b"abaab", b"x", b"aaaa"]), max_size=30),
    form=st.sampled_from(["aa", "aaaa", "aba", "ababa", "aabaa", "abaabaab", "xaxax"]),
)
def test_exactly_the_bytes_of_each_occurrence_are_masked(pieces: list[bytes], form: str) -> None:
    text, size = b"".join(pieces), len(form)
    expected = bytearray(text)
    for at in range(len(text)):
        if text.startswith(form.encode(), at):
            expected[at : at + size] = b"*" * size
    masker = SecretMasker({SecretForm(form): frozenset({"TOKEN"})})
    masked = asyncio.run(masker.mask(text))
    assert (masked.text, bool(masked.found)) == (bytes(expected), form.encode() in text)


def test_the_search_works_with_integers_of_the_same_size_for_any_text() -> None:
    """Shorter integers are faster: a program would measure whether a text has characters of a secret."""
    texts = [b"z" * 1000, b"ghp-" * 250, b"\n" * 1000, (VALUE.encode()[:-1] * 40)[:1000], bytes(1000)]
    positions = [_Positions(text, 80) for text in texts]
    for char in VALUE:
        assert len({found._find_char(char).bit_length() for found in positions}) == 1


async def test_hostile_secrets_and_answers_are_masked_in_short_steps() -> None:
    """The attacker's aim: to stop the proxy for all tenants with secrets and answers of its own."""
    values = {f"A{number}": "a" * (MAX_VALUE_CHARS - number) for number in range(20)}
    steps = 0

    async def count_steps() -> None:
        nonlocal steps
        while True:
            steps += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count_steps())
    masker, text = await SecretMasker.of(values), b"a" * 64 * 1024
    assert steps >= len(values)
    assert (await masker.mask(text)).text == b"*" * len(text)
    counting.cancel()
    assert steps > 20 * MAX_VALUE_CHARS / 1000, "one step compares at most 1,000 characters"


async def test_connections_of_a_tenant_share_one_masker_that_ends_with_the_last_of_them() -> None:
    maskers, values = SharedMaskers(), {"A": VALUE, "B": "another-secret"}
    together = await asyncio.gather(*(maskers.get("acme", dict(reversed(values.items()))) for _ in range(50)))
    together.append(await maskers.get("acme", values))
    assert len({id(masker) for masker in together}) == len(maskers) == 1
    other = await maskers.get("rival", values)
    assert other is not together[0]
    assert (await maskers.get("acme", {"A": VALUE})) is not together[0]
    del together, other
    gc.collect()
    assert len(maskers) == 0


async def test_searches_of_a_tenant_take_memory_one_at_a_time() -> None:
    maskers, values = SharedMaskers(), {f"A{number}": "a" * (MAX_VALUE_CHARS - number) for number in range(2)}
    first, second = await maskers.get("acme", values), await maskers.get("acme", {"A": VALUE})
    searching = asyncio.ensure_future(first.mask(b"a" * 64 * 1024))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(second.mask(VALUE.encode()))
    await asyncio.sleep(0)
    assert not searching.done()
    await waiting
    assert searching.done()


def test_secrets_of_a_session_that_are_too_long_together_reach_no_host(harness: SecretHarness) -> None:
    secrets = [harness.secret(name=f"S{number}", value="a" * MAX_VALUE_CHARS) for number in range(8)]
    assert status_of(harness.ask(harness.get("/"), *secrets)) == 200
    received = harness.ask(harness.get("/"), *secrets, harness.secret())
    assert status_of(received) == 403
    assert b"secrets_too_long" in received
    assert len(harness.site.requests) == 1


async def test_a_long_secret_costs_little_in_an_answer_without_it() -> None:
    masker, text = await SecretMasker.of({"A": "a" * MAX_VALUE_CHARS}), b"b" * (1024 * 1024)
    started = time.process_time()
    assert (await masker.mask(text)).text == text
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


def test_uses_of_one_tenant_leave_room_for_the_uses_of_others() -> None:
    uses = SecretUses(clock=lambda: 0.0)
    for number in range(MAX_USES + 100):
        uses.count("greedy", "s1", None, "TOKEN", f"{number}.example")
    uses.count("acme", "s2", None, "TOKEN", "a.example")
    with capture_logs() as logs:
        first = uses.take()
    assert [use["tenant"] for use in first[:2]] == ["greedy", "acme"]
    assert len(first) == MAX_REPORTED
    assert len(uses.take()) == MAX_USES + 1 - MAX_REPORTED
    assert [(line["tenant"], line["count"]) for line in logs] == [("greedy", 100)]


def test_a_session_whose_answers_often_contain_a_secret_is_refused_and_reported(harness: SecretHarness) -> None:
    with harness.connect(harness.secret(), session="echoes") as client:
        for _ in range(MAX_MASKED_ANSWERS):
            client.sendall(harness.get("/", f"Authorization: {build_placeholder('acme', 'echoes', 'TOKEN')}"))
            assert status_of(read_answer(client)) == 200
        client.sendall(harness.get("/"))
        assert status_of(read_answer(client)) == 429
    assert harness.proxy.wait_for_line(session="echoes")["outcome"] == "secret_returned"
    assert status_of(harness.ask(harness.get("/"), session="another")) == 200
    [use] = [use for use in harness.read_uses() if use["session"] == "echoes"]
    assert (use["count"], use["masked"]) == (MAX_MASKED_ANSWERS, MAX_MASKED_ANSWERS)


@pytest.mark.parametrize("coding", [None, "gzip"])
def test_an_event_arrives_before_the_next_one_is_sent(coding: str | None, harness: SecretHarness) -> None:
    packer = zlib.compressobj(wbits=31)

    def encode(event: bytes) -> bytes:
        data = packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) if coding else event
        return b"%x\r\n%s\r\n" % (len(data), data)

    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    head += f"Content-Encoding: {coding}\r\n\r\n".encode() if coding else b"\r\n"
    continues = threading.Event()
    events = [encode(b"data: first\n\n"), encode(b"data: second\n\n")]
    harness.site.answer = lambda _: [head, events[0], continues, events[1]]
    with harness.connect(harness.secret()) as client:
        client.settimeout(SOON_S)
        client.sendall(harness.get("/"))
        got = b""
        while b"data: first\n\n" not in got:
            got += client.recv(65_536)
        assert b"second" not in got
        continues.set()
        while b"data: second\n\n" not in got:
            got += client.recv(65_536)


def _give(pieces: bytes | list[bytes], _: bytes) -> bytes | list[bytes]:
    return pieces


def test_closing_chunked_and_empty_replies_arrive(harness: SecretHarness) -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end"
    chunked = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"0\r\nX: y\r\n\r\n"]
    for pieces, body in ((closing, b"until the en"), (chunked, b"abc"), (answer(b"", status="204 No"), b"")):
        harness.site.answer = partial(_give, pieces)
        received = harness.ask(harness.get("/", "Connection: close"))
        assert status_of(received) in (200, 204)
        assert body in received
        assert b"X: y" not in received
