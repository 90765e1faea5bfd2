"""Decoding of bodies: the content is the same for any division into pieces, and bad framing is refused."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.egress.http_messages import (
    LAST_CHUNK,
    Body,
    ChunkedBody,
    ExactBody,
    Framing,
    HeadError,
    OpenBody,
    build_body,
    encode_chunk,
)

CUTS = st.lists(st.integers(0, 300), max_size=8)


def feed(body: Body, data: bytes, cuts: list[int]) -> bytes:
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return b"".join(body.take(data[start:end]) for start, end in pairwise(places) if not body.is_done)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), CUTS)
def test_chunks_come_out_as_they_went_in_however_they_are_cut(pieces: list[bytes], cuts: list[int]) -> None:
    body = ChunkedBody()
    assert feed(body, b"".join(map(encode_chunk, pieces)) + LAST_CHUNK, cuts) == b"".join(pieces)
    assert body.is_done
    body.finish()


@given(
    st.lists(
        st.sampled_from([b"1", b"a", b"\r\n", b"0", b";x", b"\n", b" ", b"f", b"\r", b"-", b"Z:"]), max_size=20
    ).map(b"".join),
    CUTS,
)
def test_the_cuts_do_not_decide_whether_chunks_are_accepted(data: bytes, cuts: list[int]) -> None:
    def read(cuts: list[int]) -> tuple[bytes, bool] | str:
        body = ChunkedBody()
        try:
            return feed(body, data, cuts), body.is_done
        except HeadError:
            return "refused"

    assert read(cuts) == read([])


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1 1\r\n",
        b"1_0\r\n",
        b"1\nab",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1;x\x00\r\n",
        b"1;x\ny\r\n",
        b"1" * 16 + b"\r\n",
        b"1;" + b"x" * 5000,
        b"0\r\n folded\r\n",
        b"0\r\nGET http://x/ HTTP/1.1\r\n",
        b"0\r\nX\x00: 1\r\n",
        b"0\r\n" + b"X: y\r\n" * 5000,
    ],
)
def test_chunks_that_two_readers_could_end_differently_are_refused(data: bytes) -> None:
    with pytest.raises(HeadError):
        ChunkedBody().take(data + b"\r\n" * 3)


@pytest.mark.parametrize("data", [b"", b"5", b"5\r\n", b"5\r\nab", b"5\r\nabcde", b"5\r\nabcde\r\n", b"0\r\n"])
def test_chunks_that_end_in_the_middle_say_so(data: bytes) -> None:
    body = ChunkedBody()
    body.take(data)
    with pytest.raises(HeadError, match="in the middle"):
        body.finish()


def test_the_smallest_chunks_cost_no_more_than_their_bytes() -> None:
    small, large = b"1\r\na\r\n" * 10_000, b"1\r\na\r\n" * 100_000
    seconds = []
    for data in (small, large):
        started = time.process_time()
        assert len(ChunkedBody().take(data)) == len(data) // 6
        seconds.append(time.process_time() - started)
    # Ten times the bytes: an algorithm that copied what is left for each chunk would take a hundred times as long.
    assert seconds[1] < 40 * max(seconds[0], 0.005)


def test_a_body_of_a_length_takes_that_many_bytes_and_drops_the_rest() -> None:
    body = ExactBody(3)
    assert (body.take(b"ab"), body.is_done) == (b"ab", False)
    with pytest.raises(HeadError, match="1 bytes before its end"):
        body.finish()
    assert (body.take(b"cGET /"), body.is_done) == (b"c", True)


def test_a_message_without_a_length_has_no_body_unless_its_end_is_the_connections() -> None:
    assert build_body(Framing(), is_open=False).is_done
    assert isinstance(build_body(Framing(), is_open=True), OpenBody)


def test_no_content_is_no_chunk() -> None:
    assert encode_chunk(b"") == b""
