"""Blobs: bytes that travel next to a call or a result, in Redis. A blob's key ends with the SHA-256 of its bytes.

The key travels in the signed call or result, so its signature covers the bytes as well. A process that can write to
Redis but does not have the secret can only delete them.

The blobs of a tenant have a limit. A hash of the tenant has the size of each blob; a blob that was read or has expired
is removed from it when the limit is reached.
"""

import contextlib
import hashlib
import secrets
import time
from typing import Any

from contract.calls import BLOB_TTL_S, MAX_BLOB_BYTES
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import BlobPool, blob_key, is_blob_of
from store.connection import RedisClient, SyncRedis, broker_errors
from store.tasks import Backoff

TENANT_BLOB_BYTES = 128 * 1024 * 1024
"""Limit of the blobs of a tenant at a time, for each pool of workers: a quarter of the memory that Redis has as it is
deployed here.
"""
LEAST_CHARGE = 32 * 1024
"""A smaller blob counts as so many bytes, so that a tenant never has more than 4096 of them to count."""
CHECK_FIRST_BYTES = 1024 * 1024
"""Before a larger blob is sent to Redis, it is asked whether there is room for it."""
SIZES_TTL_S = 2 * 3600
"""Longer than any blob lives."""
ROOM_WAIT_S = 30.0
"""How long a call waits for other calls of its tenant to give back room."""
RESULT_ROOM_WAIT_S = 10.0
"""How long a result waits for it: the call has acted, and its caller waits."""
ROOM_PAUSE_S = 0.2
_DIGEST_CHARS = 64
# KEYS: sizes. ARGV: what the keys of the blobs begin with, the blob's name ('' to ask only), its size, the limit, time
# to live of the sizes. 1: there is room, and the blob counts from now on. 0: there is none, and the blob was deleted.
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


class Blobs:
    """Blobs of one deployment, for orchestrators."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def leave(self, tenant: str, data: bytes, pool: BlobPool = "sandbox") -> str:
        """Store bytes for a worker of that pool until the call has ended (`drop`), and return their key.

        Waits ROOM_WAIT_S for room in the tenant's limit. Raises ToolFailure: FILE_TOO_LARGE, QUOTA_EXCEEDED;
        BrokerUnavailable.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                f"{len(data)} bytes; at most {MAX_BLOB_BYTES} travel in one call: send them in parts",
            )
        key = new_blob_key(self._deployment, tenant, pool, data)
        until = Backoff(ROOM_WAIT_S)
        with broker_errors("the call's content was not stored"):
            while not await self._store(tenant, pool, key, data):
                if not await until.wait():
                    raise no_room(tenant)
        return key

    async def _store(self, tenant: str, pool: BlobPool, key: str, data: bytes) -> bool:
        """Return False, and store nothing, if the tenant has no room for it."""
        if len(data) > CHECK_FIRST_BYTES:
            has_room: Any = self._client.eval(*room_arguments(self._deployment, tenant, pool, "", len(data)))
            if not await has_room:
                return False
        pipe = self._client.pipeline(transaction=True)
        pipe.set(key, data, ex=BLOB_TTL_S)
        pipe.eval(*room_arguments(self._deployment, tenant, pool, key, len(data)))
        return bool((await pipe.execute())[1])

    async def drop(self, key: str) -> None:
        """Delete what was left for a call that has ended. When Redis is away it expires by itself."""
        with contextlib.suppress(BrokerUnavailable), broker_errors("the content was not deleted"):
            await self._client.unlink(key)

    async def take(self, tenant: str, key: str) -> bytes:
        """Return a result's bytes and delete them. `key` comes from the signed result. Raises ToolFailure,
        BrokerUnavailable.
        """
        if not is_blob_of(key, self._deployment, tenant):
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the result's content belongs to another tenant")
        with broker_errors("the result's content was not read"):
            data = await self._client.get(key)
        if data is None:
            raise ToolFailure(
                ErrorCode.OUTCOME_UNKNOWN, f"the result's content is gone: it lay more than {BLOB_TTL_S} s"
            )
        assert isinstance(data, bytes)
        check_blob(key, data)
        await self.drop(key)
        return data


