"""Large parts of traces, named by the hash of their content: written once, shared by the traces of a tenant."""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, Literal

MAX_INLINE_BYTES = 16 * 1024
"""A longer text or field is stored in a blob."""
REFERENCE, LITERAL = "$blob", "$literal"
"""Keys of the object that replaces a blob in a line, and of the one around an object that has such a key itself."""
_HASH = re.compile(r"[0-9a-f]{64}")
_EMPTY: dict[str, Any] = {"object": {}, "list": []}

Kind = Literal["text", "object", "list"]


class BlobFolder:
    """The blobs next to the traces of one tenant: `blobs/ab/cdef...`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Return the path of a blob. Raises ValueError for a name that is not a hash."""
        if not _HASH.fullmatch(digest):
            raise ValueError("a blob is named by a SHA-256 in hexadecimal")
        return self._folder / digest[:2] / digest[2:]

    def put(self, data: bytes, digest: str) -> None:
        """Write a blob completely or not at all, unless it exists. Raises OSError."""
        path = self.path(digest)
        try:
            # A blob that lost its content in a crash of the host is written again.
            if path.stat().st_size == len(data):
                return
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def get(self, digest: str) -> bytes | None:
        """Return the bytes of a blob; None if it does not exist or its hash is not its name."""
        try:
            data = self.path(digest).read_bytes()
        except (OSError, ValueError):
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None


def build_reference(data: bytes, kind: Kind) -> dict[str, Any]:
    """Return the object that replaces a blob in a line."""
    return {REFERENCE: hashlib.sha256(data).hexdigest(), "bytes": len(data), "kind": kind}


def resolve(value: Any, blobs: BlobFolder, missing: list[str], *, is_inner: bool = False) -> Any:
    """Return a line's value with its blobs. A note or an empty value replaces a missing one, whose hash goes into
    `missing`.

    `is_inner`: the value comes out of a blob, in which only texts can be references: blobs of blobs could grow without
    end.
    """
    if isinstance(value, list):
        return [resolve(inner, blobs, missing, is_inner=is_inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if LITERAL in value and len(value) == 1 and isinstance(value[LITERAL], dict):
        return {key: resolve(inner, blobs, missing, is_inner=is_inner) for key, inner in value[LITERAL].items()}
    if isinstance(value.get(REFERENCE), str):
        return _fetch(value, blobs, missing, is_inner)
    return {key: resolve(inner, blobs, missing, is_inner=is_inner) for key, inner in value.items()}


def _fetch(reference: dict[str, Any], blobs: BlobFolder, missing: list[str], is_inner: bool) -> Any:
    digest, kind = reference[REFERENCE], reference.get("kind")
    data = blobs.get(digest)
    if data is not None and (kind == "text" or not is_inner):
        try:
            text = data.decode()
            return text if kind == "text" else resolve(json.loads(text), blobs, missing, is_inner=True)
        except (ValueError, RecursionError):
            pass
    missing.append(digest)
    if kind in _EMPTY:
        return type(_EMPTY[kind])()
    return f"[{reference.get('bytes', '?')} bytes are missing: blob {digest[:16]}]"
