"""Blobs: bytes that travel next to a call or a result, in Redis. A blob's key ends with the SHA-256 of its bytes.

The key travels in the signed call or result, so its signature covers the bytes as well. A process that can write to Redis but does not have
the secret can only delete them.

The blobs of a tenant have a limit. A hash of the tenant has the size of each blob; a blob that was read or has expired is removed from it when the limit
is reached.
"""

import hashlib
import secrets

from contract.errors import ErrorCode, ToolFailure
from contract.names import BlobPool, blob_key

TENANT_BLOB_BYTES = 128 * 1024 * 1024
"""Limit of the blobs of a tenant at a time, for each pool of workers: a quarter of the memory that Redis has as it is deployed here."""
LEAST_CHARGE = 32 * 1024
"""A smaller blob counts as so many bytes, so that a tenant never has more than 4096 of them to count."""
CHECK_FIRST_BYTES = 1024 * 1024
"""Before a larger blob is sent to Redis, it is asked whether there is room for it."""
SIZES_TTL_S = 2 * 3600
"""Longer than any blob lives."""
_DIGEST_CHARS = 64

# KEYS: sizes. ARGV: what the keys of the blobs begin with, the blob's name ('' to ask only), its size, the limit, time to live of the sizes.
# 1: there is room, and the blob counts from now on. 0: there is none, and the blob was deleted.
ROOM_LUA = """
local size, most = tonumber(ARGV[3]), tonumber(ARGV[4])
local total = tonumber(redis.call('HGET', KEYS[1], 'total') or 0)
if total + size > most then
  local sizes = redis.call('HGETALL', KEYS[1])
  total = 0
  for at = 1, #sizes, 2 do
    if sizes[at] ~= 'total' then
      if redis.call('EXISTS', ARGV[1] .. sizes[at]) == 1 then
        total = total + tonumber(sizes[at + 1])
      else
        redis.call('HDEL', KEYS[1], sizes[at])
      end
    end
  end
  redis.call('HSET', KEYS[1], 'total', total)
end
if total + size > most then
  if ARGV[2] ~= '' then redis.call('UNLINK', ARGV[1] .. ARGV[2]) end
  return 0
end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[2], size, 'total', total + size)
  redis.call('EXPIRE', KEYS[1], ARGV[5])
end
return 1
"""


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


def room_arguments(deployment: str, tenant: str, pool: BlobPool, key: str, size: int) -> tuple[str, int, str, str, str, int, int, int]:
    """The arguments of EVAL that count a blob of that size, which was just stored under `key`. Without a key they ask whether there is room for one."""
    start = blob_key(deployment, tenant, pool, "")
    return ROOM_LUA, 1, f"{start}sizes", start, key.removeprefix(start), max(size, LEAST_CHARGE), TENANT_BLOB_BYTES, SIZES_TTL_S


def no_room(tenant: str) -> ToolFailure:
    """The failure of a blob beyond the limit."""
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED,
        f"the contents of the running calls of tenant {tenant} take {TENANT_BLOB_BYTES // 2**20} MiB of Redis, which is the limit of one tenant: "
        "wait until some of them have ended, and send it again",
    )
