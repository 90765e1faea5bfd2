"""Detection of a file's encoding: byte order marks, UTF-8 at any boundary, wide encodings, guesses, and binary files."""

import codecs
import random
import zlib
from encodings.aliases import aliases

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT
from guest.failures import RequestFailure  # noqa: E402
from guest.files.encodings import (  # noqa: E402
    BINARY_SAMPLE,
    GUESS_BYTES,
    check_codec,
    find_form,
    find_wrong_utf8,
)
from guest.files.file_types import find_type  # noqa: E402

CHINESE = "中文测试文件,包含一些常见的汉字。\n# 计算总和\n"
TRADITIONAL = "你好世界,這是一個測試檔案。\n# 計算總和並且回傳\n"
JAPANESE = "これは日本語のテストです。\n# 合計を計算する\n"
KOREAN = "안녕하세요 이것은 한국어 시험 파일입니다.\n"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big") + bytes(20)


@pytest.mark.parametrize(
    ("mark", "codec"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
        (b"\x84\x31\x95\x33", "gb18030"),
    ],
)
@given(text=st.text(max_size=20))
def test_a_byte_order_mark_determines_the_encoding(mark: bytes, codec: str, text: str) -> None:
    assume("\0" not in text)
    assume(not text.startswith("\ufeff"))
    form = find_form(mark + text.encode(codec))
    assert (form.codec, form.bom, form.is_guess) == (codec, mark, False)
    assert form.decode(mark + text.encode(codec)) == text
    assert form.bom + form.encode(text) == mark + text.encode(codec)


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_valid_utf_8_is_detected(text: str) -> None:
    data = text.encode()
    assume(not data.startswith((codecs.BOM_UTF8, b"GIF8", b"%PDF")))
    form = find_form(data)
    assert (form.codec, form.is_guess, form.decode(data)) == ("utf-8", False, text)


@pytest.mark.parametrize("character", ["é", "中", "😀"])
def test_a_character_cut_at_the_end_of_a_sample_is_valid(character: str) -> None:
    data = ("x" * 10 + character).encode()
    for end in range(10, len(data) + 1):
        assert find_form(data[:end], is_whole=False).codec == "utf-8"
        assert find_wrong_utf8(data[:end], is_whole=True) == (10 if 10 < end < len(data) else None)


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_encodings_without_a_mark_must_be_requested(codec: str) -> None:
    data = "hello\nworld\n".encode(codec)
    with pytest.raises(RequestFailure, match="not text"):
        find_form(data)
    assert find_form(data, codec).decode(data) == "hello\nworld\n"
    assert find_form(b"\0\xff", "latin-1").decode(b"\0\xff") == "\0ÿ"
    assert find_form("é".encode(), "cp1252").decode("é".encode()) == "Ã©"
    assert find_form(b"\xe9", "utf-8").decode(b"\xe9") == "\ufffd"


@pytest.mark.parametrize(
    ("text", "codec", "guess"),
    [
        (CHINESE, "gb18030", "gb18030"),
        ("你好\n", "gbk", "gb18030"),
        ("int main() { return 0; } // 返回\n", "gb2312", "gb18030"),
        ("x" * 100_000 + "\n" + CHINESE, "gb18030", "gb18030"),
        (TRADITIONAL, "big5", "cp950"),
        (JAPANESE, "shift_jis", "cp932"),
        (JAPANESE, "euc_jp", "euc_jp"),
        (KOREAN, "euc_kr", "cp949"),
        ("cafés préféré, Ärger, größer, Übergröße, España, año, não é açúcar\n", "latin-1", "latin-1"),
        ("café\n", "latin-1", "latin-1"),
        ("Ärger\n", "latin-1", "latin-1"),
        ("“quoted” – it’s 5 €\n", "cp1252", "cp1252"),
    ],
)
def test_other_encodings_are_guessed_from_their_content(text: str, codec: str, guess: str) -> None:
    form = find_form(text.encode(codec))
    assert (form.codec, form.is_guess) == (guess, True)
    assert form.decode(text.encode(codec)) == text
    damaged = CHINESE.encode() + b"\xff\xfe\n" + CHINESE.encode()
    assert (find_form(damaged).codec, find_form(damaged).is_guess) == ("utf-8", True), (
        "a few wrong bytes change nothing"
    )
    assert find_form(damaged).decode(damaged) == CHINESE + "\ufffd\ufffd\n" + CHINESE


