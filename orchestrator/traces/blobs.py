"""Large parts of traces. The name of a part is the hash of its content. A part is written once and shared by the
traces of a tenant.
"""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, Literal

MAX_INLINE_BYTES = 16 * 1024
"""Length above which a text or field is stored in a blob, in bytes."""
REFERENCE, LITERAL = "$blob", "$literal"
"""Keys of two objects in a line: the reference that replaces a blob, and the wrapper around an object that itself
contains such a key.
"""
_HASH = re.compile(r"[0-9a-f]{64}")
_EMPTY: dict[str, Any] = {"object": {}, "list": []}

Kind = Literal["text", "object", "list"]


class BlobFolder:
    """Blobs next to the traces of one tenant: `blobs/ab/cdef...`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Return the path of a blob. Raises ValueError: the name is not a hash."""
        if not _HASH.fullmatch(digest):
            raise ValueError("the name of a blob must be a SHA-256 in hexadecimal")
        return self._folder / digest[:2] / digest[2:]

    def put(self, data: bytes, digest: str) -> None:
        """Write a blob atomically, unless the blob exists. Raises OSError."""
        path = self.path(digest)
        try:
            # Compare the size: a blob that lost its content in a crash of the host is written again.
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
        """Return the bytes of a blob; None if the blob does not exist or its content does not match its hash."""
        try:
            data = self.path(digest).read_bytes()
        except (OSError, ValueError):
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None


def build_reference(data: bytes, kind: Kind) -> dict[str, Any]:
    """Return the object that replaces a blob in a line."""
    return {REFERENCE: hashlib.sha256(data).hexdigest(), "bytes": len(data), "kind": kind}


def resolve(value: Any, blobs: BlobFolder, missing: list[str], *, is_inner: bool = False) -> Any:
    """Return the value of a line with its blobs.

    A note or an empty value replaces a missing blob, and the hash of the blob is added to `missing`. `is_inner`: the
    value comes from a blob. Inside a blob only texts can be references: nested blobs could grow without a limit.
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
    """Return the content of a referenced blob, or its replacement."""
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
