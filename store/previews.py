"""Previews of sessions: which session an address belongs to, and who may use it. Each session has one preview.

Invariant: a preview that a process without the secret writes, or copies to another id, is refused.
"""

from typing import Literal

from pydantic import ValidationError

from toolcrew.contract.calls import Record
from toolcrew.contract.errors import EnvelopeRefused, RecordRefused
from toolcrew.contract.names import deployment_key, tenant_key
from toolcrew.contract.previews import new_preview_id
from toolcrew.contract.signing import SigningKeys
from toolcrew.store.audit import Actor
from toolcrew.store.connection import RedisClient, broker_errors
from toolcrew.store.scripts import Script

_KEEP = Script(
    """
-- Returns the id of the session's preview, and extends it. `candidate`: the id of a new one.
local found = redis.call('GET', session) or candidate
local left_ms = math.max(redis.call('PTTL', session), tonumber(ttl_ms))
redis.call('SET', session, found, 'PX', left_ms)
return {found, left_ms}
""",
    keys=("session",),
    args=("candidate", "ttl_ms"),
)


class Preview(Record):
    """A preview. `actor`: who asked for its address last; streams to the port are recorded for this actor."""

    tenant: str
    session: str
    access: Literal["token", "public"]
    actor: Actor


class PreviewStore:
    """The previews of a deployment."""

    def __init__(self, client: RedisClient, deployment: str, keys: SigningKeys) -> None:
        self._client = client
        self._deployment = deployment
        self._keys = keys

    async def keep(self, preview: Preview, ttl_s: float) -> str:
        """Store the preview of a session for at least `ttl_s` seconds, and return its id. Raises BrokerUnavailable."""
        session = tenant_key(self._deployment, preview.tenant, f"session.{preview.session}:preview")
        with broker_errors("the preview was not stored"):
            found, left_ms = await _KEEP.run(
                self._client, session=session, candidate=new_preview_id(), ttl_ms=int(ttl_s * 1000)
            )
            name = str(found.decode())
            sealed = self._keys.seal(f"preview {name}", preview.model_dump_json())
            await self._client.set(self._key(name), sealed, px=int(left_ms))
        return name

    async def find(self, preview: str) -> Preview | None:
        """Return a preview; None if it does not exist, or not any more. Raises BrokerUnavailable, RecordRefused."""
        with broker_errors("the preview was not read"):
            sealed = await self._client.get(self._key(preview))
        if sealed is None:
            return None
        try:
            return Preview.model_validate_json(self._keys.unseal(f"preview {preview}", sealed))
        except (EnvelopeRefused, ValidationError) as error:
            raise RecordRefused(
                f"the record of a preview is refused ({error}): run the same release with the same TOOLCREW_SECRET "
                "everywhere"
            ) from error

    def _key(self, preview: str) -> str:
        return deployment_key(self._deployment, f"preview.{preview}")
