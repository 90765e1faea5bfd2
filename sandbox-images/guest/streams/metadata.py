"""The metadata of a file: its extended attributes `user.*`, as text."""

from __future__ import annotations

import contextlib
import errno
import json
import os

from guest.failures import INVALID_ARGUMENTS, RequestFailure
from guest.fields import encode_text, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_PREFIX = "user."
_MAX_ITEMS = 64
_MAX_NAME_BYTES = 200
_MAX_VALUE_BYTES = 4096
_MAX_BYTES = 16_384
_MAX_JSON_BYTES = 50_000
"""Limit of shown metadata: an escape takes up to 6 bytes, and an entry must fit into a frame."""


def parse_metadata(header: dict[str, Any], name: str) -> dict[str, str]:
    """Return the metadata in a field. Raises RequestFailure when it is invalid or too large."""
    value = header.get(name)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} must be an object of strings")
    items = [(encode_text(key, f"{name!r}"), encode_text(text, f"{name!r}")) for key, text in value.items()]
    if len(items) > _MAX_ITEMS or sum(len(key) + len(text) for key, text in items) > _MAX_BYTES:
        raise RequestFailure(INVALID_ARGUMENTS, f"{name!r} may have {_MAX_ITEMS} names and {_MAX_BYTES} bytes in all")
    for key, text in items:
        if not 0 < len(key) <= _MAX_NAME_BYTES or b"\0" in key or len(text) > _MAX_VALUE_BYTES:
            shown = printable(key[:_MAX_NAME_BYTES])
            sentence = f"1 to {_MAX_NAME_BYTES} bytes without NUL, and its value at most {_MAX_VALUE_BYTES} bytes"
            raise RequestFailure(INVALID_ARGUMENTS, f"{shown!a} in {name!r}: a name has {sentence}")
    return value


def read_metadata(file: int | bytes) -> dict[str, str]:
    """Return the metadata of a file, given by its descriptor or by its path; a link is not followed.

    A program may have set attributes of any number and size. Those that are too many or too large are left out.
    """
    metadata: dict[str, str] = {}
    left = _MAX_JSON_BYTES
    for attribute in _list_attributes(file)[:_MAX_ITEMS]:
        # The file may lose the attribute now. A file system may also refuse to show it.
        with contextlib.suppress(OSError):
            value = printable(_get(file, attribute))
            name = printable(os.fsencode(attribute[len(_PREFIX) :]))
            left -= len(json.dumps({name: value}))
            if left >= 0:
                metadata[name] = value
    return metadata


def replace_metadata(fd: int, metadata: Mapping[str, str], shown: str) -> None:
    """Replace the whole metadata of an open file. If that fails, the file keeps what it had. Raises RequestFailure and
    OSError.
    """
    old = {attribute: _get(fd, attribute) for attribute in _list_attributes(fd)}
    new = {_PREFIX + name: value.encode("utf-8", "surrogateescape") for name, value in metadata.items()}
    try:
        _replace(fd, old, new)
    except OSError as error:
        _replace(fd, {attribute: b"" for attribute in _list_attributes(fd)}, old)
        if error.errno == errno.EOPNOTSUPP:
            raise RequestFailure(
                INVALID_ARGUMENTS, f"{shown}: its file system stores no metadata; write it without metadata"
            ) from None
        raise


def _replace(fd: int, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> None:
    # Remove first: a file system may have room for the attributes of one version only.
    for attribute in old.keys() - new.keys():
        os.removexattr(fd, attribute)
    for attribute, value in new.items():
        if old.get(attribute) != value:
            os.setxattr(fd, attribute, value)


def _list_attributes(file: int | bytes) -> list[str]:
    try:
        names = os.listxattr(file) if isinstance(file, int) else os.listxattr(file, follow_symlinks=False)
    except OSError:
        return []
    # Most files have none: a listing asks for each of its files.
    return sorted(name for name in names if name.startswith(_PREFIX)) if names else names


def _get(file: int | bytes, attribute: str) -> bytes:
    return (
        os.getxattr(file, attribute) if isinstance(file, int) else os.getxattr(file, attribute, follow_symlinks=False)
    )
