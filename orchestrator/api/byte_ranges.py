"""Parts of files in HTTP requests: the headers Range, If-Range and Content-Range, and the ETag of a file."""

import re
from dataclasses import dataclass

from toolcrew.orchestrator.http.problems import ApiCode, ApiProblem

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)")


@dataclass(frozen=True)
class ByteRange:
    """Part of a file, from the byte `start` to before the byte `end`."""

    start: int
    end: int


class RangeNotSatisfiable(Exception):
    """The file has no byte of the requested range. The message is the size of the file."""


def build_etag(size: int, modified_at: float) -> str:
    """Return the ETag of a file. It changes when the file is written."""
    return f'"{size:x}-{round(modified_at * 1_000_000):x}"'


def find_range(header: str | None, if_range: str | None, size: int, etag: str) -> ByteRange | None:
    """Return the range to send, or None for the whole file. Raises RangeNotSatisfiable.

    Several ranges, another unit and an invalid header mean the whole file, and so does an If-Range that names another
    version of it (RFC 9110, 14.2).
    """
    found = _RANGE.fullmatch((header or "").strip())
    if found is None or (if_range is not None and if_range.strip() != etag):
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        raise RangeNotSatisfiable(size)
    return ByteRange(start, end)


def parse_content_range(header: str, length: int | None) -> int:
    """Return the position of the first byte of a part that a client sends. `length`: the length of the body, if it is
    known. Raises ApiProblem.
    """
    found = _CONTENT_RANGE.fullmatch(header.strip())
    start, last = (int(number) for number in found.groups()) if found is not None else (0, -1)
    if last < start or (length is not None and length != last + 1 - start):
        raise ApiProblem(
            ApiCode.MALFORMED_REQUEST,
            "the header Content-Range is invalid or does not fit the length of the body: send `bytes FIRST-LAST/*`, "
            "or use `?offset=`",
        )
    return start
