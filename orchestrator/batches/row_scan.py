"""Scans a row file that a crash may have left incomplete. Finds the ids of the rows, the end of the complete rows,
and whether the file is a row file of the batch.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from toolcrew.contract.errors import ConfigError
from toolcrew.orchestrator.batches.rows import MAX_ROW_BYTES, Row, parse_row

_BEGIN = b'{"id": "'
"""Start of every row that toolcrew writes. The start distinguishes an incomplete row from the end of another text
file.
"""


RowCheck = Callable[[str, str], bool]
"""Returns whether a row with that id and run belongs to the batch of the file."""


@dataclass
class Scan:
    """Result of a scan.

    `end`: end of the last complete row. `lacks_newline`: the last row is complete but has no newline. `has_holes`:
    the file has bytes between rows that were never written, because the machine crashed.
    """

    ids: set[str] = field(default_factory=set)
    end: int = 0
    dropped_bytes: int = 0
    lacks_newline: bool = False
    has_holes: bool = False


def scan_rows(descriptor: int, path: Path, belongs: RowCheck) -> Scan:
    """Scan the file from its start. Raises ConfigError for content that a crash of this program cannot have left. The
    file is not changed.
    """
    scan = Scan()
    with os.fdopen(os.dup(descriptor), "rb") as source:
        source.seek(0)
        number, at = 0, 0
        while line := source.readline(MAX_ROW_BYTES + 1):
            number += 1
            at += len(line)
            if line.endswith(b"\n"):
                _take_line(scan, line, path, number, belongs)
                scan.end = at
            elif len(line) > MAX_ROW_BYTES:
                raise _build_row_error(path, number, f"the line is longer than {MAX_ROW_BYTES} bytes")
            else:
                _take_tail(scan, line, path, number, belongs)
    return scan


def read_rows(source: BinaryIO, end: int) -> Iterator[tuple[str, bytes]]:
    """Yield the id and line of every row before `end`. `source`: a file that has been scanned. Blank lines and bytes
    that were never written are skipped.
    """
    source.seek(0)
    while source.tell() < end and (line := source.readline()):
        if line.strip() and b"\0" not in line:
            yield parse_row(line).custom_id, line


def _take_line(scan: Scan, line: bytes, path: Path, number: int, belongs: RowCheck) -> None:
    """Scan one line that ends with a newline."""
    if b"\0" in line and _is_hole(scan, line):
        scan.has_holes = True
        scan.dropped_bytes += len(line)
    elif line.strip():
        _take_row(scan, _parse(line, path, number), path, number, belongs)


def _is_hole(scan: Scan, line: bytes) -> bool:
    """Return whether the line is a hole: bytes that had not reached the disk before a crash.

    JSON never contains NUL, but disks return NUL for such bytes. Without a row before the hole, the file may be any
    other file.
    """
    return bool(scan.ids) or not line.strip(b"\0\n")


def _take_tail(scan: Scan, tail: bytes, path: Path, number: int, belongs: RowCheck) -> None:
    """Scan the end of a file without a newline: a complete row or an incomplete row."""
    if _is_json(tail):
        _take_row(scan, _parse(tail, path, number), path, number, belongs)
        scan.end += len(tail)
        scan.lacks_newline = True
        return
    start = tail.rstrip(b"\0")
    if not start.startswith(_BEGIN[: len(start)]) and tail.strip() and not (b"\0" in tail and _is_hole(scan, tail)):
        raise _build_row_error(path, number, "the line does not start like a row")
    scan.dropped_bytes += len(tail)


def _is_json(tail: bytes) -> bool:
    """Return whether the text is complete JSON."""
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True


def _take_row(scan: Scan, row: Row, path: Path, number: int, belongs: RowCheck) -> None:
    """Add the id of a row. Raises ConfigError for a row of another batch and for a second row of an item."""
    if not belongs(row.custom_id, row.id):
        raise ConfigError(
            f"{path} contains a row of another batch (line {number}, '{row.custom_id[:100]}'): use a file of this "
            "batch, or a new file"
        )
    if row.custom_id in scan.ids:
        raise ConfigError(
            f"{path} contains two rows of '{row.custom_id[:100]}', the second in line {number}: remove one of them"
        )
    scan.ids.add(row.custom_id)


def _parse(line: bytes, path: Path, number: int) -> Row:
    """Return the row of a line. Raises ConfigError."""
    try:
        return parse_row(line)
    except ValueError as error:
        raise _build_row_error(path, number, str(error)) from None


def _build_row_error(path: Path, number: int, reason: str) -> ConfigError:
    """Return the error for a line that is not a row."""
    return ConfigError(
        f"line {number} of {path} is not a row of a batch ({reason[:300]}). The file was not changed: use another "
        "file, or remove the line"
    )