class WorkerBlobs:
    """Blobs of this deployment and of one pool of workers. A key must be of the tenant in the call's signed context."""

    def __init__(self, client: SyncRedis, deployment: str, pool: BlobPool) -> None:
        self._client = client
        self._deployment = deployment
        self._pool: BlobPool = pool

    def take(self, tenant: str, key: str) -> bytes:
        """Return the bytes that came with a call. The caller deletes them when the call has ended: a lost call is sent
        again with them.

        Raises ToolFailure if they are another tenant's or another pool's, have changed or have expired;
        BrokerUnavailable.
        """
        if not is_blob_of(key, self._deployment, tenant, (self._pool,)):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED, "the content of this call belongs to another tenant or to other workers"
            )
        with broker_errors("the call was not run, because its content was not read"):
            data = self._client.get(key)
        if data is None:
            raise ToolFailure(
                ErrorCode.OUTCOME_UNKNOWN,
                f"the content of this call is gone: its caller gave it up, or it lay more than {BLOB_TTL_S} s",
            )
        assert isinstance(data, bytes)
        check_blob(key, data)
        return data

    def leave(self, tenant: str, data: bytes, ttl_s: int = BLOB_TTL_S) -> str:
        """Keep bytes for the orchestrator; gives the key. Waits RESULT_ROOM_WAIT_S for room in the tenant's limit.

        Raises ToolFailure: FILE_TOO_LARGE, QUOTA_EXCEEDED; BrokerUnavailable.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE, f"{len(data)} bytes; at most {MAX_BLOB_BYTES} travel in one call"
            )
        key = new_blob_key(self._deployment, tenant, self._pool, data)
        until = time.monotonic() + RESULT_ROOM_WAIT_S
        with broker_errors("the bytes of a result were not stored"):
            while not self._store(tenant, key, data, ttl_s):
                if time.monotonic() > until:
                    raise no_room(tenant)
                time.sleep(ROOM_PAUSE_S)
        return key

    def _store(self, tenant: str, key: str, data: bytes, ttl_s: int) -> bool:
        """Return False, and store nothing, if the tenant has no room for it."""
        if len(data) > CHECK_FIRST_BYTES and not self._client.eval(
            *room_arguments(self._deployment, tenant, self._pool, "", len(data))
        ):
            return False
        pipe = self._client.pipeline(transaction=True)
        pipe.set(key, data, ex=ttl_s)
        pipe.eval(*room_arguments(self._deployment, tenant, self._pool, key, len(data)))
        return bool(pipe.execute()[1])


def new_blob_key(deployment: str, tenant: str, pool: BlobPool, data: bytes) -> str:
    """Return a key for these bytes that no other blob has."""
    return blob_key(deployment, tenant, pool, f"{secrets.token_hex(8)}-{hashlib.sha256(data).hexdigest()}")


def check_blob(key: str, data: bytes) -> None:
    """Check bytes that were read from Redis against their key, which must come from a signed record. Raises
    ToolFailure(ENVELOPE_REFUSED).
    """
    if hashlib.sha256(data).hexdigest() != key[-_DIGEST_CHARS:]:
        raise ToolFailure(
            ErrorCode.ENVELOPE_REFUSED,
            "the content in Redis is not the content that was signed, and was refused: another program has written to "
            "Redis. Find it, then send the call again",
        )


def room_arguments(
    deployment: str, tenant: str, pool: BlobPool, key: str, size: int
) -> tuple[str, int, str, str, str, int, int, int]:
    """The arguments of EVAL that count a blob of that size, which was just stored under `key`. Without a key they ask
    whether there is room for one.
    """
    start = blob_key(deployment, tenant, pool, "")
    return (
        ROOM_LUA,
        1,
        f"{start}sizes",
        start,
        key.removeprefix(start),
        max(size, LEAST_CHARGE),
        TENANT_BLOB_BYTES,
        SIZES_TTL_S,
    )


def no_room(tenant: str) -> ToolFailure:
    """The failure of a blob beyond the limit."""
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED,
        f"the contents of the running calls of tenant {tenant} take {TENANT_BLOB_BYTES // 2**20} MiB of Redis, which "
        "is the limit of one tenant: wait until some of them have ended, and send it again",
    )
