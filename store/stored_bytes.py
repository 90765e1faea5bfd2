"""Bytes that tenants have in the shared store: records of uploads and artifacts, and reservations of running uploads.

Invariant: the records, and the reservations that have not expired, of a tenant never exceed its limit because of an
upload. The bytes of an upload are reserved before they are written. A process that dies leaves a reservation, which
expires, and at most a file without a record, which `StoredFiles` records later.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.names import tenant_key
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.scripts import Script
from toolcrew.store.usage import CHANGE_STORED, DAY_S, STORED_TTL_S, TOTAL, StoredChange

RESERVED_S = 300
"""Lifetime of a reservation, in seconds. A running upload renews it, however slowly its bytes arrive."""
REPAIR_EVERY_S = 3600
_WHAT = "the stored bytes were not counted"
_DAYS = STORED_TTL_S // DAY_S

# Returns {1 if `size` bytes fit, the bytes of the other files and uploads}. `prefix`: of the records of a day.
_RESERVE = Script(
    f"""
local now = tonumber(redis.call('TIME')[1])
local total, today = 0, math.floor(now / {DAY_S})
for day = today - {_DAYS}, today do total = total + (redis.call('HGET', prefix .. day, '{TOTAL}') or 0) end
local fields = redis.call('HGETALL', reservations)
for at = 1, #fields, 2 do
  local ends_at, bytes = string.match(fields[at + 1], '^(%d+) (%d+)$')
  if not ends_at or tonumber(ends_at) <= now then redis.call('HDEL', reservations, fields[at])
  elseif fields[at] ~= id then total = total + bytes end
end
if total + size > tonumber(limit) then return {{0, total}} end
if is_reserving == '1' then
  redis.call('HSET', reservations, id, string.format('%d %d', now + ttl_s, size))
  redis.call('EXPIRE', reservations, ttl_s)
end
return {{1, total}}
""",
    keys=("reservations",),
    args=("prefix", "limit", "ttl_s", "id", "size", "is_reserving"),
)


class StoredBytes:
    """Counts the stored bytes of tenants. `find_limit` returns the limit of a tenant's uploads and artifacts at a time,
    in bytes. Every method raises BrokerUnavailable when Redis does not answer.
    """

    def __init__(self, client: RedisClient, deployment: str, find_limit: Callable[[str], Awaitable[int]]) -> None:
        self._client = client
        self._deployment = deployment
        self._find_limit = find_limit

    async def reserve(self, tenant: str, file: str, size: int) -> None:
        """Reserve `size` bytes in total for an upload, for RESERVED_S seconds. Raises ToolFailure(QUOTA_EXCEEDED): the
        tenant's limit does not allow them.
        """
        await self._check(tenant, file, size, is_reserved=True)

    @contextlib.asynccontextmanager
    async def reserving(self, tenant: str, file: str) -> AsyncIterator["UploadReservation"]:
        """Yield the reservation of an upload, which is renewed during the block and removed at its end."""
        reservation = UploadReservation(self, tenant, file)
        renewing = asyncio.ensure_future(reservation.renew())
        try:
            yield reservation
        finally:
            renewing.cancel()
            with contextlib.suppress(BrokerUnavailable):
                # The shield releases the bytes even if the request is cancelled again.
                await asyncio.shield(self.release(tenant, file))
            await asyncio.gather(renewing, return_exceptions=True)

    async def check(self, tenant: str) -> None:
        """Raise ToolFailure(QUOTA_EXCEEDED) if the tenant's files have reached its limit."""
        await self._check(tenant, "", 1, is_reserved=False)

    async def release(self, tenant: str, file: str) -> None:
        """Remove the reservation of an upload."""
        with broker_errors(_WHAT):
            await self._client.hdel(self._reservations(tenant), file)

    async def change(self, tenant: str, change: StoredChange) -> bool:
        """Record a stored file, or remove the record of a deleted one, and change the tenant's usage in the same step.
        Return False if nothing changed, because an earlier call has done the same.
        """
        with broker_errors(_WHAT):
            return bool(await CHANGE_STORED.run(self._client, **change.arguments(self._deployment, tenant)))

    async def begin_repair(self, tenant: str) -> bool:
        """Return True at most once per REPAIR_EVERY_S for a tenant: the caller then compares records and files."""
        with broker_errors(_WHAT):
            key = tenant_key(self._deployment, tenant, "usage.stored.repair")
            return bool(await self._client.set(key, 1, nx=True, ex=REPAIR_EVERY_S))

    async def list_recorded(self, tenant: str) -> set[str]:
        """Return the ids of the recorded uploads and artifacts."""
        files = set[str]()
        with broker_errors(_WHAT):
            seconds, _ = await self._client.time()
            for day in range(seconds // DAY_S - _DAYS, seconds // DAY_S + 1):
                # Read in parts: the artifacts of one day can be many.
                async for field, _ in self._client.hscan_iter(f"{self._prefix(tenant)}{day}", count=1000):
                    files.add(field.decode(errors="replace"))
        return files - {TOTAL}

    async def _check(self, tenant: str, file: str, size: int, *, is_reserved: bool) -> None:
        limit = await self._find_limit(tenant)
        with broker_errors(_WHAT):
            fits, others = await _RESERVE.run(
                self._client,
                reservations=self._reservations(tenant),
                prefix=self._prefix(tenant),
                limit=limit,
                ttl_s=RESERVED_S,
                id=file,
                size=size,
                is_reserving=int(is_reserved),
            )
        if not fits:
            raise ToolFailure(
                ErrorCode.QUOTA_EXCEEDED,
                f"the stored files of tenant {tenant} have {int(others)} bytes, and its limit is {limit} bytes: delete "
                f"files, or ask the operator for a higher limit (`toolcrew tenants set {tenant} --stored-bytes X`)",
            )

    def _prefix(self, tenant: str) -> str:
        return tenant_key(self._deployment, tenant, "usage.stored.files.")

    def _reservations(self, tenant: str) -> str:
        return tenant_key(self._deployment, tenant, "usage.stored.reserved")


class UploadReservation:
    """The bytes that one running upload has reserved."""

    def __init__(self, stored: StoredBytes, tenant: str, file: str) -> None:
        self._stored = stored
        self._tenant = tenant
        self._file = file
        self._size = 0

    async def reserve(self, size: int) -> None:
        """Reserve `size` bytes in total. Raises the errors of `StoredBytes.reserve`."""
        self._size = size
        await self._stored.reserve(self._tenant, self._file, size)

    async def renew(self) -> None:
        """Renew the reservation until the task is cancelled."""
        while True:
            await asyncio.sleep(RESERVED_S / 4)
            # A reservation that was lost, while Redis was down, and no longer fits is found when the file is recorded.
            with contextlib.suppress(BrokerUnavailable, ToolFailure):
                if self._size:
                    await self._stored.reserve(self._tenant, self._file, self._size)
