"""Parses the output of ripgrep: counts per file, and positions of matching lines."""

from __future__ import annotations

from guest.search.grep_lines import MatchPosition

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SEPARATOR = b"::"


def read_names(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Parse `path NUL path NUL ...`, split at NUL. Each file has the count 1."""
    return ((record, 1) for record in records)


def read_counts(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Parse `path NUL count LF path NUL ...`, split at NUL."""
    path = b""
    for record in records:
        if path:
            count, _, following = record.partition(b"\n")
            yield path, int(count)
            path = following
        else:
            path = record


def count_marks(records: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Parse `path NUL mark LF path NUL ...`, split at LF, and yield each file with its number of marks.

    All marks of a file must follow one another.
    """
    current, count, name_start = b"", 0, b""
    for record in records:
        path, nul, _ = record.partition(b"\0")
        if not nul:
            # The file name contains a line end.
            name_start += record + b"\n"
            continue
        path, name_start = name_start + path, b""
        if path != current and count:
            yield current, count
            count = 0
        current, count = path, count + 1
    if count:
        yield current, count


def group_positions(records: Iterator[bytes]) -> Iterator[tuple[bytes, Iterator[MatchPosition]]]:
    """Parse `name NUL line::column::offset::text LF ...`, split at LF, and yield each name with its positions.

    If the caller does not read all positions of a name, the rest is skipped. ripgrep omits the column when it is
    unknown, for example for an empty match at the end of the text.
    """
    current = next(records, None)

    def positions_of(name: bytes) -> Iterator[MatchPosition]:
        nonlocal current
        while current is not None and current.startswith(name + b"\0"):
            *numbers, _ = current[len(name) + 1 :].split(SEPARATOR)
            yield MatchPosition(int(numbers[0]), int(numbers[1]) if len(numbers) > 2 else 1, int(numbers[-1]))
            current = next(records, None)

    while current is not None:
        name = current.partition(b"\0")[0]
        positions = positions_of(name)
        yield name, positions
        for _ in positions:
            pass
