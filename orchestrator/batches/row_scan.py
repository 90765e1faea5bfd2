"""Reads a file of rows as a crash may have left it: which ids it has, where its whole rows end, and whether it is ours
at all.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from contract.errors import ConfigError
from orchestrator.batches.rows import MAX_ROW_BYTES, Row, parse_row

_BEGIN = b'{"id": "'
"""Of every row that we write: how a torn one is told from the end of somebody's text."""


class Belongs(Protocol):
    """Whether a row of that id, of that run, is of the batch that the file is opened for."""

    def __call__(self, custom_id: str, run: str, /) -> bool: ...


@dataclass
class Scan:
    """`end`: of the last whole row. `lacks_newline`: that row is whole but for its end of line. `has_holes`: between
    rows lies what a crash of the machine left, bytes that were never written."""

    ids: set[str] = field(default_factory=set)
    end: int = 0
    dropped_bytes: int = 0
    lacks_newline: bool = False
    has_holes: bool = False


def scan_rows(descriptor: int, path: Path, belongs: Belongs) -> Scan:
    """Reads from the beginning. Raises ConfigError for what no crash of ours can have left: the file is then not
    touched.
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
                raise _no_row(path, number, f"it is longer than {MAX_ROW_BYTES} bytes")
            else:
                _take_tail(scan, line, path, number, belongs)
    return scan


def read_rows(source: BinaryIO, end: int) -> Iterator[tuple[str, bytes]]:
    """Id and line of every row before `end`, of a file that has been scanned; blank lines and holes are left out."""
    source.seek(0)
    while source.tell() < end and (line := source.readline()):
        if line.strip() and b"\0" not in line:
            yield parse_row(line).custom_id, line


def _take_line(scan: Scan, line: bytes, path: Path, number: int, belongs: Belongs) -> None:
    if b"\0" in line and _is_hole(scan, line):
        scan.has_holes = True
        scan.dropped_bytes += len(line)
    elif line.strip():
        _take_row(scan, _parse(line, path, number), path, number, belongs)


def _is_hole(scan: Scan, line: bytes) -> bool:
    """JSON never holds NUL: it is what a disk gives for blocks whose content had not reached it. Behind no row of ours
    it may be anything else.
    """
    return bool(scan.ids) or not line.strip(b"\0\n")


def _take_tail(scan: Scan, tail: bytes, path: Path, number: int, belongs: Belongs) -> None:
    """The end of a file without its newline: a row that is whole, or one that was begun."""
    if _is_json(tail):
        _take_row(scan, _parse(tail, path, number), path, number, belongs)
        scan.end += len(tail)
        scan.lacks_newline = True
        return
    begun = tail.rstrip(b"\0")
    if not begun.startswith(_BEGIN[: len(begun)]) and tail.strip() and not (b"\0" in tail and _is_hole(scan, tail)):
        raise _no_row(path, number, "it begins as none does")
    scan.dropped_bytes += len(tail)


def _is_json(tail: bytes) -> bool:
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True


def _take_row(scan: Scan, row: Row, path: Path, number: int, belongs: Belongs) -> None:
    if not belongs(row.custom_id, row.id):
        raise ConfigError(
            f"{path} holds a row of another batch (line {number}, '{row.custom_id[:100]}'): give a file of this one, "
            "or a new one"
        )
    if row.custom_id in scan.ids:
        raise ConfigError(
            f"{path} holds two rows of '{row.custom_id[:100]}', the second in line {number}: remove one of them"
        )
    scan.ids.add(row.custom_id)


def _parse(line: bytes, path: Path, number: int) -> Row:
    try:
        return parse_row(line)
    except ValueError as error:
        raise _no_row(path, number, str(error)) from None


def _no_row(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(
        f"line {number} of {path} is no row of a batch ({why[:300]}): nothing was changed in it; give another file, or "
        "take the line out"
    )