def test_a_guess_uses_invalid_utf_8_at_any_offset() -> None:
    assert find_form(b"x" * BINARY_SAMPLE + b"\0").codec == "utf-8", "a NUL there is left to the tool that shows it"
    for before in (GUESS_BYTES - 1, GUESS_BYTES, 3 * GUESS_BYTES + 1):
        assert find_form(b"x" * before + CHINESE.encode("gb18030")).codec == "gb18030"


@pytest.mark.parametrize(
    "data",
    [
        b"\x7fELF\x02\x01\x01" + bytes(50),
        b"\0\x01\x02\x03",
        bytes(10),
        b"a\0b",
        b"text" * 2000 + b"\0",
        PNG,
        b"\x1f\x8b\x08" + zlib.compress(b"x" * 100)[2:],
        random.Random(1).randbytes(10_000),
        random.Random(2).randbytes(200).replace(b"\0", b"\x01"),
        b"\xff\xfe" + b"a\0\0\0b\0",
    ],
    ids=[
        "elf",
        "counting",
        "zeros",
        "odd",
        "late-nul",
        "png",
        "gzip",
        "random",
        "random-without-nul",
        "marked-with-nul",
    ],
)
def test_a_binary_file_is_refused_with_its_size(data: bytes) -> None:
    with pytest.raises(RequestFailure) as caught:
        find_form(data)
    assert (caught.value.code, caught.value.details) == ("BINARY_FILE", {"size": len(data)})


@pytest.mark.parametrize(
    ("data", "requested", "codec", "bom"),
    [
        (b"", "utf-8-sig", "utf-8", codecs.BOM_UTF8),
        (b"old", "utf-8-sig", "utf-8", b""),
        (codecs.BOM_UTF8 + b"old", "utf-8", "utf-8", codecs.BOM_UTF8),
        (b"", "UTF-16", "utf-16-le", codecs.BOM_UTF16_LE),
        (codecs.BOM_UTF16_BE + b"\0a", "utf-16", "utf-16-be", codecs.BOM_UTF16_BE),
        (b"\0a\0b", "utf16", "utf-16-be", b""),
        (b"a\0b\0", "utf_16", "utf-16-le", b""),
        (b"", "utf-16-le", "utf-16-le", b""),
    ],
)
def test_a_codec_with_a_byte_order_mark_is_split_into_codec_and_mark(
    data: bytes, requested: str, codec: str, bom: bytes
) -> None:
    form = find_form(data, requested)
    assert (form.codec, form.bom) == (codec, bom)
    assert form.encode("é") == "é".encode(codec)


@pytest.mark.parametrize(
    "name",
    ["rot13", "hex", "base64", "zlib", "idna", "punycode", "unicode_escape", "nope", "", "../os", "a" * 41, "é", "a b"],
)
def test_an_unknown_or_unsafe_codec_is_refused(name: str) -> None:
    with pytest.raises(RequestFailure, match="there is no text encoding") as caught:
        check_codec(name)
    assert caught.value.code == "INVALID_ARGUMENTS"


def test_every_accepted_codec_reads_and_writes_text() -> None:
    codecs_read = []
    for name in sorted(set(aliases.values())):
        try:
            form = find_form(b"", name)
        except RequestFailure:
            continue
        codecs_read.append(name)
        assert form.decode(form.bom + form.encode("a\n1")) == "a\n1"
        assert isinstance(find_form(b"\xff\x1b$B\n", name).decode(b"\xff\x1b$B\n"), str)
    assert len(codecs_read) > 80


@given(data=st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused_as_binary(data: bytes) -> None:
    try:
        form = find_form(data)
    except RequestFailure as failure:
        if failure.code == "BINARY_FILE":
            return
        raise
    assert form.encode("a\n")
    assert isinstance(form.decode(data), str)


def test_an_image_is_detected_only_by_its_complete_magic_number() -> None:
    for head in (PNG, b"GIF89a", b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBP"):
        file_type = find_type(head)
        assert file_type is not None
        assert file_type.medium == "image"
    for head in (b"", b"RIFF", b"RIFF\0\0\0\0WAVE", b"MZ text", b"BMW", b"PK zip", b"!<arch>", b"%PD", b"ustar"):
        assert find_type(head) is None
