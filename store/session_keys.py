"""Keys that clients choose for sessions. A session that is opened again with the same key is the same session.

Invariant: a key names one session at a time, and at most one caller opens it. The caller renews its claim while it
opens the session. If it dies, the next caller opens another session under the key.

::

    (none) --claim--> opening --confirm--> open
       ^                 |
       '----release------'  (the session was not opened)
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.names import account_key, tenant_key
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.memory import MEMORY_LUA, no_memory
from toolcrew.store.scripts import Script

KEY_TTL_S = 24 * 3600
"""Seconds for which a key names its session after its last use."""
OPENING_S = 30
"""Seconds after which the claim of a caller that no longer renews it ends."""
_WHAT = "the session's key was not read or changed"

# Returns the state, the session of the key, and the session of a caller that has died ('': none).
_CLAIM = Script(
    MEMORY_LUA
    + """
local now = read_time()
local present = redis.call('HMGET', key, 'state', 'session', 'digest', 'opening_until')
if present[1] and present[3] ~= digest then return {'other', '', ''} end
if present[1] == 'open' then
  redis.call('EXPIRE', key, ttl_s)
  return {'open', present[2], ''}
end
if present[1] and present[2] ~= session and tonumber(present[4]) > now then return {'opening', present[2], ''} end
if not present[1] then
  if not has_room(account, now, RUNNING_WORK) then return {'memory', '', ''} end
  add_bytes(account, now, RECORD_BYTES, now + ttl_s)
end
redis.call('HSET', key, 'state', 'opening', 'session', session, 'digest', digest, 'opening_until', now + opening_s)
redis.call('EXPIRE', key, ttl_s)
return {'claimed', session, present[2] ~= session and present[2] or ''}
""",
    keys=("key", "account"),
    args=("session", "digest", "ttl_s", "opening_s"),
)
# Returns 1 if the key still names the session. `state`: opening (renew the claim) or open.
_RENEW = Script(
    MEMORY_LUA
    + """
if redis.call('HGET', key, 'session') ~= session then return 0 end
redis.call('HSET', key, 'state', state, 'opening_until', read_time() + opening_s)
return 1
""",
    keys=("key",),
    args=("session", "state", "opening_s"),
)
_RELEASE = Script(
    "if redis.call('HGET', key, 'session') == session then redis.call('DEL', key) end",
    keys=("key",),
    args=("session",),
)


@dataclass(frozen=True)
class SessionKeyClaim:
    """The answer to a claim. `claimed`: the caller opens `session`. `opening`: another caller opens it. `open`: it was
    opened. `abandoned`: the session of an earlier caller, which died while it opened it; "": none.
    """

    state: Literal["claimed", "opening", "open"]
    session: str
    abandoned: str


class SessionKeys:
    """The keys of sessions of one deployment. Every method raises BrokerUnavailable when Redis does not answer."""

    def __init__(self, client: RedisClient, deployment: str) -> None:
        self._client = client
        self._deployment = deployment

    async def claim(self, tenant: str, key: str, digest: str, session: str) -> SessionKeyClaim:
        """Claim a key for a new session. `digest`: of the session's options. Raises ToolFailure: the key was used with
        other options (INVALID_ARGUMENTS), or the tenant may store no more (QUOTA_EXCEEDED).
        """
        with broker_errors(_WHAT):
            state, name, abandoned = await _CLAIM.run(
                self._client,
                key=self._name(tenant, key),
                account=account_key(self._deployment, tenant),
                session=session,
                digest=digest,
                ttl_s=KEY_TTL_S,
                opening_s=OPENING_S,
            )
        if state == b"other":
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                "this key was used for a session with other options: use a new key for each session",
            )
        if state == b"memory":
            raise no_memory("the session was not opened, because its key could not be stored")
        return SessionKeyClaim(state.decode(), name.decode(), abandoned.decode())

    async def renew(self, tenant: str, key: str, session: str) -> None:
        """Renew the claim of the caller that opens the session."""
        await self._renew(tenant, key, session, "opening")

    async def confirm(self, tenant: str, key: str, session: str) -> bool:
        """Store that the session is open. Return False if another caller has claimed the key meanwhile."""
        return await self._renew(tenant, key, session, "open")

    async def release(self, tenant: str, key: str, session: str) -> None:
        """Free the key of a session that was not opened."""
        with broker_errors(_WHAT):
            await _RELEASE.run(self._client, key=self._name(tenant, key), session=session)

    async def _renew(self, tenant: str, key: str, session: str, state: str) -> bool:
        with broker_errors(_WHAT):
            return bool(
                await _RENEW.run(
                    self._client, key=self._name(tenant, key), session=session, state=state, opening_s=OPENING_S
                )
            )

    def _name(self, tenant: str, key: str) -> str:
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        return tenant_key(self._deployment, tenant, f"session-key.{digest}")
