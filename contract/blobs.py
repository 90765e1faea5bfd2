"""Blobs: bytes that travel next to a call or a result, in Redis. A blob's key ends with the SHA-256 of its bytes.

The key travels in the signed call or result, so its signature covers the bytes as well. A process that can write to Redis but does not have
the secret can only delete them.
"""

import hashlib
import secrets

from contract.errors import ErrorCode, ToolFailure
from contract.names import BlobPool, blob_key

_DIGEST_CHARS = 64


def new_blob_key(deployment: str, tenant: str, pool: BlobPool, data: bytes) -> str:
    """Return a key for these bytes that no other blob has."""
    return blob_key(deployment, tenant, pool, f"{secrets.token_hex(8)}-{hashlib.sha256(data).hexdigest()}")


def check_blob(key: str, data: bytes) -> None:
    """Check bytes that were read from Redis against their key, which must come from a signed record. Raises ToolFailure(ENVELOPE_REFUSED)."""
    if hashlib.sha256(data).hexdigest() != key[-_DIGEST_CHARS:]:
        raise ToolFailure(
            ErrorCode.ENVELOPE_REFUSED,
            "the content in Redis is not the content that was signed, and was refused: another program has written to Redis. Find it, then "
            "send the call again",
        )
