"""Blobs in Redis: bytes that accompany a call or a result. The key of a blob ends with the SHA-256 of its bytes.

Invariant: forged bytes are detected. The signed call or result contains the key, so its signature also covers the
bytes. A process that can write to Redis but does not have the secret can only delete blobs.

The blobs of a tenant have a size limit. A hash of the tenant stores the size of each blob. Blobs that were read or
have expired are removed from the hash when the limit is reached.
"""

import contextlib
import hashlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator

from toolcrew.concurrency.read_memory import Reservation, read_memory
from toolcrew.concurrency.tasks import Backoff
from toolcrew.contract.calls import BLOB_TTL_S, MAX_BLOB_BYTES
from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import BlobPool, blob_key, is_blob_of
from toolcrew.store.connection import RedisClient, SyncRedis, broker_errors
from toolcrew.store.memory import MEMORY_LUA
from toolcrew.store.scripts import Script

TENANT_BLOB_BYTES = 128 * 1024 * 1024
"""Limit of the blobs of a tenant at the same time, for each pool of workers, in bytes. This is a quarter of Redis's
memory in the provided deployment.
"""
LEAST_CHARGE = 32 * 1024
"""Minimum number of bytes for which a blob counts towards the limit. A tenant can therefore never have more than 4096
blobs.
"""
CHECK_FIRST_BYTES = 1024 * 1024
"""Size, in bytes, above which the tenant's limit is checked before the blob is sent to Redis. A smaller blob is sent at
once; one transaction stores the blob and checks the limit.
"""
SIZES_TTL_S = 2 * 3600
"""Lifetime of the hash with the sizes of a tenant's blobs, in seconds. It is longer than the lifetime of any blob."""
ROOM_WAIT_S = 30.0
"""Seconds that a call waits for other calls of its tenant to delete their blobs, if the limit is reached."""
RESULT_ROOM_WAIT_S = 10.0
"""Seconds that a result waits for other blobs of its tenant to be deleted. Less than ROOM_WAIT_S, because a caller
waits for the result.
"""
ROOM_PAUSE_S = 0.2
PIECE_BYTES = 256 * 1024
KEPT_BYTES, LARGE_KEPT_S = 1024 * 1024, 20
"""Size, in bytes, up to which the output of a call with a chosen id is kept until it expires, and the seconds for which
a larger output is kept after it was read.
"""
_DIGEST_CHARS = 64
# Returns 1 if there is room; the size of the blob is then added. Returns 0 if there is none; the blob is then deleted.
# `prefix`: of the keys of blobs. `blob` '': check only.
ROOM = Script(
    MEMORY_LUA
    + """
local size, max_bytes = tonumber(bytes), tonumber(limit)
local total = tonumber(redis.call('HGET', sizes_key, 'total') or 0)
-- Blobs live for seconds, and running calls need them: they may use memory that longer lived records may not.
local free = free_bytes(CALLS_SHARE)
if free then max_bytes = math.min(max_bytes, RUNNING_WORK * free) end
if total + size > max_bytes then
  local sizes = redis.call('HGETALL', sizes_key)
  total = 0
  for at = 1, #sizes, 2 do
    if sizes[at] ~= 'total' then
      if redis.call('EXISTS', prefix .. sizes[at]) == 1 then
        total = total + tonumber(sizes[at + 1])
      else
        redis.call('HDEL', sizes_key, sizes[at])
      end
    end
  end
  redis.call('HSET', sizes_key, 'total', total)
end
if total + size > max_bytes then
  if blob ~= '' then redis.call('UNLINK', prefix .. blob) end
  return 0
end
if blob ~= '' then
  redis.call('HSET', sizes_key, blob, size, 'total', total + size)
  redis.call('EXPIRE', sizes_key, ttl_s)
end
return 1
""",
    keys=("sizes_key",),
    args=("prefix", "blob", "bytes", "limit", "ttl_s"),
)


