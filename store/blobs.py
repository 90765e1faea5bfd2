"""Bytes that are too large or too raw for an envelope: left for a worker, or taken from one, in Redis under the tenant's keys."""

import contextlib

import redis.asyncio
from redis.exceptions import RedisError

from contract.blobs import check_blob, new_blob_key
from contract.calls import BLOB_TTL_S, MAX_BLOB_BYTES
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import BlobPool, is_blob_of


class Blobs:
    """Blobs of one deployment."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def leave(self, tenant: str, data: bytes, pool: BlobPool = "sandbox") -> str:
        """Store bytes for a worker of that pool until the call has ended (`drop`), and return their key.

        Raises ToolFailure for more than MAX_BLOB_BYTES, BrokerUnavailable.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE, f"{len(data)} bytes; at most {MAX_BLOB_BYTES} travel in one call: send them in parts"
            )
        key = new_blob_key(self._deployment, tenant, pool, data)
        try:
            await self._client.set(key, data, ex=BLOB_TTL_S)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not take the call's content ({error})") from error
        return key

    async def drop(self, key: str) -> None:
        """Delete what was left for a call that has ended. When Redis is away it expires by itself."""
        with contextlib.suppress(RedisError, OSError):
            await self._client.unlink(key)

    async def take(self, tenant: str, key: str) -> bytes:
        """Return a result's bytes and delete them. `key` comes from the signed result. Raises ToolFailure, BrokerUnavailable."""
        if not is_blob_of(key, self._deployment, tenant):
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the result's content belongs to another tenant")
        try:
            data = await self._client.get(key)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not give the result's content ({error})") from error
        if data is None:
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, f"the result's content is gone: it lay more than {BLOB_TTL_S} s")
        assert isinstance(data, bytes)
        check_blob(key, data)
        await self.drop(key)
        return data
