"""Requests with an Idempotency-Key. Each Idempotency-Key has one slot in Redis, which holds a claim while the request
runs, and then the response.

Invariant: at most one request at a time holds a slot, and only its holder stores the response.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolcrew.contract.errors import EnvelopeRefused, ErrorCode, RecordRefused, ToolFailure
from toolcrew.contract.names import account_key, deployment_key
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.memory import MEMORY_LUA, no_memory
from toolcrew.store.scripts import Script

KEEP_S = 24 * 3600
PENDING_S = 900
"""Maximum time for which a request holds its slot, in seconds. The time is longer than any call. After that time a
repeated request finds the work of the first request by the id that is derived from the Idempotency-Key.
"""
MAX_STORED_BYTES = 256 * 1024 * 1024
"""Limit of the responses of one API key within a day, in bytes. All tenants share the memory of Redis."""
SLOT_BYTES = 200
"""Memory that each stored response needs in addition to its text, in bytes."""
FULL = (
    f"the stored responses of this API key fill {MAX_STORED_BYTES // 2**20} MiB, so the request was not started: send "
    "it without an Idempotency-Key or with another API key, or wait until yesterday's responses expire"
)
_NOT_ENDED = "the end of the request was not stored"
# Every script is repeatable after a lost reply. A repeated claim recognizes the first one, and a response is stored
# only once. A claim may also arrive after the release of the same claim, from a connection that was given up. No
# process reads the reply to such a claim, so the script must not take the slot.
_CLAIM = Script(
    MEMORY_LUA
    + """
-- `fullness`: 'full' if the account of the API key is full. `account`: memory of the tenant.
if redis.call('EXISTS', released) == 1 then return claim end
local found = redis.call('GET', slot)
if found and found ~= claim then return found end
if fullness == 'full' then return fullness end
if not found and not has_room(account, read_time(), RUNNING_WORK) then return 'memory' end
redis.call('SET', slot, claim, 'EX', ttl_s)
return false
""",
    keys=("slot", "released", "account"),
    args=("claim", "ttl_s", "fullness"),
)
_KEEP = Script(
    MEMORY_LUA
    + """
-- `hour`: the bytes of the API key in this hour.
local found = redis.call('GET', slot)
if found and found ~= claim then return 0 end
redis.call('SET', slot, response, 'EX', ttl_s)
redis.call('INCRBY', hour, bytes)
redis.call('EXPIRE', hour, count_ttl_s)
local now = read_time()
add_bytes(account, now, tonumber(bytes), now + ttl_s)
return 1
""",
    keys=("slot", "hour", "account"),
    args=("claim", "response", "ttl_s", "bytes", "count_ttl_s"),
)
_RELEASE = Script(
    """
if redis.call('GET', slot) == claim then return redis.call('DEL', slot) end
redis.call('SET', released, '', 'EX', ttl_s)
return 0
""",
    keys=("slot", "released"),
    args=("claim", "ttl_s"),
)


@dataclass(frozen=True)
class SlotClaim:
    """The claim of a request to its slot. `pending`: the content of the slot while the request runs, unique for each
    request. `tenant`: the tenant for whose memory the response counts. `released`: the Redis key that exists if the
    claim was released before Redis received the claim itself.
    """

    slot: str
    released: str
    account: str
    pending: str
    tenant: str


class IdempotencyStore:
    """The slots of one deployment. Stored responses count for the limit of an account, which is the id of an API
    key.
    """

    def __init__(
        self, client: RedisClient, deployment: str, signing: SigningKeys, clock: Callable[[], float] = time.time
    ) -> None:
        self._signing = signing
        self._deployment = deployment
        self._redis = client
        self._prefix = deployment_key(deployment, "api")
        self._clock = clock

    def name(self, account: str, name: str, digest: str, token: str, tenant: str) -> SlotClaim:
        """Return the claim of a request. `name`: its Idempotency-Key. `digest`: the digest of its content. `token`: a
        random text, new for each request.
        """
        return SlotClaim(
            f"{self._prefix}:once:{name}",
            f"{self._prefix}:released:{token}",
            account,
            json.dumps({"digest": digest, "pending": True, "by": token}),
            tenant,
        )

    async def claim(self, claim: SlotClaim) -> dict[str, Any] | None:
        """Take the slot and return None. If the slot is taken, return its content: a claim or a response. Raises
        BrokerUnavailable: the slot may have been taken. Raises ToolFailure(QUOTA_EXCEEDED): the account is full.
        """
        with broker_errors("the request was not started"):
            # The limit is approximate: requests that run at the same time may exceed it by their own responses.
            is_full = await self.count(claim.account) > MAX_STORED_BYTES
            content = await _CLAIM.run(
                self._redis,
                slot=claim.slot,
                released=claim.released,
                account=account_key(self._deployment, claim.tenant),
                claim=claim.pending,
                ttl_s=PENDING_S,
                fullness="full" if is_full else "",
            )
        if content == b"memory":
            raise no_memory("the request was not started, because its response could not be stored")
        if content == b"full":
            raise ToolFailure(ErrorCode.QUOTA_EXCEEDED, FULL)
        return self._open(claim.slot, content) if content is not None else None

    async def keep(self, claim: SlotClaim, record: str) -> None:
        """Store the response in the slot, unless another request holds the slot. A second call changes nothing. Raises
        BrokerUnavailable when Redis does not answer.
        """
        # The signature is bound to the slot. Otherwise any process that can write to Redis could forge a response of
        # the API.
        record = self._signing.seal(_purpose(claim.slot), record)
        with broker_errors(_NOT_ENDED):
            await _KEEP.run(
                self._redis,
                slot=claim.slot,
                hour=self._hour(claim.account),
                account=account_key(self._deployment, claim.tenant),
                claim=claim.pending,
                response=record,
                ttl_s=KEEP_S,
                bytes=len(record) + SLOT_BYTES,
                count_ttl_s=KEEP_S + 3600,
            )

    def _open(self, slot: str, content: bytes) -> dict[str, Any]:
        """Return a pending claim or a signed response. Raises RecordRefused: the response cannot be verified. A
        pending claim needs no signature, because it decides nothing.
        """
        try:
            if content.startswith(b"{"):
                pending: dict[str, Any] = json.loads(content)
                if pending.get("pending") is True:
                    return pending
            answer: dict[str, Any] = json.loads(self._signing.unseal(_purpose(slot), content))
        except (EnvelopeRefused, ValueError) as error:
            raise RecordRefused(
                "the stored response for this Idempotency-Key cannot be verified: send the request with a new key"
            ) from error
        return answer

    async def release(self, claim: SlotClaim) -> None:
        """Free the slot, if that claim still holds it. A second call changes nothing. Raises BrokerUnavailable when
        Redis does not answer.
        """
        with broker_errors(_NOT_ENDED):
            await _RELEASE.run(
                self._redis, slot=claim.slot, released=claim.released, claim=claim.pending, ttl_s=PENDING_S
            )

    async def count(self, account: str) -> int:
        """Return how many bytes are stored for the account. Each hour has its own counter, which expires a day later
        together with the responses.
        """
        hours: Any = await self._redis.mget([self._hour(account, back) for back in range(KEEP_S // 3600 + 1)])
        return sum(int(count) for count in hours if count is not None)

    def _hour(self, account: str, back: int = 0) -> str:
        return f"{self._prefix}:kept:{account}:{int(self._clock() // 3600) - back}"


def _purpose(slot: str) -> str:
    return f"answer {slot}"
