"""Pages of lines, compared with the plain definition, for any division of the text into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT
from guest.files.line_page import LinePage  # noqa: E402
from guest.files.requests import LINE_CHARS  # noqa: E402

UNLIMITED = 10**9


def page_of(
    text: str, piece: int, offset: int = 1, limit: int = UNLIMITED, column: int = 1, max_bytes: int = UNLIMITED
) -> LinePage:
    page = LinePage(offset, limit, column, max_bytes)
    for at in range(0, len(text), piece):
        page.take(text[at : at + piece])
    page.finish()
    return page


def lines_of(text: str) -> list[str]:
    """Return the lines without their ends. CR is a line end only before LF."""
    lines = text.split("\n")
    complete_lines = [line.removesuffix("\r") for line in lines[:-1]]
    return complete_lines + ([lines[-1]] if lines[-1] else [])


texts = st.lists(st.sampled_from(["a", "é", "中中", "😀", "\n", "\r\n", "\r", "\0"]), max_size=40).map("".join)


@given(
    text=texts, piece=st.integers(1, 9), offset=st.integers(1, 12), limit=st.integers(1, 9), column=st.integers(1, 4)
)
def test_a_page_does_not_depend_on_the_size_of_the_pieces(
    text: str, piece: int, offset: int, limit: int, column: int
) -> None:
    page = page_of(text, piece, offset, limit, column)
    lines = lines_of(text)
    expected = lines[offset - 1 : offset - 1 + limit]
    assert page.shown == ([expected[0][column - 1 :], *expected[1:]] if expected else [])
    assert page.lines == len(lines)
    assert page.first_length == (len(expected[0]) if expected else 0)
    assert page.has_final_newline == (not text or text.endswith("\n"))
    assert (page.newlines, page.crlf, page.has_cr) == (text.count("\n"), text.count("\r\n"), "\r" in text)
    assert not page.is_out_of_room


@given(
    sizes=st.lists(st.integers(0, 3 * LINE_CHARS), max_size=8),
    piece=st.integers(100, 4500),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
def test_every_character_of_a_long_line_is_reachable_by_column(sizes: list[int], piece: int, line_end: str) -> None:
    lines = ["".join(chr(0x4E00 + at % 5000) for at in range(size)) for size in sizes]
    text = "".join(line + line_end for line in lines)
    for number, line in enumerate(lines, start=1):
        shown, column = "", 1
        while True:
            page = page_of(text, piece, number, 1, column)
            shown += page.shown[0]
            if not page.cuts:
                break
            ((cut_line, shown_to, length),) = page.cuts
            assert (cut_line, shown_to, length) == (number, len(shown), len(line))
            column = shown_to + 1
        assert shown == line


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=30),
    max_bytes=st.integers(300, 1000),
    piece=st.integers(1, 300),
)
def test_consecutive_pages_show_every_line_once_within_the_byte_limit(
    sizes: list[int], max_bytes: int, piece: int
) -> None:
    lines = ["é" * (size // 2) + "x" for size in sizes]
    text = "".join(line + "\n" for line in lines)
    pages: list[str] = []
    while len(pages) < len(lines):
        page = page_of(text, piece, len(pages) + 1, max_bytes=max_bytes)
        shown = "".join(f"{number}\t{line}\n" for number, line in enumerate(page.shown, start=len(pages) + 1))
        assert page.shown
        assert len(shown.encode()) <= max_bytes
        assert page.is_out_of_room == (len(pages) + len(page.shown) < len(lines))
        pages += page.shown
    assert pages == lines


def test_only_the_shown_part_of_a_long_line_is_stored() -> None:
    page = LinePage(1, 10, 1, UNLIMITED)
    for _ in range(100):
        page.take("x" * 100_000)
    assert page.lines == 1
    page.finish()
    assert (page.shown, page.cuts) == (["x" * LINE_CHARS], [(1, LINE_CHARS, 10_000_000)])
    page = page_of("x" * LINE_CHARS + "\r\n", 1000)
    assert (page.shown, page.cuts) == (["x" * LINE_CHARS], []), "a carriage return cuts no line"
    page = page_of(("x" * (LINE_CHARS + 1) + "\n") * 150, 50_000)
    assert (len(page.cuts), len(page.shown), page.is_out_of_room, page.lines) == (100, 100, True, 150)
