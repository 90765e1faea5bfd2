"""Results between the two sides: inline data, data stored outside the envelope, and refused data."""

import json
from typing import Any

import pytest
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.envelope import INLINE_BYTES, decode_result, encode_result, find_result_key, join_result
from toolcrew.contract.errors import EnvelopeRefused


def result(**fields: Any) -> ToolResult:
    return ToolResult(**{"call_id": "c", "name": "x", "success": True, **fields})


class ResultStore:
    """Stores the given values."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def keep(self, data: bytes) -> str:
        self.kept.append(data)
        return f"key-{len(self.kept)}"


@given(st.text(), st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text()))
def test_any_result_is_decoded_unchanged(output: str, metadata: dict[str, Any]) -> None:
    sent = result(output=output, metadata=metadata)
    assert decode_result(json.loads(json.dumps(encode_result(sent)))) == sent


@given(st.integers(0, 3), st.sampled_from(["x", "é", "读", "\U0001f600"]))
def test_result_above_the_inline_limit_is_stored_and_joined(offset: int, character: str) -> None:
    store = ResultStore()
    empty = len(encode_result(result(output=""))["data"][0][0][0].encode())
    count = (INLINE_BYTES - empty) // len(character.encode()) + offset - 1
    sent = result(output=character * count)
    encoded = json.loads(json.dumps(encode_result(sent, store.keep)))
    is_kept = empty + count * len(character.encode()) > INLINE_BYTES
    assert (find_result_key(encoded) is not None) is is_kept
    assert len(json.dumps(encoded, ensure_ascii=False).encode()) < INLINE_BYTES + 1024
    whole = join_result(encoded, store.kept[0]) if is_kept else encoded
    assert decode_result(whole) == sent


@pytest.mark.parametrize(
    "record", [None, b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"call_id": "other", "name": "x", "success": true}']
)
def test_wrong_stored_record_is_refused(record: bytes | None) -> None:
    large = result(output="x" * 200_000)
    encoded = encode_result(large, ResultStore().keep)
    with pytest.raises(EnvelopeRefused):
        decode_result(encoded if record is None else join_result(encoded, record))
    # Without a store, the whole result is inline.
    assert decode_result(encode_result(large)) == large


@pytest.mark.parametrize(
    "data", [[[]], [[[]]], [[[1]]], [[["{}"]]], [[["x"]]], [[[{}]]], [[['{"call_id":"c"}']]]], ids=str
)
def test_result_data_of_another_structure_is_refused(data: Any) -> None:
    with pytest.raises(EnvelopeRefused):
        decode_result({**encode_result(result()), "data": data})


def test_lone_surrogate_in_metadata_is_replaced() -> None:
    decoded = decode_result(encode_result(result(output="fine", metadata={"name": "a\ud800b"})))
    assert (decoded.output, decoded.metadata) == ("fine", {"name": "a?b"})


@pytest.mark.parametrize("maxlen", [None, 46, 160, 100_000])
def test_key_of_a_stored_result_is_not_shown_in_flower(maxlen: int | None) -> None:
    encoded = encode_result(result(output="x" * 200_000), lambda data: "canary")
    assert "canary" not in saferepr(encoded, maxlen)
