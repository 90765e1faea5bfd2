"""Bytes that are too large or too raw for an envelope: left for a worker, or taken from one, in Redis under the tenant's keys."""

import contextlib
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from contract.blobs import CHECK_FIRST_BYTES, check_blob, new_blob_key, no_room, room_arguments
from contract.calls import BLOB_TTL_S, MAX_BLOB_BYTES
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import BlobPool, is_blob_of
from store.tasks import Backoff

ROOM_WAIT_S = 30.0
"""How long a call waits for other calls of its tenant to give back room."""


class Blobs:
    """Blobs of one deployment."""

    def __init__(self, client: "redis.asyncio.Redis", deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def leave(self, tenant: str, data: bytes, pool: BlobPool = "sandbox") -> str:
        """Store bytes for a worker of that pool until the call has ended (`drop`), and return their key.

        Waits ROOM_WAIT_S for room in the tenant's limit. Raises ToolFailure: FILE_TOO_LARGE, QUOTA_EXCEEDED; BrokerUnavailable.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(
                ErrorCode.FILE_TOO_LARGE, f"{len(data)} bytes; at most {MAX_BLOB_BYTES} travel in one call: send them in parts"
            )
        key = new_blob_key(self._deployment, tenant, pool, data)
        until = Backoff(ROOM_WAIT_S)
        try:
            while not await self._store(tenant, pool, key, data):
                if not await until.wait():
                    raise no_room(tenant)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"Redis did not take the call's content ({error})") from error
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
