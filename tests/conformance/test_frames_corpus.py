"""Both codecs of the guest protocol parse the same bytes in the same way, for every size of the pieces."""

import itertools
import json
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT
from toolcrew.workers.sandboxd import frames as host

assert GUEST_PARENT  # this import makes the guest importable
from guest import frames as guest  # noqa: E402

_CORPUS = json.loads((Path(__file__).parent / "frames" / "corpus.json").read_text())["cases"]
_LIMITS = {"up": host.MAX_UP, "down": host.MAX_DOWN}


class AnyFrame(Protocol):
    header: Any
    body: bytes


class Codec:
    """Either of the two codecs, behind common names."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.error: type[Exception] = module.FrameError
        self._module = module

    def encode(self, header: dict[str, Any], body: bytes, max_total: int) -> bytes:
        return bytes(self._module.encode_frame(header, body, max_total=max_total))

    def decode(self, pieces: list[bytes], max_total: int) -> list[tuple[Any, bytes]]:
        decoder = self._module.FrameDecoder(max_total)
        frames: list[AnyFrame] = [frame for piece in pieces for frame in decoder.feed(piece)]
        return [(frame.header, frame.body) for frame in frames]


CODECS = (Codec("host", host), Codec("guest", guest))
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges)]


def ways_to_cut(case: dict[str, Any]) -> list[list[bytes]]:
    data = bytes.fromhex(case["hex"])
    return [[data], cut(data, case["cuts"]), [data[at : at + 1] for at in range(len(data))]]


@by_codec
@pytest.mark.parametrize("case", _CORPUS, ids=[case["name"] for case in _CORPUS])
def test_every_corpus_case_decodes_as_specified(codec: Codec, case: dict[str, Any]) -> None:
    expected = [(frame["header"], bytes.fromhex(frame["body_hex"])) for frame in case.get("frames", [])]
    for pieces in ways_to_cut(case):
        if case.get("error"):
            with pytest.raises(codec.error):
                codec.decode(pieces, _LIMITS[case["direction"]])
        else:
            assert codec.decode(pieces, _LIMITS[case["direction"]]) == expected


def test_both_codecs_have_the_same_limits() -> None:
    for name in ("MAX_DOWN", "MAX_UP", "MAX_HEADER", "MAX_BODY_UP", "MAX_DEPTH"):
        assert getattr(host, name) == getattr(guest, name)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_headers = st.dictionaries(st.text(), _values, max_size=5)


@by_codec
@given(
    messages=st.lists(st.tuples(_headers, st.binary(max_size=200)), max_size=5),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
)
@settings(deadline=None)
def test_frames_of_either_codec_decode_in_both_for_all_chunk_sizes(
    codec: Codec, messages: list[tuple[dict[str, Any], bytes]], cuts: list[int]
) -> None:
    data = b"".join(codec.encode(header, body, host.MAX_UP) for header, body in messages)
    for reader in CODECS:
        assert reader.decode(cut(data, cuts), host.MAX_UP) == messages


_garbage = st.binary(max_size=300) | st.builds(
    lambda total, header, rest: total.to_bytes(4, "big") + header.to_bytes(4, "big") + rest,
    st.integers(0, 400),
    st.integers(0, 400),
    st.binary(max_size=400) | st.text(alphabet='{}[]":,01eE-NaInfity\\u ', max_size=400).map(str.encode),
)


@given(data=_garbage, cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(deadline=None, max_examples=400)
def test_both_codecs_agree_on_random_bytes(data: bytes, cuts: list[int]) -> None:
    results = []
    for codec in CODECS:
        try:
            results.append(repr(codec.decode(cut(data, cuts), host.MAX_UP)))
        except codec.error:
            results.append("error")
    assert results[0] == results[1]


@given(header=st.text(alphabet='{}[]":,01eE-.NaInfity\\ud8 \n', max_size=60), body=st.binary(max_size=20))
@settings(deadline=None, max_examples=400)
def test_both_codecs_agree_on_unusual_headers(header: str, body: bytes) -> None:
    text = header.encode() or b" "
    data = (4 + len(text) + len(body)).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text + body
    results = []
    for codec in CODECS:
        try:
            results.append(repr(codec.decode([data], host.MAX_UP)))
        except codec.error:
            results.append("error")
    assert results[0] == results[1]
