"""Attempts of a program in a sandbox to guess a secret piece by piece: it makes the secret's host return a guess, and
looks at the sizes, the number and the moment of the pieces that come back. Whatever it sees must be the same for a
right guess and a wrong one, unless the guess is the whole secret.
"""

import base64
import contextlib
import gzip
import itertools
import select
import ssl
import string
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.sandboxd.secret_harness import VALUE, SecretHarness, answer, open_secret_harness
from tests.support.stack.waiting import SOON_S
from toolcrew.workers.egress.limits import ProxyLimits

QUIET_S = 0.05
"""Time without data after which the proxy holds back what it has. A longer wait of a busy machine changes no size."""
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
REST = b" and the rest of the answer"
RAW = VALUE.encode()
FORMS = {
    "plain": RAW,
    "upper": RAW.upper(),
    "hex": RAW.hex().encode(),
    "base64": base64.b64encode(RAW),
    "shifted base64": base64.b64encode(b"xy" + RAW)[3:],
}
Pieces = Sequence[bytes]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _compressed(text: bytes, coding: str) -> tuple[bytes, bytes]:
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)
    return CHUNKED + b"Content-Encoding: %s\r\n\r\n" % coding.encode() + chunk(first), chunk(
        packer.compress(REST) + packer.flush()
    ) + b"0\r\n\r\n"


PLACES: dict[str, Callable[[bytes], tuple[bytes, bytes]]] = {
    # What the host sends before it pauses, and what it sends then.
    "the end of a body with a length": lambda text: (answer(text), b""),
    "the end of a chunked body": lambda text: (CHUNKED + b"\r\n" + chunk(text) + b"0\r\n\r\n", b""),
    "the end of a connection": lambda text: (HEAD + b"Connection: close\r\n\r\n" + text, b""),
    "the end of a chunk": lambda text: (CHUNKED + b"\r\n" + chunk(text), chunk(REST) + b"0\r\n\r\n"),
    "the middle of a body with a length": lambda text: (
        HEAD + b"Content-Length: %d\r\n\r\n" % len(text + REST) + text,
        REST,
    ),
    "the end of an event": lambda text: (
        CHUNKED + b"Content-Type: text/event-stream\r\n\r\n" + chunk(b"data: a\n\n") + chunk(b"data: " + text),
        chunk(b"\n\n") + b"0\r\n\r\n",
    ),
    "the end of a read": lambda text: (answer((b"." * (16_384 - len(text)) + text) * 3), b""),
    "a long body": lambda text: (answer(b"." * 70_000 + text), b""),
    "a header": lambda text: (answer(b"", "X-Text: " + text.decode(), "Set-Cookie: a=" + text.decode()), b""),
    "the end of a compressed body": lambda text: (answer(gzip.compress(text, 0), "Content-Encoding: gzip"), b""),
    "the middle of a compressed body": lambda text: _compressed(text, "gzip"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[SecretHarness]:
    with open_secret_harness(ProxyLimits(watch_s=0.05, linger_s=0.5)) as harness:
        yield harness


@pytest.fixture
def harness(shared: SecretHarness) -> SecretHarness:
    return shared.reset()


def _read_sizes(client: ssl.SSLSocket, quiet_s: float) -> Iterator[int]:
    """Yield the size of each TLS record, until none comes for some time after the first."""
    wait_s = SOON_S
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        while client.pending() or select.select([client], [], [], wait_s)[0]:
            wait_s = quiet_s
            if not (piece := client.recv(65_536)):
                return
            yield len(piece)


class Program:
    """A program with a connection to the host, which returns what the program asks for."""

    def __init__(self, harness: SecretHarness) -> None:
        self._harness = harness

    def observe(self, place: str, guess: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the pieces that come before the host's pause, and after it."""
        first, rest = PLACES[place](b"<" + guess)
        continues = threading.Event()
        pieces: list[bytes | threading.Event] = [first, continues, rest] if rest else [first]
        self._harness.site.answer = lambda _: pieces
        with self._harness.connect(self._harness.secret()) as client:
            client.sendall(self._harness.get("/", "Connection: close"))
            before = tuple(_read_sizes(client, QUIET_S)) if rest else ()
            continues.set()
            return before, tuple(_read_sizes(client, SOON_S))


@pytest.mark.parametrize("place", PLACES)
def test_right_and_wrong_guesses_look_the_same(place: str, harness: SecretHarness) -> None:
    program = Program(harness)
    for name, form in FORMS.items():
        for length in (1, len(form) // 2, len(form) - 1):
            right = form[:length]
            wrong = right[:-1] + (b"0" if right[-1:] != b"0" else b"1")
            assert program.observe(place, right) == program.observe(place, wrong), (name, length)


def _guess(program: Program, place: str, known: bytes) -> bytes:
    """Return the one next character whose answer differs from all others; empty if none does."""
    seen = {character: program.observe(place, known + character.encode()) for character in string.ascii_lowercase}
    counts = Counter(seen.values())
    rare = [character for character, sizes in seen.items() if counts[sizes] == 1]
    return rare[0].encode() if len(rare) == 1 else b""


@pytest.mark.parametrize("place", ["the end of a body with a length", "the end of a chunked body"])
def test_a_guessing_program_recovers_nothing(place: str, harness: SecretHarness) -> None:
    program = Program(harness)
    for known in (b"", b"g", RAW[:7]):
        assert _guess(program, place, known) == b""


def test_the_program_sees_a_difference_where_one_is(harness: SecretHarness) -> None:
    program = Program(harness)
    seen = {program.observe("the end of a chunk", b"x" * count) for count in (1, 500)}
    assert len(seen) == 2


def test_the_mask_hides_every_bit_of_a_secret_in_base64(harness: SecretHarness) -> None:
    """The characters at both ends of an encoded secret also encode bits of the text around it."""
    for before, after in itertools.product(range(3), range(3)):
        variants = {
            harness_answer(harness, base64.b64encode(b"x" * before + value.encode() + b"y" * after))
            for value in (VALUE, "\x7e" + VALUE[1:-1] + "\x21")
        }
        assert len(variants) == 1


def harness_answer(harness: SecretHarness, body: bytes) -> bytes:
    harness.site.answer = lambda _: answer(body)
    return harness.ask(harness.get("/"), harness.secret(), harness.secret(name="OTHER", value="~" + VALUE[1:-1] + "!"))
