"""Unpacking bodies within bounds, and reading them as text: charsets, JSON, media types."""

import contextlib
import gzip
import json
import time
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.workers.web.bodies import PIECE_BYTES, BodyDecoder, Inflater
from toolcrew.workers.web.charsets import decode_body, known_charset
from toolcrew.workers.web.documents import lay_out_json
from toolcrew.workers.web.limits import FetchLimits
from toolcrew.workers.web.media_types import declared_charset, media_type, reads_as_text

LIMITS = FetchLimits(decoded_bytes=300_000, ratio=100, ratio_floor_bytes=64 * 1024)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def unpack(encoding: str, pieces: Iterable[bytes], limits: FetchLimits = LIMITS) -> bytes:
    decoder = BodyDecoder(encoding, limits)
    unpacked = b"".join(part for piece in pieces for part in decoder.feed(piece))
    decoder.finish()
    return unpacked


def refusal(encoding: str, pieces: Iterable[bytes], limits: FetchLimits = LIMITS) -> ToolFailure:
    with pytest.raises(ToolFailure) as failed:
        unpack(encoding, pieces, limits)
    return failed.value


PACKERS: dict[str, Any] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "": bytes,
}


@given(st.sampled_from([*PACKERS.items(), ("deflate", raw_deflate)]), st.binary(max_size=2000), st.integers(1, 50))
def test_compressed_body_is_unpacked_from_any_chunks(packer: tuple[str, Any], data: bytes, size: int) -> None:
    encoding, pack = packer
    packed = pack(data)
    assert unpack(encoding, [packed[at : at + size] for at in range(0, len(packed), size)]) == data


@pytest.mark.parametrize("beyond", [0, 1, 100, 258, 300])
def test_output_beyond_the_last_full_piece_is_not_lost(beyond: int) -> None:
    data = b"a" * (PIECE_BYTES + beyond)
    assert unpack("deflate", [raw_deflate(data)], FetchLimits(ratio=10_000)) == data


@given(st.sampled_from(["gzip", "deflate"]), st.binary(max_size=500))
def test_any_compressed_bytes_are_unpacked_or_refused(encoding: str, data: bytes) -> None:
    with contextlib.suppress(ToolFailure):
        unpack(encoding, [data])


def test_gzip_members_are_joined_and_padding_is_dropped() -> None:
    assert unpack("gzip", [gzip.compress(b"a") + gzip.compress(b"b") + b"\0\0"]) == b"ab"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_decompression_bomb_is_stopped_inside_the_decoder(encoding: str) -> None:
    bomb = PACKERS[encoding](bytes(12_000_000))
    decoder = BodyDecoder(encoding, FetchLimits())
    with pytest.raises(ToolFailure) as failed:
        list(decoder.feed(bomb))
    assert failed.value.code is ErrorCode.FILE_TOO_LARGE
    assert "100 times its size" in failed.value.message
    assert decoder.unpacked < len(bomb) * 100 + 1024 * 1024


def test_output_pieces_are_bounded_and_empty_members_are_fast() -> None:
    assert max(map(len, Inflater("gzip").feed(gzip.compress(bytes(8_000_000))))) == PIECE_BYTES
    empty = Inflater("gzip")
    began = time.process_time()
    assert b"".join(empty.feed(gzip.compress(b"") * 50_000)) == b""
    assert empty.is_whole
    assert time.process_time() - began < 2, "the rest of the input is copied for every member"


def test_compression_ratio_is_checked_while_data_arrives() -> None:
    good = bytes(range(256)) * 16
    assert (
        refusal("gzip", [gzip.compress(good, 0), gzip.compress(bytes(2_000_000))], FetchLimits()).code
        is ErrorCode.FILE_TOO_LARGE
    )


@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_body_above_the_size_limit_is_refused(encoding: str) -> None:
    noise = b"".join(b"%d " % (number * number) for number in range(60_000))
    assert "300000 bytes" in refusal(encoding, [PACKERS[encoding](noise)]).message


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "identity, gzip", "x" * 1000])
def test_unrequested_content_encoding_is_refused(encoding: str) -> None:
    assert refusal(encoding, []).code is ErrorCode.NETWORK_ERROR


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_truncated_compressed_body_is_an_error(encoding: str) -> None:
    packed = PACKERS[encoding](b"some text " * 100)
    for length in (1, 2, 5, len(packed) - 1):
        assert "ended in the middle" in refusal(encoding, [packed[:length]]).message
    assert unpack(encoding, []) == b""


# Charsets