class Blobs:
    """Blobs of one deployment, for orchestrators."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def leave(self, tenant: str, data: bytes, pool: BlobPool = "sandbox") -> str:
        """Store bytes for a worker of that pool until the call has ended (`drop`), and return their key.

        If the tenant's limit is reached, wait up to ROOM_WAIT_S seconds. Raises ToolFailure(FILE_TOO_LARGE): too large
        for one call. Raises ToolFailure(QUOTA_EXCEEDED): the limit is still reached. Raises BrokerUnavailable when
        Redis does not answer.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                f"the content has {len(data)} bytes, and one call can carry at most {MAX_BLOB_BYTES}: send it in parts",
            )
        key = new_blob_key(self._deployment, tenant, pool, data)
        until = Backoff(ROOM_WAIT_S)
        with broker_errors("the call's content was not stored"):
            while not await self._store(tenant, pool, key, data):
                if not await until.wait():
                    raise blob_limit_error(tenant)
        return key

    async def _store(self, tenant: str, pool: BlobPool, key: str, data: bytes) -> bool:
        """Store a blob. Return False, without storing it, if the tenant has no room."""
        if len(data) > CHECK_FIRST_BYTES and not await ROOM.run(
            self._client, **room_values(self._deployment, tenant, pool, "", len(data))
        ):
            return False
        pipe = self._client.pipeline(transaction=True)
        # A transaction, because a blob that is not counted would bypass the limit.
        pipe.set(key, data, ex=BLOB_TTL_S)
        ROOM.add_to(pipe, **room_values(self._deployment, tenant, pool, key, len(data)))
        return bool((await pipe.execute())[1])

    async def drop(self, key: str) -> None:
        """Delete the blob of a call that has ended. If Redis does not answer, the blob expires by itself."""
        with contextlib.suppress(BrokerUnavailable), broker_errors("the content was not deleted"):
            await self._client.unlink(key)

    async def take(self, tenant: str, key: str, *, keeps: bool = False) -> bytes:
        """Return a result's bytes and delete them, unless `keeps` (KEPT_BYTES). `key` must come from the signed result.
        Raises ToolFailure: the
        blob belongs to another tenant, has expired, or was changed. Raises BrokerUnavailable when Redis does not
        answer.
        """
        self._check_owner(tenant, key)
        with broker_errors("the result's content was not read"):
            data = await self._client.get(key)
        if data is None:
            raise _build_expired_error()
        assert isinstance(data, bytes)
        check_blob(key, data)
        await self._end(key, len(data), keeps)
        return data

    async def _end(self, key: str, size: int, keeps: bool) -> None:
        """Delete a blob that was read, or limit how long a large one is kept."""
        if not keeps:
            await self.drop(key)
        elif size > KEPT_BYTES:
            with contextlib.suppress(BrokerUnavailable), broker_errors("the lifetime of the content was not changed"):
                await self._client.expire(key, LARGE_KEPT_S)

    @contextlib.asynccontextmanager
    async def hold(
        self, tenant: str, key: str, copies: int = 1, *, keeps: bool = False
    ) -> AsyncIterator[tuple[deque[bytes], Reservation]]:
        """Yield a result's bytes in pieces, and the memory that is reserved during the block: `copies` times their
        size. Delete the blob, unless `keeps` (KEPT_BYTES). Raises the errors of `take` and of `ReadMemory.reserve`.
        """
        self._check_owner(tenant, key)
        size = 0
        try:
            with broker_errors("the result's content was not read"):
                size = min(int(await self._client.strlen(key)), MAX_BLOB_BYTES)
            async with read_memory().reserve(tenant, size * copies) as memory:
                yield await self._pieces(key, size), memory
        finally:
            await self._end(key, size, keeps)

    async def _pieces(self, key: str, size: int) -> deque[bytes]:
        pipe = self._client.pipeline(transaction=True)
        for start in range(0, size, PIECE_BYTES):
            pipe.getrange(key, start, start + PIECE_BYTES - 1)
        with broker_errors("the result's content was not read"):
            pieces = deque[bytes](await pipe.execute())
            # The length of a missing blob is 0, as that of an empty file.
            if not any(pieces) and not await self._client.exists(key):
                raise _build_expired_error()
        check_blob(key, *pieces)
        return pieces

    def _check_owner(self, tenant: str, key: str) -> None:
        if not is_blob_of(key, self._deployment, tenant):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "the result was refused, because its content belongs to another tenant: check which programs "
                "write to this Redis",
            )


