"""Edits of random files, in this process: the result equals Python's own replace, and no other byte changes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT
from tests.support.guest.search_harness import LocalContext

assert GUEST_PARENT

from guest.failures import RequestFailure  # noqa: E402
from guest.files.edit_matching import Needle, fit_line_ends  # noqa: E402
from guest.files.edits import edit_text  # noqa: E402
from guest.files.encodings import find_form  # noqa: E402
from guest.files.requests import EditTextRequest  # noqa: E402
from guest.paths import GuestPaths  # noqa: E402


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edits")
    (path / "w").mkdir()
    (path / "o").mkdir()
    return path


def edit(root: Path, data: bytes, edits: list[tuple[str, str, bool]]) -> bytes | str:
    """Return the file after the edit, or the code of the failure. After a failure, the file is checked to be
    unchanged.
    """
    file = root / "w" / "f"
    file.write_bytes(data)
    names = ("old_string", "new_string", "replace_all")
    paths = GuestPaths((os.fsencode(root / "w"),), os.fsencode(root / "o"))
    body = json.dumps([dict(zip(names, parts, strict=True)) for parts in edits]).encode()
    context: Any = LocalContext(paths, "file", body)
    try:
        edit_text(EditTextRequest({"path": "f", "max_bytes": 8192, "timeout_s": 5.0}), context)
    except RequestFailure as failure:
        assert file.read_bytes() == data
        return failure.code
    finally:
        os.close(context.body)
        assert [path.name for path in (root / "w").iterdir()] == ["f"]
    assert len(context.sent) <= 8192
    return file.read_bytes()


def codec_of(data: bytes) -> str:
    """Return the encoding that an edit detects for such a file, if its characters can start at any byte."""
    codec = find_form(data).codec
    assume(codec in ("utf-8", "latin-1", "cp1252"))
    return codec


def fits(text: str, codec: str) -> bool:
    return text.encode(codec, "replace").decode(codec) == text


slow_property = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
# Few different bytes, so that things match; some that are no UTF-8, none that make a file binary.
some_bytes = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b"\n", b"\xc3\xa9", b"\xff", b"\xe6\x97\xa5", b" ", b"\t"]), max_size=30
).map(b"".join)
some_text = st.text("ab\né日 \t", max_size=4)


@slow_property
@given(parts=st.lists(some_bytes, min_size=2, max_size=5), old=some_text.filter(bool), new=some_text)
def test_replace_all_equals_the_python_replace(root: Path, parts: list[bytes], old: str, new: str) -> None:
    codec = codec_of(b"".join(parts))
    assume(old != new and fits(old, codec) and fits(new, codec))
    data = old.encode(codec).join(parts)
    assume(codec_of(data) == codec)
    assert edit(root, data, [(old, new, True)]) == data.replace(old.encode(codec), new.encode(codec))


@slow_property
@given(before=some_bytes, old=some_text, new=some_text, after=some_bytes)
def test_bytes_outside_the_single_match_do_not_change(
    root: Path, before: bytes, old: str, new: str, after: bytes
) -> None:
    codec = codec_of(before + after)
    assume(old != new and fits(old, codec) and fits(new, codec))
    data = before + f"<{old}>".encode(codec) + after
    assume(codec_of(data) == codec)
    assert edit(root, data, [(f"<{old}>", f"<{new}>", False)]) == before + f"<{new}>".encode(codec) + after


@slow_property
@given(data=some_bytes, edits=st.lists(st.tuples(some_text, some_text, st.booleans()), min_size=1, max_size=4))
def test_a_list_of_edits_is_applied_completely_or_not_at_all(
    root: Path, data: bytes, edits: list[tuple[str, str, bool]]
) -> None:
    assume(all((old + new).isascii() for old, new, _ in edits))
    expected = data
    for old, new, replace_all in edits:
        occurrences = len([at for at in range(len(expected)) if expected.startswith(old.encode(), at)])
        if (not old and expected) or old == new or (old and not occurrences) or (occurrences > 1 and not replace_all):
            assert isinstance(edit(root, data, edits), str)
            return
        expected = expected.replace(old.encode(), new.encode()) if old else new.encode()
    result = edit(root, data, edits)
    assert result == (expected if expected != data else "NO_CHANGE")


ended_lines = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"", b"\r"]), st.sampled_from([b"\n", b"\r\n"])), max_size=12
)


@slow_property
@given(lines=ended_lines, old=st.text("ab\n", min_size=1, max_size=5), new=st.text("xy\n", max_size=4))
def test_lf_in_a_search_matches_crlf(lines: list[tuple[bytes, bytes]], old: str, new: str) -> None:
    assume(all(line != b"\r" for line, _ in lines))
    body = b"".join(line + end for line, end in lines)
    spans = list(Needle(body, old.encode(), "utf-8").find_all())
    plain = body.replace(b"\r\n", b"\n")
    assert len(spans) == plain.count(old.encode())
    edited = bytearray()
    at = 0
    for start, end in spans:
        assert body[start:end].replace(b"\r\n", b"\n") == old.encode()
        assert start == 0 or not (body[start - 1 : start] == b"\r" and body[start : start + 1] == b"\n"), (
            "a line end is not split"
        )
        edited += body[at:start] + fit_line_ends(new.encode(), body, (start, end))
        at = end
    edited += body[at:]
    assert bytes(edited).replace(b"\r\n", b"\n") == plain.replace(old.encode(), new.encode())


@slow_property
@given(
    text=st.text("aソ表\\能n日|", max_size=12),
    old=st.sampled_from(["\\", "n", "|", "ソ", "a"]),
    codec=st.sampled_from(["cp932", "gb18030", "cp950"]),
)
def test_a_match_never_starts_within_a_multibyte_character(text: str, old: str, codec: str) -> None:
    assume(codec != "cp950" or all(character in "aソ表\\能n日|" for character in text))
    try:
        body = text.encode(codec)
    except UnicodeEncodeError:
        return
    spans = list(Needle(body, old.encode(codec), codec).find_all())
    assert [len(body[:start].decode(codec)) for start, _ in spans] == [
        at for at, character in enumerate(text) if character == old
    ]
