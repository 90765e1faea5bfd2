"""Bytes that are too large or too raw for an envelope: taken from and left in Redis under the tenant's own keys."""

import time

import redis

from contract.blobs import CHECK_FIRST_BYTES, check_blob, new_blob_key, no_room, room_arguments
from contract.calls import BLOB_TTL_S, MAX_BLOB_BYTES
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import BlobPool, is_blob_of

ROOM_WAIT_S = 10.0
"""How long a result waits for other calls of its tenant to give back room: the call has acted, and its caller waits."""
ROOM_PAUSE_S = 0.2


class Blobs:
    """Blobs of this deployment and of one pool of workers. A key must be of the tenant in the call's signed context."""

    def __init__(self, client: "redis.Redis", deployment: str, pool: BlobPool) -> None:
        self._client = client
        self._deployment = deployment
        self._pool: BlobPool = pool

    def take(self, tenant: str, key: str) -> bytes:
        """Return the bytes that came with a call. The caller deletes them when the call has ended: a lost call is sent again with them.

        Raises ToolFailure if they are another tenant's or another pool's, have changed or have expired; BrokerUnavailable.
        """
        if not is_blob_of(key, self._deployment, tenant, (self._pool,)):
            raise ToolFailure(ErrorCode.PERMISSION_DENIED, "the content of this call belongs to another tenant or to other workers")
        try:
            data = self._client.get(key)
        except redis.RedisError as error:
            raise BrokerUnavailable(f"the call was not run: Redis did not give its content ({error}); see that Redis is up") from error
        if data is None:
            raise ToolFailure(
                ErrorCode.OUTCOME_UNKNOWN, f"the content of this call is gone: its caller gave it up, or it lay more than {BLOB_TTL_S} s"
            )
        assert isinstance(data, bytes)
        check_blob(key, data)
        return data

    def leave(self, tenant: str, data: bytes, ttl_s: int = BLOB_TTL_S) -> str:
        """Keep bytes for the orchestrator; gives the key. Waits ROOM_WAIT_S for room in the tenant's limit.

        Raises ToolFailure: FILE_TOO_LARGE, QUOTA_EXCEEDED; BrokerUnavailable.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ToolFailure(ErrorCode.FILE_TOO_LARGE, f"{len(data)} bytes; at most {MAX_BLOB_BYTES} travel in one call")
        key = new_blob_key(self._deployment, tenant, self._pool, data)
        until = time.monotonic() + ROOM_WAIT_S
        try:
            while not self._store(tenant, key, data, ttl_s):
                if time.monotonic() > until:
                    raise no_room(tenant)
                time.sleep(ROOM_PAUSE_S)
        except redis.RedisError as error:
            raise BrokerUnavailable(f"Redis did not take the bytes of a result ({error}); see that Redis is up") from error
        return key

    def _store(self, tenant: str, key: str, data: bytes, ttl_s: int) -> bool:
        """Return False, and store nothing, if the tenant has no room for it."""
        if len(data) > CHECK_FIRST_BYTES and not self._client.eval(*room_arguments(self._deployment, tenant, self._pool, "", len(data))):
            return False
        pipe = self._client.pipeline(transaction=True)
        pipe.set(key, data, ex=ttl_s)
        pipe.eval(*room_arguments(self._deployment, tenant, self._pool, key, len(data)))
        return bool(pipe.execute()[1])