class WorkerBlobs:
    """Blobs of one deployment and one pool of workers. A key must belong to the tenant in the call's signed context."""

    def __init__(self, client: SyncRedis, deployment: str, pool: BlobPool) -> None:
        self._client = client
        self._deployment = deployment
        self._pool: BlobPool = pool

    def take(self, tenant: str, key: str) -> bytes:
        """Return the bytes of a call. The caller deletes them after the call has ended, because a lost call is sent
        again with the same bytes.

        Raises ToolFailure: the blob belongs to another tenant or another pool, has expired, or was changed. Raises
        BrokerUnavailable when Redis does not answer.
        """
        if not is_blob_of(key, self._deployment, tenant, (self._pool,)):
            raise ToolFailure(
                ErrorCode.PERMISSION_DENIED,
                "the call was refused, because its content belongs to another "
                "tenant or to other workers: check which programs write to this Redis",
            )
        with broker_errors("the call was not run, because its content was not read"):
            data = self._client.get(key)
        if data is None:
            raise ToolFailure(
                ErrorCode.OUTCOME_UNKNOWN,
                "the content of this call is missing: its caller cancelled the call, or the content has expired "
                f"after {BLOB_TTL_S} s",
            )
        assert isinstance(data, bytes)
        check_blob(key, data)
        return data

    def leave(self, tenant: str, data: bytes, ttl_s: int = BLOB_TTL_S) -> str:
        """Store bytes for the orchestrator, and return their key. If the tenant's limit is reached, wait up to
        RESULT_ROOM_WAIT_S seconds.

        Raises ToolFailure(FILE_TOO_LARGE): too large for one call. Raises ToolFailure(QUOTA_EXCEEDED): the limit is
        still reached. Raises BrokerUnavailable when Redis does not answer.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE,
                f"the content has {len(data)} bytes, and one call can carry at most {MAX_BLOB_BYTES}",
            )
        key = new_blob_key(self._deployment, tenant, self._pool, data)
        until = time.monotonic() + RESULT_ROOM_WAIT_S
        with broker_errors("the bytes of a result were not stored"):
            while not self._store(tenant, key, data, ttl_s):
                if time.monotonic() > until:
                    raise blob_limit_error(tenant)
                time.sleep(ROOM_PAUSE_S)
        return key

    def _store(self, tenant: str, key: str, data: bytes, ttl_s: int) -> bool:
        """Store a blob. Return False, without storing it, if the tenant has no room."""
        if len(data) > CHECK_FIRST_BYTES and not ROOM.run_blocking(
            self._client, **room_values(self._deployment, tenant, self._pool, "", len(data))
        ):
            return False
        pipe = self._client.pipeline(transaction=True)
        # A transaction, because a blob that is not counted would bypass the limit.
        pipe.set(key, data, ex=ttl_s)
        ROOM.add_to(pipe, **room_values(self._deployment, tenant, self._pool, key, len(data)))
        return bool(pipe.execute()[1])


def _build_expired_error() -> ToolFailure:
    return ToolFailure(
        ErrorCode.RESULT_EXPIRED,
        f"the content of the result has expired after {BLOB_TTL_S} s at most: send the call with a new id or key if a "
        "repetition is safe",
    )


def new_blob_key(deployment: str, tenant: str, pool: BlobPool, data: bytes) -> str:
    """Return a unique key for these bytes."""
    return blob_key(deployment, tenant, pool, f"{secrets.token_hex(8)}-{hashlib.sha256(data).hexdigest()}")


def check_blob(key: str, *pieces: bytes) -> None:
    """Check bytes from Redis against their key, which must come from a signed record. Raises
    ToolFailure(ENVELOPE_REFUSED): the bytes were changed.
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    if digest.hexdigest() != key[-_DIGEST_CHARS:]:
        raise ToolFailure(
            ErrorCode.ENVELOPE_REFUSED,
            "the content in Redis was refused because it differs from the signed content: another program has "
            "written to Redis. Find that program, then send the call again",
        )


def room_values(deployment: str, tenant: str, pool: BlobPool, key: str, size: int) -> dict[str, str | int]:
    """Return the keys and arguments of ROOM for a blob of that size, which was just stored under `key`. If `key` is "",
    the script only checks whether the tenant's limit allows the blob.
    """
    prefix = blob_key(deployment, tenant, pool, "")
    return {
        "sizes_key": f"{prefix}sizes",
        "prefix": prefix,
        "blob": key.removeprefix(prefix),
        "bytes": max(size, LEAST_CHARGE),
        "limit": TENANT_BLOB_BYTES,
        "ttl_s": SIZES_TTL_S,
    }


def blob_limit_error(tenant: str) -> ToolFailure:
    """Return the failure for a blob that would exceed the tenant's limit."""
    return ToolFailure(
        ErrorCode.QUOTA_EXCEEDED,
        f"the contents of the running calls of tenant {tenant} take {TENANT_BLOB_BYTES // 2**20} MiB of Redis, "
        "which is the limit of a tenant, or Redis is nearly full: wait until some calls have ended, then send the call "
        "again",
    )
