"""What an engine writes, read: counts of files, and the places of their matching lines."""

from __future__ import annotations

from guest.search.grep_lines import Mark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SEPARATOR = b"::"


def read_names(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """`path NUL path NUL ...`, cut at its NULs. A file that is only named counts once."""
    return ((record, 1) for record in records)


def read_counts(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """`path NUL count LF path NUL ...`, cut at its NULs."""
    path = b""
    for record in records:
        if path:
            count, _, following = record.partition(b"\n")
            yield path, int(count)
            path = following
        else:
            path = record


def count_marks(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """`path NUL mark LF path NUL ...`, cut at its LFs, a file's marks one after the other: each file and how many it
    has.
    """
    current, count, torn = b"", 0, b""
    for record in records:
        path, nul, _ = record.partition(b"\0")
        if not nul:
            # The name of the file holds a line end.
            torn += record + b"\n"
            continue
        path, torn = torn + path, b""
        if path != current and count:
            yield current, count
            count = 0
        current, count = path, count + 1
    if count:
        yield current, count


def group_marks(records: Iterator[bytes]) -> Iterator[tuple[bytes, Iterator[Mark]]]:
    """`name NUL line::column::offset::text LF ...`, cut at its LFs: each name and its marks, which are read as far as
    they are wanted.

    ripgrep leaves the column out when it cannot tell it, as of an empty match at the very end.
    """
    current = next(records, None)

    def marks_of(name: bytes) -> Iterator[Mark]:
        nonlocal current
        while current is not None and current.startswith(name + b"\0"):
            *places, _ = current[len(name) + 1 :].split(SEPARATOR)
            yield Mark(int(places[0]), int(places[1]) if len(places) > 2 else 1, int(places[-1]))
            current = next(records, None)

    while current is not None:
        name = current.partition(b"\0")[0]
        marks = marks_of(name)
        yield name, marks
        for _ in marks:
            pass
