"""Events of running calls as bytes: any text is restored, sizes are bounded, and invalid data is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.call_events import (
    MAX_EVENT_BYTES,
    MAX_PIECE_BYTES,
    MODEL,
    decode_answer,
    decode_event,
    encode_answer,
    encode_event,
    encode_output,
)
from contract.errors import EnvelopeRefused


@given(st.text(max_size=200), st.integers(1, 400))
def test_output_of_any_kind_comes_back_from_pieces_that_are_small_enough(text: str, times: int) -> None:
    pieces = encode_output("stdout", text * times)
    assert all(len(data) <= MAX_PIECE_BYTES for _, data in pieces)
    events = [decode_event(data) for _, data in pieces]
    assert "".join(str(event.payload["text"]) for event in events) == text * times
    assert [len(str(event.payload["text"])) for event in events] == [characters for characters, _ in pieces]


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_an_event_or_are_refused(data: bytes) -> None:
    for read in (decode_event, decode_answer):
        try:
            read(data)
        except EnvelopeRefused:
            continue


def test_what_is_too_large_is_neither_sent_nor_read() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        encode_event(MODEL, {"text": "x" * MAX_EVENT_BYTES})
    with pytest.raises(ValueError, match="the limit is"):
        encode_answer({"text": "x" * 1024 * 1024})
    with pytest.raises(EnvelopeRefused):
        decode_event(json.dumps({"kind": "output", "payload": {"text": "x" * MAX_EVENT_BYTES}}).encode())