@pytest.mark.parametrize(
    ("body", "declared", "charset", "source"),
    [
        ("h\u00e9".encode(), "utf-8", "utf-8", "header"),
        ("h\u00e9".encode("latin-1"), "ISO-8859-1", "cp1252", "header"),
        ("\u4e2d".encode("gb18030"), "gb2312", "gb18030", "header"),
        ("\ufeffh\u00e9".encode(), None, "utf-8", "mark"),
        (b"\xff\xfe" + "h\u00e9".encode("utf-16-le"), None, "utf-16-le", "mark"),
        ('<meta charset="windows-1251">\u0434\u0430'.encode("cp1251"), None, "cp1251", "meta"),
        (
            '<meta http-equiv=x content="text/html; charset=koi8-r">\u0434\u0430'.encode("koi8-r"),
            None,
            "koi8-r",
            "meta",
        ),
        ('<meta charset="windows-1251">\u0434\u0430'.encode(), "utf-8", "utf-8", "header"),
        ('<meta charset="utf-16">\u00e9'.encode(), None, "utf-8", "meta"),
        ("h\u00e9".encode(), "no-such-charset", "utf-8", "guess"),
        ("h\u00e9".encode(), None, "utf-8", "guess"),
    ],
)
def test_charset_sources_have_an_order_of_precedence(
    body: bytes, declared: str | None, charset: str, source: str
) -> None:
    decoded = decode_body(body, declared, is_html=True)
    assert (decoded.charset, decoded.source, decoded.replaced) == (charset, source, 0)
    assert decoded.text[-1] in "\u00e9\u4e2d\u0430"


def test_undeclared_charset_is_guessed() -> None:
    text = (
        "\u0412 \u043d\u0430\u0447\u0430\u043b\u0435 \u0431\u044b\u043b\u043e \u0441\u043b\u043e\u0432\u043e, \u0438 "
        "\u0441\u043b\u043e\u0432\u043e \u0431\u044b\u043b\u043e \u0443 \u043d\u0438\u0445. "
    ) * 20
    decoded = decode_body(text.encode("cp1251"), None, is_html=False)
    assert (decoded.text, decoded.source) == (text, "guess")


@pytest.mark.parametrize(
    "label",
    [
        "rot13", "zlib", "base64", "idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7", "mbcs",
        "x" * 200, "\0",
    ],
)  # fmt: skip
def test_python_codecs_that_are_no_web_charsets_are_refused(label: str) -> None:
    assert known_charset(label) is None


@given(st.binary(max_size=300), st.text(max_size=20) | st.none())
def test_any_body_is_decoded(body: bytes, declared: str | None) -> None:
    assert decode_body(body, declared, is_html=True).text is not None


# JSON


def json_values() -> st.SearchStrategy[Any]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=10)
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=20,
    )


@given(json_values(), st.sampled_from([None, 2]), st.booleans())
def test_lay_out_json_formats_like_json_dumps(value: Any, indent: int | None, ascii_only: bool) -> None:
    given_text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert lay_out_json(given_text) == json.dumps(value, indent=2, ensure_ascii=ascii_only)


def test_lay_out_json_changes_no_token() -> None:
    assert lay_out_json('{"a":1.50,"a":1e5,"b":"\\u00e9\\/"}') == '{\n  "a": 1.50,\n  "a": 1e5,\n  "b": "\\u00e9\\/"\n}'


@pytest.mark.parametrize(
    "text", ["", "{", "{'a': 1}", "[1,]", "[" * 5000 + "]" * 5000, "1" * 5000, '"' + "a" * 1024 * 1024 + '"']
)
def test_invalid_or_oversized_json_is_not_formatted(text: str) -> None:
    assert lay_out_json(text) is None


def test_deeply_nested_json_with_many_items_is_not_formatted() -> None:
    depth = 400
    assert lay_out_json("[" * depth + ",".join("1" * 100_000) + "]" * depth) is None


# Media types


@pytest.mark.parametrize(
    ("header", "name", "charset", "reads"),
    [
        ("text/html; charset=UTF-8", "text/html", "UTF-8", True),
        ('Text/HTML;charset="a b"', "text/html", "a b", True),
        ("", "text/html", None, True),
        ("application/ld+json", "application/ld+json", None, True),
        ("application/pdf", "application/pdf", None, False),
        ("image/svg+xml", "image/svg+xml", None, True),
        ("image/png\n[injected]", "application/octet-stream", None, False),
        ("application/x-ndjson", "application/x-ndjson", None, True),
        ("nonsense", "application/octet-stream", None, False),
    ],
)
def test_content_type_header_is_parsed(header: str, name: str, charset: str | None, reads: bool) -> None:
    assert (media_type(header), declared_charset(header), reads_as_text(media_type(header))) == (name, charset, reads)


@given(st.text(max_size=60) | st.text(alphabet="text/html;charset*=0'\"%\\ -utf8,", max_size=60))
def test_any_content_type_header_is_parsed(header: str) -> None:
    assert media_type(header).isascii()
    assert media_type(header).isprintable()
    declared_charset(f"text/html; {header}")
