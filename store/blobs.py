"""Bytes that are too large or too raw for an envelope, in Redis under the tenant's keys: left by one side and taken by the other."""

import contextlib
import time
from typing import Any

from contract.blobs import CHECK_FIRST_BYTES, check_blob, new_blob_key, no_room, room_arguments
from contract.calls import BLOB_TTL_S, MAX_BLOB_BYTES
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import BlobPool, is_blob_of
from store.connection import RedisClient, SyncRedis, broker_errors
from store.tasks import Backoff

ROOM_WAIT_S = 30.0
"""How long a call waits for other calls of its tenant to give back room."""
RESULT_ROOM_WAIT_S = 10.0
"""How long a result waits for it: the call has acted, and its caller waits."""
ROOM_PAUSE_S = 0.2


class Blobs:
    """Blobs of one deployment, for orchestrators."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
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
        """Return a result's bytes and delete them. `key` comes from the signed result. Raises ToolFailure, BrokerUnavailable."""
        if not is_blob_of(key, self._deployment, tenant):
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the result's content belongs to another tenant")
        with broker_errors("the result's content was not read"):
            data = await self._client.get(key)
        if data is None:
            raise ToolFailure(ErrorCode.OUTCOME_UNKNOWN, f"the result's content is gone: it lay more than {BLOB_TTL_S} s")
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
        """Return the bytes that came with a call. The caller deletes them when the call has ended: a lost call is sent again with them.

        Raises ToolFailure if they are another tenant's or another pool's, have changed or have expired; BrokerUnavailable.
        """
        if not is_blob_of(key, self._deployment, tenant, (self._pool,)):
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the content of this call belongs to another tenant or to other workers")
        with broker_errors("the call was not run, because its content was not read"):
            data = self._client.get(key)
        if data is None:
            raise ToolFailure(
                ErrorCode.OUTCOME_UNKNOWN, f"the content of this call is gone: its caller gave it up, or it lay more than {BLOB_TTL_S} s"
            )
        assert isinstance(data, bytes)
        check_blob(key, data)
        return data

    def leave(self, tenant: str, data: bytes, ttl_s: int = BLOB_TTL_S) -> str:
        """Keep bytes for the orchestrator; gives the key. Waits RESULT_ROOM_WAIT_S for room in the tenant's limit.

        Raises ToolFailure: FILE_TOO_LARGE, QUOTA_EXCEEDED; BrokerUnavailable.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(ErrorCode.FILE_TOO_LARGE, f"{len(data)} bytes; at most {MAX_BLOB_BYTES} travel in one call")
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
        if len(data) > CHECK_FIRST_BYTES and not self._client.eval(*room_arguments(self._deployment, tenant, self._pool, "", len(data))):
            return False
        pipe = self._client.pipeline(transaction=True)
        pipe.set(key, data, ex=ttl_s)
        pipe.eval(*room_arguments(self._deployment, tenant, self._pool, key, len(data)))
        return bool(pipe.execute()[1])
