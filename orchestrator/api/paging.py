"""Paging of lists: a limit, and a cursor for the next page."""

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Annotated, TypeVar

from fastapi import Query

from toolcrew.contract.access_views import Page
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.http.problems import ApiProblem

T = TypeVar("T")
MAX_LIMIT = 200
_WORDS = re.compile(r"[\x21-\x7e]{1,300}")

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of items.")]
Cursor = Annotated[str | None, Query(max_length=512, description="`next_cursor` of the previous page.")]


def encode_cursor(position: str) -> str:
    """Encode a position as an opaque cursor."""
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    """Return the position of a cursor, or None for the start. Raises ApiProblem for an invalid cursor."""
    if cursor is None:
        return None
    try:
        position = base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError, UnicodeError):
        position = ""
    if not _WORDS.fullmatch(position):
        raise ApiProblem(
            ErrorCode.INVALID_ARGUMENTS,
            "the cursor is invalid: send `next_cursor` of the previous page, or omit it for the first page",
        )
    return position


def page_from(items: Iterable[T], position: str | None) -> Page[T]:
    """Return a page of a list. `position`: where the next page begins; None: this is the last page."""
    return Page(data=list(items), next_cursor=encode_cursor(position) if position else None)


def page_of(items: list[T], cursor: str | None, limit: int) -> Page[T]:
    """Return a page of a list that is completely in memory. Its cursors are indexes into the list."""
    position = decode_cursor(cursor) or "0"
    if not position.isascii() or not position.isdigit() or len(position) > 9:
        raise ApiProblem(
            ErrorCode.INVALID_ARGUMENTS, "the cursor belongs to another list: use the cursor of a page of this list"
        )
    start = int(position)
    return page_from(items[start : start + limit], str(start + limit) if start + limit < len(items) else None)
