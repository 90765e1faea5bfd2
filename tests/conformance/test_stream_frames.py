"""Both codecs of the stream protocol parse the same bytes in the same way, and find EPOCH at any place."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT
from toolcrew.contract import stream_protocol as host

assert GUEST_PARENT  # this import makes the guest importable
from guest.streams import frames as guest  # noqa: E402

Fields = tuple[int, int, int, bytes, int]
"""Kind, stream, offset, payload, flags."""

EPOCH: Fields = (11, 0, 0, bytes(range(100, 120)), 0)
_KINDS = st.integers(1, 11)
_NUMBERS = st.integers(0, 300) | st.sampled_from([0x140B, 0x140B00, 0x140B0000, 20, 2**32 - 1])
_OFFSETS = st.integers(0, 300) | st.sampled_from([0, 0x140B, 0x140B << 40, 0x0B << 56, 2**63])
_PARTS = st.lists(
    st.sampled_from([host.EPOCH_HEADER, host.EPOCH_HEADER[:13], host.EPOCH_HEADER[3:], b"\0", b"\x14\x0b", b"x"])
)


@st.composite
def frames(draw: st.DrawFn) -> Fields:
    kind = draw(_KINDS)
    payload = b""
    if kind == 3:
        payload = b"".join(draw(_PARTS)) + draw(st.binary(max_size=50))
    elif kind in (1, 2, 5, 6, 7):
        payload = b'{"what": "process"}'
    elif kind in (9, 10):
        payload = draw(st.binary(max_size=64).filter(lambda data: b"\x14\x0b" not in data))
    elif kind == 11:
        payload = draw(st.binary(min_size=20, max_size=20).filter(lambda data: b"\x14\x0b" not in data))
    number = draw(_NUMBERS) if kind < 9 else 0
    offset = draw(_OFFSETS) if kind in (3, 4) else 0
    return kind, number, offset, payload, draw(st.integers(0, 3)) if kind == 3 else 0


def encode_both(fields: Fields) -> bytes:
    kind, stream, offset, payload, flags = fields
    data = host.StreamFrame(host.FrameKind(kind), stream, offset, payload, flags).encode()
    assert guest.StreamFrame(kind, stream, offset, payload, flags).encode() == data
    return data


def as_fields(frame: Any) -> Fields:
    return int(frame.kind), frame.stream, frame.offset, frame.payload, frame.flags


def decode_host(pieces: list[bytes]) -> list[Fields]:
    decoder = host.StreamDecoder()
    return [as_fields(frame) for piece in pieces for frame in decoder.feed(piece)]


def decode_guest(pieces: list[bytes]) -> list[Fields]:
    decoder = guest.StreamDecoder()
    return [as_fields(frame) for piece in pieces for frame in decoder.feed(piece)]


def join_data(decoded: list[Fields]) -> list[Fields]:
    """Join the frames into which DATA was cut."""
    joined: list[Fields] = []
    for frame in decoded:
        last = joined[-1] if joined else None
        if last and last[0] == frame[0] == 3 and last[1] == frame[1] and last[2] + len(last[3]) == frame[2]:
            joined[-1] = (3, last[1], last[2], last[3] + frame[3], last[4] | frame[4])
        else:
            joined.append(frame)
    return joined


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges)]


@given(st.lists(frames(), max_size=5), st.lists(st.integers(0, 10_000), max_size=5))
@example([(3, 0x140B0000, 0, host.EPOCH_HEADER, 2)], [])
def test_both_codecs_agree_and_return_what_was_encoded(sent: list[Fields], cuts: list[int]) -> None:
    pieces = cut(b"".join(map(encode_both, sent)), cuts)
    decoded = decode_host(pieces)
    assert decode_guest(pieces) == decoded
    assert join_data(decoded) == join_data(sent)


@given(st.lists(frames(), max_size=4), st.integers(0, 10_000))
def test_an_epoch_is_found_after_a_part_of_a_frame(sent: list[Fields], size: int) -> None:
    before = b"".join(map(encode_both, sent))
    begin = before[: size % (len(before) + 1)]
    whole = decode_host([begin])
    pieces = [begin, encode_both(EPOCH), encode_both((9, 0, 0, b"after", 0))]
    for decoded in (decode_host(pieces), decode_guest(pieces), decode_guest([b"".join(pieces)])):
        assert decoded[-2:] == [EPOCH, (9, 0, 0, b"after", 0)]
        # The last frame before may be dropped: EPOCH ends its stream anyway.
        assert decoded[:-2] in (whole, whole[:-1])


def test_an_epoch_is_found_after_a_part_of_an_epoch() -> None:
    for size in range(40):
        pieces = [encode_both(EPOCH)[:size], encode_both(EPOCH)]
        assert decode_host(pieces) == decode_guest(pieces) == decode_guest([b"".join(pieces)]) == [EPOCH]


def test_no_frame_is_completed_by_an_epoch_in_the_next_read() -> None:
    begin, epoch = encode_both((3, 1, 0, b"x" * 30, 0))[:-5], encode_both(EPOCH)
    for size in range(len(epoch)):
        decoder = guest.StreamDecoder()
        decoded = decoder.feed(begin + epoch[:size], more_follow=True) + decoder.feed(epoch[size:])
        assert list(map(as_fields, decoded)) == [EPOCH]


@given(st.lists(frames(), max_size=4), st.lists(st.integers(0, 10_000), max_size=4), st.integers(0, 10_000))
def test_an_epoch_is_found_in_pieces_of_any_size(sent: list[Fields], cuts: list[int], size: int) -> None:
    before = b"".join(map(encode_both, sent))
    pieces = cut(before[: size % (len(before) + 1)] + encode_both(EPOCH), cuts)
    assert decode_guest(pieces)[-1] == EPOCH


def test_the_header_of_epoch_never_occurs_in_other_frames() -> None:
    rng = random.Random(7)
    parts = [host.EPOCH_HEADER, host.EPOCH_HEADER[:17], host.EPOCH_HEADER[2:], b"\0" * 9, b"\x14", b"\x0b\0\0"]
    for _ in range(3000):
        data = b""
        for _ in range(rng.randrange(1, 5)):
            payload = b"".join(rng.choices(parts, k=rng.randrange(5)))
            stream, offset = rng.choice([1, 20, 0x140B, 0x140B00]), rng.choice([0, 1, 0x140B, 20])
            data += encode_both((rng.choice([3, 4, 8]), stream, offset, b"", 0))
            data += encode_both((3, stream, offset, payload, 0))
        assert host.EPOCH_HEADER not in data


@pytest.mark.parametrize(
    "header",
    [
        (0, 12, 0, 0, 1, 0),
        (0, 0, 0, 0, 1, 0),
        (32_769, 3, 0, 0, 1, 0),
        (1, 4, 0, 0, 1, 0),
        (0, 3, 4, 0, 1, 0),
        (65_537, 1, 0, 0, 1, 0),
        (65, 9, 0, 0, 0, 0),
        (0, 3, 0, 1, 1, 0),
        (0, 4, 1, 0, 1, 0),
    ],
)
def test_an_invalid_header_is_refused_by_both(header: tuple[int, ...]) -> None:
    data = host.HEADER.pack(*header)
    with pytest.raises(host.StreamFrameError):
        host.StreamDecoder().feed(data)
    assert [frame.kind for frame in guest.StreamDecoder().feed(data)] == [guest.INVALID]


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_the_guest_survives_any_bytes_and_finds_the_next_epoch(noise: bytes, cuts: list[int]) -> None:
    decoded = decode_guest([*cut(noise, cuts), encode_both(EPOCH)])
    assert decoded[-1] == EPOCH
    assert sum(frame[0] == guest.INVALID for frame in decoded) <= 1
