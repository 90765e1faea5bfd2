"""The host's codec in cases that the shared corpus does not cover: sizes at their limits, memory and time."""

import time
import tracemalloc

import pytest

from toolcrew.workers.sandboxd.frames import (
    MAX_BODY_UP,
    MAX_DOWN,
    MAX_HEADER,
    MAX_UP,
    Frame,
    FrameDecoder,
    FrameError,
    encode_frame,
)


def test_a_frame_one_byte_above_the_total_limit_is_refused() -> None:
    empty = len(encode_frame({"a": 1}, max_total=MAX_DOWN)) - 4
    body = bytes(MAX_DOWN - empty)
    assert FrameDecoder(MAX_DOWN).feed(encode_frame({"a": 1}, body, max_total=MAX_DOWN)) == [Frame({"a": 1}, body)]
    with pytest.raises(FrameError):
        encode_frame({"a": 1}, body + b"x", max_total=MAX_DOWN)


def test_a_header_one_byte_above_the_limit_is_refused() -> None:
    assert FrameDecoder(MAX_UP).feed(encode_frame({"a": "x" * (MAX_HEADER - 8)}, max_total=MAX_UP))
    with pytest.raises(FrameError, match="header"):
        encode_frame({"a": "x" * (MAX_HEADER - 7)}, max_total=MAX_UP)


def test_a_decoder_refuses_all_input_after_an_error() -> None:
    decoder = FrameDecoder(MAX_UP)
    with pytest.raises(FrameError):
        decoder.feed(bytes(8))
    with pytest.raises(FrameError):
        decoder.feed(encode_frame({}, max_total=MAX_UP))


def test_a_header_that_is_not_valid_json_is_not_encoded() -> None:
    for header in ({"a": float("nan")}, {"a": b"bytes"}, {"a": 10**5000}):
        with pytest.raises(FrameError):
            encode_frame(header, max_total=MAX_UP)


def test_many_small_frames_in_one_piece_take_linear_time() -> None:
    stream = encode_frame({"a": 1}, b"x", max_total=MAX_UP) * 50_000
    started = time.process_time()
    assert len(FrameDecoder(MAX_UP).feed(stream)) == 50_000
    assert time.process_time() - started < 10


def test_a_large_frame_fed_byte_by_byte_uses_bounded_memory() -> None:
    frame = encode_frame({}, bytes(MAX_BODY_UP // 8), max_total=MAX_UP)
    decoder = FrameDecoder(MAX_UP)
    tracemalloc.start()
    try:
        for at in range(len(frame) - 1):
            assert decoder.feed(frame[at : at + 1]) == []
        assert tracemalloc.get_traced_memory()[1] < 4 * len(frame)
    finally:
        tracemalloc.stop()
    assert len(decoder.feed(frame[-1:])) == 1
